"""Groups of elements as views: a matrix [R, C] seen as [R/r, r, C/c, c], one scale per r x c group.

Every scaling is a group size (r, c): (1, 128) for a tile along the columns, (128, 1) for one along the
rows, (R, C) for the whole matrix. So one piece of code serves every scaling and both axes, without a
transposed copy. Ragged edges are padded with zeros, which never raise a maximum of magnitudes.

Work is cut into pieces of whole groups that stay in a core's cache: a dozen passes over a piece cost
less than two over memory (CPU; an accelerator
takes pieces large enough to fill it, and small beside its memory). A trace on tensors without memory asks what lives at
once, which the first two pieces and the last one say (`ends_alone`): of a large layer there are thousands.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from scrimp.precision.formats import Scaling

PIECE_ELEMENTS = {"cpu": 2**18, "cuda": 2**22}
"""Elements of one piece, by device type: 1 MiB of float32 in a core's second-level cache, 16 MiB on an accelerator."""

_ENDS_ALONE: ContextVar[bool] = ContextVar("ends_alone", default=False)


@contextlib.contextmanager
def ends_alone() -> Iterator[None]:
    """Inside, of more than three pieces only the first two and the last are taken: for fake tensors, whose bytes they
    tell and whose numbers nobody reads."""
    token = _ENDS_ALONE.set(True)
    try:
        yield
    finally:
        _ENDS_ALONE.reset(token)


def cut(num_rows: int, step: int) -> Iterator[slice]:
    """Ranges of `step` rows; the last may be shorter."""
    starts: Sequence[int] = range(0, num_rows, step)
    if _ENDS_ALONE.get() and len(starts) > 3:
        starts = (*starts[:2], starts[-1])
    for start in starts:
        yield slice(start, min(start + step, num_rows))


@dataclass(frozen=True)
class Groups:
    """Rows and columns of one group."""

    rows: int
    columns: int

    @classmethod
    def of(cls, scaling: Scaling, axis: int, num_rows: int, num_columns: int) -> Groups:
        """The groups of a matrix whose `axis` (-1 columns, -2 rows) is the scaled one."""
        along = num_columns if axis == -1 else num_rows
        across = num_rows if axis == -1 else num_columns
        size_along = along if scaling.columns is None else scaling.columns
        size_across = across if scaling.rows is None else scaling.rows
        return cls(size_across, size_along) if axis == -1 else cls(size_along, size_across)

    def view(self, matrix: Tensor) -> Tensor:
        """[R/r, r, C/c, c]: a view where the groups fit, a zero-padded copy where they do not."""
        num_rows, num_columns = matrix.shape
        pad_rows, pad_columns = -num_rows % self.rows, -num_columns % self.columns
        if pad_rows or pad_columns:
            matrix = F.pad(matrix, (0, pad_columns, 0, pad_rows))
        view: Tensor = matrix.unflatten(1, (-1, self.columns)).unflatten(0, (-1, self.rows))
        return view

    def pieces(self, num_rows: int, num_columns: int, device_type: str) -> Iterator[slice]:
        """Ranges of rows of whole groups, each small enough for the cache."""
        limit = PIECE_ELEMENTS.get(device_type, PIECE_ELEMENTS["cuda"])
        step = max(1, limit // max(1, num_columns * self.rows)) * self.rows
        return cut(num_rows, step)


def largest_magnitude(view: Tensor) -> Tensor:
    """Per group of a float32 view [A, r, B, c], shape [A, 1, B, 1]; NaN where a member is NaN."""
    # One axis at a time: torch reduces single axes several times faster than pairs.
    magnitude = view.abs()
    if view.shape[1] > 1:
        magnitude = magnitude.amax(1, keepdim=True)
    return magnitude.amax(3, keepdim=True) if view.shape[3] > 1 else magnitude
