"""Which queries of one rank meet which keys of another, as calls that flash attention takes without a mask.

Problem  In a ring, the queries of rank r meet the keys of every rank s. Who may look at whom follows from positions in
         the whole row, from documents and from the window, and neither rank holds neighbouring positions. A mask would
         say it all, but takes T^2 / W^2 numbers, and the kernel computes what a mask hides.
Method   A document's tokens are neighbours on every rank (`division`). Per document and source, what is visible is one
         tile: a rectangle of queries and keys that is wholly visible, or a causal square.

             zigzag      s = r  the causal square of all
                         s < r  all queries, and the keys of chunk s
                         s > r  the queries of chunk 2 W - 1 - r, and all keys
             contiguous  s = r  the causal square;  s < r  the rectangle;  s > r  nothing
             striped     query i is token i W + r, key j is token j W + s: visible where j <= i + c, with
                         c = 0 for s <= r and c = -1 for s > r; without the first query or the last key, which
                         then see or are seen by nobody, that is a causal square

Window   A window w matters to a document of more than w tokens: then pairs of chunks are tiles of their own. Keys that
         no query sees and queries that see no key are cut off; queries that see all that is left make a rectangle.
         The others are a tile with a bound: `left` keys are visible beside the diagonal that ends in the lower right
         corner (as flash attention counts):  left = w - 1 + (end of keys) - (end of queries).  It has no more queries
         than keys, as it must: CUDA's kernel lets a window without a right bound end as many keys beside the diagonal
         as the tile has. Striped, distances are multiples of W:  left = floor((w - 1 - r + s) / W) + c.
Strips   A kernel without windows (the CPU's) would compute all of a tile with `left`. `strips` cuts it into pieces of
         about left + 1 queries with the keys that these see.
Checked  tests/models/test_tiles.py: the visible pairs of all ranks and sources, against the definition.

Letters: T tokens of a row, W ranks, r the queries' rank, s the source: the rank whose keys they are.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from scrimp.models.context_parallel.division import Division, Run

SHORTEST_STRIP = 64
"""Queries of a strip at least: narrower ones would cost more in calls than they save."""


@dataclass(frozen=True)
class Document:
    """A document, or the equal documents of neighbouring rows."""

    rows: slice
    start: int
    """Position in its row."""
    stop: int

    @property
    def length(self) -> int:
        """Tokens."""
        return self.stop - self.start


@dataclass(frozen=True)
class Tile:
    """Queries of a rank and keys of a source, both as slices of what the ranks hold."""

    rows: slice
    queries: slice
    keys: slice
    causal: bool = False
    """Query i sees key j only where j <= i + (keys - queries)."""
    left: int | None = None
    """And only where j >= i + (keys - queries) - left; None: no such bound."""
    place: int = 0
    """Number of a tile among a document's for one source: two with the same number share neither queries nor keys."""

    @property
    def num_queries(self) -> int:
        """In a row."""
        return int(self.queries.stop - self.queries.start)

    @property
    def num_keys(self) -> int:
        """In a row."""
        return int(self.keys.stop - self.keys.start)

    @property
    def needs_mask(self) -> bool:
        """Whether a kernel that knows whole rectangles and causal squares alone needs one."""
        return self.left is not None or (self.causal and self.num_queries != self.num_keys)


def documents_of(bounds: tuple[int, ...], length: int) -> tuple[Document, ...]:
    """The documents of packed rows; neighbouring rows that are divided alike go together.

    Args:
        bounds: cumulative starts over the flattened rows, every row's among them, and the end.
        length: T.
    """
    num_rows = bounds[-1] // length
    rows: list[list[tuple[int, int]]] = [[] for _ in range(num_rows)]
    for start, stop in pairwise(bounds):
        row, first = divmod(start, length)
        rows[row].append((first, first + stop - start))
    found: list[Document] = []
    first = 0
    for spans, alike in groupby(rows):
        count = len(list(alike))
        found += [Document(slice(first, first + count), start, stop) for start, stop in spans]
        first += count
    return tuple(found)


def tiles_of(
    division: Division,
    rank: int,
    source: int,
    documents: tuple[Document, ...],
    *,
    window: int | None = None,
    causal: bool = True,
) -> tuple[Tile, ...]:
    """All that queries of a rank see of the keys of a source.

    Args:
        window: the last so many tokens are seen, a token itself included; None: all. Causal attention alone.
    """
    found: list[Tile] = []
    for document in documents:
        reached = None if window is None or window >= document.length else window
        if not causal:
            found += _rectangle(division, rank, source, document)
        elif division.scheme == "striped":
            found += _striped(division, rank, source, document, reached)
        elif reached is None:
            found += _chunks_together(division, rank, source, document)
        else:
            found += _chunk_pairs(division, rank, source, document, reached)
    return tuple(found)


def strips(tile: Tile) -> Iterator[Tile]:
    """The same as tiles of which most is visible."""
    if tile.left is None:
        yield tile
        return
    offset = tile.num_keys - tile.num_queries
    height = max(tile.left + 1, SHORTEST_STRIP)
    for first in range(0, tile.num_queries, height):
        stop = min(first + height, tile.num_queries)
        start = max(first + offset - tile.left, 0)
        # Below the diagonal that ends in the lower right corner; a tile that is not causal sees to its end.
        end = stop + offset if tile.causal else tile.num_keys
        left = tile.left + end - (stop + offset)
        yield replace(
            tile,
            queries=_shifted(tile.queries, first, stop),
            keys=_shifted(tile.keys, start, end),
            left=left if left < end - start - 1 else None,
        )


def _shifted(within: slice, start: int, stop: int) -> slice:
    return slice(within.start + start, within.start + stop)


def _span(division: Division, rank: int, document: Document) -> slice:
    """Where a rank holds tokens of a document."""
    return slice(division.before(rank, document.start), division.before(rank, document.stop))


def _tile(
    document: Document,
    queries: slice,
    keys: slice,
    *,
    causal: bool = False,
    left: int | None = None,
    place: int = 0,
) -> Iterator[Tile]:
    """One tile, if there is anything in it; `left` is dropped where every query sees the first key."""
    if queries.start >= queries.stop or keys.start >= keys.stop:
        return
    if left is not None and left >= keys.stop - keys.start - 1:
        left = None
    yield Tile(document.rows, queries, keys, causal, left, place)


def _rectangle(division: Division, rank: int, source: int, document: Document) -> Iterator[Tile]:
    """All see all."""
    return _tile(document, _span(division, rank, document), _span(division, source, document))


def _striped(
    division: Division, rank: int, source: int, document: Document, window: int | None
) -> Iterator[Tile]:
    c = 0 if source <= rank else -1
    first, stop = division.before(source, document.start), division.before(rank, document.stop)
    queries, keys = slice(first - c, stop), slice(first, stop + c)
    if window is None:
        return _tile(document, queries, keys, causal=True)
    left = (window - 1 - rank + source) // division.ranks + c
    return _tile(document, queries, keys, causal=True, left=left) if left >= 0 else iter(())


def _chunks_together(division: Division, rank: int, source: int, document: Document) -> Iterator[Tile]:
    queries, keys = _span(division, rank, document), _span(division, source, document)
    if rank == source:
        return _tile(document, queries, keys, causal=True)
    # Whole chunks see whole chunks: the queries of chunks after the source's first, the keys of chunks before the
    # rank's last.
    lowest, highest = division.runs(source)[0].first, division.runs(rank)[-1].first
    queries = slice(max(queries.start, division.before(rank, lowest)), queries.stop)
    keys = slice(keys.start, min(keys.stop, division.before(source, highest)))
    return _tile(document, queries, keys)


def _chunk_pairs(
    division: Division, rank: int, source: int, document: Document, window: int
) -> Iterator[Tile]:
    def local(who: int, start: int, stop: int) -> slice:
        return slice(division.before(who, start), division.before(who, stop))

    pairs = [(one, other) for one in division.runs(rank) for other in division.runs(source)]
    for place, (one, other) in enumerate(pairs):
        (q_start, q_stop), (k_start, k_stop) = _within(one, document), _within(other, document)
        if one == other:
            here = local(rank, q_start, q_stop)
            yield from _tile(document, here, here, causal=True, left=window - 1, place=place)
        elif one.first > other.first:
            k_start, q_stop = max(k_start, q_start - window + 1), min(q_stop, k_stop + window - 1)
            # Queries before this position see all of these keys, those from there on not the first.
            middle = min(q_stop, k_start + window)
            queries, keys = local(rank, q_start, middle), local(source, k_start, k_stop)
            yield from _tile(document, queries, keys, place=place)
            queries, keys = local(rank, middle, q_stop), local(source, k_start + 1, k_stop)
            left = window - 1 + k_stop - q_stop
            yield from _tile(document, queries, keys, left=left, place=place + len(pairs))


def _within(run: Run, document: Document) -> tuple[int, int]:
    """Positions of a chunk that a document has; the stop may lie before the start."""
    return max(run.first, document.start), min(run.stop, document.stop)
