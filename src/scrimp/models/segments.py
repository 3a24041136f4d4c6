"""Which packed documents a CPU attends to in one call.

Problem  One call for all rows needs a mask as soon as a row holds two documents, and computes what the mask hides.
         One call per document costs some 20 us of overhead each, which short documents do not repay; and one call for
         many whole rows holds the gradients of all of them at once.
Method   A segment is a call over neighbouring tokens of the packed rows:

         alone    A document: one causal call.
         rows     Rows that are one document each go together, up to `ROWS_TOKENS` tokens a call.
         tiny     Documents of fewer than `TINY_TOKENS` tokens that follow each other in a row share a call with a small
                  mask, up to `SHARED_TOKENS` tokens.

         A document that reaches the sliding window takes its corner of one mask, as large as the longest of them.
Memory   Results and gradients of a segment are written where they belong before the next one runs. So no batch needs
         more at any moment than `worst_segments` does, up to some kB that oneDNN packs in bf16.
Bound    One call per row made steps of llama-3m a seventh slower in bf16 at 256 tokens a row, a tenth at 512. More than
         `ROWS_TOKENS` would save a smaller part, and hold more (docs/lab-log.md).
Checked  tests/models/test_attention.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scrimp.models.masks import added, allowed

TINY_TOKENS = 16
"""Documents of fewer share a call."""
SHARED_TOKENS = 128
"""Most tokens of a call that tiny documents share."""
ROWS_TOKENS = 2048
"""Most tokens of a call for several rows."""


@dataclass(frozen=True)
class Segment:
    """Documents that are attended to in one call."""

    start: int
    """First token, over all rows."""
    lengths: tuple[int, ...]
    """Tokens per document of one row."""
    rows: int = 1
    """Rows of one document each, if there are several."""

    @property
    def length(self) -> int:
        """Tokens in a row."""
        return sum(self.lengths)

    @property
    def stop(self) -> int:
        """The token after the last."""
        return self.start + self.rows * self.length

    def of(self, x_BTXK: Tensor) -> Tensor:
        """A view of its tokens, shape (rows, tokens of a row, heads, K)."""
        tokens = x_BTXK.flatten(0, 1)[self.start : self.stop]
        return tokens.view(self.rows, self.length, *tokens.shape[1:])

    def of_sums(self, lse_HS: Tensor) -> Tensor:
        """A view of its log-sum-exps, shape (rows, heads, tokens of a row)."""
        tokens = lse_HS[:, self.start : self.stop]
        return tokens.view(-1, self.rows, self.length).transpose(0, 1)

    def mask(self, shared: Tensor | None, window: int | None, like: Tensor) -> Tensor | None:
        """What is added to its scores; None: they are causal.

        Args:
            shared: `window_mask` of the batch.
            window: the sliding window, where any document of the batch reaches it.
            like: for its type and device.
        """
        if len(self.lengths) > 1:
            return added(allowed(1, self.length, self.lengths, window, like.device), like.dtype)
        if window is None or self.length <= window:
            return None
        assert shared is not None
        return shared[..., : self.length, : self.length]


def segments_of(lengths: tuple[int, ...], row: int) -> tuple[Segment, ...]:
    """The segments of documents of so many tokens each, in rows of `row` tokens."""
    found: list[Segment] = []
    start = 0
    for length in lengths:
        last = found[-1] if found else None
        joined = None if last is None else _joined(last, length, row, begins_row=start % row == 0)
        if joined is None:
            found.append(Segment(start, (length,)))
        else:
            found[-1] = joined
        start += length
    return tuple(found)


def _joined(last: Segment, length: int, row: int, *, begins_row: bool) -> Segment | None:
    """A segment with the next document in it; None where that needs a call of its own."""
    if begins_row:
        are_rows = last.length == length == row and (last.rows + 1) * row <= ROWS_TOKENS
        return replace(last, rows=last.rows + 1) if are_rows and len(last.lengths) == 1 else None
    is_tiny = max(length, *last.lengths) < TINY_TOKENS and last.length + length <= SHARED_TOKENS
    return replace(last, lengths=(*last.lengths, length)) if is_tiny else None


def worst_segments(rows: int, length: int, widened: int) -> tuple[Segment, ...]:
    """Rows of one document, and calls beside them: no batch takes more for one.

    Args:
        widened: tokens of the longest document that `scrimp.models.cpu_attention` widens; 0: none is.
    """
    longest, shared = min(length, widened), min(length, SHARED_TOKENS)
    # A document alone, and what tiny ones share; each once more as long as it is widened.
    alone = [Segment(0, (longest,))] if longest else []
    tiny = [Segment(0, (1,) * tokens) for tokens in {shared, min(shared, longest) or shared}]
    return (*segments_of((length,) * rows, length), *alone, *tiny)


def window_mask(lengths: tuple[int, ...], window: int | None, dtype: torch.dtype) -> Tensor | None:
    """The mask of which each document that reaches the window takes a corner."""
    if window is None:
        return None
    return added(allowed(1, max(lengths), None, window, torch.device("cpu")), dtype)
