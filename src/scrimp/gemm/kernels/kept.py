"""Codes that were kept for the backward pass, read as its product wants them, from one reading of memory.

Problem  E2M1 codes lie two to a byte, groups have scales of one byte: operator by operator the codes of one input are
         read and written as integers and floats some ten times before a product can read them.
Method   ::

             tiles of E2M1   a byte of two codes  ->  two bytes, the E4M3 codes of the same values    1.5 bytes
             groups          codes and scales     ->  q s in bfloat16, exact (groups.py)              3, of E2M1 2.6

         for each number, in the layout that they lie in. E2M1 in E4M3, with c the three magnitude bits::

             0 for c = 0,   0x30 for c = 1,   0x30 + 4 c from c = 2 on

Limits   As of groups.py. Scales of whole tensors are left to the product. Not timed on a GPU yet.
Checked  tests/gemm/test_triton_kept.py: against `scrimp.formats`
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.gemm.kernels.arithmetic import (
    E4M3,
    block_of_program,
    power_of_two,
    store_block,
    to_bfloat16,
    value_of,
)
from scrimp.gemm.kernels.launch import cdiv, check_devices, check_row_major, element_constants, run
from scrimp.precision.formats import lookup_element, lookup_scaling
from scrimp.precision.recipes import Operand

BLOCK, WARPS = 64, 4


@triton.jit
def load_codes(codes, outer, inner_block, num_outer, num_inner, BITS: tl.constexpr, BLOCK: tl.constexpr):
    """A block of uint8 codes, one to a byte, of those that lie two to a byte where they have 4 bits."""
    BYTES: tl.constexpr = BLOCK * BITS // 8
    num_bytes = tl.cdiv(num_inner, 8 // BITS)
    inner = inner_block * BYTES + tl.arange(0, BYTES)
    mask = (outer < num_outer)[:, None] & (inner < num_bytes)[None, :]
    found = tl.load(codes + outer[:, None] * num_bytes + inner[None, :], mask=mask, other=0)
    if BITS == 4:
        found = tl.reshape(tl.join(found & 15, found >> 4), (outer.shape[0], BLOCK))
    return found


@triton.jit
def widen_codes_kernel(codes, out, num_outer, num_inner, BLOCK: tl.constexpr):
    """A block of E2M1 codes as the E4M3 codes of the same values."""
    _, inner_block, outer, inner = block_of_program(num_inner, BLOCK, BLOCK)
    code = load_codes(codes, outer, inner_block, num_outer, num_inner, 4, BLOCK)
    magnitude = code & 7
    wide = tl.where(magnitude > 1, 0x30 + (magnitude << 2), magnitude * 0x30) | ((code & 8) << 4)
    store_block(out, wide.to(tl.uint8), outer, inner, num_outer, num_inner)


@triton.jit
def group_values_kernel(
    codes,
    scales,
    out,
    num_outer,
    num_inner,
    NVFP4: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    BITS: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A block of codes times the scales of its groups, E4M3 where NVFP4, else E8M0."""
    ROWS: tl.constexpr = BLOCK // GROUP_ROWS
    COLUMNS: tl.constexpr = BLOCK // GROUP_COLUMNS
    outer_block, inner_block, outer, inner = block_of_program(num_inner, BLOCK, BLOCK)
    values = value_of(load_codes(codes, outer, inner_block, num_outer, num_inner, BITS, BLOCK), BITS, ELEMENT)
    rows, columns = outer_block * ROWS + tl.arange(0, ROWS), inner_block * COLUMNS + tl.arange(0, COLUMNS)
    num_columns = tl.cdiv(num_inner, GROUP_COLUMNS)
    mask = (rows < tl.cdiv(num_outer, GROUP_ROWS))[:, None] & (columns < num_columns)[None, :]
    code = tl.load(scales + rows[:, None] * num_columns + columns[None, :], mask=mask, other=0)
    if NVFP4:
        scale = tl.where((code & 0x7F) == 0x7F, float("nan"), value_of(code, 8, E4M3))
    else:
        scale = tl.where(code == 255, float("nan"), power_of_two(code.to(tl.int32)))
    grouped = tl.reshape(values, (ROWS, GROUP_ROWS, COLUMNS, GROUP_COLUMNS))
    grouped *= tl.reshape(scale, (ROWS, 1, COLUMNS, 1))
    found = to_bfloat16(tl.reshape(grouped, (BLOCK, BLOCK)))
    store_block(out, found, outer, inner, num_outer, num_inner)


def widen_codes(payload: Tensor, length: int) -> Tensor:
    """E2M1 codes as E4M3 codes of the same values.

    Args:
        payload: uint8 [R, ceil(length / 2)], two codes a byte, row-major.
        length: numbers of a row.

    Returns:
        float8_e4m3fn [R, length].

    Raises:
        PlanError: a payload that is not of this length.
        DeviceError: not on a CUDA device.
    """
    _check(payload, torch.uint8, (len(payload), -(-length // 2)))
    out = torch.empty(len(payload), length, dtype=torch.float8_e4m3fn, device=payload.device)
    if out.numel():
        run(
            widen_codes_kernel,
            _grid(out),
            payload,
            out.view(torch.uint8),
            *out.shape,
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


def group_values(payload: Tensor, scales: Tensor, operand: Operand, length: int) -> Tensor:
    """Codes of groups times their scales, in bfloat16; of rotated numbers rotated still.

    Args:
        payload: codes [R, length], E2M1 two to a byte, row-major, the scaled axis last.
        scales: of groups, one byte each.
        operand: mx, nvfp4 or nvfp4_2d scaling.
        length: numbers of a row, those included that a rotation padded.

    Raises:
        PlanError: codes that are not of this length.
        DeviceError: not on a CUDA device.
    """
    element, scaling = lookup_element(operand.element), lookup_scaling(operand.scaling)
    _check(payload, payload.dtype, (len(payload), -(-length * element.bits // 8)))
    check_devices(payload=payload, scales=scales)
    out = torch.empty(len(payload), length, dtype=torch.bfloat16, device=payload.device)
    if out.numel():
        run(
            group_values_kernel,
            _grid(out),
            payload.view(torch.uint8),
            scales.contiguous().view(torch.uint8),
            out,
            *out.shape,
            NVFP4=scaling.has_tensor_scale,
            GROUP_ROWS=scaling.rows,
            GROUP_COLUMNS=scaling.columns,
            BITS=element.bits,
            ELEMENT=element_constants(element),
            BLOCK=BLOCK,
            num_warps=WARPS,
        )
    return out


def _grid(out: Tensor) -> tuple[int]:
    return (cdiv(len(out), BLOCK) * cdiv(out.shape[1], BLOCK),)


def _check(payload: Tensor, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    check_devices(payload=payload)
    check_row_major("payload", payload)
    if payload.dtype != dtype or payload.shape != shape:
        got = f"{payload.dtype} {tuple(payload.shape)}"
        raise PlanError("these are not the codes of so many numbers", got=got, expected=f"{dtype} {shape}")
