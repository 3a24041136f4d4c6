"""RMSNorm and SwiGLU that write the operands of the next GEMM instead of activations.

Problem  Only GEMMs read the result of a norm or of SwiGLU. Written in bfloat16 and quantized by another kernel it
         crosses memory three times more than needed.
Method   The same arithmetic as `scrimp.models.functions`, then `tiles.py` on the registers:

             rms_norm  r = 1 / sqrt(mean(x^2) + eps),  y = bf16((x r) w)          in float32
             swiglu    s = T(silu(gate)),  y = T(s up)                  T: rounding to the input's type

Rounding Sums and exponentials differ from eager code in the last bits of float32, so y may differ by one unit
         of bfloat16; codes and scales are exactly those of y (`keep_values=True` returns it).
Limits   Nearest rounding only: X is never rounded stochastically.
Checked  tests/gemm/test_triton_fused.py.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.gemm.kernels.arithmetic import to_bfloat16, widen
from scrimp.gemm.kernels.launch import (
    TILE,
    ColumnTiles,
    RowTiles,
    check_devices,
    check_matrix,
    checked_element,
    element_constants,
    empty_tiles,
    run,
)
from scrimp.gemm.kernels.tiles import load_block, store_column_tiles, store_row_tiles

SWIGLU_WARPS = 16
"""Both tiles from registers, since computing values twice costs more: 16 warps have enough of them."""


@dataclass(frozen=True)
class FusedTiles:
    """Operands made from an activation that was never stored."""

    row: RowTiles | None
    column: ColumnTiles | None
    values: Tensor | None
    """The activation itself, where it was asked for."""
    rstd: Tensor | None
    """float32 [R]: r of each row, which the norm's backward needs."""


@triton.jit
def store_tiles(
    y,
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
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    KEEP: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
):
    """Write what is asked for of a float32 block of values in their final type, zero beyond the edges."""
    if KEEP:
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        address = values + rows[:, None] * num_columns + columns[None, :]
        tl.store(address, to_bfloat16(y) if values.dtype.element_ty == tl.bfloat16 else y, mask=mask)
    if BY_ROW:
        store_row_tiles(
            y,
            rows,
            columns,
            block_column,
            row_codes,
            row_scales,
            row_scales,
            row_scales,
            num_rows,
            num_columns,
            False,
            MAX_VALUE,
            MANTISSA_BITS,
            MIN_EXPONENT,
        )
    if BY_COLUMN:
        store_column_tiles(
            y,
            rows,
            columns,
            block_row,
            column_codes,
            column_scales,
            column_scales,
            column_scales,
            num_rows,
            num_columns,
            False,
            MAX_VALUE,
            MANTISSA_BITS,
            MIN_EXPONENT,
        )


@triton.jit
def rounded_as(x, tensor):
    """float32 x with a value that the tensor's type has."""
    if tensor.dtype.element_ty == tl.bfloat16:
        x = widen(to_bfloat16(x))
    return x


@triton.jit
def swiglu_kernel(
    gate_up,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    values,
    num_rows,
    num_columns,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    KEEP: tl.constexpr,
    MAX_VALUE: tl.constexpr,
    MANTISSA_BITS: tl.constexpr,
    MIN_EXPONENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Tiles of one block of silu(gate) up."""
    blocks_wide = tl.cdiv(num_columns, BLOCK)
    block_row = (tl.program_id(0) // blocks_wide).to(tl.int64)
    block_column = (tl.program_id(0) % blocks_wide).to(tl.int64)
    rows = block_row * BLOCK + tl.arange(0, BLOCK)
    columns = block_column * BLOCK + tl.arange(0, BLOCK)
    gate = load_block(gate_up, rows, columns, num_rows, num_columns, 2 * num_columns)
    up = load_block(gate_up + num_columns, rows, columns, num_rows, num_columns, 2 * num_columns)
    silu = tl.div_rn(gate, 1.0 + tl.exp(-gate))
    y = rounded_as(rounded_as(silu, gate_up) * up, gate_up)
    store_tiles(
        y,
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
        BY_ROW,
        BY_COLUMN,
        KEEP,
        MAX_VALUE,
        MANTISSA_BITS,
        MIN_EXPONENT,
    )


def swiglu_quantize(
    gate_up: Tensor,
    element: str,
    *,
    by_row: bool = True,
    by_column: bool = True,
    keep_values: bool = False,
) -> FusedTiles:
    """silu(gate) up for gate and up side by side, quantized to nearest in tiles, reading memory once.

    Args:
        gate_up: row-major [R, 2 F], bfloat16 or float32; the type of the values too.
        element: e2m1 (stored as E4M3 codes), e4m3 or e5m2.
        by_row: tiles along F, codes [R, F].
        by_column: tiles along the rows, codes [F, R].
        keep_values: also write the values [R, F].

    Raises:
        PlanError: a tensor or a choice that the kernel does not take.
        DeviceError: not on a CUDA device.
    """
    check_matrix("gate_up", gate_up)
    kind = checked_element(element)
    num_rows, num_columns = gate_up.shape[0], gate_up.shape[1] // 2
    if gate_up.shape[1] % 2:
        raise PlanError(
            "gate and up differ in width", got=f"{gate_up.shape[1]} columns", expected="an even number"
        )
    if not (by_row or by_column):
        raise PlanError("nothing to quantize", got="by_row=False, by_column=False", expected="one of them")
    check_devices(gate_up=gate_up)
    device = gate_up.device
    row = empty_tiles(num_rows, num_columns, element, device) if by_row else None
    column = empty_tiles(num_columns, num_rows, element, device) if by_column else None
    values = gate_up.new_empty(num_rows, num_columns) if keep_values else None
    unused = gate_up, gate_up
    if gate_up.numel():
        run(
            swiglu_kernel,
            (triton.cdiv(num_rows, TILE) * triton.cdiv(num_columns, TILE),),
            gate_up,
            *(row or unused),
            *(column or unused),
            gate_up if values is None else values,
            num_rows,
            num_columns,
            BY_ROW=by_row,
            BY_COLUMN=by_column,
            KEEP=keep_values,
            **element_constants(kind),
            BLOCK=TILE,
            num_warps=SWIGLU_WARPS,
        )
    return FusedTiles(RowTiles(*row) if row else None, ColumnTiles(*column) if column else None, values, None)
