"""torch's linear layer, whose weight's gradient can be made later than that of its input (`weight_gradients`).

Limits   The input must need a gradient.
Checked  tests/gemm/test_weight_gradients.py
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.errors import ModelError
from scrimp.gemm.grouped import GroupedLinear
from scrimp.gemm.linear import compute_dtype
from scrimp.gemm.linear_kinds import has_own_forward
from scrimp.gemm.recompute import only_saves
from scrimp.gemm.weight_gradients import make_later


class SplitLinear(nn.Linear):
    """torch's linear layer, whose weight's gradient can be made later than that of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + bias, x of any leading shape."""
        compute = compute_dtype(x)
        matrix = x.flatten(0, -2)
        # In a tuple: of an input without a gradient autograd would call the weight's hooks all the same.
        found = _Product.apply(matrix, (self.weight,), compute, only_saves(self))  # type: ignore[no-untyped-call]
        y = cast(Tensor, found)
        if self.bias is not None:
            y = y + self.bias.to(compute)
        return y.view(*x.shape[:-1], self.out_features)


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


def split_products(module: nn.Module) -> None:
    """Let the gradients of the weights of a module's linear layers wait, where a backward pass asks for it; those of
    planned layers do not.

    Raises:
        ModelError: a layer has a forward method of its own.
    """
    for name, layer in module.named_modules():
        if isinstance(layer, GroupedLinear):
            layer.splits = True
        if not isinstance(layer, nn.Linear) or hasattr(layer, "planned"):
            continue
        if has_own_forward(layer):
            raise ModelError(
                "a schedule that splits backward passes cannot split this layer's",
                got=f"{name}: {type(layer).__name__}, with a forward method of its own",
                do="choose layout.schedule 1f1b",
            )
        layer.__class__ = SplitLinear
