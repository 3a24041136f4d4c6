"""How much an error of a gradient moves the next update: what the optimizer makes of it.

Problem  AdamW divides by the history of the gradient, so that the same error moves one weight a lot and another one
         hardly. SGD does not. Muon moves most along the directions that the gradient hardly has.
Method   With h(g) what the optimizer makes of a gradient (`UpdateRule`), the sensitivity is the ratio of norms for a
         small random change, safe where h is steep::

             s = rms(h(g + d n) - h(g)) / d,     n ~ N(0, 1),  d = step * rms(g)

         and lr s / |W| turns an error of the gradient into a relative change of the weight. Where h is linear, s = 1.
Limits   The spec's d is the error of the weight's own gradient; here it is a fixed share of rms(g), which
         ranks alike and exists for weights that are not quantized.
Source   SNIP (arXiv 2602.01410), eq. (3) of the reconstruction, in its finite-difference form.
Checked  tests/statistics/test_sensitivity.py: against the closed form, and the optimizer's own step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scrimp.statistics.optimizer_view import UpdateRule
from scrimp.statistics.ranks import Piece

STEP = 0.05
"""Size of the change as a share of rms(g)."""


def sensitivity(
    rule: UpdateRule,
    gradient: Tensor,
    generator: torch.Generator,
    spread: Tensor | None = None,
    *,
    piece: Piece | None = None,
    norm: float = 0.0,
) -> float:
    """rms(h(g + d n) - h(g)) / d of one parameter.

    Args:
        gradient: as the optimizer reads it, clipped.
        spread: deviation of n by element, of mean square 1; None: 1 everywhere.
        piece: what of the parameter, gradient and state lies here; the result is then this rank's part, to
            be added in squares. None: all.
        norm: of the whole gradient, where a piece is given.
    """
    if rule.is_linear:
        return 1.0
    g = gradient.float()
    shape = tuple(g.shape) if piece is None else piece.shape
    root = math.sqrt(math.prod(shape))
    size = STEP * (float(torch.linalg.vector_norm(g)) if piece is None else norm) / root
    if size == 0.0:
        return 0.0
    noise = torch.randn(shape, generator=generator, device=g.device).mul_(size)
    if spread is not None:
        noise.mul_(spread)
    if piece is not None:
        noise = piece.cut(noise)
    change = rule.direction(g + noise).sub_(rule.direction(g))
    return float(torch.linalg.vector_norm(change)) / (size * root)
