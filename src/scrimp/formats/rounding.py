"""Rounds float32 to the values of a narrow element type, in place, by float arithmetic alone.

Problem  An emulated format rounds every number of every operand several times per step; a table look-up
         or a cast to a type that the CPU does not know costs many times the rest.
Method   The spacing of an element's values around x is a power of two,

             step(x) = 2^(e - m),   e = max(floor(log2 |x|), min_exponent)

         with m explicit mantissa bits; 2^e is x's own exponent field with the mantissa masked off.

         nearest      M = 1.5 * 2^23 * step; (x + M) - M. Around M float32 itself has the spacing
                      `step`, so its addition rounds to nearest even, as IEEE 754 demands.
         stochastic   floor(x / step + u) * step with u uniform in [0, 1): up with the probability of the
                      distance, so that the mean is x. Of u the first 23 - m bits are taken, so that x / step + u
                      is exact in float32 for every x that the element has, and leaves it where it is.

         Values beyond the largest saturate; NaN stays NaN. Zeros come out positive, whatever rounded
         to them: a sum of products never sees their sign, and to keep it costs half as much again.
Limits   Inputs are float32, |x| below 2^100 or so before the clamp; scales bring them there.
Checked  tests/formats/test_elements.py: all bfloat16 inputs against ml_dtypes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scrimp.formats.noise import BITS
from scrimp.precision.formats import Element

_EXPONENT_FIELD = 0x7F800000


def round_(x: Tensor, element: Element, noise: Tensor | None = None) -> Tensor:
    """Round float32 `x` in place to the element's values; with noise in [0, 1) stochastically."""
    x.clamp_(-element.max_value, element.max_value)
    power = x.abs().clamp_min_(math.ldexp(1.0, element.min_exponent))
    # 2^e; a NaN becomes infinity, which below makes NaN again.
    power.view(torch.int32).bitwise_and_(_EXPONENT_FIELD)
    if noise is None:
        large = 1.5 * 2.0 ** (23 - element.mantissa_bits)  # times a power of two: exact
        return x.add_(power, alpha=large).sub_(power, alpha=large)
    step = power.mul_(2.0**-element.mantissa_bits)
    if element.mantissa_bits > 23 - BITS:
        unit = 2.0 ** (element.mantissa_bits - 23)
        noise = noise.div(unit).floor_().mul_(unit)
    x.div_(step).add_(noise).floor_().mul_(step)
    # Noise can lift a value beyond the largest only where its scale let it exceed that.
    return x.clamp_(-element.max_value, element.max_value)
