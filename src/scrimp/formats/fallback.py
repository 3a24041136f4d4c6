"""Groups of integers that one payload rounds too coarsely get a second one, for what the first left of them.

Problem  An outlier sets the scale of its group, and integers have no exponent of their own: of 128 numbers beside one
         that is a thousand times as large nothing is left. Activations of gated MLPs have such outliers.
Method   A group falls back where its numbers are small beside its largest, which the magnitudes of its codes q say.
         What is left of it is rounded to nearest again, by a scale of its own::

             0 < sum |q| < 1024               of 128 numbers: the largest is 16 times their mean or more
             r  = x - q s                     s its scale
             s' = max |r| / 127,              q' = round(r / s')
             x~ = q s + q' s'                 16 bits; or, of far outliers, the others as without them

         All other groups have s' = 0 and q' = 0. Rounding moves a number by s / 4 in the mean: a group falls back where
         that is 3 % of its numbers, about where E4M3 (2.2 %) would be the better format.
Alike    Sums of codes are integers below 2^24, which float32 has: every device finds the same ones in any order. A
         group is asked alone, so that micro-batches and ranks that share a layer change no decision.
Limits   Groups of 128. A ragged one counts its padding as zeros, and falls back sooner. One with a NaN or an infinity
         has the scale NaN, and does not.
Source   Zhang et al. 2025, Accurate INT8 Training Through Dynamic Block-Level Fallback, arXiv 2503.08040: activation
         blocks with outliers in 16 bits instead of 8. Which blocks do is a rule of Scrimp's own.
Checked  tests/formats/test_fallback.py: against numpy, group by group
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.formats.grouping import largest_magnitude
from scrimp.formats.rounding import round_
from scrimp.formats.scales import fp32_scales
from scrimp.precision.formats import Element
from scrimp.precision.recipes import FALLBACK_SUM


@dataclass(frozen=True)
class Remainder:
    """What groups that fell back leave, rounded; of the others zeros."""

    rounded: Tensor
    """float32 values of the element, by groups [A, r, B, c]."""
    scales: Tensor
    """float32 [A, 1, B, 1]; 0 where there is no remainder."""


def remainder_of(x: Tensor, rounded: Tensor, scales: Tensor, element: Element) -> Remainder:
    """Quantize what rounding left of the groups that fall back.

    Args:
        x: float32 by groups, [A, r, B, c].
        rounded: x over its scales, rounded.
        scales: float32 [A, 1, B, 1].
    """
    total = rounded.abs().sum((1, 3), keepdim=True)
    falls_back = (total > 0) & (total < FALLBACK_SUM)
    left = torch.where(falls_back, x - rounded * scales, 0.0)
    amax = largest_magnitude(left)
    own = fp32_scales(amax, element).decode
    return Remainder(round_(left.div_(own), element), torch.where(amax == 0, 0.0, own))
