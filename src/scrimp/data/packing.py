"""Whole conversations packed into sequences, for a loss on the assistant's tokens alone.

Problem  A window over a stream of conversations begins and ends in the middle of one, and what is then asked without
         its question teaches wrong things. A conversation to a row wastes most of the row.
Method   A conversation of n tokens takes n - 1 positions: its last token is a target only. Conversations go, the
         longest first, each into the row where it leaves the least space (best-fit decreasing), rows of `sequence`
         positions; what stays empty is padded. Attention keeps conversations apart, by the same document starts as for
         text, so that a row's loss is the sum of theirs.
Too long What is longer than a row is cut at its end: its first turns stay in their context. If no token of an answer
         is left then, it is left out. `Packed.sentence` says how many.
Order    A row is a sample; samples are shuffled per epoch by `SampleIndex`. Rows follow from lengths and `sequence`
         alone.
Cost     O(N log N + N sequence / 64) for N conversations, 24 bytes for each.
Checked  tests/data/test_packing.py
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from scrimp.config.mixture import MOST_SOURCES
from scrimp.data.batch import IGNORED, Row
from scrimp.data.corpus import TokenStream
from scrimp.data.shards import BoolArray, Int64Array
from scrimp.errors import DataError


class Packed:
    """The rows of a stream of conversations.

    Args:
        stream: of conversations.
        sequence: positions of a row.
        name: the split, for errors.
    """

    def __init__(self, stream: TokenStream, sequence: int, name: str = "training") -> None:
        self.stream, self.sequence = stream, sequence
        self._starts = stream.document_starts(0, stream.num_tokens)
        lengths = np.diff(self._starts, append=stream.num_tokens)
        is_cut = lengths - 1 > sequence
        self._taken = np.minimum(lengths, sequence + 1)
        kept = self._taken > 1
        for number in np.flatnonzero(is_cut):
            kept[number] = self._mask(int(number))[1:].any()
        self._rows = best_fit(self._taken - 1, sequence, np.flatnonzero(kept))
        self.num_cut, self.num_left_out = int((is_cut & kept).sum()), int((~kept).sum())
        if not self._rows:
            raise DataError(
                f"the {name} split has no conversation with an answer in the first {sequence:,} tokens",
                got=f"{len(lengths):,} conversations",
                do="raise train.sequence, or give more conversations",
            )
        self._fill = float((self._taken[kept] - 1).sum()) / (len(self._rows) * sequence)

    @property
    def num_samples(self) -> int:
        """Rows."""
        return len(self._rows)

    @property
    def sentence(self) -> str:
        """How the conversations fit, for people."""
        count = len(self._starts) - self.num_left_out
        text = f"{count:,} conversations in {len(self._rows):,} sequences of {self.sequence:,} tokens"
        text += f", {self._fill:.0%} full"
        if self.num_cut or self.num_left_out:
            text += f"; longer than a sequence: {self.num_cut:,} cut at the end"
            text += f", {self.num_left_out:,} left out, for no answer begins before the cut"
        return text

    def row(self, number: int) -> Row:
        """One row, filled up with token 0 and targets that do not count."""
        tokens = np.zeros(self.sequence, dtype=np.int64)
        targets = np.full(self.sequence, IGNORED, dtype=np.int64)
        starts, at = [], 0
        for document in self._rows[number]:
            first, taken = int(self._starts[document]), int(self._taken[document])
            read = self.stream.read(first, first + taken).astype(np.int64)
            stop = at + taken - 1
            tokens[at:stop] = read[:-1]
            targets[at:stop] = np.where(self._mask(document)[1:], read[1:], IGNORED)
            starts.append(at)
            at = stop
        if at < self.sequence:
            starts.append(at)  # what fills the row up attends to nothing else
        return tokens, targets, np.array(starts[1:], dtype=np.int64)

    def answer_bytes(self, number: int) -> float:
        """UTF-8 bytes of the answers in a row; of a conversation that is cut its share of tokens."""
        return sum(
            self.stream.text_bytes_between(first, first + int(self._taken[document]))
            for document in self._rows[number]
            for first in [int(self._starts[document])]
        )

    def _mask(self, document: int) -> BoolArray:
        first = int(self._starts[document])
        return self.stream.mask(first, first + int(self._taken[document]))


@lru_cache(maxsize=2 * MOST_SOURCES)  # both splits of each source of a mixture
def packed(stream: TokenStream, sequence: int, name: str = "training") -> Packed:
    """The rows of a stream, made once."""
    return Packed(stream, sequence, name)


def best_fit(lengths: Int64Array, capacity: int, which: Int64Array) -> list[list[int]]:
    """Rows of `capacity` that hold the lengths numbered `which`, the longest first; of equals the first first."""
    order = which[np.argsort(-lengths[which], kind="stable")]
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = {}
    spaces = 0  # bit s is set if a row has s positions left
    for number in order.tolist():
        length = int(lengths[number])
        fitting = spaces >> length
        if fitting:
            space = length + (fitting & -fitting).bit_length() - 1
            row = with_space[space].pop()
            if not with_space[space]:
                spaces &= ~(1 << space)
        else:
            space, row = capacity, len(rows)
            rows.append([])
        rows[row].append(number)
        left = space - length
        if left:
            with_space.setdefault(left, []).append(row)
            spaces |= 1 << left
    return rows
