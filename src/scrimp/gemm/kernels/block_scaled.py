"""Blocks of 128 x 128: codes, scales and transposed codes of a weight, from one reading of memory.

A square block has one scale whichever axis is summed over, so the transposed copy that dgrad reads has the
same codes, and forward and backward see the same weights. s = amax / qmax, q = round(x / s) to nearest.

Checked  tests/gemm/test_triton_tiles.py: codes and scales equal to `scrimp.formats.quantize`; test_ptx.py: so are those
         of the PTX compiled for Hopper, run on a CPU, and its threads do not race.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.gemm.kernels.arithmetic import (
    block_of_program,
    fp32_scale,
    load_block,
    magnitude_bits,
    round_nearest,
    store_block,
)
from scrimp.gemm.kernels.launch import (
    CODE_TYPES,
    TILE,
    WARPS_NEAREST,
    WeightBlocks,
    cdiv,
    check_devices,
    check_matrix,
    checked_element,
    element_constants,
    run,
)


@triton.jit
def quantize_blocks_kernel(
    x,
    codes,
    scales,
    transposed_codes,
    num_rows,
    num_columns,
    TRANSPOSED: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block a program."""
    _, _, rows, columns = block_of_program(num_columns, BLOCK, BLOCK)
    block = load_block(x, rows, columns, num_rows, num_columns)
    scale = fp32_scale(tl.max(magnitude_bits(block)), ELEMENT)
    tl.store(scales + tl.program_id(0), scale)
    q = round_nearest(tl.div_rn(block, scale), ELEMENT).to(codes.dtype.element_ty)
    store_block(codes, q, rows, columns, num_rows, num_columns)
    if TRANSPOSED:
        store_block(transposed_codes, tl.trans(q), columns, rows, num_columns, num_rows)


def quantize_blocks(w: Tensor, element: str, *, transposed: bool) -> WeightBlocks:
    """Quantize a matrix in blocks of 128 x 128, to nearest.

    Args:
        w: row-major [R, C], bfloat16 or float32.
        element: e2m1 (stored as E4M3 codes), e4m3, e5m2 or int8.
        transposed: also write the codes as [C, R].

    Raises:
        PlanError: a tensor or an element that the kernel does not take.
        DeviceError: not on a CUDA device.
    """
    check_matrix("w", w)
    kind = checked_element(element)
    check_devices(w=w)
    num_rows, num_columns = w.shape
    grid = cdiv(num_rows, TILE), cdiv(num_columns, TILE)
    codes = torch.empty(w.shape, dtype=CODE_TYPES[element], device=w.device)
    scales = torch.empty(grid, device=w.device)
    other = torch.empty(num_columns, num_rows, dtype=codes.dtype, device=w.device) if transposed else None
    if w.numel():
        run(
            quantize_blocks_kernel,
            (grid[0] * grid[1],),
            w,
            codes,
            scales,
            codes if other is None else other,
            num_rows,
            num_columns,
            TRANSPOSED=transposed,
            ELEMENT=element_constants(kind),
            BLOCK=TILE,
            num_warps=WARPS_NEAREST,
        )
    return WeightBlocks(codes, scales, other)
