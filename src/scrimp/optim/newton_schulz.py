"""The nearest thing to an orthogonal matrix that five small products give.

Method   X = M / |M|, then five times X = a X + (b G + c G G) X with G = X X': a quintic in the singular values that
         brings all of them to between 0.7 and 1.2, those that were near zero last. The operations are those of
         torch.optim.Muon, in its order, so that in bf16 results are the same bit for bit.
Cost     15 products; 10 max(m, n)^2 min(m, n) FLOPs or fewer.
Source   Jordan, https://kellerjordan.github.io/posts/muon/
Checked  tests/optim/test_muon.py, tests/optim/test_muon_rule.py
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
STEPS = 5
EPS = 1e-7
"""The least norm that is divided by."""


def orthogonalised(
    matrix: Tensor,
    coefficients: tuple[float, float, float] = COEFFICIENTS,
    steps: int = STEPS,
    eps: float = EPS,
) -> Tensor:
    """A matrix with the singular vectors of this one, which is overwritten, and singular values near 1; in its type."""
    a, b, c = coefficients
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x.div_(x.norm().clamp(min=eps))
    del matrix
    for _ in range(steps):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if is_tall else x


def matched_rate(rows: int, columns: int) -> float:
    """What an orthogonalised matrix is multiplied by, so that its root mean square is that of AdamW's updates."""
    return 0.2 * math.sqrt(max(rows, columns))
