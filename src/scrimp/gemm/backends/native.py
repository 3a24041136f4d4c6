"""torch's own kernels: FP8 products by `torch._scaled_mm` and `torch.nn.functional.scaled_mm`.

Problem  A GPU multiplies FP8 codes twice as fast as bf16 numbers, and Blackwell FP4 codes, if codes and scales lie as
         cuBLASLt wants them.
Method   Codes of both operands have the summed axis last ("TN"): A [M, K] row-major, B [N, K] passed as its
         transpose. Scales:

         ==============  ===========================================================================
         tensor          one number
         row             [M, 1] and [1, N]; for fp32 results, and on a CPU, as a factor on the result:
                         kernels for row scales may give 16 bits only, and torch 2.11 has none for a CPU
         tile            [rows, K / 128], stride (1, rows); A padded to a multiple of 4 rows
         block           [round_up(K / 128, 4), N / 128], stride 1 on the first axis
         mx, nvfp4       padded to 128 rows x 4 columns, in tiles of 32 x 4 x 4 ("swizzled"); NVFP4's fp32
                         scales beside them; the 16 x 16 blocks of W repeated for each row
         ==============  ===========================================================================

         Triton's kernels make the codes on a GPU, of groups with scales swizzled; the reference those of
         four-over-six, and of tensors and rows where a maximum is taken over ranks.

         Fast accumulation (fewer bits in the FP8 accumulator) in fprop only, as torchao does: errors of
         gradients add up over steps.
Rules    K and N are multiples of 16 (128 along K for tiles, 32 for MX and NVFP4); never E5M2 x E5M2. A CPU's
         kernel would take more, and is refused the same, so that what passes there passes on a GPU.
Limits   Which GPU has which kernel is no question of this file: `scrimp.gemm.select` tries them.
         A CPU's kernel is some thousand times slower than a bf16 product: for probes only.
         Not run here, written after the documented interface: tile and block on Hopper, MX and NVFP4 on Blackwell
         (`_tile_product`, `_mx_product`, `_nvfp4_product`).
Sources  torch's ScaledBlas.cpp for shapes and strides of scales; torchao's to_blocked for the swizzle.
Checked  tests/gemm/test_native.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from scrimp.errors import PlanError
from scrimp.formats import QuantizedTensor
from scrimp.gemm.backends.base import Backend
from scrimp.gemm.backends.operands import (
    GROUPS,
    PAIRED,
    KernelCodes,
    check_same_device,
    checked_matrix,
    has_triton,
    is_kernel_pair,
    kernel_codes,
    kernel_pair,
    to_stored,
)
from scrimp.gemm.deferred import Deferred, Matrix, made
from scrimp.gemm.problem import AXES, Shape, Use, multiply, operands_of
from scrimp.gemm.weight_sums import PlainProduct, Product
from scrimp.precision import Operand

QUANTIZED = ("tensor", "row", "tile", "block", *GROUPS)
"""Scalings that Triton's kernels quantize."""
NVFP4 = ("nvfp4", "nvfp4_2d")
_FAMILIES = {"tensor": "tensor", "row": "row", "tile": "tile", "block": "tile", "mx": "mx"}
_FAMILIES.update(dict.fromkeys(NVFP4, "nvfp4"))
_K_MULTIPLE = {"tensor": 16, "row": 16, "tile": 128, "mx": 32, "nvfp4": 32}
_N_MULTIPLE = 16
_TILE_ROWS = 4


@dataclass(frozen=True)
class _Plain:
    """A tensor in high precision, as it is."""

    values: Tensor


@dataclass(frozen=True)
class _Codes:
    """Codes and scales with the summed axis last."""

    payload: Tensor
    scales: Tensor
    tensor_scale: Tensor | None
    operand: Operand
    k: int
    is_swizzled: bool = False
    """Scales of groups lie as cuBLASLt reads them."""


class TorchBackend(Backend):
    """Native scaled products, and plain ones in bf16 and fp32."""

    name = "torch"

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        """The rules of CUDA's kernels, on every device; whether this GPU has the kernel shows only when it runs."""
        a, b = operands_of(gemm, recipe)
        return None if a is None or b is None else _refusal(a, b, shape, device)

    def makes(self, x: Deferred, use: Use) -> bool:
        """Where Triton quantizes."""
        return _has_kernel(x, use) and use.operand is not None and use.operand.scaling in PAIRED

    def prepare(self, x: Matrix, use: Use) -> _Plain | _Codes:
        """Codes with the summed axis last; on a GPU by Triton's quantizers."""
        if use.operand is None:
            return _Plain(checked_matrix(made(x)))
        if _has_kernel(x, use):
            return _of_kernel(kernel_codes(x, use, "swizzled"), use, x)
        return self.load(super().store(checked_matrix(made(x)), use))

    def prepare_pair(self, x: Matrix, first: Use, second: Use) -> tuple[_Codes, _Codes] | None:
        """Both copies of a gradient from the same passes over memory, where Triton quantizes."""
        if not _is_kernel_pair(x, first, second):
            return None
        a, b = kernel_pair(x, first, second, ("swizzled", "swizzled"))
        return _of_kernel(a, first, x), _of_kernel(b, second, x)

    def prepare_and_store(self, x: Matrix, use: Use, saved: Use) -> tuple[_Plain | _Codes, QuantizedTensor]:
        """The same for fprop's operand and the codes that wgrad will read."""
        if not _is_kernel_pair(x, use, saved):
            return self.prepare(x, use), self.store(x, saved)
        a, codes = kernel_pair(x, use, saved, ("swizzled", "kept"))
        assert saved.operand is not None
        return _of_kernel(a, use, x), to_stored(codes, saved.operand, saved.axis, x.shape)

    def store(self, x: Matrix, use: Use) -> QuantizedTensor:
        """The reference's codes, by Triton's quantizers where they run."""
        assert use.operand is not None
        if _has_kernel(x, use):
            return to_stored(kernel_codes(x, use, "kept"), use.operand, use.axis, x.shape)
        return super().store(x, use)

    def load(self, codes: QuantizedTensor) -> _Codes:
        """Stored codes are what the kernels read."""
        k = codes.shape[codes.axis]
        return _Codes(codes.payload, codes.scales, codes.tensor_scale, codes.operand, k)

    def weight_product(self, a: Any, b: Any, compute: torch.dtype, weight: torch.dtype) -> Product:
        """One that may add itself, of plain operands."""
        if isinstance(a, _Plain) and isinstance(b, _Plain) and a.values.dtype == compute:
            check_same_device(a.values, b.values)
            return PlainProduct(a.values, b.values, weight)
        return super().weight_product(a, b, compute, weight)

    def multiply(self, gemm: str, a: _Plain | _Codes, b: _Plain | _Codes, out: torch.dtype) -> Tensor:
        """A B^T.

        Raises:
            PlanError: a shape that the kernels do not take; `refusal` says so before.
        """
        if isinstance(a, _Plain) or isinstance(b, _Plain):
            assert isinstance(a, _Plain)
            assert isinstance(b, _Plain)
            check_same_device(a.values, b.values)
            a_axis, b_axis = AXES[gemm]
            return multiply(a.values, a_axis, b.values, b_axis).to(out)
        check_same_device(a.payload, b.payload)
        shape = Shape(len(a.payload), len(b.payload), a.k)
        reason = _refusal(a.operand, b.operand, shape, a.payload.device)
        if reason is not None:
            raise PlanError(f"torch has no kernel for this {gemm}", got=reason, do="plan another back end")
        if not shape.flops:
            return torch.zeros(shape.m, shape.n, dtype=out, device=a.payload.device)
        return _PRODUCTS[_FAMILIES[a.operand.scaling]](gemm, a, b, out)


def _has_kernel(x: Matrix, use: Use) -> bool:
    """Whether Triton quantizes this operand; of tensors and rows not where a maximum is taken over ranks."""
    operand = use.operand
    if operand is None or operand.scaling not in QUANTIZED or not _is_on_gpu(x) or not has_triton():
        return False
    if operand.scaling in GROUPS:
        return not operand.four_over_six
    return operand.element != "e2m1" and not operand.hadamard and use.reduce_amax is None


def _is_on_gpu(x: Matrix) -> bool:
    return x.device.type == "cuda"


def _is_kernel_pair(x: Matrix, first: Use, second: Use) -> bool:
    return _has_kernel(x, first) and _has_kernel(x, second) and is_kernel_pair(first, second)


def _of_kernel(found: KernelCodes, use: Use, x: Matrix) -> _Codes:
    assert use.operand is not None
    is_swizzled = use.operand.scaling in GROUPS
    k = x.shape[use.axis]
    return _Codes(found.codes, found.scales, found.tensor_scale, use.operand, k, is_swizzled)


# -- rules -------------------------------------------------------------------------------------


def _refusal(a: Operand, b: Operand, shape: Shape | None, device: torch.device) -> str | None:
    family = _FAMILIES[a.scaling]
    reason = _operand_refusal(a, b, family)
    if reason is None and device.type not in ("cuda", "cpu"):
        reason = f"torch multiplies scaled codes on cuda and cpu, not on {device.type}"
    if reason is None and device.type == "cpu" and family not in ("tensor", "row"):
        reason = "torch's CPU kernel takes one scale per tensor or per row"
    if reason is not None or shape is None:
        return reason
    multiple = _K_MULTIPLE[family]
    if shape.k % multiple:
        return f"K must be a multiple of {multiple}, in {shape}"
    return f"N must be a multiple of {_N_MULTIPLE}, in {shape}" if shape.n % _N_MULTIPLE else None


def _operand_refusal(a: Operand, b: Operand, family: str) -> str | None:
    if family != _FAMILIES[b.scaling] or (a.scaling, b.scaling) == ("block", "block"):
        return f"no kernel multiplies {a.scaling} by {b.scaling} scales"
    if family in ("mx", "nvfp4"):
        same = (a.element == "e2m1") == (b.element == "e2m1")
        return None if same else f"no kernel multiplies {a.element} by {b.element}"
    if "int8" in (a.element, b.element):
        return f"torch multiplies no INT8 codes with {a.scaling} scales"
    if "e2m1" in (a.element, b.element):
        return f"no tensor core multiplies E2M1 codes with {a.scaling} scales"
    return "no kernel multiplies E5M2 by E5M2" if a.element == b.element == "e5m2" else None


# -- products ----------------------------------------------------------------------------------


def _tensor_product(gemm: str, a: _Codes, b: _Codes, out: torch.dtype) -> Tensor:
    return _scaled(gemm, a, b, a.scales.reshape(()), b.scales.reshape(()), out)


def _row_product(gemm: str, a: _Codes, b: _Codes, out: torch.dtype) -> Tensor:
    a_scales, b_scales = a.scales.reshape(-1, 1), b.scales.reshape(1, -1)
    if out == torch.float32 or not _is_on_gpu(a_scales):
        one = torch.ones((), device=a_scales.device)
        return (_scaled(gemm, a, b, one, one, torch.float32) * a_scales * b_scales).to(out)
    return _scaled(gemm, a, b, a_scales.contiguous(), b_scales.contiguous(), out)


def _scaled(gemm: str, a: _Codes, b: _Codes, a_scale: Tensor, b_scale: Tensor, out: torch.dtype) -> Tensor:
    return torch._scaled_mm(
        a.payload, b.payload.t(), a_scale, b_scale, out_dtype=out, use_fast_accum=gemm == "fprop"
    )


def _tile_product(gemm: str, a: _Codes, b: _Codes, out: torch.dtype) -> Tensor:
    """Hopper's 1x128 and 128x128 scales; promoted to fp32 at every tile, so never "fast"."""
    rows = len(a.payload)
    pad = -rows % _TILE_ROWS if a.operand.scaling == "tile" else 0
    payload = a.payload
    if pad:
        payload = F.pad(payload.view(torch.uint8), (0, 0, 0, pad)).view(payload.dtype)
    kinds = {"tile": ScalingType.BlockWise1x128, "block": ScalingType.BlockWise128x128}
    product = F.scaled_mm(
        payload,
        b.payload.t(),
        _tile_scales(a, pad),
        kinds[a.operand.scaling],
        _tile_scales(b, 0),
        kinds[b.operand.scaling],
        output_dtype=out,
    )
    return product[:rows]


def _tile_scales(x: _Codes, pad: int) -> Tensor:
    if x.operand.scaling == "tile":
        return _columns_first(F.pad(x.scales, (0, 0, 0, pad)) if pad else x.scales)
    return _columns_first(F.pad(x.scales, (0, -x.scales.shape[1] % 4)).t())


def _columns_first(matrix: Tensor) -> Tensor:
    """Strides (1, rows) also where an axis has one element, whose stride torch takes for arbitrary, and cuBLAS not."""
    rows, columns = matrix.shape
    if matrix.stride() == (1, rows):
        return matrix
    return torch.empty(columns, rows, dtype=matrix.dtype, device=matrix.device).t().copy_(matrix)


def _mx_product(gemm: str, a: _Codes, b: _Codes, out: torch.dtype) -> Tensor:
    """Blackwell's 1x32 scales, E4M3, E5M2 or E2M1 codes. Not run yet."""
    # The FP4 kernel gives bf16 only.
    type_ = torch.bfloat16 if a.operand.element == "e2m1" else out
    scales = [_swizzled(x).view(torch.float8_e8m0fnu) for x in (a, b)]
    kind, order = ScalingType.BlockWise1x32, SwizzleType.SWIZZLE_32_4_4
    a_codes, b_codes = _elements(a), _elements(b).t()
    product = F.scaled_mm(
        a_codes, b_codes, scales[0], kind, scales[1], kind, order, order, output_dtype=type_
    )
    return product.to(out)


def _nvfp4_product(gemm: str, a: _Codes, b: _Codes, out: torch.dtype) -> Tensor:
    """Blackwell's 1x16 scales with one fp32 scale per tensor. Not run yet."""
    a_scales, b_scales = ([_swizzled(x), _whole(x)] for x in (a, b))
    kinds = [ScalingType.BlockWise1x16, ScalingType.TensorWise]
    orders = [SwizzleType.SWIZZLE_32_4_4, SwizzleType.NO_SWIZZLE]
    return F.scaled_mm(
        _elements(a),
        _elements(b).t(),
        a_scales,
        kinds,
        b_scales,
        kinds,
        orders,
        orders,
        output_dtype=out,
    )


def _whole(x: _Codes) -> Tensor:
    assert x.tensor_scale is not None
    return x.tensor_scale.reshape(1)


def _swizzled(x: _Codes) -> Tensor:
    """Scales of groups as cuBLASLt reads them, of every row: those of 16 x 16 blocks repeated."""
    if x.is_swizzled:
        return x.scales
    if x.operand.scaling != "nvfp4_2d":
        return swizzle(x.scales)
    repeated = x.scales.view(torch.uint8).repeat_interleave(16, 0)[: len(x.payload)]
    return swizzle(repeated.view(x.scales.dtype))


def _elements(x: _Codes) -> Tensor:
    if x.operand.element != "e2m1":
        return x.payload
    return x.payload.contiguous().view(torch.float4_e2m1fn_x2)


def swizzle(scales: Tensor) -> Tensor:
    """One-byte scales [R, C] as cuBLASLt reads them: padded to 128 x 4, each such tile as 32 x 4 x 4."""
    rows, columns = scales.shape
    padded = F.pad(scales.view(torch.uint8), (0, -columns % 4, 0, -rows % 128))
    tiles = padded.view(math.ceil(rows / 128), 4, 32, math.ceil(columns / 4), 4)
    return tiles.permute(0, 3, 2, 1, 4).reshape(-1).view(scales.dtype)


_PRODUCTS = {
    "tensor": _tensor_product,
    "row": _row_product,
    "tile": _tile_product,
    "mx": _mx_product,
    "nvfp4": _nvfp4_product,
}
