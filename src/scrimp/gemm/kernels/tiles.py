"""Tiles of 128 along both axes of a matrix, from one reading of memory.

Problem  X is summed over its columns in fprop and over its rows in wgrad; G likewise in dgrad and wgrad. Two
         quantizers and a transpose read the matrix three times and write it once too often.
Method   A program takes one block of 128 x 128. Its 128 rows are 128 tiles along the columns, its 128 columns
         are 128 tiles along the rows: both sets of maxima, scales and codes come from one reading of
         device memory (and a second of the cache, which halves the registers and so doubles the programs
         at work), and the second set is stored transposed, which is what a GEMM reads.

             s = amax / qmax,   q = round(x / s)         (arithmetic.py)

Noise    Stochastic rounding adds the hashes of an element's row and column in the whole matrix, whichever
         way its codes are stored; the two results take separate streams.
Limits   A group with a NaN or an infinity has the scale NaN; the codes beside it mean nothing.
Checked  tests/gemm/test_triton_tiles.py: codes and scales equal to `scrimp.formats.quantize`.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats.noise import Noise
from scrimp.gemm.kernels.arithmetic import fp32_scale, magnitude_bits, quantize_tile, widen
from scrimp.gemm.kernels.launch import (
    TILE,
    WARPS_NEAREST,
    WARPS_STOCHASTIC,
    ColumnTiles,
    RowTiles,
    check_devices,
    check_matrix,
    checked_element,
    element_constants,
    empty_tiles,
    hashes,
    run,
)


@triton.jit
def load_block(x, rows, columns, num_rows, num_columns, row_stride):
    """A float32 block, zero beyond the edges."""
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return widen(tl.load(x + rows[:, None] * row_stride + columns[None, :], mask=mask, other=0.0))


@triton.jit
def store_row_tiles(
    x,
    rows,
    columns,
    group,
    codes,
    scales,
    row_hashes,
    column_hashes,
    num_rows,
    num_columns,
    STOCHASTIC: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Quantize a loaded float32 block along its columns; codes [R, C], scales [R, groups] column-major."""
    scale = fp32_scale(tl.max(magnitude_bits(x), 1), MAX_VALUE)
    tl.store(scales + group * num_rows + rows, scale, mask=rows < num_rows)
    row_hash = 0
    column_hash = 0
    if STOCHASTIC:
        row_hash = tl.load(row_hashes + rows, mask=rows < num_rows, other=0)[:, None]
        column_hash = tl.load(column_hashes + columns, mask=columns < num_columns, other=0)[None, :]
    q = quantize_tile(
        x, scale[:, None], row_hash, column_hash, STOCHASTIC, MAX_VALUE, MANTISSA_BITS, MIN_EXPONENT
    )
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    address = codes + rows[:, None] * num_columns + columns[None, :]
    tl.store(address, q.to(codes.dtype.element_ty), mask=mask)


@triton.jit
def store_column_tiles(
    x,
    rows,
    columns,
    group,
    codes,
    scales,
    row_hashes,
    column_hashes,
    num_rows,
    num_columns,
    STOCHASTIC: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Quantize a loaded float32 block along its rows; codes [C, R], scales [C, groups] column-major."""
    scale = fp32_scale(tl.max(magnitude_bits(x), 0), MAX_VALUE)
    tl.store(scales + group * num_columns + columns, scale, mask=columns < num_columns)
    row_hash = 0
    column_hash = 0
    if STOCHASTIC:
        row_hash = tl.load(row_hashes + rows, mask=rows < num_rows, other=0)[:, None]
        column_hash = tl.load(column_hashes + columns, mask=columns < num_columns, other=0)[None, :]
    q = quantize_tile(
        x, scale[None, :], row_hash, column_hash, STOCHASTIC, MAX_VALUE, MANTISSA_BITS, MIN_EXPONENT
    )
    # One byte an element crosses the threads, not four.
    transposed = tl.trans(q.to(codes.dtype.element_ty))
    mask = (columns < num_columns)[:, None] & (rows < num_rows)[None, :]
    tl.store(codes + columns[:, None] * num_rows + rows[None, :], transposed, mask=mask)


@triton.jit
def quantize_tiles_kernel(
    x,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    row_hashes,
    column_hashes,
    second_row_hashes,
    second_column_hashes,
    num_rows,
    num_columns,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STOCHASTIC_COLUMN: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of BLOCK x BLOCK a program, neighbours along the columns next to each other in time."""
    blocks_wide = tl.cdiv(num_columns, BLOCK)
    block_row = (tl.program_id(0) // blocks_wide).to(tl.int64)
    block_column = (tl.program_id(0) % blocks_wide).to(tl.int64)
    rows = block_row * BLOCK + tl.arange(0, BLOCK)
    columns = block_column * BLOCK + tl.arange(0, BLOCK)
    if BY_ROW:
        block = load_block(x, rows, columns, num_rows, num_columns, num_columns)
        store_row_tiles(
            block,
            rows,
            columns,
            block_column,
            row_codes,
            row_scales,
            row_hashes,
            column_hashes,
            num_rows,
            num_columns,
            STOCHASTIC,
            MAX_VALUE,
            MANTISSA_BITS,
            MIN_EXPONENT,
        )
    if BY_COLUMN:
        # Again, from the first-level cache: held in registers through both halves, twice as many are needed.
        block = load_block(x, rows, columns, num_rows, num_columns, num_columns)
        store_column_tiles(
            block,
            rows,
            columns,
            block_row,
            column_codes,
            column_scales,
            second_row_hashes,
            second_column_hashes,
            num_rows,
            num_columns,
            STOCHASTIC_COLUMN,
            MAX_VALUE,
            MANTISSA_BITS,
            MIN_EXPONENT,
        )


def quantize_tiles(
    x: Tensor,
    element: str,
    *,
    by_row: bool,
    by_column: bool,
    noise: Noise | None = None,
    noise_column: Noise | None = None,
) -> tuple[RowTiles | None, ColumnTiles | None]:
    """Quantize a matrix in tiles of 128 along its columns, its rows, or both, reading it once.

    Args:
        x: row-major [R, C], bfloat16 or float32.
        element: e2m1 (stored as E4M3 codes), e4m3 or e5m2.
        by_row: tiles along the columns, codes [R, C].
        by_column: tiles along the rows, codes [C, R].
        noise: rounds the row tiles stochastically; unset: to nearest.
        noise_column: the same for the column tiles.

    Raises:
        PlanError: a tensor or a choice that the kernel does not take.
        DeviceError: not on a CUDA device.
    """
    check_matrix("x", x)
    kind = checked_element(element)
    _check_choice(by_row, by_column, noise, noise_column)
    check_devices(x=x)
    num_rows, num_columns = x.shape
    row = empty_tiles(num_rows, num_columns, element, x.device) if by_row else None
    column = empty_tiles(num_columns, num_rows, element, x.device) if by_column else None
    if x.numel():
        run(
            quantize_tiles_kernel,
            (triton.cdiv(num_rows, TILE) * triton.cdiv(num_columns, TILE),),
            x,
            *(row or (x, x)),
            *(column or (x, x)),
            *hashes(noise, num_rows, num_columns, x),
            *hashes(noise_column, num_rows, num_columns, x),
            num_rows,
            num_columns,
            BY_ROW=by_row,
            BY_COLUMN=by_column,
            STOCHASTIC=noise is not None,
            STOCHASTIC_COLUMN=noise_column is not None,
            **element_constants(kind),
            BLOCK=TILE,
            num_warps=WARPS_NEAREST if noise is None and noise_column is None else WARPS_STOCHASTIC,
        )
    return RowTiles(*row) if row else None, ColumnTiles(*column) if column else None


def _check_choice(by_row: bool, by_column: bool, noise: Noise | None, noise_column: Noise | None) -> None:
    if not (by_row or by_column):
        raise PlanError("nothing to quantize", got="by_row=False, by_column=False", expected="one of them")
    for name, stream, wanted in (("noise", noise, by_row), ("noise_column", noise_column, by_column)):
        if stream is not None and not wanted:
            raise PlanError(f"{name} is for tiles that are not asked for", do=f"leave {name} out")
    if noise is not None and noise == noise_column:
        raise PlanError(
            "both results would round with the same noise",
            got=f"key {noise.key} twice",
            do="derive a stream for each",
        )
