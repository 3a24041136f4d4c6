"""torch's linear layer, whose backward pass adds to the sum of its weight's gradients (`weight_sums`).

Outside of `adding`, and where no product of torch adds to such a sum, it is torch's own, call by call.

Compiled   The gradients are one opaque operator, to which the sum is a number: equal blocks share a graph.
Checked    tests/gemm/test_weight_sums.py
"""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.gemm.problem import compute_dtype
from scrimp.gemm.recompute import only_saves
from scrimp.gemm.stored_weight import plain_linear
from scrimp.gemm.weight_sums import PlainProduct, sum_for, sum_of


class SummedLinear(nn.Linear):
    """torch's linear layer, which may add to the sum of its weight's gradients."""

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + bias, x of any leading shape."""
        return summed_linear(x, self.weight, self.bias, self)


def summed_linear(x: Tensor, weight: Tensor, bias: Tensor | None, owner: object) -> Tensor:
    """x W^T + bias in the compute type.

    Args:
        x: of any leading shape.
        owner: the planned layer, or the module of one that is not.
    """
    total = sum_for(weight, x)
    compute = compute_dtype(x)
    if total is None or compute not in total.plain:
        return plain_linear(x, weight, bias)
    is_skipped = not torch.compiler.is_compiling() and only_saves(owner)
    matrix = x[None] if x.dim() == 1 else x.flatten(0, -2)
    found = _Product.apply(matrix, weight, bias, total.handle, compute, is_skipped)  # type: ignore[no-untyped-call]
    return cast(Tensor, found).view(*x.shape[:-1], weight.shape[0])


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        handle: Tensor,
        compute: torch.dtype,
        is_skipped: bool,
    ) -> Tensor:
        low = x.to(compute)
        ctx.save_for_backward(low, weight, handle)
        ctx.input_dtype, ctx.bias_dtype = x.dtype, None if bias is None else bias.dtype
        if is_skipped:
            return low.new_empty(len(low), len(weight))
        with torch.autocast(x.device.type, enabled=False):
            return F.linear(low, weight.to(compute), None if bias is None else bias.to(compute))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, handle = ctx.saved_tensors
        make = summed_backward if torch.compiler.is_compiling() else _gradients
        grad_x = make(g, x, weight, handle, ctx.needs_input_grad[0])
        grad_x = grad_x.to(ctx.input_dtype) if ctx.needs_input_grad[0] else None
        grad_bias = None if ctx.bias_dtype is None else g.sum(0).to(ctx.bias_dtype)
        return grad_x, None, grad_bias, None, None, None


def _gradients(g: Tensor, x: Tensor, weight: Tensor, handle: Tensor, needs_x: bool) -> Tensor:
    """dX, or an empty tensor; dW is added to its sum."""
    with torch.autocast(g.device.type, enabled=False):
        grad_x = g @ weight.to(g.dtype) if needs_x else g.new_empty(0)
        sum_of(handle).add(PlainProduct(g, x, weight.dtype))
    return grad_x


summed_backward = torch.library.custom_op("scrimp::summed_backward", _gradients, mutates_args=())


@summed_backward.register_fake
def _(g: Tensor, x: Tensor, weight: Tensor, handle: Tensor, needs_x: bool) -> Tensor:
    return torch.empty_like(x) if needs_x else g.new_empty(0)
