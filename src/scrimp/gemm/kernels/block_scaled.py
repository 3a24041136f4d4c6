"""Blocks of 128 x 128: codes and scales of a weight, from one reading of memory, as the product that sums along an axis
reads them.

A square block has one scale whichever axis is summed over, so what fprop and dgrad read are the same codes, once
transposed: forward and backward see the same weights. s = amax / qmax, q = round(x / s) to nearest. Rotated blocks
differ between the two.

Checked  tests/gemm/test_triton_tiles.py: codes and scales equal to `scrimp.formats.quantize`, rotated ones where the
         rotation's sums are exact (maxima.py); test_ptx.py: so are those of the PTX compiled for Hopper, run on a CPU,
         and its threads do not race.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

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
    check_devices,
    check_matrix,
    checked_element,
    element_constants,
    run,
)
from scrimp.gemm.kernels.maxima import check_axis, load_rotated, rotation_for


@triton.jit
def quantize_blocks_kernel(
    x,
    rotation,
    codes,
    scales,
    num_rows,
    num_columns,
    AXIS: tl.constexpr,
    HADAMARD: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block a program, its codes stored with the summed axis last: the columns where AXIS is 1, the rows where 0.

    What is rotated along the rows is read with strides exchanged; else codes are turned, a byte each.
    """
    _, _, rows, columns = block_of_program(num_columns, BLOCK, BLOCK)
    IS_TURNED: tl.constexpr = HADAMARD and AXIS == 0
    if IS_TURNED:
        block = load_rotated(x, x, rotation, columns, rows, num_columns, num_rows, 0, True, None, BLOCK)
    else:
        block = load_rotated(x, x, rotation, rows, columns, num_rows, num_columns, 1, HADAMARD, None, BLOCK)
    scale = fp32_scale(tl.max(magnitude_bits(block)), ELEMENT)
    tl.store(scales + tl.program_id(0), scale)
    q = round_nearest(tl.div_rn(block, scale), ELEMENT).to(codes.dtype.element_ty)
    summed = num_columns if AXIS == 1 else num_rows
    length = tl.cdiv(summed, 16) * 16 if HADAMARD else summed
    if AXIS == 1:
        store_block(codes, q, rows, columns, num_rows, length)
    else:
        store_block(codes, q if IS_TURNED else tl.trans(q), columns, rows, num_columns, length)


def quantize_blocks(w: Tensor, element: str, axis: int = -1, *, hadamard: bool = False) -> WeightBlocks:
    """Quantize a matrix in blocks of 128 x 128, to nearest.

    Args:
        w: row-major [R, C], bfloat16 or float32.
        element: e2m1 (stored as E4M3 codes), e4m3, e5m2 or int8.
        axis: the one that a product sums over, -1 or -2.
        hadamard: each 16 numbers along it are rotated first, and codes padded to 16.

    Raises:
        PlanError: a tensor, an element or an axis that the kernel does not take.
        DeviceError: not on a CUDA device.
    """
    check_matrix("w", w)
    check_axis(axis)
    kind = checked_element(element)
    check_devices(w=w)
    outer, summed = w.shape if axis == -1 else w.shape[::-1]
    if hadamard:
        summed += -summed % HADAMARD_SIZE
    codes = torch.empty(outer, summed, dtype=CODE_TYPES[element], device=w.device)
    scales = torch.empty(*(cdiv(size, TILE) for size in w.shape), device=w.device)
    if w.numel():
        run(
            quantize_blocks_kernel,
            (scales.numel(),),
            w,
            rotation_for(w, hadamard),
            codes,
            scales,
            *w.shape,
            AXIS=axis + 2,
            HADAMARD=hadamard,
            ELEMENT=element_constants(kind),
            BLOCK=TILE,
            num_warps=WARPS_STOCHASTIC if hadamard else WARPS_NEAREST,
        )
    return WeightBlocks(codes, scales if axis == -1 else scales.t())
