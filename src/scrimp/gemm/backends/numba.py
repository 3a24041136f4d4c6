"""The reference's numbers, made faster on a CPU by kernels that Numba compiles.

Method   `prepare`, `store`, `load` and `multiply` give bit for bit what the reference gives, each number read and
         written once (`scrimp.gemm.cpu_passes`); codes under a scale of NaN, which say nothing, may be others. Products
         are torch's.
Limits   Where Numba is installed (`pip install scrimp[numba]`), and for recipes that quantize. Two scales a block
         (`four_over_six`), two payloads (`fallback`), and numbers in float64 and float16 go through the reference.
Checked  tests/gemm/test_numba_backend.py
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from scrimp.cpu import TYPES, has_numba
from scrimp.formats import QuantizedTensor
from scrimp.formats import scales as scale_rules
from scrimp.formats.codes import BYTES
from scrimp.formats.grouping import Groups
from scrimp.formats.quantize import rotated_whole
from scrimp.formats.quantized import INEXACT_IN_BF16, FakeQuantized
from scrimp.formats.scales import GroupScales
from scrimp.gemm.backends.block_sums import sum_of_blocks
from scrimp.gemm.backends.reference import (
    ReferenceBackend,
    ReferenceOperand,
    bf16_carriers,
    bf16_product,
)
from scrimp.gemm.deferred import Matrix, made
from scrimp.gemm.problem import AXES, ROWS, Shape, Use
from scrimp.precision import (
    HIGH_PRECISION,
    Element,
    Operand,
    Scaling,
    lookup_element,
    lookup_scaling,
    scale_shape,
)
from scrimp.tracing import has_memory

if TYPE_CHECKING:
    from types import ModuleType


@functools.cache
def _passes() -> ModuleType:
    """Not at the top: numba takes half a second, which a run that quantizes nothing need not wait for."""
    from scrimp.gemm import cpu_passes

    return cpu_passes


class NumbaBackend(ReferenceBackend):
    """Every recipe on CPUs."""

    name = "numba"

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        """Elsewhere than on a CPU, and what quantizes nothing."""
        if device.type != "cpu":
            return "its kernels are for CPUs"
        if recipe in HIGH_PRECISION:
            return f"{recipe} quantizes nothing"
        return (
            None
            if has_numba()
            else "numba is not installed, or cannot be imported here (pip install scrimp[numba])"
        )

    def prepare(self, x: Matrix, use: Use) -> ReferenceOperand:
        """Values after rounding, as the reference's."""
        x = made(x)
        if not self._can_read(x, use.operand):
            return super().prepare(x, use)
        is_bf16 = x.dtype == torch.bfloat16 and self.multiplies_bf16_fast(x.device)
        scaled = _Scaled.of(x, use)
        inner = scaled.decode if is_bf16 and scaled.kind.name in INEXACT_IN_BF16 else None
        values = _passes().rounded_values(
            *scaled.arguments(),
            scaled.decode if inner is None else None,
            torch.bfloat16 if is_bf16 else torch.float32,
            **scaled.rule(),
        )
        return ReferenceOperand(FakeQuantized(values, scaled.outer, inner))

    def store(self, x: Matrix, use: Use) -> QuantizedTensor:
        """Codes, as the reference's."""
        x = made(x)
        if not self._can_read(x, use.operand):
            return super().store(x, use)
        assert use.operand is not None
        scaled = _Scaled.of(x, use)
        codes, stored = _passes().rounded_codes(*scaled.arguments(), **scaled.rule()), scaled.scales.stored
        if use.axis == ROWS:
            codes, stored = codes.t().contiguous(), stored.t()
        stored = stored.reshape(scale_shape(codes.shape, scaled.kind))
        element = scaled.element
        codes = _packed(codes) if element.bits == 4 else codes.view(BYTES[element.name])
        return QuantizedTensor(
            codes, stored.contiguous(), scaled.tensor_scale, use.operand, use.axis, x.shape
        )

    def load(self, codes: QuantizedTensor) -> ReferenceOperand:
        """Values of kept codes, as the reference's."""
        if not self._can_read(codes.payload, codes.operand, (torch.uint8, *BYTES.values())):
            return super().load(codes)
        kind, element = lookup_scaling(codes.operand.scaling), lookup_element(codes.operand.element)
        length = codes.operand.length(codes.shape[codes.axis])
        groups = Groups.of(kind, -1, len(codes.payload), length)
        scales = None if kind.columns is None else codes.scale_values().contiguous()
        exact, payload = kind.name not in INEXACT_IN_BF16, codes.payload.contiguous()
        if not exact and self.multiplies_bf16_fast(payload.device):
            values = _passes().values_of(payload, element, length, groups, None, torch.bfloat16)
            return ReferenceOperand(codes.matrix_of(values, inner=scales), is_exact_in_bf16=True)
        values = _passes().values_of(payload, element, length, groups, scales, torch.float32)
        return ReferenceOperand(codes.matrix_of(values), is_exact_in_bf16=exact)

    def multiply(self, gemm: str, a: ReferenceOperand, b: ReferenceOperand, out: torch.dtype) -> Tensor:
        """The product, as the reference's."""
        values = a.quantized.values, b.quantized.values
        is_ours = self.takes(values[0].device) and out in TYPES and all(one.numel() for one in values)
        carriers = bf16_carriers(a, b, out) if is_ours else None
        if carriers is None:
            return super().multiply(gemm, a, b, out)
        (left, right), axes = carriers, AXES[gemm]
        if left.inner is None and right.inner is None:
            product = bf16_product(left.values, axes[0], right.values, axes[1])
            found: Tensor = _passes().scaled_product(product, left.outer, right.outer, out)
            return found
        if left.outer is not None or right.outer is not None:
            return super().multiply(gemm, a, b, out)
        return sum_of_blocks(gemm, left, right, out, _passes().add_products)

    def takes(self, device: torch.device) -> bool:
        """Whether its kernels reach the memory of a device; what they do not reach goes through the reference."""
        return device.type == "cpu" and has_numba()

    def _can_read(self, x: Tensor, operand: Operand | None, types: tuple[torch.dtype, ...] = TYPES) -> bool:
        """Whether the kernels take a tensor."""
        if operand is None or operand.four_over_six or operand.fallback or not self.takes(x.device):
            return False
        return x.dim() == 2 and x.numel() > 0 and x.dtype in types


@dataclass(frozen=True)
class _Scaled:
    """A matrix whose groups have their scales, before it is rounded."""

    x: Tensor
    operand: Operand
    kind: Scaling
    element: Element
    groups: Groups
    scales: GroupScales
    tensor_scale: Tensor | None
    lift: float
    hashes: tuple[Tensor, Tensor] | None

    @classmethod
    def of(cls, x: Tensor, use: Use) -> _Scaled:
        """By the reference's rules."""
        operand, axis = use.operand, use.axis
        assert operand is not None
        kind, element = lookup_scaling(operand.scaling), lookup_element(operand.element)
        x = x.detach()
        x = rotated_whole(x, axis) if operand.hadamard else x.contiguous()
        groups = Groups.of(kind, axis, *x.shape)
        largest = _passes().largest_magnitudes(x, groups)
        tensor_scale, lift = None, 1.0
        if kind.has_tensor_scale:
            # As integers: the order of magnitudes, in which NaN is above infinity.
            whole = largest.view(torch.int32).amax().view(torch.float32)
            if use.reduce_amax is not None:
                use.reduce_amax(whole)
            tensor_scale = scale_rules.nvfp4_tensor_scale(whole)
            if has_memory(tensor_scale):
                lift = scale_rules.lift_of(tensor_scale).item()
        if kind.columns is None and use.reduce_amax is not None:
            use.reduce_amax(largest)
        hashes = None
        if operand.rounding == "stochastic":
            hashes = use.noise.row_hashes(len(x), x.device), use.noise.column_hashes(x.shape[1], x.device)
        no_clip = hashes is not None
        scales = _passes().scales_of(largest, kind, element, tensor_scale, lift=lift, no_clip=no_clip)
        return cls(x, operand, kind, element, groups, scales, tensor_scale, lift, hashes)

    @property
    def decode(self) -> Tensor | None:
        """What rounded numbers are multiplied by; None: nothing, the scale leaves the sum."""
        return None if self.kind.columns is None else self.scales.decode

    @property
    def outer(self) -> Tensor | None:
        """The scale that leaves the sum."""
        if self.tensor_scale is not None:
            return self.tensor_scale.reshape(1, 1)
        return self.scales.decode if self.kind.columns is None else None

    def arguments(self) -> tuple[Tensor, Groups, Element, Tensor]:
        """What every kernel takes first."""
        return self.x, self.groups, self.element, self.scales.encode

    def rule(self) -> dict[str, Any]:
        """How a kernel scales and rounds."""
        return {"is_divided": self.kind.scale_type == "fp32", "lift": self.lift, "hashes": self.hashes}


def _packed(codes: Tensor) -> Tensor:
    """Two codes a byte along the last axis, the first in the low half."""
    if codes.shape[1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[:, 0::2] | (codes[:, 1::2] << 4)
