"""RMSNorm that writes row and column tiles: see fused.py for the problem and the rounding.

Method   For row tiles alone a program holds 16 rows, sums, and reads them again from cache. Column tiles
         need 128 rows, too few programs to fill a GPU: there one kernel makes r, and one of 128 x 128
         blocks the tiles, so that x crosses memory twice.
Checked  tests/gemm/test_triton_fused.py.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.gemm.kernels.arithmetic import to_bfloat16, widen
from scrimp.gemm.kernels.fused import FusedTiles, store_tiles
from scrimp.gemm.kernels.launch import (
    INPUT_TYPES,
    TILE,
    WARPS_NEAREST,
    ColumnTiles,
    RowTiles,
    check_devices,
    check_matrix,
    checked_element,
    element_constants,
    empty_tiles,
    run,
)
from scrimp.gemm.kernels.tiles import load_block

NORM_ROWS = 16
"""Rows of a program of the norm: 16 x 4096 bfloat16 are 128 KiB, read twice, the second time from cache."""


@triton.jit
def normalise(x, weight, columns, num_columns, r):
    """(x r) w with a bfloat16's value; x zero beyond the edges."""
    w = widen(tl.load(weight + columns, mask=columns < num_columns, other=0.0))
    return widen(to_bfloat16((x * r[:, None]) * w[None, :]))


@triton.jit
def rms_norm_rows_kernel(
    x,
    weight,
    rstd,
    codes,
    scales,
    values,
    num_rows,
    num_columns,
    eps,
    QUANTIZE: tl.constexpr,
    KEEP: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """r of some rows, and their row tiles if asked for."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    squares = tl.zeros((ROWS, BLOCK), tl.float32)
    for first in range(0, num_columns, BLOCK):
        block = load_block(x, rows, first + tl.arange(0, BLOCK), num_rows, num_columns, num_columns)
        squares += block * block
    mean = tl.div_rn(tl.sum(squares, 1), num_columns * 1.0)
    r = tl.div_rn(1.0, tl.sqrt_rn(mean + eps))
    tl.store(rstd + rows, r, mask=rows < num_rows)
    if QUANTIZE:
        for first in range(0, num_columns, BLOCK):
            columns = first + tl.arange(0, BLOCK)
            block = load_block(x, rows, columns, num_rows, num_columns, num_columns)
            store_tiles(
                normalise(block, weight, columns, num_columns, r),
                rows,
                columns,
                0,
                first // BLOCK,
                codes,
                scales,
                codes,
                scales,
                values,
                num_rows,
                num_columns,
                True,
                False,
                KEEP,
                MAX_VALUE,
                MANTISSA_BITS,
                MIN_EXPONENT,
            )


@triton.jit
def rms_norm_blocks_kernel(
    x,
    weight,
    rstd,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    values,
    num_rows,
    num_columns,
    KEEP: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Row and column tiles of one block, from r."""
    blocks_wide = tl.cdiv(num_columns, BLOCK)
    block_row = (tl.program_id(0) // blocks_wide).to(tl.int64)
    block_column = (tl.program_id(0) % blocks_wide).to(tl.int64)
    rows = block_row * BLOCK + tl.arange(0, BLOCK)
    columns = block_column * BLOCK + tl.arange(0, BLOCK)
    r = tl.load(rstd + rows, mask=rows < num_rows, other=0.0)
    block = load_block(x, rows, columns, num_rows, num_columns, num_columns)
    store_tiles(
        normalise(block, weight, columns, num_columns, r),
        rows,
        columns,
        block_row,
        block_column,
        row_codes,
        row_scales,
        column_codes,
        column_scales,
        values,
        num_rows,
        num_columns,
        True,
        False,
        KEEP,
        MAX_VALUE,
        MANTISSA_BITS,
        MIN_EXPONENT,
    )
    # Again, from cache: as in tiles.py.
    block = load_block(x, rows, columns, num_rows, num_columns, num_columns)
    store_tiles(
        normalise(block, weight, columns, num_columns, r),
        rows,
        columns,
        block_row,
        block_column,
        row_codes,
        row_scales,
        column_codes,
        column_scales,
        values,
        num_rows,
        num_columns,
        False,
        True,
        False,
        MAX_VALUE,
        MANTISSA_BITS,
        MIN_EXPONENT,
    )


def rms_norm_quantize(
    x: Tensor, weight: Tensor, eps: float, element: str, *, by_column: bool = False, keep_values: bool = False
) -> FusedTiles:
    """RMSNorm of each row, in bfloat16, quantized to nearest in tiles.

    Args:
        x: row-major [R, C], bfloat16 or float32.
        weight: [C], bfloat16 or float32.
        element: e2m1 (stored as E4M3 codes), e4m3 or e5m2.
        by_column: column tiles beside the row tiles.
        keep_values: also write the bfloat16 values.

    Raises:
        PlanError: tensors that do not fit.
        DeviceError: not on a CUDA device.
    """
    check_matrix("x", x)
    constants: dict[str, Any] = {
        **element_constants(checked_element(element)),
        "KEEP": keep_values,
        "BLOCK": TILE,
    }
    num_rows, num_columns = x.shape
    if weight.shape != (num_columns,) or weight.dtype not in INPUT_TYPES or not weight.is_contiguous():
        got = f"{weight.dtype} {tuple(weight.shape)}, strides {weight.stride()}"
        raise PlanError("weight does not fit x", got=got, expected=f"bfloat16 or float32 ({num_columns},)")
    check_devices(x=x, weight=weight)
    rstd = torch.empty(num_rows, device=x.device)
    row = empty_tiles(num_rows, num_columns, element, x.device)
    column = empty_tiles(num_columns, num_rows, element, x.device) if by_column else None
    values = torch.empty(x.shape, dtype=torch.bfloat16, device=x.device) if keep_values else None
    out = x if values is None else values
    if x.numel():
        run(
            rms_norm_rows_kernel,
            (triton.cdiv(num_rows, NORM_ROWS),),
            x,
            weight,
            rstd,
            *row,
            out,
            num_rows,
            num_columns,
            eps,
            QUANTIZE=not by_column,
            ROWS=NORM_ROWS,
            num_warps=4,
            **constants,
        )
    if x.numel() and column:
        blocks = triton.cdiv(num_rows, TILE) * triton.cdiv(num_columns, TILE)
        arguments = (x, weight, rstd, *row, *column, out, num_rows, num_columns)
        run(rms_norm_blocks_kernel, (blocks,), *arguments, num_warps=WARPS_NEAREST, **constants)
    return FusedTiles(RowTiles(*row), ColumnTiles(*column) if column else None, values, rstd)
