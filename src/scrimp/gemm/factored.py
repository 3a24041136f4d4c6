"""A linear layer that is a product of two: y = B (A x) + bias, with A of (r, inputs) and B of (outputs, r).

Each factor is a linear layer of its own, with a plan of its own. What makes a layer's input again in backward
(`scrimp.gemm.recompute`) makes that of A again; B reads what A gave, r numbers of each token, which is kept.
Checked  tests/models/test_factors.py
"""

from __future__ import annotations

from typing import cast

from torch import Tensor, nn


class FactoredLinear(nn.Module):
    """A linear layer of rank r.

    Args:
        first: A, without a bias.
        second: B, with the layer's bias if it has one.
    """

    def __init__(self, first: nn.Linear, second: nn.Linear) -> None:
        super().__init__()
        self.A, self.B = first, second

    def forward(self, x: Tensor) -> Tensor:
        """B (A x) + bias, x of any leading shape."""
        return cast(Tensor, self.B(self.A(x)))
