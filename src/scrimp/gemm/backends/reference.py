"""The reference back end: quantize, dequantize, multiply. It defines what every recipe means.

Method   Operands are rounded to their formats by `scrimp.formats.fake_quantize` and multiplied with
         sums in fp32. A scale that is the same along the summed axis (tensor, row, NVFP4's second)
         leaves the sum and is applied to the result.
Carrier  The format in which the values are multiplied:

         fp32     exact for everything, and slow where bf16 has matrix units. Always in fp32 runs.
         bf16     where both operands' values are exact in it: all scalings but tile and block.
         blocks   tile and block: the element's values, which are exact in bf16; of every 128 numbers of the summed
                  axis one product, and fp32 sums of the products times the scales of rows and columns, as hardware
                  does it (`block_sums`).

         bf16 carriers are taken where the results are bf16 anyway and the device multiplies bf16 fast. A CPU
         gives each product rounded to bf16, so results there carry that rounding as well as their own
         (relative to float64 1.7e-3 with one rounding, 2.4e-3 with outer scales, 2.1e-3 to 2.3e-3 in blocks; measured).
Limits   An emulation: its speed says nothing of the format's.
Checked  tests/gemm/test_reference.py against float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scrimp.formats import QuantizedTensor, fake_quantize
from scrimp.formats.quantized import INEXACT_IN_BF16, FakeQuantized
from scrimp.gemm.backends.base import Backend
from scrimp.gemm.backends.block_sums import Part, sum_of_blocks
from scrimp.gemm.cpu_products import has_bf16_units
from scrimp.gemm.deferred import Matrix, made
from scrimp.gemm.problem import AXES, COLUMNS, Shape, Use, multiply
from scrimp.precision import HIGH_PRECISION


@dataclass(frozen=True)
class ReferenceOperand:
    """One operand: what it was quantized to, or a high-precision tensor as it is."""

    quantized: FakeQuantized
    is_plain: bool = False
    is_exact_in_bf16: bool = False


class ReferenceBackend(Backend):
    """Every recipe on every device."""

    name = "reference"

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        """Never: any shape, ragged ones padded with zeros."""
        return None

    def emulates(self, recipe: str) -> bool:
        """All that it quantizes."""
        return recipe not in HIGH_PRECISION

    def prepare(self, x: Matrix, use: Use) -> ReferenceOperand:
        """Values after rounding, in the tensor's own layout; in bf16 carriers where x is bf16."""
        x = made(x)
        if use.operand is None:
            return ReferenceOperand(FakeQuantized(x, None), is_plain=True)
        is_bf16 = x.dtype == torch.bfloat16 and self.multiplies_bf16_fast(x.device)
        return ReferenceOperand(
            fake_quantize(
                x,
                use.operand,
                use.axis,
                noise=use.noise,
                reduce_amax=use.reduce_amax,
                keep_rotation=True,
                carrier=torch.bfloat16 if is_bf16 else torch.float32,
            )
        )

    def multiplies_bf16_fast(self, device: torch.device) -> bool:
        """Whether bf16 carriers are worth it there."""
        return multiplies_bf16_fast(device)

    def load(self, codes: QuantizedTensor) -> ReferenceOperand:
        """Values of kept codes."""
        exact = codes.operand.scaling not in INEXACT_IN_BF16
        if not exact and self.multiplies_bf16_fast(codes.payload.device):
            return ReferenceOperand(codes.element_matrix(), is_exact_in_bf16=True)
        return ReferenceOperand(codes.dequantize_matrix(), is_exact_in_bf16=exact)

    def multiply(self, gemm: str, a: ReferenceOperand, b: ReferenceOperand, out: torch.dtype) -> Tensor:
        """The product in the cheapest carrier that is exact enough, see the module."""
        product = _product(gemm, a, b, out)
        for outer, is_first in ((a.quantized.outer, True), (b.quantized.outer, False)):
            if outer is not None:
                # Scales of rows of the result stand upright, those of its columns lie.
                column = outer.reshape(-1, 1)
                product.mul_(column if is_first else column.T)
        return product.to(out)


def _product(gemm: str, a: ReferenceOperand, b: ReferenceOperand, out: torch.dtype) -> Tensor:
    a_axis, b_axis = AXES[gemm]
    if a.is_plain and b.is_plain:
        return multiply(a.quantized.values, a_axis, b.quantized.values, b_axis)
    carriers = bf16_carriers(a, b, out)
    if carriers is None:
        return multiply(a.quantized.wide(), a_axis, b.quantized.wide(), b_axis)
    left, right = carriers
    if left.inner is None and right.inner is None:
        return bf16_product(left.values, a_axis, right.values, b_axis).float()
    return sum_of_blocks(gemm, left, right, torch.float32, add_products)


def add_products(total: Tensor, parts: Iterator[Part], count: int) -> None:
    """Multiply and add one product after the other (`block_sums.Adder`)."""
    for part in parts:
        product = bf16_product(part.left, COLUMNS, part.right, COLUMNS).float()
        if part.of_rows is not None:
            product.mul_(part.of_rows[:, None])
        if part.of_columns is not None:
            product.mul_(part.of_columns)
        total.add_(product)
        del product  # before the next one is made


def bf16_carriers(
    a: ReferenceOperand, b: ReferenceOperand, out: torch.dtype
) -> tuple[FakeQuantized, FakeQuantized] | None:
    """Both operands in bf16, exactly; None: the carriers are fp32, or nothing is quantized."""
    left, right = a.quantized, b.quantized
    if (a.is_plain and b.is_plain) or out == torch.float32 or left.values.dtype == torch.float32:
        return None
    if right.values.dtype == torch.float32:  # of kept codes
        if not b.is_exact_in_bf16:
            return None
        right = replace(right, values=right.values.to(torch.bfloat16))
    return left, right


def bf16_product(a: Tensor, a_axis: int, b: Tensor, b_axis: int) -> Tensor:
    """A product of bf16 matrices; in fp32 where the device gives its sums unrounded."""
    if a.device.type != "cuda":
        return multiply(a, a_axis, b, b_axis)
    left, right = (a if a_axis == COLUMNS else a.T), (b.T if b_axis == COLUMNS else b)
    return torch.mm(left, right, out_dtype=torch.float32)


def multiplies_bf16_fast(device: torch.device) -> bool:
    """Whether bf16 products run on matrix units here."""
    return device.type != "cpu" or has_bf16_units()
