"""Which documents are held out for evaluation.

By share   Candidates are the documents with the lowest hashes. In that order those are held out that
           fit into twice the share asked for, by bytes, until the share is reached. A document stays in
           training if another training document holds 80 % of its 13-grams (see grams); a candidate
           that stays in training, and holds one that does not, is left out of both.
Inside     Where fewer than 8 documents that fit hold less than half the share (few documents, or large
           ones), the end of the largest document is cut off and held out instead; the corpus says so.
By source  A file of its own, or a data set's own validation split, is held out whole. Training documents
           that hold 80 % of the 13-grams of a held-out one are left out.
Beside     others in a mixture each source holds out its own share, and training documents like one that another
           source holds out are left out, by the same rule (see mixed_texts).
Fixed      All of this depends on the text alone. What was decided is kept in the manifest.
Cost       Two passes over the text (one reads it, where memory holds it: see passes), and for each candidate
           about 2 KB of memory. Against a split by hash alone (benchmarks/prepare_versions.py, on a busy machine)
           `prepare` takes, in wall time: where it trains a BPE, as by default, 0.95 to 1.05 times (1 MB, four calls
           each); with a BPE that is there 1.18 to 1.21 times, of which half is a constant 30 ms; with the bytes
           tokenizer, which has nothing to encode, 1.3 to 1.4 times. Where each pass reads the text anew, 2.3 times
           (180 MB, three repeats).
Limits     See grams for what a near document is, and the errors of finding one.
Checked    tests/data/test_split.py.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

from scrimp.data.documents import Document, document_of
from scrimp.data.grams import Hashes, SketchIndex, batched, grams, sketch
from scrimp.errors import DataError

_HASH_SPAN = 1 << 64
_LOWEST = 16
"""Candidates there are at least, however small the share."""
_CANDIDATES = 1.5
"""Times the share asked for: some are too large, or near."""
_LARGEST = 4
"""Documents whose ends are tried."""
_ENOUGH_DOCUMENTS = 8

Pass = Callable[[str], Iterator[Document]]
"""The documents of the source from the first to the last; its argument says what for."""


@dataclass(frozen=True)
class Split:
    """Decides the side of every document."""

    threshold: int = 0
    """Documents with a hash below this are held out."""
    trained: frozenset[int] = frozenset()
    """Hashes below the threshold that are trained on."""
    left_out: frozenset[int] = frozenset()
    """Hashes of documents on neither side: they are like one of the other side."""
    tail: tuple[int, int] | None = None
    """Hash of a document that is cut, and the character from which it is held out."""

    def parts(self, corpus: Iterable[Document], skipped: dict[str, int] | None = None) -> Iterator[Document]:
        """The documents of both sides, each marked; those left out are counted in `skipped`."""
        for document in corpus:
            if self.tail is not None and document.hash == self.tail[0]:
                head, end = cut_off(document, self.tail[1])
                if self._is_kept(head, skipped):
                    yield head
                yield end
            elif self._is_kept(document, skipped):
                is_held_out = document.hash < self.threshold and document.hash not in self.trained
                yield replace(document, held_out=True) if is_held_out else document

    def _is_kept(self, document: Document, skipped: dict[str, int] | None) -> bool:
        if document.hash not in self.left_out:
            return True
        if skipped is not None:
            reason = "documents like those of the other split"
            skipped[reason] = skipped.get(reason, 0) + 1
        return False

    def content(self) -> SplitContent:
        """The split as it stands in corpus.json."""
        tail = None if self.tail is None else Tail(f"{self.tail[0]:016x}", self.tail[1])
        trained, left_out = (
            [f"{one:016x}" for one in sorted(part)] for part in (self.trained, self.left_out)
        )
        return SplitContent(f"{self.threshold:x}", trained, left_out, tail)


@dataclass(frozen=True)
class Tail:
    """The document that is cut, and the character from which it is held out."""

    document: str
    at: int


@dataclass(frozen=True)
class SplitContent:
    """A split in corpus.json: hashes in hexadecimal, since they have 64 bits."""

    threshold: str
    trained: list[str]
    left_out: list[str]
    tail: Tail | None

    def split(self) -> Split:
        """The split that this says; ValueError for text that is no number."""
        trained, left_out = (
            frozenset(int(one, 16) for one in part) for part in (self.trained, self.left_out)
        )
        tail = None if self.tail is None else (int(self.tail.document, 16), self.tail.at)
        return Split(int(self.threshold, 16), trained, left_out, tail)


def cut_off(document: Document, at: int) -> tuple[Document, Document]:
    """A document in two: what is trained on, and its end, which is held out."""
    return document_of(document.text[:at]), replace(document_of(document.text[at:]), held_out=True)


@dataclass
class _Candidate:
    """A document that may be held out."""

    hash: int
    num_bytes: int
    sketch: Hashes | None = None
    copies: int = 0
    held_by: tuple[int, ...] = ()
    """Hashes of other candidates that hold most of it."""
    is_near: bool = False
    """Whether a document that is no candidate holds most of it."""

    @property
    def size(self) -> int:
        """Bytes of all copies."""
        return self.num_bytes * self.copies


class _Survey:
    """The first look through the corpus: its size, the candidates, and the largest documents."""

    def __init__(self, corpus: Iterable[Document], share: float) -> None:
        self.num_documents = self.num_bytes = 0
        self.candidates: dict[int, _Candidate] = {}
        self.largest: list[tuple[int, int]] = []
        for batch in batched(self._counted(corpus, int(_CANDIDATES * share * _HASH_SPAN)), 1 << 18):
            found = grams([document.raw for document in batch])
            for number, document in enumerate(batch):
                self.candidates[document.hash].sketch = sketch(found.of(number))
        self.candidates = dict(sorted(self.candidates.items()))

    def _counted(self, corpus: Iterable[Document], threshold: int) -> Iterator[Document]:
        """Count every document; pass on those that are candidates, the last few of them at the end."""
        lowest = [-_HASH_SPAN] * _LOWEST
        waiting: dict[int, Document] = {}  # of the lowest so far, those above the threshold
        for document in corpus:
            self.num_documents += 1
            self.num_bytes += document.num_bytes
            entry = (document.num_bytes, document.hash)
            if (len(self.largest) < _LARGEST or entry > self.largest[0]) and entry not in self.largest:
                heapq.heappush(self.largest, entry)
                if len(self.largest) > _LARGEST:
                    heapq.heappop(self.largest)
            if (known := self.candidates.get(document.hash)) is not None:
                known.copies += 1
                continue
            is_candidate = document.hash < threshold
            if document.hash < -lowest[0]:
                highest = -heapq.heapreplace(lowest, -document.hash)
                if waiting.pop(highest, None) is not None:
                    del self.candidates[highest]
                if not is_candidate:
                    waiting[document.hash] = document
            if is_candidate or document.hash in waiting:
                self.candidates[document.hash] = _Candidate(document.hash, document.num_bytes, copies=1)
            if is_candidate:
                yield document
        yield from waiting.values()


def split_by_share(read: Pass, share: float, *, may_cut: bool = True) -> Split:
    """The split that holds out a share of the text, by bytes.

    Args:
        may_cut: the end of a document may be cut off.

    Raises:
        DataError: the corpus is too small, or so much alike that nothing can be held out.
    """
    if share == 0.0:
        return Split()
    survey = _Survey(read("looking through"), share)
    candidates = survey.candidates
    _compare(read("comparing the documents of"), list(candidates.values()))
    target = share * survey.num_bytes
    taken = _take(candidates, target, survey.num_bytes)
    if may_cut and len(taken) < _ENOUGH_DOCUMENTS and sum(candidates[one].size for one in taken) < target / 2:
        tail = _tail(read, [hash_ for _, hash_ in sorted(survey.largest, reverse=True)], target)
        if tail is not None:
            return Split(tail=tail)
    if not taken:
        raise _nothing_to_hold_out(survey)
    threshold = max(taken) + 1
    left_out = frozenset(other for one in taken for other in candidates[one].held_by if other not in taken)
    below = frozenset(one for one in candidates if one < threshold)
    return Split(threshold, below - taken - left_out, left_out)


def _nothing_to_hold_out(survey: _Survey) -> DataError:
    if survey.num_documents <= _ENOUGH_DOCUMENTS and survey.num_bytes < 1 << 10:
        return DataError(
            "the corpus is too small to hold documents out",
            got=f"{survey.num_documents} document{'s' if survey.num_documents != 1 else ''}, "
            f"{survey.num_bytes:,} bytes",
            do="give more text, or set data.held_out to 0 to train without evaluation",
        )
    return DataError(
        "no text can be held out",
        got="documents of which 80 % of the 13-grams stand in others, too",
        expected="a document unlike all others",
        do="set data.held_out to a file of other text, or to 0 to train without evaluation",
    )


def _take(candidates: dict[int, _Candidate], target: float, total: int) -> frozenset[int]:
    """Candidates in the order of their hashes until their bytes reach the target.

    With those that are left out because of them they never hold twice of it, and something is left to train on.
    """
    taken: set[int] = set()
    gone: set[int] = set()
    held = size = 0
    for one in candidates.values():
        if held >= target:
            break
        new = {one.hash, *one.held_by} - gone
        added = sum(candidates[other].size for other in new)
        if not one.is_near and size + added <= min(2 * target, (target + total) / 2):
            taken.add(one.hash)
            gone |= new
            held, size = held + one.size, size + added
    return frozenset(taken)


def _compare(corpus: Iterable[Document], candidates: list[_Candidate]) -> None:
    """Note for every candidate which documents hold most of it."""
    index = SketchIndex([one.sketch for one in candidates if one.sketch is not None])
    number_of = {one.hash: number for number, one in enumerate(candidates)}
    for batch in batched(corpus):
        own = [number_of.get(document.hash, -1) for document in batch]
        for number, found in index.near(grams([document.raw for document in batch]), own):
            other, one = batch[number].hash, candidates[found]
            if own[number] < 0:
                one.is_near = True
                index.settle(found)
            elif other not in one.held_by:
                one.held_by += (other,)
        for found in index.crowded():
            candidates[found].is_near = True


def _tail(read: Pass, largest: list[int], target: float) -> tuple[int, int] | None:
    """Hash and first character of a document's end that is like no other text; the largest document's first."""
    pieces = _ends(read, largest, target)
    tails = [tail for _, tail in pieces.values()]
    hashes = [tail.hash for tail in tails]
    equal: set[int] = set()

    def others() -> Iterator[Document]:
        for document in read("comparing ends in"):
            for part in pieces.get(document.hash, (document,)):
                if part.hash in hashes and not part.held_out:
                    equal.add(part.hash)
                yield part

    found = grams([tail.raw for tail in tails])
    candidates = [
        _Candidate(tail.hash, tail.num_bytes, sketch(found.of(number))) for number, tail in enumerate(tails)
    ]
    _compare(others(), candidates)
    for (one, (head, _)), candidate in zip(pieces.items(), candidates, strict=True):
        is_alone = hashes.count(candidate.hash) == 1 and candidate.hash not in equal
        if is_alone and not candidate.is_near and not candidate.held_by:
            return one, len(head.text)
    return None


def _ends(read: Pass, largest: list[int], target: float) -> dict[int, tuple[Document, Document]]:
    """Documents by their hash, each cut so that the ends of all its copies hold about `target` bytes."""
    texts: dict[int, Document] = {}
    copies = dict.fromkeys(largest, 0)
    for document in read("looking for an end in"):
        if document.hash in copies:
            texts[document.hash] = document
            copies[document.hash] += 1
    cuts = {one: _where_to_cut(texts[one], target / copies[one]) for one in largest if one in texts}
    return {one: cut_off(texts[one], at) for one, at in cuts.items() if at is not None}


def _where_to_cut(document: Document, num_bytes: float) -> int | None:
    """The character from which about `num_bytes` are left, at a line's end if one is near; None if none fits."""
    text = document.text
    end = len(text.rstrip())
    size = min(max(round(num_bytes * len(text) / document.num_bytes), 1), end // 2)
    if size < 1:
        return None
    line = text.rfind("\n", max(end - 2 * size, 0), end - size) + 1
    at = line if line > 0 else end - size
    return None if text[:at].isspace() or text[at:].isspace() else at


@dataclass(frozen=True)
class HeldOutText:
    """What documents that are held out are known by."""

    hashes: frozenset[int]
    sketches: tuple[Hashes, ...]

    @classmethod
    def of(cls, held_out: Iterable[Document]) -> HeldOutText:
        """All of some documents."""
        hashes: set[int] = set()
        sketches: list[Hashes] = []
        for batch in batched(held_out):
            found = grams([document.raw for document in batch])
            for number, document in enumerate(batch):
                if document.hash not in hashes:
                    hashes.add(document.hash)
                    sketches.append(sketch(found.of(number)))
        return cls(frozenset(hashes), tuple(sketches))

    def alike(self, trained: Iterable[Document]) -> frozenset[int]:
        """The hashes of training documents that are one of these, or hold 80 % of the 13-grams of one.

        Raises:
            DataError: all of them do.
        """
        index = SketchIndex(self.sketches)
        found: set[int] = set()
        kept = 0
        for batch in batched(trained):
            near = {number for number, _ in index.near(grams([document.raw for document in batch]))}
            for number, document in enumerate(batch):
                if number in near or document.hash in self.hashes:
                    found.add(document.hash)
                else:
                    kept += 1
        if not kept:
            raise DataError(
                "nothing is left to train on",
                got=f"{len(found):,} documents, all like those held out",
                do="give another held-out source",
            )
        return frozenset(found)


def split_by_source(read: Pass, held_out: Iterable[Document]) -> Split:
    """The split beside a held-out source: which training documents are like its documents.

    Raises:
        DataError: the held-out source holds no text, or nothing is left to train on.
    """
    text = HeldOutText.of(held_out)
    if not text.hashes:
        raise DataError("the held-out source holds no text", expected="at least one document")
    return Split(left_out=text.alike(read("comparing the documents of")))
