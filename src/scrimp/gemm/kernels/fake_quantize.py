"""MX and NVFP4 values in bfloat16: what a GEMM reads where no tensor core knows the format.

Problem  An E2M1 or E4M3 code times its group's E8M0 or E4M3 scale is exact in bfloat16, so a bfloat16 GEMM over
         q s gives the format's numbers on any GPU, if making q s costs one reading and one writing.
Method   A program takes a block of whole groups: 1 x 32 (mx), 1 x 16 (nvfp4) or 16 x 16 (nvfp4_2d), along the
         columns. For the other axis it reads and writes the same memory with strides exchanged; triton
         lays its threads along the stride that is 1. Rules of scales and rounding: arithmetic.py. The
         tensor's scale needs the maximum of all: `tensor_amax`, one kernel for blocks and one `max` over them.
Hadamard Groups of 16 are multiplied by the rotation in float32 by fused multiply-adds (no TF32), before maxima are
         taken. Values stay rotated and padded to 16, as `fake_quantize(keep_rotation=True)` gives them.
Limits   The rotation's sums of 16 addends round in an order that no one promises, so bit equality with
         `scrimp.formats` holds where these sums are exact, and else to about one unit of the sum.
         four_over_six has no kernel. E4M3 under mx with a scale below 2^-124 is not exact in bfloat16.
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
from scrimp.formats.noise import Noise
from scrimp.formats.scales import nvfp4_tensor_scale
from scrimp.gemm.kernels.arithmetic import (
    block_of_program,
    e4m3_scale,
    e8m0_scale,
    lift_of,
    load_block,
    magnitude_bits,
    rounded,
    to_bfloat16,
    uniform,
)
from scrimp.gemm.kernels.launch import check_devices, check_matrix, element_constants, hashes, run
from scrimp.precision.formats import lookup_element, lookup_scaling
from scrimp.precision.recipes import Operand

SCALINGS = ("mx", "nvfp4", "nvfp4_2d")
BLOCK_ROWS, BLOCK_COLUMNS = 64, 64


@triton.jit
def load_rotated(
    x,
    rotation,
    num_rows,
    num_columns,
    covered_columns,
    row_stride,
    column_stride,
    HADAMARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """(rows, columns, float32 values) of this program's block, each 16 along the columns rotated if asked for."""
    _, _, rows, columns = block_of_program(covered_columns, ROWS, COLUMNS)
    block = load_block(x, rows, columns, num_rows, num_columns, row_stride, column_stride)
    if HADAMARD:
        index = tl.arange(0, 16)
        matrix = tl.load(rotation + index[:, None] * 16 + index[None, :])
        groups = tl.reshape(block, (ROWS * COLUMNS // 16, 16))
        block = tl.reshape(tl.dot(groups, matrix, input_precision="ieee"), (ROWS, COLUMNS))
    return rows, columns, block


@triton.jit
def tensor_amax_kernel(
    x,
    rotation,
    maxima,
    num_rows,
    num_columns,
    row_stride,
    column_stride,
    HADAMARD: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Bits of the largest magnitude of each block."""
    _, _, block = load_rotated(
        x, rotation, num_rows, num_columns, num_columns, row_stride, column_stride, HADAMARD, ROWS, COLUMNS
    )
    tl.store(maxima + tl.program_id(0), tl.max(magnitude_bits(block)))


@triton.jit
def fake_quantize_kernel(
    x,
    rotation,
    tensor_scale,
    values,
    row_hashes,
    column_hashes,
    num_rows,
    num_columns,
    padded_columns,
    row_stride,
    column_stride,
    out_row_stride,
    out_column_stride,
    HADAMARD: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    NVFP4: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    ELEMENT: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One block of whole groups a program: q s in bfloat16."""
    rows, columns, block = load_rotated(
        x, rotation, num_rows, num_columns, padded_columns, row_stride, column_stride, HADAMARD, ROWS, COLUMNS
    )
    shape: tl.constexpr = (ROWS // GROUP_ROWS, GROUP_ROWS, COLUMNS // GROUP_COLUMNS, GROUP_COLUMNS)
    grouped = tl.reshape(block, shape)
    amax = tl.max(tl.max(magnitude_bits(grouped), 3, keep_dims=True), 1, keep_dims=True)
    if NVFP4:
        g = tl.load(tensor_scale)
        decode, encode = e4m3_scale(amax, g, STOCHASTIC)
        grouped *= lift_of(g)
    else:
        decode, encode = e8m0_scale(amax, ELEMENT, MAX_EXPONENT, STOCHASTIC)
    noise = 0.0
    if STOCHASTIC:
        row_hash = tl.load(row_hashes + rows, mask=rows < num_rows, other=0)
        column_hash = tl.load(column_hashes + columns, mask=columns < padded_columns, other=0)
        noise = tl.reshape(uniform(row_hash[:, None], column_hash[None, :]), shape)
    q = rounded(grouped * encode, noise, STOCHASTIC, ELEMENT)
    product = tl.reshape(q * decode, (ROWS, COLUMNS))
    mask = (rows < num_rows)[:, None] & (columns < padded_columns)[None, :]
    address = values + rows[:, None] * out_row_stride + columns[None, :] * out_column_stride
    tl.store(address, to_bfloat16(product), mask=mask)


def fake_quantize_groups(
    x: Tensor,
    operand: Operand,
    axis: int,
    tensor_scale: Tensor | None = None,
    noise: Noise | None = None,
) -> tuple[Tensor, Tensor | None]:
    """bfloat16 values q s of a matrix in MX or NVFP4 groups, in its own layout, and NVFP4's tensor scale.

    The same as `scrimp.formats.fake_quantize(..., keep_rotation=True)`.

    Args:
        x: row-major [R, C], bfloat16 or float32.
        operand: mx, nvfp4 or nvfp4_2d scaling, without four_over_six.
        axis: -1 or -2, the one that groups lie along.
        tensor_scale: NVFP4's, float32 of one element; unset: from `tensor_amax`.
        noise: stream for stochastic rounding; unset: the stream of key 0.

    Returns:
        values, padded to a multiple of 16 along the axis where the operand is rotated; the tensor's
        scale, None for mx.

    Raises:
        PlanError: a tensor or an operand that the kernel does not take.
        DeviceError: not on a CUDA device.
    """
    _check(x, operand, axis, tensor_scale)
    if tensor_scale is None and lookup_scaling(operand.scaling).has_tensor_scale:
        tensor_scale = nvfp4_tensor_scale(tensor_amax(x, operand.hadamard, axis))
    out = _empty_values(x, operand, axis)
    if out.numel():
        stream = (noise or Noise()) if operand.rounding == "stochastic" else None
        _write_values(x, out, operand, axis, tensor_scale, stream)
    return out, tensor_scale


def _empty_values(x: Tensor, operand: Operand, axis: int) -> Tensor:
    """Room for the values, padded along the axis where groups are rotated."""
    shape = list(x.shape)
    if operand.hadamard:
        shape[axis] += -shape[axis] % HADAMARD_SIZE
    return torch.empty(shape, dtype=torch.bfloat16, device=x.device)


def _write_values(
    x: Tensor, out: Tensor, operand: Operand, axis: int, tensor_scale: Tensor | None, noise: Noise | None
) -> None:
    """Launch the kernel. To it the scaled axis is "columns", whichever it is: the memory stays where it is."""
    element, scaling = lookup_element(operand.element), lookup_scaling(operand.scaling)
    across, along = x.shape if axis == -1 else x.shape[::-1]
    padded = out.shape[axis]
    by_row, by_column = hashes(noise, out.shape[0], out.shape[1], x)
    run(
        fake_quantize_kernel,
        (triton.cdiv(across, BLOCK_ROWS) * triton.cdiv(padded, BLOCK_COLUMNS),),
        x,
        _rotation(x, operand.hadamard),
        x if tensor_scale is None else tensor_scale,
        out,
        *((by_row, by_column) if axis == -1 else (by_column, by_row)),
        across,
        along,
        padded,
        *_strides(x, axis),
        *_strides(out, axis),
        HADAMARD=operand.hadamard,
        STOCHASTIC=noise is not None,
        NVFP4=scaling.has_tensor_scale,
        GROUP_ROWS=scaling.rows,
        GROUP_COLUMNS=scaling.columns,
        MAX_EXPONENT=element.max_exponent,
        ELEMENT=element_constants(element),
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS,
        num_warps=4,
    )


def tensor_amax(x: Tensor, hadamard: bool = False, axis: int = -1) -> Tensor:
    """Largest magnitude of a matrix, after its rotation along an axis if asked for; NaN where one is.

    Returns:
        float32 of no axes, on x's device; 0 of an empty matrix.
    """
    check_matrix("x", x)
    _check_axis(axis)
    check_devices(x=x)
    if not x.numel():
        return torch.zeros((), device=x.device)
    across, along = x.shape if axis == -1 else x.shape[::-1]
    num_blocks = triton.cdiv(across, BLOCK_ROWS) * triton.cdiv(along, BLOCK_COLUMNS)
    maxima = torch.empty(num_blocks, dtype=torch.int32, device=x.device)
    run(
        tensor_amax_kernel,
        (num_blocks,),
        x,
        _rotation(x, hadamard),
        maxima,
        across,
        along,
        *_strides(x, axis),
        HADAMARD=hadamard,
        ROWS=BLOCK_ROWS,
        COLUMNS=BLOCK_COLUMNS,
        num_warps=4,
    )
    return maxima.max().view(torch.float32)


def _rotation(x: Tensor, hadamard: bool) -> Tensor:
    """The rotation as a matrix, or any tensor where it is not read."""
    return _rotation_on(x.device) if hadamard else x


@functools.cache
def _rotation_on(device: torch.device) -> Tensor:
    return rotate(torch.eye(HADAMARD_SIZE, device=device), -1).contiguous()


def _strides(x: Tensor, axis: int) -> tuple[int, int]:
    """Across and along the scaled axis."""
    return (x.shape[1], 1) if axis == -1 else (1, x.shape[1])


def _check(x: Tensor, operand: Operand, axis: int, tensor_scale: Tensor | None) -> None:
    check_matrix("x", x)
    _check_axis(axis)
    if operand.scaling not in SCALINGS:
        raise PlanError("no kernel for these groups", got=operand.scaling, expected=", ".join(SCALINGS))
    if operand.four_over_six:
        raise PlanError("four_over_six has no kernel", do="use scrimp.formats.fake_quantize")
    if tensor_scale is not None:
        if not lookup_scaling(operand.scaling).has_tensor_scale:
            raise PlanError(f"{operand.scaling} has no tensor scale", do="leave tensor_scale out")
        if tensor_scale.numel() != 1 or tensor_scale.dtype != torch.float32:
            got = f"{tensor_scale.dtype} {tuple(tensor_scale.shape)}"
            raise PlanError("tensor_scale must be one number", got=got, expected="float32, one element")
    check_devices(x=x, tensor_scale=tensor_scale)


def _check_axis(axis: int) -> None:
    if axis not in (-1, -2):
        raise PlanError("there is no such axis of a matrix", got=axis, expected="-1 or -2")
