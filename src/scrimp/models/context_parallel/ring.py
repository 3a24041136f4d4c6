"""Ring attention: keys and values travel from rank to rank past queries that stay.

Problem  Of a row of T tokens, rank r has the queries, keys and values of T / W. Each query must meet all keys that it
         sees, and no rank may hold all keys, nor T x T scores.
Method   W hops. In each, a rank computes its queries against the block of keys and values at hand, while this block
         goes on to the next rank and the previous rank's comes in. Results are merged in fp32 by their log-sum-exps:

             out = out + (part - out) / (1 + exp(l - l_part))        l = log(exp(l) + exp(l_part))

         so nothing but (out, l) is kept of what passed. The backward pass runs the same blocks again, with the results
         and sums of whole rows (`calls`): each then gives its share of dQ, dK and dV. dK and dV travel with the block
         whose they are, each rank adding its share, and are home after W hops.
         Which tiles of a block are visible at all, `tiles` says; where none are, the block passes uncomputed. It
         travels all the same: a further rank may need it.
         With attention that is not causal this is ring self-attention (RSA).
Bytes    that a rank sends, with n = 2 B (T / W) N K numbers in a block of keys and values of e bytes each:

             forward     (W - 1) n e                      W - 1 hops
             backward    (W - 1) n e + 4 W n              dK and dV travel W hops, in fp32

         Heads travel as they are: with grouped queries, N of them, not H.
Memory   Two blocks (n e bytes each) and the results in fp32; in the backward pass also two blocks of gradients in fp32,
         and dQ in fp32.
Compiled Forward and backward are one opaque operator each, so torch.compile leaves them whole, and recomputation can
         keep the results (`ring_attention` is among `attention_operators`): then nothing travels twice.
Limits   All ranks must hold as many rows and tokens, and run the same blocks in the same order. No second derivatives.
         Results do not depend on timing; on W they do, in their last bits.
Source   RSA: arXiv 2105.13120; Ring Attention: arXiv 2310.01889
Checked  tests/models/test_context_parallel.py: float64 attention, one process, and bytes

Shapes: B rows, T tokens of a row, W ranks, t = T / W tokens of a rank, H query heads, N KV heads, K head size.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.models.context_parallel.calls import Call, calls_of
from scrimp.models.context_parallel.division import Division, Scheme
from scrimp.models.context_parallel.tiles import documents_of, tiles_of

PLANS = 4
"""Batches whose calls a ring remembers, from their forward to their backward pass; others are found anew."""

Calls = tuple[tuple[Call, ...], ...]
"""By source."""

_numbers = itertools.count()
_rings: weakref.WeakValueDictionary[int, Ring] = weakref.WeakValueDictionary()


class Ring:
    """Ranks among which keys and values travel. It must live as long as a backward pass may need it.

    Args:
        group: the ranks; None: the default group.
        scheme: how rows are divided.
        window: the last so many tokens are seen; None: all.
        causal: whether a token sees none after it.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        scheme: Scheme,
        *,
        window: int | None = None,
        causal: bool = True,
    ) -> None:
        assert causal or window is None, "windows are for causal attention"
        self.group = cast(dist.ProcessGroup, group or dist.group.WORLD)
        self.scheme, self.window, self.causal = scheme, window, causal
        self.rank, self.size = dist.get_rank(self.group), dist.get_world_size(self.group)
        number = next(_numbers)
        self.handle = torch.tensor(number)
        """What stands for it in operators."""
        _rings[number] = self
        self.calls = lru_cache(PLANS)(self._calls)

    def _calls(self, rows: int, part: int, bounds: tuple[int, ...], device: torch.device) -> Calls:
        """What is computed, by source: the rank whose keys are at hand."""
        division = Division(self.scheme, part * self.size, self.size)
        assert bounds[-1] == rows * division.length, "document starts do not cover the rows"
        documents = documents_of(bounds, division.length)
        options = {"window": self.window, "causal": self.causal}
        return tuple(
            calls_of(tiles_of(division, self.rank, source, documents, **options), part, device)  # type: ignore[arg-type]
            for source in range(self.size)
        )

    def hops(self) -> Iterator[tuple[int, bool]]:
        """The source at hand in each hop, and whether it is the last."""
        for hop in range(self.size):
            yield (self.rank - hop) % self.size, hop == self.size - 1

    def send(self, *tensors: Tensor) -> Arriving:
        """Send tensors to the next rank; the same of the previous rank are on their way."""
        if not tensors:
            return Arriving((), [])
        if self.size == 1:
            return Arriving(tensors, [])
        after, before = (dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1))
        found = tuple(torch.empty_like(tensor) for tensor in tensors)
        sent = [dist.P2POp(dist.isend, x, after, self.group, tag) for tag, x in enumerate(tensors)]
        comes = [dist.P2POp(dist.irecv, x, before, self.group, tag) for tag, x in enumerate(found)]
        return Arriving(found, dist.batch_isend_irecv(sent + comes))


@dataclass(frozen=True)
class Arriving:
    """Tensors that are on their way here, while others leave."""

    tensors: tuple[Tensor, ...]
    works: list[dist.Work]

    def wait(self) -> tuple[Tensor, ...]:
        """The tensors; what was sent may be overwritten from now on."""
        for work in self.works:
            work.wait()
        return self.tensors


def ring_attention(q_BtHK: Tensor, kv_2BtNK: Tensor, ring: Ring, document_starts: Tensor) -> Tensor:
    """out_BtHK of a rank's queries over the keys of all ranks.

    Args:
        q_BtHK: queries, turned to their positions in the whole row.
        kv_2BtNK: keys, likewise, and values.
        ring: equal on all ranks.
        document_starts: int32 on the CPU: cumulative starts over the flattened B * T tokens of whole rows, every
            row's among them, and the end. Attention never leaves a document.
    """
    found = _RingAttention.apply(q_BtHK, kv_2BtNK, ring.handle, document_starts)  # type: ignore[no-untyped-call]
    return cast(Tensor, found)


def ring_bytes(
    ranks: int, *, rows: int, part: int, kv_heads: int, head_size: int, itemsize: int
) -> tuple[int, int]:
    """What a rank sends in one forward and in one backward pass, by the formula above.

    Args:
        part: t.
        itemsize: e.
    """
    if ranks == 1:
        return 0, 0
    block = 2 * rows * part * kv_heads * head_size
    forward = (ranks - 1) * block * itemsize
    return forward, forward + 4 * ranks * block


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, handle: Tensor, starts: Tensor) -> Tensor:
        out: Tensor
        out, lse = ring_forward(q, kv, handle, starts)
        ctx.save_for_backward(q, kv, out, lse, handle, starts)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dq, dkv = ring_backward(grad.contiguous(), *ctx.saved_tensors)
        return dq, dkv, None, None


def _of(handle: Tensor, q: Tensor, starts: Tensor) -> tuple[Ring, Calls]:
    ring = _rings[int(handle)]
    return ring, ring.calls(q.shape[0], q.shape[1], tuple(starts.tolist()), q.device)


@torch.library.custom_op("scrimp::ring_attention", mutates_args=())
def ring_forward(q: Tensor, kv: Tensor, handle: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    """Results, and lse_BtH in fp32."""
    ring, calls = _of(handle, q, starts)
    out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.full(q.shape[:3], float("-inf"), dtype=torch.float32, device=q.device)
    block = kv.contiguous()
    for source, is_last in ring.hops():
        arriving = ring.send(*([] if is_last else [block]))
        for call in calls[source]:
            merge(out, lse, call, *call.forward(call.queries(q), call.keys(block[0]), call.keys(block[1])))
        if not is_last:
            (block,) = arriving.wait()
    return out.to(q.dtype), lse


@ring_forward.register_fake
def _(q: Tensor, kv: Tensor, handle: Tensor, starts: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[:3], dtype=torch.float32)


def merge(out: Tensor, lse: Tensor, call: Call, part: Tensor, part_lse: Tensor) -> None:
    """Add what some queries found in some keys to what they have found so far."""
    so_far, sums = call.queries(out), call.queries(lse)
    # Of queries that have found nothing yet, sums are -inf: the weight is 1.
    so_far.lerp_(part.float(), torch.sigmoid(part_lse - sums)[..., None])
    call.put_queries(out, so_far)
    call.put_queries(lse, torch.logaddexp(sums, part_lse, out=sums))


@torch.library.custom_op("scrimp::ring_attention_backward", mutates_args=())
def ring_backward(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, handle: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of q and kv."""
    ring, calls = _of(handle, q, starts)
    dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    block, travelling = kv.contiguous(), list[Tensor]()
    for source, is_last in ring.hops():
        arriving = ring.send(*([] if is_last else [block]), *travelling)
        dkv = torch.zeros(kv.shape, dtype=torch.float32, device=kv.device)
        for call in calls[source]:
            add_gradients(dq, dkv, call, grad, q, block, out, lse)
        came = list(arriving.wait())
        if not is_last:
            block = came.pop(0)
        if came:
            dkv += came[0]
        travelling = [dkv]
    (home,) = ring.send(*travelling).wait()
    return dq.to(q.dtype), home.to(kv.dtype)


@ring_backward.register_fake
def _(
    grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor, handle: Tensor, starts: Tensor
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), kv.new_empty(kv.shape)


def add_gradients(
    dq: Tensor, dkv: Tensor, call: Call, grad: Tensor, q: Tensor, kv: Tensor, out: Tensor, lse: Tensor
) -> None:
    k, v = call.keys(kv[0]), call.keys(kv[1])
    of_q, of_k, of_v = call.backward(
        call.queries(grad), call.queries(q), k, v, call.queries(out), call.queries(lse)
    )
    call.put_queries(dq, call.queries(dq).add_(of_q))
    call.put_keys(dkv[0], call.keys(dkv[0]).add_(of_k))
    call.put_keys(dkv[1], call.keys(dkv[1]).add_(of_v))
