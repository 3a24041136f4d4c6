"""Bytes that a quantizer must move at least: every input read once, every output written once.

Columns that share a scale, and a whole tensor, are read twice: the largest number must be known before the first is
rounded. A kernel's time over (bytes / memory bandwidth) says how far it is from the best possible; no cache
can lower these figures for tensors larger than it.

Checked  tests/benchmarks/test_gemm_benchmark.py: against the sizes of the tensors.
"""

from __future__ import annotations

from functools import partial
from math import ceil

from scrimp.gemm.kernels.launch import TILE, GroupsOf
from scrimp.precision import lookup_scaling, storage_bytes

SCALE_BYTES = 4
HASH_BYTES = 4
BF16_BYTES = 2


def bytes_moved(function: str, rows: int, columns: int, input_bytes: int, **options: bool) -> int:
    """Bytes read and written by a launcher of `scrimp.gemm.kernels`.

    Args:
        input_bytes: bytes of one input element: 2 or 4.
        options: by_row, by_column, stochastic, stochastic_column, where the launcher has them.
    """
    return _FLOORS[function](rows, columns, input_bytes, **options)


def groups_moved(rows: int, columns: int, input_bytes: int, *sides: GroupsOf | None) -> int:
    """The same of `quantize_groups`, which reads twice where it looks for the largest number of a tensor.

    Args:
        sides: groups along the columns, and along the rows.
    """
    numbers, found, readings = rows * columns, 0, 1
    for one, shape in zip(sides, ((rows, columns), (columns, rows)), strict=False):
        if one is None:
            continue
        operand = one.operand
        is_code = one.form != "values"
        found += storage_bytes(shape, operand.element, operand.scaling) if is_code else BF16_BYTES * numbers
        found += _hashes(rows, columns, int(operand.rounding == "stochastic"))
        if lookup_scaling(operand.scaling).has_tensor_scale and one.amax is None:
            readings = 2
    return readings * input_bytes * numbers + found


def _along_axes(
    scaling: str,
    rows: int,
    columns: int,
    input_bytes: int,
    *,
    by_row: bool = True,
    by_column: bool = True,
    stochastic: bool = False,
    stochastic_column: bool = False,
) -> int:
    """What quantizes along either axis or both, one byte a code."""
    readings = {"tile": 1, "row": 1 + by_column, "tensor": 2}[scaling]
    tiles = by_row * rows * ceil(columns / TILE) + by_column * columns * ceil(rows / TILE)
    scales = {"tile": tiles, "row": by_row * rows + by_column * columns, "tensor": 1}[scaling]
    streams = (by_row and stochastic) + (by_column and stochastic_column)
    numbers = rows * columns * (readings * input_bytes + by_row + by_column)
    return numbers + SCALE_BYTES * scales + _hashes(rows, columns, streams)


def _quantize_blocks(rows: int, columns: int, input_bytes: int) -> int:
    scales = SCALE_BYTES * ceil(rows / TILE) * ceil(columns / TILE)
    return rows * columns * (input_bytes + 1) + scales


def _tensor_amax(rows: int, columns: int, input_bytes: int) -> int:
    return rows * columns * input_bytes


def _hashes(rows: int, columns: int, streams: int) -> int:
    return streams * HASH_BYTES * (rows + columns)


_FLOORS = {
    "quantize_tiles": partial(_along_axes, "tile"),
    "quantize_rows": partial(_along_axes, "row"),
    "quantize_tensor": partial(_along_axes, "tensor"),
    "quantize_blocks": _quantize_blocks,
    "tensor_amax": _tensor_amax,
}
