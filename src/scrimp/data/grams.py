"""The 13-grams of documents as numbers, and which documents share most of them.

Problem  A document that stands in the training text with a few words changed is no held-out document.
         To find such pairs every document has to be compared with every held-out one.
Method   Words are runs of letters, digits and underscores, without regard to case; a character of a
         script without spaces counts as a word. Every 13 words in a row become one hash of 64 bits, with
         numpy for some 64 KiB at a time. A held-out document is known by the 128 lowest of its
         hashes (Broder, 1997), and one of fewer 13-grams by all. As many of them as occur in another
         document are an estimate of the share of its 13-grams that stand there. Only the rarest
         of a sketch, without which the share cannot be reached, are looked up in an index
         (the prefix filter of Chaudhuri et al., 2006); only for their hits the whole sketch is compared.
Error    Documents of up to 127 13-grams are compared exactly, up to equal hashes of 64 bits. Of others a pair
         counts as near from 88 of 128 on: one that shares exactly 80 % is missed with probability 0.1 %;
         one that shares 60 % is taken for near in 3 % of the cases, one that shares half in 1e-5 (binomial).
Cost     About 22 ns of a core per byte (measured), and 1.5 KB for each document that may be held out.
Limits   The share is that of the held-out document. A training document that is a small part of
         a held-out one is not found, nor is one of fewer than 13 words.
Checked  tests/data/test_grams.py, against sets of 13-grams.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

GRAM_WORDS = 13
NEAR_SHARE = 0.8
SKETCH_GRAMS = 128
_NEAR_IN_SKETCH = 88
_MOST_FAILURES = 1000
"""A document that so many others resemble without being near is not worth more comparing."""
_BLOCK = 1 << 15
_PAIRS = 1 << 12

Hashes = npt.NDArray[np.uint64]


def _mix(values: Hashes) -> Hashes:
    """The finalizer of splitmix64, in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


def _powers(base: int, count: int) -> Hashes:
    powers = np.full(count, base, dtype=np.uint64)
    powers[0] = 1
    return np.multiply.accumulate(powers)


_BASE = 0x9E3779B97F4A7C15
_POWERS, _INVERSE_POWERS = (_powers(base, 2 * _BLOCK) for base in (_BASE, pow(_BASE, -1, 1 << 64)))
_IS_WORD = np.array([byte >= 0x80 or chr(byte).isalnum() or byte == ord("_") for byte in range(256)])
_LETTERS: Hashes = _mix(
    np.array([ord(chr(b).lower()) + 1 if b < 0x80 else b + 1 for b in range(256)], np.uint64)
)
_LETTERS[~_IS_WORD] = 0


@dataclass(frozen=True)
class Grams:
    """Hashes of the 13-grams of some documents, one after the other."""

    hashes: Hashes
    """One for each word of all documents: of the 13 words from there."""
    first: npt.NDArray[np.int64]
    """The first word of each document, and the number of words."""

    def of(self, document: int) -> Hashes:
        """The different hashes of one document, in rising order."""
        start, stop = self.first[document], self.first[document + 1] - GRAM_WORDS + 1
        return np.unique(self.hashes[start : max(start, stop)])

    def holds(self, words: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Those of the words from which 13 lie in one document, and their documents."""
        documents = np.searchsorted(self.first, words, side="right") - 1
        inside = words + GRAM_WORDS <= self.first[documents + 1]
        return words[inside], documents[inside]


def grams(texts: Sequence[str]) -> Grams:
    """The 13-grams of some texts, together at most some MB."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
    raw = np.frombuffer(b" ".join(encoded) + b" ", dtype=np.uint8)
    is_word = _IS_WORD[raw]
    begins = is_word.copy()
    np.greater(is_word[1:], is_word[:-1], out=begins[1:])
    begins |= raw >= 0xE0  # the first byte of a character that is a word by itself
    starts = np.flatnonzero(begins)
    ends = np.cumsum([len(text) + 1 for text in encoded])
    first = np.concatenate([[0], np.searchsorted(starts, ends)])
    words = _mix(_word_hashes(raw, starts))
    return Grams(_gram_hashes(words), first)


def _word_hashes(raw: npt.NDArray[np.uint8], starts: npt.NDArray[np.int64]) -> Hashes:
    """The sum(letter[i] * base**i) of each word, computed in blocks that fit a cache."""
    words = np.empty(len(starts), dtype=np.uint64)
    borders = np.unique(np.searchsorted(starts, np.arange(0, len(raw), _BLOCK)))
    borders = np.append(borders[borders < len(starts)], len(starts))
    for first, last in itertools.pairwise(borders.tolist()):
        begin = int(starts[first])
        end = int(starts[last]) if last < len(starts) else len(raw)
        letters = _LETTERS[raw[begin:end]]
        if len(letters) <= len(_POWERS):
            letters *= _POWERS[: len(letters)]
        else:  # a word longer than a block
            letters *= np.resize(_POWERS, len(letters))
        at = starts[first:last] - begin
        words[first:last] = np.add.reduceat(letters, at) * _INVERSE_POWERS[at % len(_POWERS)]
    return words


def _gram_hashes(words: Hashes) -> Hashes:
    """The hash of each word with the twelve after it; the last twelve words have none of their own."""
    count = max(len(words) - GRAM_WORDS + 1, 0)
    hashes = words[:count].copy()
    for place in range(1, GRAM_WORDS):
        hashes *= np.uint64(_BASE)
        hashes += words[place : place + count]
    return np.concatenate([_mix(hashes), np.zeros(len(words) - count, dtype=np.uint64)])


def sketch(hashes: Hashes) -> Hashes:
    """What a held-out document is known by, from its hashes in rising order."""
    return hashes[:SKETCH_GRAMS].copy()


def _needed(size: int) -> int:
    """How many of a sketch must occur in a document that is near."""
    return _NEAR_IN_SKETCH if size >= SKETCH_GRAMS else math.ceil(NEAR_SHARE * size - 1e-9)


class SketchIndex:
    """Finds the documents of which nearly all 13-grams stand in another one.

    Args:
        sketches: of the documents to be found, by `sketch`.
    """

    def __init__(self, sketches: Sequence[Hashes]) -> None:
        self._sketches = list(sketches)
        self._needed = np.array([_needed(len(one)) for one in sketches], dtype=np.int64)
        self._live = np.array([len(one) > 0 for one in sketches], dtype=bool)
        self._failures = np.zeros(len(sketches), dtype=np.int64)
        self._keys, self._owners = self._rarest()
        bits = min(max((16 * len(self._keys)).bit_length(), 10), 24)
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, dtype=bool)
        self._filter[self._keys >> self._shift] = True

    def _rarest(self) -> tuple[Hashes, npt.NDArray[np.int64]]:
        """As many hashes of each sketch, the rarest, that a near document holds one of them; and their owners."""
        if not self._sketches:
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
        sizes = np.array([len(one) for one in self._sketches], dtype=np.int64)
        hashes, owners = np.concatenate(self._sketches), np.repeat(np.arange(len(sizes)), sizes)
        _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        order = np.lexsort((hashes, counts[inverse], owners))
        rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        order = order[rank <= (sizes - self._needed)[owners]]
        order = order[np.argsort(hashes[order], kind="stable")]
        return hashes[order], owners[order]

    def settle(self, found: int) -> None:
        """Look no more for this document."""
        self._live[found] = False

    def crowded(self) -> list[int]:
        """Documents that too many others resemble to be looked for any more; each is told once."""
        found = np.flatnonzero(self._live & (self._failures > _MOST_FAILURES)).tolist()
        self._live[found] = False
        return found

    def near(self, batch: Grams) -> Iterator[tuple[int, int]]:
        """Pairs (document of the batch, document of the index that stands nearly whole in it)."""
        words, documents = batch.holds(np.flatnonzero(self._filter[batch.hashes >> self._shift]))
        for document in np.unique(documents).tolist():
            hashes = batch.hashes[words[documents == document]]
            first, last = (np.searchsorted(self._keys, hashes, side=side) for side in ("left", "right"))
            rows = [self._owners[a:b] for a, b in zip(first, last, strict=True) if a < b]
            if not rows:
                continue
            owners = np.unique(np.concatenate(rows))
            owners = owners[self._live[owners]]
            if len(owners):
                own = batch.of(document)
                yield from ((document, found) for found in self._compare(own, owners))

    def _compare(self, own: Hashes, owners: npt.NDArray[np.int64]) -> Iterator[int]:
        for start in range(0, len(owners), _PAIRS):
            part = owners[start : start + _PAIRS]
            sizes = [len(self._sketches[owner]) for owner in part]
            wanted = np.concatenate([self._sketches[owner] for owner in part])
            place = np.minimum(np.searchsorted(own, wanted), len(own) - 1)
            shared = np.add.reduceat((own[place] == wanted).astype(np.int64), np.cumsum([0, *sizes[:-1]]))
            is_near = shared >= self._needed[part]
            self._failures[part[~is_near]] += 1
            yield from part[is_near].tolist()


def batched(items: Iterable[Any], num_bytes: int = 1 << 16) -> Iterator[list[Any]]:
    """Documents in groups of about 64 KiB, in order."""
    group: list[Any] = []
    size = 0
    for item in items:
        group.append(item)
        size += item.num_bytes
        if size >= num_bytes:
            yield group
            group, size = [], 0
    if group:
        yield group
