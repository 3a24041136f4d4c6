"""Bytes that a quantizer must move at least: every input read once, every output written once.

A kernel's time over (bytes / memory bandwidth) says how far it is from the best possible; no cache
can lower these figures for tensors larger than it.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil

from scrimp.errors import PlanError
from scrimp.gemm.kernels.launch import TILE

SCALE_BYTES = 4
HASH_BYTES = 4
BF16_BYTES = 2


def bytes_moved(function: str, rows: int, columns: int, input_bytes: int, **options: bool) -> int:
    """Bytes read and written by a launcher.

    Args:
        function: a launcher's name.
        rows: of the result; columns likewise (so F, not 2 F, for swiglu_quantize).
        input_bytes: bytes of one input element: 2 or 4.
        options: by_row, by_column, stochastic, stochastic_column, transposed, keep_values, where the
            launcher has them.

    Raises:
        PlanError: not a launcher.
    """
    if function not in _FLOORS:
        raise PlanError("no such kernel", got=function, expected=", ".join(_FLOORS))
    return _FLOORS[function](rows, columns, input_bytes, **options)


def _tiles(rows: int, columns: int) -> int:
    return rows * columns + SCALE_BYTES * rows * ceil(columns / TILE)


def _hashes(rows: int, columns: int, streams: int) -> int:
    return streams * HASH_BYTES * (rows + columns)


def _quantize_tiles(
    rows: int,
    columns: int,
    input_bytes: int,
    *,
    by_row: bool = True,
    by_column: bool = True,
    stochastic: bool = False,
    stochastic_column: bool = False,
) -> int:
    written = by_row * _tiles(rows, columns) + by_column * _tiles(columns, rows)
    streams = (by_row and stochastic) + (by_column and stochastic_column)
    return rows * columns * input_bytes + written + _hashes(rows, columns, streams)


def _quantize_blocks(rows: int, columns: int, input_bytes: int, *, transposed: bool = False) -> int:
    scales = SCALE_BYTES * ceil(rows / TILE) * ceil(columns / TILE)
    return rows * columns * (input_bytes + 1 + transposed) + scales


def _fake_quantize_groups(rows: int, columns: int, input_bytes: int, *, stochastic: bool = False) -> int:
    return rows * columns * (input_bytes + BF16_BYTES) + _hashes(rows, columns, int(stochastic))


def _tensor_amax(rows: int, columns: int, input_bytes: int) -> int:
    return rows * columns * input_bytes


def _rms_norm_quantize(
    rows: int, columns: int, input_bytes: int, *, by_column: bool = False, keep_values: bool = False
) -> int:
    tiles = _quantize_tiles(rows, columns, input_bytes, by_column=by_column)
    rstd, weight = 4 * rows, 4 * columns
    return tiles + rstd + weight + keep_values * BF16_BYTES * rows * columns


def _swiglu_quantize(
    rows: int,
    columns: int,
    input_bytes: int,
    *,
    by_row: bool = True,
    by_column: bool = True,
    keep_values: bool = False,
) -> int:
    tiles = _quantize_tiles(rows, columns, 2 * input_bytes, by_row=by_row, by_column=by_column)
    return tiles + keep_values * input_bytes * rows * columns


_FLOORS: dict[str, Callable[..., int]] = {
    "quantize_tiles": _quantize_tiles,
    "quantize_blocks": _quantize_blocks,
    "fake_quantize_groups": _fake_quantize_groups,
    "tensor_amax": _tensor_amax,
    "rms_norm_quantize": _rms_norm_quantize,
    "swiglu_quantize": _swiglu_quantize,
}
