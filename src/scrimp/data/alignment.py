"""Which sentences of two texts are translations of one another: the best path through both, in a band.

Problem  Two documents tell the same in two languages. Translators join and split sentences, leave some out and add
         others, so that sentence 500 of one may be sentence 470 of the other.
Method   Dynamic programming over (i, j), how many sentences of each are behind. A move pairs a sentence with one, with
         two, or two with one, or skips one on either side:

             best(i, j) = max( best(i-1, j-1) + s(i, j),          best(i-1, j),
                               best(i-1, j-2) + s(i, j-1..j),     best(i, j-1)
                               best(i-2, j-1) + s(i-1..i, j) )

         Skips score 0: a pair is taken where its score is above 0, which a scorer sees to (`Scorer`). A row of the
         table is then a few sums of the two rows before it, and a running maximum for skips on the target's side.
         Only j within `width` of the diagonal, j = i m / n, are looked at: a byte for each of n (2 width + 1) moves is
         in memory. A path that comes to the edge of its band is sought again in one twice as wide.
Limits   Pairs of three sentences and more, and sentences that change places, are not found. A path that stays within
         its band is the best one there; another could be better outside.
Source   Gale & Church, "A Program for Aligning Sentences in Bilingual Corpora" (1993); Song et al., arXiv 2311.03696,
         whose moves these are
Checked  tests/data/test_alignment.py: every path of small tables, by brute force
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
MOVES: Final = ((1, 0), (0, 1), (1, 1), (1, 2), (2, 1))
"""Sentences of the source and of the target that a move goes past."""
_SKIP_SOURCE, _SKIP_TARGET, _ONE, _TWO_OF_TARGET, _TWO_OF_SOURCE = range(len(MOVES))
LEAST_WIDTH: Final = 32


class Scorer(Protocol):
    """What pairs of sentences are worth, more than to skip them."""

    def row(self, i: int, low: int, high: int) -> tuple[Floats, Floats, Floats]:
        """Scores of pairs that end with sentence i of the source and sentences low to high - 1 of the target: one with
        one, one with two, two with one. What begins before the first sentence is never asked for its score."""
        ...


@dataclass(frozen=True, order=True)
class Pair:
    """Sentences that belong together: from `source`, so many, and from `target`."""

    source: int
    sources: int
    target: int
    targets: int


def align(scorer: Scorer, sources: int, targets: int, *, width: int | None = None) -> list[Pair]:
    """The pairs of the best path through so many sentences, in their order.

    Args:
        width: sentences of the target on either side of the diagonal; None: enough, by the path itself.
    """
    if width is not None:
        return _best_path(scorer, _Band(sources, targets, width))[0]
    width = max(LEAST_WIDTH, abs(sources - targets))
    while True:
        pairs, touches = _best_path(scorer, _Band(sources, targets, width))
        if not touches:
            return pairs
        width *= 2


@dataclass(frozen=True)
class _Band:
    """The part of the table that is looked at."""

    sources: int
    targets: int
    width: int

    def low(self, i: int) -> int:
        """The first j of row i."""
        return max(0, self._diagonal(i) - self.width)

    def high(self, i: int) -> int:
        """The last one."""
        return min(self.targets, self._diagonal(i) + self.width)

    def is_edge(self, i: int, j: int) -> bool:
        """Whether the band, and not the table, ends here."""
        return (j == self.low(i) > 0) or (j == self.high(i) < self.targets)

    def _diagonal(self, i: int) -> int:
        return round(i * self.targets / max(1, self.sources))


def _best_path(scorer: Scorer, band: _Band) -> tuple[list[Pair], bool]:
    """The pairs of the best path, and whether it comes to an edge of its band."""
    moves: list[NDArray[np.int8]] = []
    rows: list[Floats] = []
    """The last two rows of `best`, whole: -inf outside of the band."""
    for i in range(band.sources + 1):
        low, high = band.low(i), band.high(i)
        candidates = np.full((len(MOVES), high - low + 1), -np.inf)
        if i == 0:
            candidates[_SKIP_SOURCE, 0] = 0.0  # where every path begins
        else:
            candidates[_SKIP_SOURCE] = rows[-1][low : high + 1]
            _add_pairs(candidates, scorer, i, low, high, rows)
        best = candidates.max(0)
        move = candidates.argmax(0).astype(np.int8)
        skipped = np.maximum.accumulate(best)
        move[1:][skipped[:-1] >= best[1:]] = _SKIP_TARGET
        row = np.full(band.targets + 1, -np.inf)
        row[low : high + 1] = skipped
        rows = [*rows[-1:], row]
        moves.append(move)
    return _traced(moves, band)


def _add_pairs(candidates: Floats, scorer: Scorer, i: int, low: int, high: int, rows: list[Floats]) -> None:
    """Fill in the moves that pair sentence i - 1 of the source with something."""
    first = max(low, 1)
    if first > high:
        return
    ones, two_targets, two_sources = scorer.row(i - 1, first - 1, high)
    candidates[_ONE, first - low :] = rows[-1][first - 1 : high] + ones
    if high >= 2:
        second = max(first, 2)
        candidates[_TWO_OF_TARGET, second - low :] = (
            rows[-1][second - 2 : high - 1] + two_targets[second - first :]
        )
    if len(rows) == 2:
        candidates[_TWO_OF_SOURCE, first - low :] = rows[-2][first - 1 : high] + two_sources


def _traced(moves: list[NDArray[np.int8]], band: _Band) -> tuple[list[Pair], bool]:
    """Back from the end of both texts to their beginning."""
    i, j, pairs, touches = band.sources, band.targets, list[Pair](), False
    while i > 0 or j > 0:
        touches |= band.is_edge(i, j)
        sources, targets = MOVES[moves[i][j - band.low(i)]] if i > 0 else (0, 1)
        i, j = i - sources, j - targets
        if sources and targets:
            pairs.append(Pair(i, sources, j, targets))
    return pairs[::-1], touches
