"""The reference back end: quantize, dequantize, multiply. It defines what every recipe means.

Method   Operands are rounded to their formats by `scrimp.formats.fake_quantize` and multiplied with
         sums in fp32. A scale that is the same along the summed axis (tensor, row, NVFP4's second)
         leaves the sum and is applied to the result.
Carrier  The format in which the values are multiplied:

         fp32     exact for everything, and slow where bf16 has matrix units. Always in fp32 runs.
         bf16     where both operands' values are exact in it: all scalings but tile and block.
         bf16x3   tile and block: v = hi + lo with two bf16 numbers, and hi hi' + hi lo' + lo hi', which
                  leaves out 2^-16 of a product. Three fast products instead of a slow one.

         bf16 carriers are taken where the results are bf16 anyway and the device multiplies bf16 fast.
Limits   An emulation: its speed says nothing of the format's.
Checked  tests/gemm/test_reference.py against float64.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.formats import QuantizedTensor, fake_quantize
from scrimp.formats.quantize import FakeQuantized
from scrimp.gemm.backends.base import Backend
from scrimp.gemm.problem import AXES, COLUMNS, Shape, Use, multiply
from scrimp.precision import Operand, lookup_scaling

_INEXACT_IN_BF16 = ("tile", "block")


@dataclass(frozen=True)
class _Values:
    """float32 values of one operand, or a high-precision tensor as it is."""

    values: Tensor
    outer: Tensor | None
    is_exact_in_bf16: bool
    is_quantized: bool = True


class ReferenceBackend(Backend):
    """Every recipe on every device."""

    name = "reference"

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        """Never: any shape, ragged ones padded with zeros."""
        return None

    def prepare(self, x: Tensor, use: Use) -> _Values:
        """Values after rounding, in the tensor's own layout."""
        if use.operand is None:
            return _Values(x, None, x.dtype == torch.bfloat16, is_quantized=False)
        quantized = fake_quantize(
            x, use.operand, use.axis, noise=use.noise, reduce_amax=use.reduce_amax, keep_rotation=True
        )
        return _of(quantized, use.operand)

    def load(self, codes: QuantizedTensor) -> _Values:
        """Values of kept codes."""
        return _of(codes.dequantize_matrix(), codes.operand)

    def multiply(self, gemm: str, a: _Values, b: _Values, out: torch.dtype) -> Tensor:
        """The product in the cheapest carrier that is exact enough, see the module."""
        product = _product(gemm, a, b, out)
        for outer, is_first in ((a.outer, True), (b.outer, False)):
            if outer is not None:
                # Scales of rows of the result stand upright, those of its columns lie.
                column = outer.reshape(-1, 1)
                product = product * (column if is_first else column.T)
        return product.to(out)


def _of(quantized: FakeQuantized, operand: Operand) -> _Values:
    exact = lookup_scaling(operand.scaling).name not in _INEXACT_IN_BF16
    return _Values(quantized.values, quantized.outer, exact)


def _product(gemm: str, a: _Values, b: _Values, out: torch.dtype) -> Tensor:
    a_axis, b_axis = AXES[gemm]
    if a.values.dtype == b.values.dtype == torch.bfloat16:
        return multiply(a.values, a_axis, b.values, b_axis)
    if out == torch.float32 or not a.is_quantized or not multiplies_bf16_fast(a.values.device):
        return multiply(a.values.float(), a_axis, b.values.float(), b_axis)
    a_hi, b_hi = a.values.to(torch.bfloat16), b.values.to(torch.bfloat16)
    product = _wide(a_hi, a_axis, b_hi, b_axis)
    if not b.is_exact_in_bf16:
        product = product + _wide(a_hi, a_axis, (b.values - b_hi).to(torch.bfloat16), b_axis)
    if not a.is_exact_in_bf16:
        product = product + _wide((a.values - a_hi).to(torch.bfloat16), a_axis, b_hi, b_axis)
    return product


def _wide(a: Tensor, a_axis: int, b: Tensor, b_axis: int) -> Tensor:
    """A bf16 product in fp32 where the device gives its sums unrounded."""
    if a.device.type != "cuda":
        return multiply(a, a_axis, b, b_axis).float()
    left, right = (a if a_axis == COLUMNS else a.T), (b.T if b_axis == COLUMNS else b)
    return torch.mm(left, right, out_dtype=torch.float32)


def multiplies_bf16_fast(device: torch.device) -> bool:
    """Whether bf16 products run on matrix units here."""
    if device.type == "cpu":
        return bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return True
