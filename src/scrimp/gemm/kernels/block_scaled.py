"""Blocks of 128 x 128: codes, scales and transposed codes of a weight, from one reading of memory.

A square block has one scale whichever axis is summed over, so the transposed copy that dgrad reads has the
same codes, and forward and backward see the same weights. s = amax / qmax, q = round(x / s) to nearest. What is
rotated first (each 16 numbers along the summed axis) differs between the two, and each is made by itself.

Checked  tests/gemm/test_triton_tiles.py: codes and scales equal to `scrimp.formats.quantize`; test_ptx.py: so are those
         of the PTX compiled for Hopper, run on a CPU, and its threads do not race.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats.hadamard import SIZE as HADAMARD_SIZE
from scrimp.gemm.kernels.arithmetic import (
    block_of_program,
    fp32_scale,
    magnitude_bits,
    round_nearest,
    store_block,
)
from scrimp.gemm.kernels.launch import (
    CODE_TYPES,
    TILE,
    WARPS_NEAREST,
    WARPS_STOCHASTIC,
    WeightBlocks,
    cdiv,
    check_choice,
    check_devices,
    check_matrix,
    checked_element,
    element_constants,
    run,
)
from scrimp.gemm.kernels.maxima import load_rotated, rotation_for


@triton.jit
def quantize_blocks_kernel(
    x,
    rotation,
    codes,
    scales,
    transposed_codes,
    num_rows,
    num_columns,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    HADAMARD: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block a program. Rotated along the rows, it is read with strides exchanged, as its codes are stored."""
    _, _, rows, columns = block_of_program(num_columns, BLOCK, BLOCK)
    IS_TURNED: tl.constexpr = HADAMARD and BY_COLUMN
    if IS_TURNED:
        block = load_rotated(x, x, rotation, columns, rows, num_columns, num_rows, 0, True, None, BLOCK)
    else:
        block = load_rotated(x, x, rotation, rows, columns, num_rows, num_columns, 1, HADAMARD, None, BLOCK)
    scale = fp32_scale(tl.max(magnitude_bits(block)), ELEMENT)
    tl.store(scales + tl.program_id(0), scale)
    q = round_nearest(tl.div_rn(block, scale), ELEMENT).to(codes.dtype.element_ty)
    if BY_ROW:
        length = tl.cdiv(num_columns, 16) * 16 if HADAMARD else num_columns
        store_block(codes, q, rows, columns, num_rows, length)
    if BY_COLUMN:
        length = tl.cdiv(num_rows, 16) * 16 if HADAMARD else num_rows
        store_block(transposed_codes, q if IS_TURNED else tl.trans(q), columns, rows, num_columns, length)


def quantize_blocks(
    w: Tensor, element: str, *, by_row: bool = False, by_column: bool = False, hadamard: bool = False
) -> WeightBlocks:
    """Quantize a matrix in blocks of 128 x 128, to nearest.

    Args:
        w: row-major [R, C], bfloat16 or float32.
        element: e2m1 (stored as E4M3 codes), e4m3, e5m2 or int8.
        by_row: codes [R, C], for sums along the columns.
        by_column: the same codes as [C, R], for sums along the rows.
        hadamard: each 16 numbers along the summed axis are rotated first, and codes padded to 16: one axis alone.

    Raises:
        PlanError: a tensor or an element that the kernel does not take.
        DeviceError: not on a CUDA device.
    """
    check_matrix("w", w)
    check_choice(by_row, by_column, None, None)
    if hadamard and by_row and by_column:
        raise PlanError("what is rotated along each axis has its own codes", expected="by_row or by_column")
    kind = checked_element(element)
    check_devices(w=w)
    num_rows, num_columns = w.shape
    along, across = (size + -size % HADAMARD_SIZE if hadamard else size for size in w.shape)
    grid = cdiv(num_rows, TILE), cdiv(num_columns, TILE)
    dtype, scales = CODE_TYPES[element], torch.empty(grid, device=w.device)
    codes = torch.empty(num_rows, across, dtype=dtype, device=w.device) if by_row else None
    other = torch.empty(num_columns, along, dtype=dtype, device=w.device) if by_column else None
    if w.numel():
        run(
            quantize_blocks_kernel,
            (grid[0] * grid[1],),
            w,
            rotation_for(w, hadamard),
            other if codes is None else codes,
            scales,
            codes if other is None else other,
            num_rows,
            num_columns,
            BY_ROW=by_row,
            BY_COLUMN=by_column,
            HADAMARD=hadamard,
            ELEMENT=element_constants(kind),
            BLOCK=TILE,
            num_warps=WARPS_STOCHASTIC if hadamard else WARPS_NEAREST,
        )
    return WeightBlocks(codes, scales, other)
