"""A linear layer whose weight is frozen, with a low-rank adapter beside it that is trained (LoRA).

Method   With r the rank, a the scale, and a layer in which n layers are stacked (W = [W_1; ...; W_n], as queries, keys
         and values), each stacked layer i has matrices of its own::

             y_i = x W_i^T + a (x A_i^T) B_i^T        A = [A_1; ...; A_n]  (n r, in)       B = [B_1; ...; B_n]  (out, r)

         so that the rows of A and B are those of adapters of the layers apart, and x A^T is one product for all.
         B begins with zeros: so does training where the base stands.
Order    The adapter's products come before the weight's: where a part of the model that ends with this layer runs
         again in backward (`scrimp.gemm.recompute`), the weight's product is the one that is left out.
Types    A and B are float32 whatever W is; products run in the compute type, as those of a plan's working format.
Planned  By a plan the weight's fprop and dgrad run in its formats; the adapter's products in the compute type.
Limits   The weight has no wgrad, and a plan's format for it says nothing.
Source   Hu et al. 2021, arXiv 2106.09685
Checked  tests/gemm/test_adapted.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrimp.gemm.linear import PlannedLinear
from scrimp.gemm.problem import compute_dtype
from scrimp.gemm.stored_weight import plain_linear


class AdaptedLinear(nn.Linear):
    """A frozen linear layer and its adapter. `adapt` makes one of a linear layer."""

    lora_a: nn.Parameter
    lora_b: nn.Parameter
    rows: tuple[int, ...]
    """Outputs of each layer that is stacked in it."""
    scale: float

    def forward(self, x: Tensor) -> Tensor:
        """x W^T + bias and what the adapter adds, x of any leading shape."""
        added = self.added(x)
        return plain_linear(x, self.weight, self.bias) + added

    def added(self, x: Tensor) -> Tensor:
        """What the adapter adds."""
        compute = compute_dtype(x)
        # Scaled where it is narrow: backward would scale the gradient of the whole output else.
        low = F.linear(x.to(compute), self.lora_a.to(compute)) * self.scale
        parts = low.split(len(self.lora_a) // len(self.rows), dim=-1)
        b = self.lora_b.to(compute).split(self.rows)
        found = [F.linear(one, matrix) for one, matrix in zip(parts, b, strict=True)]
        return found[0] if len(found) == 1 else torch.cat(found, dim=-1)


class PlannedAdapted(PlannedLinear, AdaptedLinear):
    """The same, the frozen weight's GEMMs by a plan."""

    def forward(self, x: Tensor, *, made_again: bool = False) -> Tensor:
        """x W^T + bias and what the adapter adds, x of any leading shape."""
        added = self.added(x)
        return PlannedLinear.forward(self, x, made_again=made_again) + added


def merged(weight: Tensor, lora_a: Tensor, lora_b: Tensor, rows: Sequence[int], scale: float) -> Tensor:
    """W_i + a B_i A_i of each layer that is stacked in one: computed in float32, in the weight's type."""
    rank, total = lora_b.shape[1], weight.float()
    pairs = zip(lora_b.float().split(rows), lora_a.float().split(rank), strict=True)
    return (total + scale * torch.cat([b @ a for b, a in pairs])).to(weight.dtype)


def adapt(layer: nn.Linear, rank: int, rows: Sequence[int], scale: float) -> None:
    """Give a linear layer an adapter, its matrices uninitialised; the layer itself is left to be frozen.

    Args:
        layer: of no class that has a forward of its own, or one whose weight is stored; stays the same object.
        rows: outputs of each layer that is stacked in it.
        scale: alpha / rank.
    """
    layer.__class__ = AdaptedLinear
    adapted = cast(AdaptedLinear, layer)
    device = layer.weight.device
    adapted.lora_a = nn.Parameter(torch.empty(len(rows) * rank, layer.in_features, device=device))
    adapted.lora_b = nn.Parameter(torch.empty(layer.out_features, rank, device=device))
    adapted.rows, adapted.scale = tuple(rows), scale
