"""A linear layer whose matrix is a product of two factors and a sparse matrix: y = (B A + S) x + bias.

Problem  A product of rank r cannot become every matrix. A sparse matrix beside it has any rank, and few numbers.
Method   SLTrain: S has numbers at places that are drawn once and stay, k in each row. Trained are A, B and these
         numbers alone. For a product the whole matrix is made, and let go of after it, so that one layer at a time has
         it; backward makes it again, and afterwards the gradient of the whole matrix, of which little is kept::

             W  = B A, at the places of S plus its numbers     y  = W x
             dx = W' dy      dW = dy x'      dB = dW A'      dA = B' dW      dS = dW at the places of S

         All are of the working format; dW is rounded to it, as a full matrix's gradient is.
Places   Number j of a row lies in one of the columns from n j / k to n (j + 1) / k, at a place that a hash of the
         layer's name, the row and j says. No two lie at one place, every column is as likely, and places are made
         wherever they are needed: they are no tensor of a model, of a checkpoint, or of ranks.
Limits   A layer's places depend on its name and shape alone: runs of several seeds share them.
         Making W and pulling dW back costs 8 r n m FLOPs in a micro-batch, beside 6 n m for each of its tokens.
         So does each token that is generated.
         A plan's formats would quantize W: they are refused beside such layers, as compiled blocks are, which would
         keep every W from forward to backward (`scrimp.config.low_rank`).
Source   Han et al. 2024, SLTrain, arXiv 2406.02214, whose places are drawn from all of the matrix, so that rows differ
         in how many they have
Checked  tests/models/test_sparse_low_rank.py: float64, bytes of the trace, places; tests/training/test_low_rank_runs.py
"""

from __future__ import annotations

import hashlib
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.formats.noise import Noise
from scrimp.gemm.problem import compute_dtype
from scrimp.gemm.recompute import only_saves


class SparseLowRankLinear(nn.Module):
    """A linear layer of W = B A + S.

    Args:
        name: the layer's name in the model, of which the places of S are a function.
        first: A, without a bias.
        second: B, without a bias.
        entries: numbers of S in each row.
        bias: of the layer.
    """

    def __init__(self, name: str, first: nn.Linear, second: nn.Linear, entries: int, *, bias: bool) -> None:
        super().__init__()
        self.name, self.A, self.B = name, first, second
        like = second.weight
        self.S = nn.Parameter(like.new_empty(second.out_features, entries))
        self.bias = nn.Parameter(like.new_empty(second.out_features)) if bias else None

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.A.in_features

    def forward(self, x: Tensor) -> Tensor:
        """(B A + S) x + bias, x of any leading shape."""
        compute = compute_dtype(x)
        given = self.A.weight, self.B.weight, self.S
        y = cast(Tensor, _Product.apply(x.flatten(0, -2), *given, self, compute))  # type: ignore[no-untyped-call]
        y = y.view(*x.shape[:-1], y.shape[-1])
        return y if self.bias is None else y + self.bias.to(compute)


def whole_matrix(first: Tensor, second: Tensor, values: Tensor, name: str) -> Tensor:
    """B A + S of a layer by its name, in the type that all three have."""
    weight = second @ first
    columns = columns_of(name, values, weight.shape[1])
    return weight.scatter_(1, columns, weight.gather(1, columns) + values)


def columns_of(name: str, values: Tensor, inputs: int) -> Tensor:
    """The columns of S's numbers, int64 of their shape, rising in each row.

    Args:
        name: the layer's name in the model.
        values: the numbers, [outputs, k], for their shape and device.
        inputs: columns of the whole matrix.
    """
    (rows, entries), device = values.shape, values.device
    key = int.from_bytes(hashlib.sha256(f"{name}.S".encode()).digest()[:8], "little")
    first = torch.arange(entries + 1, device=device) * inputs // entries
    span = first[1:] - first[:-1]
    return (Noise(key).uniform(rows, entries, device) * span).long() + first[:-1]


class _Product(torch.autograd.Function):
    """W x of matrices x [tokens, inputs]."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        first: Tensor,
        second: Tensor,
        values: Tensor,
        layer: SparseLowRankLinear,
        compute: torch.dtype,
    ) -> Tensor:
        ctx.layer, ctx.compute, ctx.dtype = layer, compute, x.dtype
        x = x.to(compute)
        ctx.save_for_backward(x, first, second, values)
        if only_saves(layer):
            return x.new_empty(len(x), len(second))
        with torch.autocast(x.device.type, enabled=False):
            weight = whole_matrix(first.to(compute), second.to(compute), values.to(compute), layer.name)
            return x @ weight.t()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, *parts = ctx.saved_tensors
        dtypes = [part.dtype for part in parts]
        first, second, values = (part.to(ctx.compute) for part in parts)
        name, grad_x = ctx.layer.name, None
        with torch.autocast(g.device.type, enabled=False):
            if ctx.needs_input_grad[0]:
                grad_x = (g @ whole_matrix(first, second, values, name)).to(ctx.dtype)
            whole = g.t() @ x
            gradients = (
                second.t() @ whole,
                whole @ first.t(),
                whole.gather(1, columns_of(name, values, whole.shape[1])),
            )
        return grad_x, *(one.to(dtype) for one, dtype in zip(gradients, dtypes, strict=True)), None, None
