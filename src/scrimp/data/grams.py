"""The 13-grams of documents as numbers, and which documents share most of them.

Problem  A document that stands in the training text with a few words changed is no held-out document.
         To find such pairs every document has to be compared with every held-out one.
Words    are runs of ASCII letters, digits, underscores and of characters beyond ASCII; a character of
         three or four bytes in UTF-8 (as of scripts without spaces) begins a word of its own. A word
         is known by its first eight bytes, up to the next break and of seven bits each, ASCII without
         regard to case: longer words that begin alike are equal. Every 13 words in a row have a hash of 64 bits.
Sketch   A held-out document is known by 128 of its hashes, those that are lowest once they are mixed (Broder,
         1997), and one of fewer 13-grams by all. As many of them as occur in another document are an
         estimate of the share of its 13-grams that stand there.
Search   Only the rarest of a sketch are looked up in an index: so many that a near document holds at least 8 of
         them, or fewer where there are not as many rare ones (the prefix filter of Chaudhuri et al., 2006). Only of
         documents that do is the whole sketch compared.
Speed    The upper 24 bits of a hash come from the first two letters of each of the first eight words alone.
         They are what is computed for all text, with numpy for some 128 KiB at a time; the rest of a hash
         only where they are those of a hash in the index.
Error    Documents of up to 127 13-grams are compared exactly, up to equal hashes. Of others a pair
         counts as near from 88 of 128 on: one that shares exactly 80 % is missed with probability 0.1 %;
         one that shares 60 % is taken for near in 3 % of the cases, one that shares half in 1e-5 (binomial).
Cost     See split for that of a whole `prepare`; about 2 KB for each document that may be held out.
Limits   The share is that of the held-out document. A training document that is a small part of
         a held-out one is not found, nor is one of fewer than 13 words.
Checked  tests/data/test_grams.py, against sets of 13-grams.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

GRAM_WORDS = 13
NEAR_SHARE = 0.8
SKETCH_GRAMS = 128
_NEAR_IN_SKETCH = 88
_HITS = 8
"""How many of the rarest hashes of a sketch must occur before the whole sketch is compared."""
_RARE = 16
"""A hash in more sketches is common wording. It finds nobody, and every document that holds it would be compared."""
_MOST_FAILURES = 1000
"""A document that so many others resemble without being near is not worth more comparing."""
_PAIRS = 1 << 12

Hashes = npt.NDArray[np.uint64]
Numbers = npt.NDArray[np.int64]

_BREAK = 0x80


def _code(byte: int) -> int:
    """What a byte counts as: a break between words, else seven bits without regard to case."""
    letter = chr(byte).lower()
    return byte & 0x7F if byte >= 0x80 else ord(letter) if letter.isalnum() or letter == "_" else _BREAK


_CODES = bytes(map(_code, range(256)))
_BREAKS = np.uint64(0x0101010101010101 * _BREAK)
_BASE = np.uint64(0x9E3779B97F4A7C15)
_QUICK_BITS = 24
_QUICK = np.uint64((1 << 64) - (1 << 64 - _QUICK_BITS))


@dataclass(frozen=True)
class Grams:
    """The 13-grams of some documents, one after the other; hashed where that is asked for."""

    quick: Hashes
    """For each 13 words in a row: the upper bits of their hash, and lower ones that mean nothing."""
    starts: Numbers
    """Where each word begins."""
    words: Hashes
    """The eight bytes from there, for every byte."""
    lengths: list[int]
    """Bytes of each document."""

    @cached_property
    def first(self) -> Numbers:
        """The first word of each document, and the number of words."""
        return np.searchsorted(self.starts, np.cumsum([0, *(length + 1 for length in self.lengths)]))

    def of(self, document: int) -> Hashes:
        """The different hashes of one document, in rising order."""
        start, stop = self.first[document : document + 2].tolist()
        if stop - start < GRAM_WORDS:
            return np.empty(0, dtype=np.uint64)
        hashes = _hashes(self.quick[start : stop - GRAM_WORDS + 1], self.words[self.starts[start:stop]])
        hashes.sort()
        is_first = np.ones(len(hashes), dtype=bool)
        np.not_equal(hashes[1:], hashes[:-1], out=is_first[1:])
        return hashes[is_first]

    def at(self, places: Numbers) -> Hashes:
        """The hashes of the 13 words from each of these on."""
        if len(places) * GRAM_WORDS > len(self.starts):  # text that repeats itself
            return _hashes(self.quick, self.words[self.starts])[places]
        words = self.words[self.starts[places + np.arange(GRAM_WORDS)[:, None]]]
        return _hashes(self.quick[places], words).reshape(-1)

    def documents(self, places: Numbers) -> Numbers:
        """The documents in which the 13 words from each of these on lie; -1 where they lie in two."""
        documents = np.searchsorted(self.first, places, side="right") - 1
        return np.where(places + GRAM_WORDS <= self.first[documents + 1], documents, -1)


def grams(texts: Sequence[bytes]) -> Grams:
    """The 13-grams of some texts in UTF-8, together at most some MB."""
    raw = b" ".join([b"", *texts, b" " * 8])
    table = raw.translate(_CODES)
    codes = np.frombuffer(table, dtype=np.uint8)
    size = len(raw) - 1
    padded = np.ones(size + size // 9 + 1, dtype=bool)
    begins = np.less(codes[1:], codes[:-1] & np.uint8(_BREAK), out=padded[:size])  # a letter behind a break
    if not raw.isascii():
        begins |= np.frombuffer(raw, dtype=np.uint8)[1:] >= 0xE0  # a character that is a word by itself
    # numpy searches twice as slowly where at most a tenth is set: a few marks are added behind the end, and cut off.
    num_words = int(np.count_nonzero(begins))
    starts = np.flatnonzero(padded[: size + max((size - 10 * num_words) // 9 + 1, 0)])[:num_words]
    words = np.ndarray(len(raw) - 8, dtype="<u8", buffer=table, offset=1, strides=(1,))
    letters = (codes[1:-1] ^ codes[2:])[starts]
    count = max(len(letters) - GRAM_WORDS + 1, 0)
    quick = np.ndarray(count, dtype="<u8", buffer=letters, strides=(1,)) * _BASE
    return Grams(quick, starts, words, [len(text) for text in texts])


def _hashes(quick: Hashes, words: Hashes) -> Hashes:
    """The hashes of each 13 words in a row along the first axis; a word comes as eight bytes from its start."""
    breaks = words & _BREAKS
    words &= breaks ^ (breaks - np.uint64(1))  # nothing behind the first break; all, where there is none
    words ^= words >> np.uint64(32)  # or the last letters of words would not reach the low bits of a sum
    hashes = words
    for distance in (1, 2, 4, GRAM_WORDS - 8):  # 2, 4 and 8 words; 8, and the 8 that begin 5 words later
        hashes = hashes[:-distance] * _BASE**distance + hashes[distance:]
    hashes *= _BASE  # else the last word's first letters would be shifted out
    hashes >>= np.uint64(_QUICK_BITS)
    hashes |= quick & _QUICK
    return hashes


def sketch(hashes: Hashes) -> Hashes:
    """What a held-out document is known by, from its hashes in rising order."""
    if len(hashes) <= SKETCH_GRAMS:
        return hashes.copy()
    # Text from a template shares the upper bits of a hash, line by line: unmixed, the lowest would be of one place.
    mixed = hashes ^ (hashes << np.uint64(_QUICK_BITS))
    mixed *= np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    return np.sort(hashes[np.argpartition(mixed, SKETCH_GRAMS)[:SKETCH_GRAMS]])


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
        self._hits = np.minimum(self._needed, _HITS)
        self._live = np.array([len(one) > 0 for one in sketches], dtype=bool)
        self._failures = np.zeros(len(sketches), dtype=np.int64)
        self._keys, self._owners = self._rarest()
        bits = min(max((128 * len(self._keys)).bit_length(), 10), _QUICK_BITS)
        self._shift = np.uint64(64 - bits)
        self._filter = np.zeros(1 << bits, dtype=bool)
        self._filter[self._keys >> self._shift] = True

    def _rarest(self) -> tuple[Hashes, Numbers]:
        """As many hashes of each sketch, the rarest, that a near document holds `_hits`; and their owners."""
        if not self._sketches:
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64)
        sizes = np.array([len(one) for one in self._sketches], dtype=np.int64)
        hashes, owners = np.concatenate(self._sketches), np.repeat(np.arange(len(sizes)), sizes)
        _, inverse, counts = np.unique(hashes, return_inverse=True, return_counts=True)
        order = np.lexsort((hashes, counts[inverse], owners))
        # Where fewer are rare than must be looked up, a near document need not hold as many of them.
        rare = np.bincount(owners[counts[inverse] <= _RARE], minlength=len(sizes))
        self._hits = np.clip(rare - (sizes - self._needed), np.minimum(self._needed, 1), self._hits)
        rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        order = order[rank < (sizes - self._needed + self._hits)[owners]]
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

    def near(self, batch: Grams, own: Sequence[int] | None = None) -> Iterator[tuple[int, int]]:
        """Pairs (document of the batch, document of the index that stands nearly whole in it).

        Args:
            batch: the documents to look through.
            own: for each of them which one of the index it is itself, or -1.
        """
        places = np.flatnonzero(self._filter[(batch.quick >> self._shift).view(np.int64)])
        quick = batch.quick[places]
        nearest = self._keys.take(np.searchsorted(self._keys, quick & _QUICK), mode="clip")
        places = places[(nearest ^ quick) <= ~_QUICK]
        if not len(places):
            return
        hashes = batch.at(places)
        first, last = (np.searchsorted(self._keys, hashes, side) for side in ("left", "right"))
        counts = last - first
        rows = np.repeat(last - np.cumsum(counts), counts) + np.arange(counts.sum())
        documents = np.repeat(batch.documents(places), counts)
        wanted = (documents >= 0) & self._live[self._owners[rows]]
        if own is not None:
            wanted &= np.array(own)[documents] != self._owners[rows]
        for document in np.unique(documents[wanted]).tolist():
            held = np.unique(rows[wanted & (documents == document)])
            owners, hits = np.unique(self._owners[held], return_counts=True)
            owners = owners[hits >= self._hits[owners]]
            if len(owners):
                yield from ((document, found) for found in self._compare(batch.of(document), owners))

    def _compare(self, own: Hashes, owners: Numbers) -> Iterator[int]:
        for start in range(0, len(owners), _PAIRS):
            part = owners[start : start + _PAIRS]
            sizes = [len(self._sketches[owner]) for owner in part]
            wanted = np.concatenate([self._sketches[owner] for owner in part])
            place = np.minimum(np.searchsorted(own, wanted), len(own) - 1)
            shared = np.add.reduceat((own[place] == wanted).astype(np.int64), np.cumsum([0, *sizes[:-1]]))
            is_near = shared >= self._needed[part]
            self._failures[part[~is_near]] += 1
            yield from part[is_near].tolist()


def batched(items: Iterable[Any], num_bytes: int = 1 << 17) -> Iterator[list[Any]]:
    """Documents in groups of about 128 KiB, in order."""
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
