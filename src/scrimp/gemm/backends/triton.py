"""Triton's kernels: FP8 and FP4 in tiles on FP8 tensor cores, INT8 on its own, the others as exact bf16 products.

fp8, fp4             One kernel quantizes a tensor, both ways where backward needs both; `scaled_matmul` multiplies
                     codes and applies the scales at every 128 of K. E2M1 values travel as E4M3 codes: the
                     numbers are FP4's, the speed is FP8's.
int8                 The same kernels, on tensor cores for integers, which GPUs have from Turing on. For int8_fallback
                     the quantizer makes second codes of X beside the first, and the product reads those that there are;
                     for int8_hadamard it rotates what it quantizes.
mxfp8, mxfp4, nvfp4  Code times scale is exact in bf16: quantized and dequantized in one pass over memory, then a bf16
                     product with fp32 sums; NVFP4's scales of whole tensors multiply the result.
Stored codes         are those of `scrimp.formats.quantize`, bit for bit, E2M1 packed, from the pass that makes fprop's
                     operand. Of rotated groups, tiles and blocks a code may fall to the other side of a tie
                     (kernels/maxima.py).
Limits               No tensor or row scales (torch's kernels take those) and no four-over-six. Where a tile
                     has a NaN its scale is NaN, and its stored codes mean nothing.
Checked              tests/gemm/test_native.py, in Triton's interpreter.
"""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scrimp.formats import Noise, QuantizedTensor
from scrimp.formats.codes import BYTES
from scrimp.gemm import kernels
from scrimp.gemm.backends.base import Backend
from scrimp.gemm.backends.operands import (
    GROUPS,
    PAIRED,
    KernelCodes,
    check_same_device,
    from_stored,
    has_triton,
    is_kernel_pair,
    kernel_codes,
    kernel_pair,
    to_stored,
)
from scrimp.gemm.deferred import Deferred, Matrix
from scrimp.gemm.kernels.launch import CODE_TYPES, INPUT_TYPES, may_run
from scrimp.gemm.problem import AXES, COLUMNS, Shape, Use, operands_of
from scrimp.gemm.weight_sums import Product
from scrimp.precision import Operand

TILES = ("tile", "block")


@dataclass(frozen=True)
class _Values:
    """bfloat16 values in the tensor's own layout."""

    values: Tensor
    outer: Tensor | None
    """fp32 scale of the whole tensor."""


class TritonBackend(Backend):
    """Fused quantizers, and the GEMM over tiles."""

    name = "triton"

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        """Any shape; formats with tiles, blocks or groups; CUDA, or the interpreter."""
        operands = operands_of(gemm, recipe)
        for operand, axis in zip(operands, AXES[gemm], strict=True):
            if (reason := _operand_refusal(operand, axis)) is not None:
                return reason
        if _is_tiled(operands[0]) != _is_tiled(operands[1]):
            return "no kernel multiplies tiles by groups"
        if not has_triton():
            return "triton is not installed"
        return None if device.type == "cuda" or is_interpreted() else "triton kernels need a CUDA device"

    def emulates(self, recipe: str) -> bool:
        """All but fp8 and integers: E2M1 on FP8 units, MX and NVFP4 on bf16 units."""
        return recipe != "fp8" and not any(
            one and one.element == "int8" for one in operands_of("fprop", recipe)
        )

    def tuning_bytes(self, gemm: str, recipe: str, shape: Shape, out: torch.dtype) -> int:
        """Bytes for products of tiles, whose kernel has shapes to choose from; 0 for all others."""
        first, _ = operands_of(gemm, recipe)
        if first is None or not _is_tiled(first):
            return 0
        return kernels.tuning_bytes(shape.m, shape.n, shape.k, out, fallback=first.fallback)

    def tune(self, gemm: str, recipe: str, shape: Shape, out: torch.dtype, device: torch.device) -> None:
        """Try them for this product."""
        first, second = operands_of(gemm, recipe)
        if first is not None and _is_tiled(first):
            is_block, codes = second is not None and second.scaling == "block", CODE_TYPES[first.element]
            kernels.tune(
                shape.m,
                shape.n,
                shape.k,
                out,
                is_block=is_block,
                codes=codes,
                device=device,
                fallback=first.fallback,
            )
            if gemm == "wgrad":
                _adds(device, out, codes)

    def makes(self, x: Deferred, use: Use) -> bool:
        """By all quantizers but that of blocks, which are weights'."""
        return use.operand is not None and use.operand.scaling in PAIRED

    def prepare(self, x: Matrix, use: Use) -> KernelCodes | _Values:
        """Codes of tiles and blocks; bf16 values of groups."""
        if _is_tiled(use.operand):
            return kernel_codes(x, use)
        return _values(kernel_codes(x, use, "values"))

    def prepare_pair(
        self, x: Matrix, first: Use, second: Use
    ) -> tuple[KernelCodes | _Values, KernelCodes | _Values] | None:
        """Both copies of a tiled tensor in one pass over memory; values of groups would lie side by side, four bytes
        for each number, to save the reading of two."""
        is_pair = _is_tiled(first.operand) and is_kernel_pair(first, second)
        return kernel_pair(x, first, second) if is_pair else None

    def store(self, x: Matrix, use: Use) -> QuantizedTensor:
        """The reference's codes, by the fused quantizers."""
        assert use.operand is not None
        return to_stored(kernel_codes(x, use, "kept"), use.operand, use.axis, x.shape)

    def prepare_and_store(
        self, x: Matrix, use: Use, saved: Use
    ) -> tuple[KernelCodes | _Values, QuantizedTensor]:
        """fprop's operand and the codes for wgrad in one pass over memory."""
        if not is_kernel_pair(use, saved):
            return self.prepare(x, use), self.store(x, saved)
        is_tiled = _is_tiled(use.operand)
        found, codes = kernel_pair(x, use, saved, ("codes" if is_tiled else "values", "kept"))
        assert saved.operand is not None
        stored = to_stored(codes, saved.operand, saved.axis, x.shape)
        return found if is_tiled else _values(found), stored

    def load(self, codes: QuantizedTensor) -> KernelCodes | _Values:
        """Codes, E2M1 as E4M3, or their bf16 values."""
        if codes.operand.scaling in TILES:
            return from_stored(codes)
        length = codes.operand.length(codes.shape[codes.axis])
        values = kernels.group_values(codes.payload, codes.scales, codes.operand, length)
        return _Values(values if codes.axis % 2 else values.T, codes.tensor_scale)

    def weight_product(self, a: Any, b: Any, compute: torch.dtype, weight: torch.dtype) -> Product:
        """One that may add itself, of tiles."""
        if isinstance(a, KernelCodes) and isinstance(b, KernelCodes):
            check_same_device(a.codes, b.codes)
            return _TileProduct(a, b, compute, weight)
        return super().weight_product(a, b, compute, weight)

    def multiply(
        self, gemm: str, a: KernelCodes | _Values, b: KernelCodes | _Values, out: torch.dtype
    ) -> Tensor:
        """A B^T."""
        if isinstance(a, KernelCodes) and isinstance(b, KernelCodes):
            check_same_device(a.codes, b.codes)
            return kernels.scaled_matmul(a.codes, a.scales, b.codes, b.scales, out, rest=a.rest)
        assert isinstance(a, _Values)
        assert isinstance(b, _Values)
        check_same_device(a.values, b.values)
        a_axis, b_axis = AXES[gemm]
        left = a.values if a_axis == COLUMNS else a.values.T
        right = b.values.T if b_axis == COLUMNS else b.values
        if a.outer is None and b.outer is None and out == torch.bfloat16 and sums_in_float32(left):
            return left @ right
        return kernels.apply_scales(_wide(left, right), a.outer, b.outer, out)


@dataclass(frozen=True)
class _TileProduct(Product):
    """wgrad of tiles, whose kernel adds to sums in float32 and, rounded stochastically, in bf16."""

    a: KernelCodes
    b: KernelCodes
    compute: torch.dtype
    weight: torch.dtype

    def adds(self, dtype: torch.dtype, added: int = 1) -> bool:
        """Where it gave the sums of a product in float32 that is added afterwards."""
        return _adds(self.a.codes.device, dtype, self.a.codes.dtype)

    def add(self, total: Tensor, noise: Noise | None) -> None:
        """By the kernel."""
        kernels.add_scaled_matmul(total, self.a.codes, self.a.scales, self.b.codes, self.b.scales, noise)

    def made(self, dtype: torch.dtype | None = None) -> Tensor:
        """In the compute type first, but where a sum begins with it that others are added to."""
        out = dtype if dtype is not None and self.adds(dtype) else self.compute
        found = kernels.scaled_matmul(self.a.codes, self.a.scales, self.b.codes, self.b.scales, out)
        return found.to(dtype or self.weight)


@functools.cache
def _adds(device: torch.device, dtype: torch.dtype, codes: torch.dtype) -> bool:
    """Whether the kernel that adds gives the bits of product and sum apart, tried once in a process: while it tunes."""

    element = next(name for name, type_ in BYTES.items() if type_ == codes)

    def trial() -> bool:
        generator = torch.Generator().manual_seed(0)
        matrices = (torch.randn(size, 300, generator=generator).to(device) for size in (130, 70))
        a, b = (kernels.quantize_tiles(one, element, by_row=True, by_column=False)[0] for one in matrices)
        assert a is not None
        assert b is not None
        total = torch.randn(130, 70, generator=generator).to(device, dtype)
        expected, noise = total.clone(), Noise(5, 3, 11) if dtype == torch.bfloat16 else None
        product = kernels.scaled_matmul(a.codes, a.scales, b.codes, b.scales, torch.float32)
        if noise is None:
            expected += product
        else:
            kernels.add_rounded(expected, product, noise)
        kernels.add_scaled_matmul(total, a.codes, a.scales, b.codes, b.scales, noise)
        return torch.equal(total, expected)

    return dtype in INPUT_TYPES and may_run("product that adds to a sum", trial)


def _values(found: KernelCodes) -> _Values:
    return _Values(found.codes, found.tensor_scale)


def is_interpreted() -> bool:
    """Whether Triton interprets its kernels, on any device and slowly."""
    if not has_triton():
        return False
    return bool(importlib.import_module("triton").knobs.runtime.interpret)


def _is_tiled(operand: Operand | None) -> bool:
    return operand is not None and operand.scaling in TILES


def _operand_refusal(operand: Operand | None, axis: int) -> str | None:
    if operand is None:
        return "high precision is multiplied by torch"
    if operand.scaling not in (*TILES, *GROUPS):
        return f"no kernel for {operand.scaling} scales: torch's kernels take them"
    if operand.four_over_six:
        return "four-over-six has no kernel"
    if operand.fallback and axis != COLUMNS:
        return "no kernel makes second codes along rows"
    if operand.scaling == "block" and operand.rounding == "stochastic":
        return "no kernel rounds blocks stochastically"
    return None


def sums_in_float32(x: Tensor) -> bool:
    """Whether products of bf16 matrices add up in fp32, whatever they give."""
    return x.device.type == "cuda"


def _wide(left: Tensor, right: Tensor) -> Tensor:
    """A product of bf16 matrices in fp32."""
    if left.device.type == "cuda":
        return torch.mm(left, right, out_dtype=torch.float32)
    return left.float() @ right.float()
