"""Blocks of a matrix that kernels read, which may be those of a gate (`scrimp.gemm.deferred`).

Problem  A quantizer that reads act(gate) * up saves its writing and its reading, if it makes each number itself.
Method   Kernels load blocks through `load_source`: as they lie in memory, or made of gate and up, or of the gradient of
         their product. GATE is None, or (gradients are made, the gate is GELU's). The sigmoid's exponential and
         division are the device's own; all else rounds as float32 does. Gradients of gate and of up are blocks of
         different programs, which both read the gradient and the gate: the second time from the second-level cache.
Whole    `gate_matrix` stores the same numbers, for those who do not quantize.
Limits   Another device's exponential differs in its last bits, and some numbers then in the last bit of bfloat16. Not
         timed on a GPU yet.
Checked  tests/gemm/test_gates.py: against float64, and quantizers against themselves on whole matrices bit for bit
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.gemm.deferred import Deferred
from scrimp.gemm.kernels.arithmetic import block_of_program, store_block, to_bfloat16, widen
from scrimp.gemm.kernels.launch import (
    TILE,
    WARPS_STOCHASTIC,
    cdiv,
    check_source,
    run,
    source_of,
)

CUBIC = tl.constexpr(0.044715)
SLOPE = tl.constexpr(1.5957691216057308)
"""sqrt(8 / pi)."""


@triton.jit
def sigmoid_of(gate, GELU: tl.constexpr):
    """(s(u), du / dgate) of a gate."""
    slope = 1.0
    u = gate
    if GELU:
        square = gate * gate
        u = SLOPE * (gate + CUBIC * gate * square)
        slope = SLOPE * (1.0 + 3.0 * CUBIC * square)
    return 1.0 / (1.0 + tl.exp(-u)), slope


@triton.jit
def rounded_like(value, pointer):
    """float32 values of the type that a pointer points to."""
    return widen(to_bfloat16(value)) if pointer.dtype.element_ty == tl.bfloat16 else value


@triton.jit
def source_values(x, halves, row, column, mask, num_columns, GATE: tl.constexpr):
    """float32 values at rows and columns of a matrix with so many columns, zero where the mask is off."""
    if GATE is None:
        found = widen(tl.load(x + row * num_columns + column, mask=mask, other=0.0))
    elif not GATE[0]:
        at = halves + row * (2 * num_columns) + column
        gate = widen(tl.load(at, mask=mask, other=0.0))
        up = widen(tl.load(at + num_columns, mask=mask, other=0.0))
        s, _ = sigmoid_of(gate, GATE[1])
        found = rounded_like(gate * s * up, halves)
    else:
        width = num_columns // 2
        is_up = column >= width
        within = tl.where(is_up, column - width, column)
        at = halves + row * num_columns + within
        gate = widen(tl.load(at, mask=mask, other=0.0))
        grad = widen(tl.load(x + row * width + within, mask=mask, other=0.0))
        up = widen(tl.load(at + width, mask=mask & (column < width), other=0.0))
        s, slope = sigmoid_of(gate, GATE[1])
        of_gate = grad * up * (s * (1.0 + gate * slope * (1.0 - s)))
        found = rounded_like(tl.where(is_up, grad * (gate * s), of_gate), halves)
    return found


@triton.jit
def load_source(x, halves, rows, columns, num_rows, num_columns, AXIS: tl.constexpr, GATE: tl.constexpr):
    """A float32 block [rows, columns], or where AXIS is 0 [columns, rows], zero beyond the edges."""
    row, column = tl.expand_dims(rows, AXIS), tl.expand_dims(columns, 1 - AXIS)
    mask = tl.expand_dims(rows < num_rows, AXIS) & tl.expand_dims(columns < num_columns, 1 - AXIS)
    return source_values(x, halves, row, column, mask, num_columns, GATE)


@triton.jit
def gate_matrix_kernel(x, halves, out, num_rows, num_columns, GATE: tl.constexpr, BLOCK: tl.constexpr):
    """One block a program, as it is."""
    _, _, rows, columns = block_of_program(num_columns, BLOCK, BLOCK)
    block = load_source(x, halves, rows, columns, num_rows, num_columns, 1, GATE)
    if out.dtype.element_ty == tl.bfloat16:
        store_block(out, to_bfloat16(block), rows, columns, num_rows, num_columns)
    else:
        store_block(out, block, rows, columns, num_rows, num_columns)


def gate_matrix(x: Deferred) -> Tensor:
    """The matrix of a gate, or of its gradients.

    Raises:
        PlanError: tensors that kernels do not read.
        DeviceError: not on a CUDA device.
    """
    check_source("x", x)
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        first, halves, gate = source_of(x)
        run(
            gate_matrix_kernel,
            (cdiv(x.shape[0], TILE) * cdiv(x.shape[1], TILE),),
            first,
            halves,
            out,
            *x.shape,
            GATE=gate,
            BLOCK=TILE,
            num_warps=WARPS_STOCHASTIC,
        )
    return out
