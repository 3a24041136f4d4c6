"""Temporary memory of updates and gradient sums that are no fused kernel: arrays of one piece of a matrix.

Method   `scrimp.optim.update` works through a matrix in pieces of rows, in arrays that it uses again, the largest
         matrix first. So what it holds is so many fp32 or int32 arrays of the largest piece, and hashes of rows and
         columns, which are made from three int64 arrays. 8-bit moments take one array more for signs, one where a row
         is no whole number of blocks, and the scales.
Limits   The numbers of arrays are those of `scrimp.optim.update` and `rounding`.
Checked  tests/optim/test_scratch.py: the updates themselves, counted by torch's profiler.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor

from scrimp.formats.moment_codes import BLOCK

_BEFORE_NOISE = 4
"""Arrays of an update that exist when the first hashes are made: gradient, other, mean, square."""
_NOISE = 2
"""hash, bits."""
_HASH_BYTES = 24
"""Bytes for one row or column while its hash is made: three int64."""
_SCALARS = 64
"""Numbers that are tensors of their own."""
_SCALE_ARRAYS = 6
"""Arrays that hold one number per block."""


def update_scratch(parameters: Iterable[Tensor], piece: int, *, eight_bit: bool) -> int:
    """Bytes that the update of some parameters takes beside them.

    Args:
        piece: most elements at once.
        eight_bit: moments of matrices are kept in 8 bits.
    """
    shapes = sorted(map(_matrix, parameters), key=lambda shape: -shape[0] * shape[1])
    most = 4 * max(_elements(shape, piece) for shape in shapes)
    extra = 0.0
    if eight_bit:
        matrices = [columns for _, columns in shapes if columns > 1]
        padded = max((math.ceil(c / BLOCK) * BLOCK / c for c in matrices if c % BLOCK), default=0)
        extra = 1 + padded + _SCALE_ARRAYS / BLOCK
    first, *others = shapes
    found = [_peak(first, most, piece, _BEFORE_NOISE, extra)]
    return max(found + [int(most * (_BEFORE_NOISE + _NOISE)) + _hashing(shape, piece) for shape in others])


def sum_scratch(parameter: Tensor, piece: int) -> int:
    """Bytes that adding a bf16 gradient to a bf16 sum with stochastic rounding takes beside both."""
    shape = _matrix(parameter)
    most = 4 * _elements(shape, piece)
    widened = most if _is_cut(shape, piece) else 0  # of the gradient, which an addition copies
    return max(2 * most + 4 * shape[1] + _SCALARS, _peak(shape, most, piece, 1, 0.0) + widened)


def _peak(shape: tuple[int, int], most: int, piece: int, before: int, extra: float) -> int:
    """Most bytes that one matrix takes: while hashes are made, or after that, when from its second piece on all arrays
    exist."""
    rows, columns = _piece(shape, piece)[0], shape[1]
    arrays = before + (_NOISE if _is_cut(shape, piece) else 0)
    of_rows = arrays * most + _HASH_BYTES * rows + 4 * columns
    after = int((before + _NOISE + extra) * most) + 4 * (rows + columns)
    return max(_HASH_BYTES * columns, of_rows, after) + _SCALARS


def _matrix(parameter: Tensor) -> tuple[int, int]:
    rows = parameter.shape[0]
    return rows, parameter.numel() // rows


def _piece(shape: tuple[int, int], piece: int) -> tuple[int, int]:
    """Rows and columns at once."""
    rows, columns = shape
    width = min(columns, max(1, piece // BLOCK) * BLOCK)
    return min(rows, max(1, piece // width)), width


def _elements(shape: tuple[int, int], piece: int) -> int:
    height, width = _piece(shape, piece)
    return height * width


def _is_cut(shape: tuple[int, int], piece: int) -> bool:
    return _elements(shape, piece) < shape[0] * shape[1]


def _hashing(shape: tuple[int, int], piece: int) -> int:
    """Hashes of columns are kept while those of rows are made."""
    return max(_HASH_BYTES * shape[1], _HASH_BYTES * _piece(shape, piece)[0] + 4 * shape[1])
