"""Ranks that share the layers of a model: each computes with its own heads, its own part of the MLP, its own words.

Problem  The weights of one block, or the logits of one chunk, are more than a device holds or multiplies in time.
Method   Of the two products of attention and of the MLP the first is cut by its outputs and the second by its inputs
         (Megatron): what is between them stays on its rank, and the second gives partial sums. Around them the
         residual stream, on which all else works token by token, is cut along the sequence (sequence parallelism)::

             norm(x_BtD) -- gather --> qkv, attention, out -- scatter --> + x_BtD
             norm(x_BtD) -- gather --> gate_up, gate, down -- scatter --> + x_BtD

         `gather` joins the tokens of all ranks, `scatter` adds up partial sums and leaves each rank its tokens; each
         is the other's derivative. Embedding and head are cut over the vocabulary: looking words up gives partial
         sums too, of which all but one are zero, and the head reads gathered tokens.
Copies   A weight that every rank has (a norm) sees its rank's tokens or heads alone: `one_copy` adds up its gradients,
         so that they, and with them the copies, are equal bit for bit.
Bytes    A rank sends in a block, forward and backward, with n ranks and e bytes a number: 8 B T D e (n - 1) / n. That
         is what all-reduces without sequence parallelism send too (PTD-P). Copies of norms add all-reduces of a few D.
Choice   Plain tensors, and an autograd function for each exchange, instead of DTensors: a fused weight's rows of one
         rank are three ranges, which no placement describes; planned products, recomputation and compiled blocks
         then see ordinary tensors of smaller layers; and FSDP2 shards them as it does any others.
Limits   The sequence must divide by the ranks. What `gather` gives a product is kept whole for its backward pass, if
         that is not recomputed (from `norms` on, which gathers again).
Source   Megatron-LM, arXiv 1909.08053; sequence parallelism, arXiv 2205.05198; PTD-P, arXiv 2104.04473
Checked  tests/parity/

Shapes: B rows, T tokens of a row, n ranks, t = T / n, D width, V vocabulary.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.errors import ConfigError
from scrimp.gemm import compute_dtype
from scrimp.models.blocks import Embedding, RMSNorm
from scrimp.models.functions import at_least_float32

_numbers = itertools.count()
_all: weakref.WeakValueDictionary[int, TensorRanks] = weakref.WeakValueDictionary()


class TensorRanks:
    """The ranks of a group, in the order of their tokens, heads and words. It must outlive all backward passes.

    Args:
        group: the ranks.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.number = group, next(_numbers)
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self._cuts_tokens = True
        _all[self.number] = self

    @contextlib.contextmanager
    def whole_rows(self) -> Iterator[None]:
        """Inside, without gradients, every rank has all tokens of the residual stream: one, or any number of them."""
        assert not torch.is_grad_enabled()
        self._cuts_tokens = False
        try:
            yield
        finally:
            self._cuts_tokens = True

    def share(self, count: int) -> range:
        """Which of so many things in a row are this rank's; the shares differ by one at most."""
        return range(count * self.rank // self.size, count * (self.rank + 1) // self.size)

    def gather(self, x_BtD: Tensor) -> Tensor:
        """x_BTD: the tokens of all ranks, in the type of the product that reads them."""
        x_BtD = x_BtD.to(compute_dtype(x_BtD))
        if not self._cuts_tokens:
            return x_BtD
        return cast(Tensor, _Gather.apply(x_BtD, self.number, self.size))  # type: ignore[no-untyped-call]

    def scatter(self, partial_BTD: Tensor) -> Tensor:
        """x_BtD: the sum of all ranks' tensors, at this rank's tokens.

        Raises:
            ConfigError: the sequence does not divide.
        """
        if not self._cuts_tokens:
            return self.sum(partial_BTD)
        if partial_BTD.shape[1] % self.size:
            raise ConfigError(
                "sequences cannot be cut over the ranks that share layers (layout.tp)",
                got=f"{partial_BTD.shape[1]:,} tokens on {self.size} ranks",
                expected=f"a multiple of {self.size}",
            )
        return cast(Tensor, _Scatter.apply(partial_BTD, self.number, self.size))  # type: ignore[no-untyped-call]

    def joined(self, logits: Tensor, words: int) -> Tensor:
        """Logits of all words from each rank's own, in the last dimension; without gradients, of a few positions."""
        own = self.share(words)
        whole = logits.new_zeros(*logits.shape[:-1], words)
        whole[..., own.start : own.stop] = logits
        return self.sum(whole)

    def one_copy(self, weight: Tensor) -> Tensor:
        """A weight that all ranks have, with the sum of all ranks' gradients."""
        return cast(Tensor, _OneCopy.apply(weight, self.number))  # type: ignore[no-untyped-call]

    def sum(self, x: Tensor) -> Tensor:
        """The sum of all ranks' tensors, on each of them."""
        return cast(Tensor, _Sum.apply(x, self.number))  # type: ignore[no-untyped-call]


class CutEmbedding(Embedding):
    """An embedding of which each rank has the rows of its words: tokens of whole rows to this rank's part of them.

    Args:
        whole: the embedding that is cut.
    """

    def __init__(self, whole: Embedding, ranks: TensorRanks) -> None:
        self.words, self.ranks = ranks.share(whole.num_embeddings), ranks
        like = whole.weight
        super().__init__(len(self.words), whole.embedding_dim, device=like.device, dtype=like.dtype)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        """x_BtD."""
        index_BT = tokens_BT - self.words.start
        is_elsewhere_BT = (index_BT < 0) | (index_BT >= len(self.words))
        x_BTD = super().forward(index_BT.masked_fill(is_elsewhere_BT, 0))
        return self.ranks.scatter(x_BTD.masked_fill(is_elsewhere_BT[..., None], 0.0))


class AllHeadsNorm(RMSNorm):
    """The root mean square over the heads of all ranks, of which each has its own, with its part of the weight.

    Args:
        whole: the norm that is cut.
        own: which of its numbers are this rank's.
    """

    def __init__(self, whole: RMSNorm, own: range, ranks: TensorRanks) -> None:
        torch.nn.Module.__init__(self)
        assert (whole.offset, whole.scale) == (0.0, 1.0)
        self.eps, self.offset, self.scale = whole.eps, whole.offset, whole.scale
        self.one_copy = None
        self.size, self.ranks = len(whole.weight), ranks
        self.weight = torch.nn.Parameter(whole.weight.new_empty(len(own)))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, of all ranks together."""
        wide = at_least_float32(x)
        mean = self.ranks.sum(wide.square().sum(-1, keepdim=True)) / self.size
        return (wide * torch.rsqrt(mean + self.eps) * self.weight).to(compute_dtype(x))


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_BtD: Tensor, number: int, size: int) -> Tensor:
        ctx.number, ctx.size = number, size
        return cast(Tensor, gather_tokens(x_BtD, number, size))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor, None, None]:
        return scatter_tokens(grad_BTD, ctx.number, ctx.size), None, None


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, partial_BTD: Tensor, number: int, size: int) -> Tensor:
        ctx.number, ctx.size = number, size
        return cast(Tensor, scatter_tokens(partial_BTD, number, size))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_BtD: Tensor) -> tuple[Tensor, None, None]:
        return gather_tokens(grad_BtD, ctx.number, ctx.size), None, None


class _OneCopy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, number: int) -> Tensor:
        ctx.number = number
        return weight.view_as(weight)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return add_up(grad, ctx.number), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int) -> Tensor:
        ctx.number = number
        return cast(Tensor, add_up(x, number))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return add_up(grad, ctx.number), None


# Operators, so that torch.compile sees each exchange as one, and takes none of it apart. From torch 2.12 on two of
# torch's functions have new names, and the old ones warn.


@torch.library.custom_op("scrimp::gather_tokens", mutates_args=())
def gather_tokens(x_BtD: Tensor, number: int, size: int) -> Tensor:
    """One all-gather."""
    B, t, D = x_BtD.shape
    found = x_BtD.new_empty(size * B, t, D)
    call = "all_gather_single" if hasattr(dist, "all_gather_single") else "all_gather_into_tensor"
    getattr(dist, call)(found, x_BtD.contiguous(), group=_all[number].group)
    return found.view(size, B, t, D).transpose(0, 1).reshape(B, size * t, D)


@gather_tokens.register_fake
def _(x_BtD: Tensor, number: int, size: int) -> Tensor:
    B, t, D = x_BtD.shape
    return x_BtD.new_empty(B, size * t, D)


@torch.library.custom_op("scrimp::scatter_tokens", mutates_args=())
def scatter_tokens(partial_BTD: Tensor, number: int, size: int) -> Tensor:
    """One reduce-scatter."""
    B, T, D = partial_BTD.shape
    sent = partial_BTD.view(B, size, T // size, D).transpose(0, 1).reshape(size * B, T // size, D)
    found = partial_BTD.new_empty(B, T // size, D)
    call = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    getattr(dist, call)(found, sent, group=_all[number].group)
    return found


@scatter_tokens.register_fake
def _(partial_BTD: Tensor, number: int, size: int) -> Tensor:
    B, T, D = partial_BTD.shape
    return partial_BTD.new_empty(B, T // size, D)


@torch.library.custom_op("scrimp::add_up", mutates_args=())
def add_up(x: Tensor, number: int) -> Tensor:
    """One all-reduce."""
    total = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, group=_all[number].group)
    return total


@add_up.register_fake
def _(x: Tensor, number: int) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)
