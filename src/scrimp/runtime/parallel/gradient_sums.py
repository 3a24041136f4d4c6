"""Adds up the gradients of whole copies of a model while the backward pass still runs.

Problem  Ranks that have all of their weights (`layout.dp`, alone or beside tp and pp) need one another's gradients, and
         nothing else. FSDP2 over one shard would copy each weight and each gradient into buffers and out of them again.
Method   Sums of gradients go in buckets, in the reverse order of the model's parameters. As soon as the last
         micro-batch of a step has made all of a bucket, they are copied into one tensor, whose pieces they are from
         then on, and it is all-reduced. A bucket waits for those before it: whatever a backward pass makes first, all
         ranks reduce the same in the same order. `finish` reduces what is left, and waits. With P numbers and n copies
         a rank sends in a step::

             2 * 4 P (n - 1) / n bytes, and as much of one number a parameter (below)

         Sums are added in float32; those in bf16 are rounded once, at the end.
Nothing  A parameter without a gradient on this rank may have one on another: it counts as zeros. How many ranks had one
         is a sum too, and where none had, there is none.
Limits   Schedules that make the gradients of weights later (zbv, dualpipev) reduce all of them in `finish`. Models with
         routed experts stay with FSDP2, which shards the experts over the copies.
Source   Li et al., PyTorch Distributed, arXiv 2006.15704, and the size of its buckets
Checked  tests/runtime/parallel/test_gradient_sums.py, tests/parity/
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from scrimp.planner.memory.shared_costs import BUCKET_BYTES
from scrimp.runtime.memory.gradients import GradientSlot


class GradientSums:
    """The sums over copies of one model.

    Args:
        group: the ranks that have the same weights.
        bucket_bytes: most of a bucket of several sums.
    """

    def __init__(self, group: dist.ProcessGroup, *, bucket_bytes: int = BUCKET_BYTES) -> None:
        self._group, self._bucket_bytes = group, bucket_bytes
        self._buckets: list[_Bucket] = []
        self._begun = 0
        """Buckets that are being reduced."""
        self._is_last = False

    def follow(self, model: nn.Module, slot_of: Callable[[str], GradientSlot]) -> None:
        """From now on add up a model's gradients; when its optimizer has set its own hooks.

        Args:
            slot_of: where the optimizer collects the gradients of a parameter.
        """
        trained = [(name, one) for name, one in model.named_parameters() if one.requires_grad]
        for name, parameter in reversed(trained):
            slot = slot_of(name)
            if not self._buckets or self._buckets[-1].nbytes + _nbytes(slot) > self._bucket_bytes:
                self._buckets.append(_Bucket())
            note = functools.partial(self._note, self._buckets[-1], self._buckets[-1].add(slot))
            parameter.register_post_accumulate_grad_hook(note)

    def begin(self, *, is_last: bool) -> None:
        """The gradients of the next micro-batch are the last of the step, or not."""
        self._is_last = is_last

    def finish(self) -> None:
        """After the passes of a step: the sums over all copies are there; every copy must call it."""
        self._is_last = False
        for bucket in self._buckets[self._begun :]:
            bucket.reduce(self._group)
        counts = torch.tensor([one for bucket in self._buckets for one in bucket.has_own], dtype=torch.int32)
        counts = counts.to(self._buckets[0].slots[0].like.device)
        dist.all_reduce(counts, group=self._group)
        found = iter(counts.tolist())
        for bucket in self._buckets:
            bucket.finish(found)
        self._begun = 0

    def _note(self, bucket: _Bucket, place: int, _: Tensor) -> None:
        if not self._is_last:
            return
        bucket.missing.discard(place)
        while self._begun < len(self._buckets) and not self._buckets[self._begun].missing:
            self._buckets[self._begun].reduce(self._group)
            self._begun += 1


class _Bucket:
    """Sums that are reduced together."""

    def __init__(self) -> None:
        self.slots: list[GradientSlot] = []
        self.nbytes = 0
        """While they are reduced."""
        self.missing: set[int] = set()
        """Places of those that the last micro-batch has still to make."""
        self.has_own: list[bool] = []
        """Which of them this rank has a gradient of."""
        self._pieces: list[Tensor] = []
        self._work: Any = None

    def add(self, slot: GradientSlot) -> int:
        """One more; gives its place."""
        self.slots.append(slot)
        self.nbytes += _nbytes(slot)
        self.missing.add(len(self.slots) - 1)
        return len(self.slots) - 1

    @torch.no_grad()
    def reduce(self, group: dist.ProcessGroup) -> None:
        """Begin."""
        own = [slot.sum for slot in self.slots]
        self.has_own = [one is not None for one in own]
        sums = [_flat(slot, one) for slot, one in zip(self.slots, own, strict=True)]
        flat = sums[0] if len(sums) == 1 else torch.cat(sums)
        pieces = zip(flat.split([one.numel() for one in sums]), self.slots, strict=True)
        self._pieces = [piece.view(slot.like.shape) for piece, slot in pieces]
        for slot, piece in zip(self.slots, self._pieces, strict=True):
            slot.sum = piece if slot.like.dtype == torch.float32 else None  # what bf16 took is free
        self._work = dist.all_reduce(flat, group=group, async_op=True)

    def finish(self, counts: Iterator[int]) -> None:
        """Wait for the sums.

        Args:
            counts: of each sum, how many ranks had a gradient.
        """
        self._work.wait()
        for slot, piece in zip(self.slots, self._pieces, strict=True):
            slot.sum = piece.to(slot.like.dtype) if next(counts) else None
        self._pieces, self._work, self.missing = [], None, set(range(len(self.slots)))


def _flat(slot: GradientSlot, own: Tensor | None) -> Tensor:
    like = slot.like
    return torch.zeros(like.numel(), device=like.device) if own is None else own.float().flatten()


def _nbytes(slot: GradientSlot) -> int:
    return slot.like.numel() * torch.float32.itemsize
