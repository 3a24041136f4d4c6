"""Ulysses: from a part of the tokens with all heads to all tokens with a part of the heads, and back.

Problem  Attention needs whole rows; everything else in a block works token by token.
Method   Heads know nothing of each other. Before attention each rank sends, to every other, its tokens' queries, keys
         and values of that rank's heads (one all-to-all); then it has whole rows of H / W heads, and attention is the
         usual one, documents and windows included. A second all-to-all brings the results back. Gradients take the
         same ways backwards.
Heads    W must divide H. Of N key heads a rank gets N / W where W divides N; where N divides W, each key head goes to
         the W / N ranks that have its queries, and its gradients are added. Other numbers are refused.
Bytes    that a rank sends in one forward pass, and as many in one backward pass, with t = T / W tokens, G heads of
         queries, keys and values that a rank computes with, and e bytes a number:

             (W - 1) B t K e (G + H / W)

Limits   Rows are divided contiguously. All ranks must run the same blocks in the same order. Recomputation exchanges
         again what it makes again.
Source   DeepSpeed Ulysses, arXiv 2309.14509
Checked  tests/models/test_context_parallel.py

Shapes: B rows, T tokens of a row, W ranks, t = T / W, H query heads, N KV heads, G heads of a rank, K head size.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import replace
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.errors import ConfigError
from scrimp.models.spec import AttentionSpec

_numbers = itertools.count()
_ulysses: weakref.WeakValueDictionary[int, Ulysses] = weakref.WeakValueDictionary()


class Ulysses:
    """The exchange of one kind of attention. It must live as long as a backward pass may need it.

    Args:
        group: the ranks; None: the default group.
        attends: attention with all heads.
        device: of what is exchanged.

    Raises:
        ConfigError: heads do not divide over the ranks.
    """

    def __init__(self, group: dist.ProcessGroup | None, attends: AttentionSpec, device: torch.device) -> None:
        self.group = cast(dist.ProcessGroup, group or dist.group.WORLD)
        self.size = dist.get_world_size(self.group)
        self.attends = heads_of_rank(attends, self.size)
        """Attention with a rank's heads."""
        self.index = torch.tensor(_head_index(attends, self.size), device=device)
        """Which heads go to each rank, one rank after the other."""
        number = next(_numbers)
        self.handle = torch.tensor(number)
        """What stands for it in operators."""
        _ulysses[number] = self

    def to_heads(self, qkv_BtCK: Tensor) -> Tensor:
        """qkv_BTGK, whole rows of a rank's heads, of some tokens with all C heads."""
        B, t, _, K = qkv_BtCK.shape
        sent = qkv_BtCK.index_select(2, self.index).view(B, t, self.size, -1, K)
        return self._exchanged(sent.permute(2, 0, 1, 3, 4)).transpose(0, 1).flatten(1, 2)

    def to_tokens(self, out_BThK: Tensor) -> Tensor:
        """out_BtHK, some tokens with all heads, of whole rows of a rank's heads."""
        sent = out_BThK.unflatten(1, (self.size, -1))
        return self._exchanged(sent.transpose(0, 1)).permute(1, 2, 0, 3, 4).flatten(2, 3)

    def _exchanged(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Exchange.apply(x.contiguous(), self.handle))  # type: ignore[no-untyped-call]


def heads_of_rank(attends: AttentionSpec, ranks: int) -> AttentionSpec:
    """A rank's share of the heads.

    Raises:
        ConfigError: they do not divide.
    """
    H, N = attends.num_heads, attends.num_kv_heads
    if H % ranks:
        raise ConfigError(
            "context parallelism: attention heads do not divide over the ranks of Ulysses",
            got=f"{H} query heads on {ranks} ranks",
            expected="a number of ranks that divides the heads",
            do="use fewer ranks, or a ring (zigzag)",
        )
    if N % ranks and ranks % N:
        raise ConfigError(
            "context parallelism: key heads do not divide over the ranks of Ulysses",
            got=f"{N} key heads on {ranks} ranks",
            expected="a number of ranks that divides the key heads, or that they divide",
            do="use another number of ranks, or a ring (zigzag)",
        )
    return replace(attends, num_heads=H // ranks, num_kv_heads=max(N // ranks, 1))


def _head_index(attends: AttentionSpec, ranks: int) -> list[int]:
    """Query, key and value heads side by side in another order: those of rank 0, then those of rank 1, and so on."""
    H, N, own = attends.num_heads, attends.num_kv_heads, heads_of_rank(attends, ranks)
    found: list[int] = []
    for rank in range(ranks):
        queries = range(rank * own.num_heads, (rank + 1) * own.num_heads)
        first = rank * N // ranks
        keys = range(first, first + own.num_kv_heads)
        found += [*queries, *(H + key for key in keys), *(H + N + key for key in keys)]
    return found


def ulysses_bytes(attends: AttentionSpec, ranks: int, *, rows: int, part: int, itemsize: int) -> int:
    """What a rank sends in one forward pass, and in one backward pass, by the formula above.

    Args:
        part: t.
        itemsize: e.
    """
    own = heads_of_rank(attends, ranks)
    heads = 2 * own.num_heads + 2 * own.num_kv_heads
    return (ranks - 1) * rows * part * attends.head_size * itemsize * heads


class _Exchange(torch.autograd.Function):
    """Entry i of the first dimension goes to rank i, and comes back as entry of the rank that sent it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, handle: Tensor) -> Tensor:
        ctx.save_for_backward(handle)
        return cast(Tensor, exchange(x, handle))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (handle,) = ctx.saved_tensors
        return exchange(grad.contiguous(), handle), None


@torch.library.custom_op("scrimp::exchange", mutates_args=())
def exchange(x: Tensor, handle: Tensor) -> Tensor:
    """One all-to-all, opaque to torch.compile."""
    found = torch.empty_like(x)
    dist.all_to_all_single(found, x, group=_ulysses[int(handle)].group)
    return found


@exchange.register_fake
def _(x: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(x)
