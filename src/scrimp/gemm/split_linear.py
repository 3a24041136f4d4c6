"""torch's linear layer, whose weight's gradient can be made later than that of its input (`weight_gradients`).

Limits   The input must need a gradient.
Checked  tests/gemm/test_weight_gradients.py
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.gemm.linear import PlannedLinear, planned_linear, runs_plain
from scrimp.gemm.problem import compute_dtype
from scrimp.gemm.recompute import only_saves
from scrimp.gemm.weight_gradients import make_later


class SplitLinear(nn.Linear):
    """torch's linear layer, whose weight's gradient can be made later than that of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + bias, x of any leading shape."""
        compute, owner = compute_dtype(x), getattr(self, "planned", self)
        matrix = x.flatten(0, -2)
        # In a tuple: of an input without a gradient autograd would call the weight's hooks all the same.
        found = _Product.apply(matrix, (self.weight,), compute, only_saves(owner))  # type: ignore[no-untyped-call]
        y = cast(Tensor, found)
        if self.bias is not None:
            y = y + self.bias.to(compute)
        return y.view(*x.shape[:-1], self.out_features)


class PlannedSplit(PlannedLinear, SplitLinear):
    """The same, by a plan: planned products wait as well."""

    def forward(self, x: Tensor, *, made_again: bool = False) -> Tensor:
        """x W^T + bias, x of any leading shape."""
        if runs_plain(x, self.planned):
            return SplitLinear.forward(self, x)
        return planned_linear(x, self.weight, self.bias, self.planned, splits=True, made_again=made_again)


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weights: tuple[Tensor], compute: torch.dtype, is_skipped: bool
    ) -> Tensor:
        low, (weight,) = x.to(compute), weights
        ctx.save_for_backward(low)
        ctx.weight, ctx.input_dtype = weight, x.dtype
        if is_skipped:
            return low.new_empty(len(low), len(weight))
        with torch.autocast(x.device.type, enabled=False):
            return low @ weight.to(compute).t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None, None, None]:
        (x,), weight = ctx.saved_tensors, ctx.weight
        make_later(weight, lambda: (g.t() @ x).to(weight.dtype))
        return (g @ weight.to(g.dtype)).to(ctx.input_dtype), None, None, None
