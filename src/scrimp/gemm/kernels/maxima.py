"""The largest magnitude of a matrix, as it is and with each 16 numbers along an axis rotated, from one reading.

Problem  A scale of a whole tensor needs its largest number before the first one is rounded. What backward needs of an
         NVFP4 tensor is rotated along its rows, and so has another largest number than what fprop needs.
Method   A program takes a block of 64 x 64 and stores the bits of the largest |x| of each half that is asked for: along
         the columns and along the rows, each rotated or not, the second from the first-level cache. One `max` goes
         over the blocks. A NaN is the largest of all (arithmetic.py).
Hadamard Groups of 16 are multiplied by the rotation in float32 by fused multiply-adds (no TF32). Along the rows a
         program reads the same memory with strides exchanged; Triton lays its threads along the stride that is 1.
Limits   The rotation's sums of 16 addends round in an order that no one promises, so bit equality with
         `scrimp.formats` holds where these sums are exact, and else to about one unit of the sum.
Checked  tests/gemm/test_triton_groups.py; test_ptx.py: the PTX compiled for Hopper, run on a CPU.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats.hadamard import SIZE as HADAMARD_SIZE
from scrimp.formats.hadamard import rotate
from scrimp.gemm.deferred import Matrix
from scrimp.gemm.kernels.arithmetic import block_of_program, magnitude_bits
from scrimp.gemm.kernels.gates import load_source
from scrimp.gemm.kernels.launch import cdiv, check_devices, check_source, run, source_of

BLOCK, WARPS = 64, 4


@triton.jit
def load_rotated(
    x,
    halves,
    rotation,
    outer,
    inner,
    num_outer,
    num_inner,
    AXIS: tl.constexpr,
    HADAMARD: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """float32 values [outer, inner] of a row-major matrix, each 16 along `inner` rotated if asked for.

    AXIS is the one that `inner` lies along: 1 the columns, 0 the rows.
    """
    if AXIS == 1:
        block = load_source(x, halves, outer, inner, num_outer, num_inner, 1, GATE)
    else:
        block = load_source(x, halves, inner, outer, num_inner, num_outer, 0, GATE)
    if HADAMARD:
        index = tl.arange(0, 16)
        matrix = tl.load(rotation + index[:, None] * 16 + index[None, :])
        groups = tl.reshape(block, (BLOCK * BLOCK // 16, 16))
        block = tl.reshape(tl.dot(groups, matrix, input_precision="ieee"), (BLOCK, BLOCK))
    return block


@triton.jit
def largest_magnitude_kernel(
    x,
    halves,
    rotation,
    maxima,
    num_rows,
    num_columns,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    HADAMARD: tl.constexpr,
    HADAMARD_COLUMN: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bits of the largest magnitude of each block, for each half that is asked for: [halves, blocks]."""
    _, _, rows, columns = block_of_program(num_columns, BLOCK, BLOCK)
    if BY_ROW:
        block = load_rotated(
            x, halves, rotation, rows, columns, num_rows, num_columns, 1, HADAMARD, GATE, BLOCK
        )
        tl.store(maxima + tl.program_id(0), tl.max(magnitude_bits(block)))
        maxima += tl.cdiv(num_rows, BLOCK) * tl.cdiv(num_columns, BLOCK)
    if BY_COLUMN:
        block = load_rotated(
            x, halves, rotation, columns, rows, num_columns, num_rows, 0, HADAMARD_COLUMN, GATE, BLOCK
        )
        tl.store(maxima + tl.program_id(0), tl.max(magnitude_bits(block)))


def largest_magnitudes(x: Matrix, by_row: bool | None, by_column: bool | None) -> Tensor:
    """Largest magnitudes of a matrix for codes along its columns, its rows, or both; NaN where one is.

    Args:
        x: row-major, bfloat16 or float32, or what makes it.
        by_row: whether numbers are rotated along the columns first; None: not asked for.
        by_column: the same along the rows.

    Returns:
        float32, one number for each that is asked for, on x's device; 0 of an empty matrix.
    """
    check_source("x", x)
    first, halves, gate = source_of(x)
    check_devices(x=first)
    wanted = [one for one in (by_row, by_column) if one is not None]
    if not x.numel():
        return torch.zeros(len(wanted), device=x.device)
    num_rows, num_columns = x.shape
    num_blocks = cdiv(num_rows, BLOCK) * cdiv(num_columns, BLOCK)
    maxima = torch.empty(len(wanted), num_blocks, dtype=torch.int32, device=x.device)
    run(
        largest_magnitude_kernel,
        (num_blocks,),
        first,
        halves,
        rotation_for(first, any(wanted)),
        maxima,
        num_rows,
        num_columns,
        BY_ROW=by_row is not None,
        BY_COLUMN=by_column is not None,
        HADAMARD=bool(by_row),
        HADAMARD_COLUMN=bool(by_column),
        GATE=gate,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return maxima.amax(1).view(torch.float32)


def tensor_amax(x: Matrix, hadamard: bool = False, axis: int = -1) -> Tensor:
    """Largest magnitude of a matrix, after its rotation along an axis if asked for; NaN where one is.

    Args:
        x: row-major, bfloat16 or float32.

    Returns:
        float32 of no axes, on x's device; 0 of an empty matrix.
    """
    check_axis(axis)
    return largest_magnitudes(x, *((hadamard, None) if axis == -1 else (None, hadamard)))[0]


def rotation_for(x: Tensor, hadamard: bool) -> Tensor:
    """The rotation as a matrix, or any tensor where it is not read."""
    return _rotation_on(x.device) if hadamard else x


@functools.cache
def _rotation_on(device: torch.device) -> Tensor:
    return rotate(torch.eye(HADAMARD_SIZE, device=device), -1).contiguous()


def check_axis(axis: int) -> None:
    """Refuse what is no axis of a matrix."""
    if axis not in (-1, -2):
        raise PlanError("there is no such axis of a matrix", got=axis, expected="-1 or -2")
