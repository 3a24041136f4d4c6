"""Gradients of some blocks live in host memory between their backward passes.

Method   Per block and micro-batch::

             before its backward pass   the sum so far is waited for (from the second micro-batch of a step on), and
                                        that of the block before it begins to come: autograd adds to it on the
                                        device, in the same order as if it had never left
             after its backward pass    the norm of each sum is taken, and the sum leaves

         At most three blocks of sums are on the device: the one that grows, the one that comes, and the one that
         leaves, which is held until the next block's pass is over.
Limits   The norms of all micro-batches but the last are for nothing: a vector norm per tensor.
Source   LLMQ's offloaded gradients; docs/memory.md
Checked  tests/runtime/memory/test_blocks.py
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

from scrimp.runtime.memory.arena import HostArena, Place
from scrimp.runtime.memory.link import Link, Ticket


class GradientSlot(Protocol):
    """Where the sum of one tensor's gradients is found while it is on the device."""

    like: Tensor
    """Its shape, type and device; may have no memory."""
    sum: Tensor | None


class OwnGradient:
    """The slot of a tensor that autograd (or a hook) sums gradients in: its `grad`."""

    def __init__(self, target: Tensor) -> None:
        self.like = target

    @property
    def sum(self) -> Tensor | None:
        """The tensor's `grad`."""
        return self.like.grad

    @sum.setter
    def sum(self, value: Tensor | None) -> None:
        self.like.grad = value


class HeldGradient:
    """The slot of a tensor that is updated elsewhere: a hook sums its gradients here.

    Args:
        like: of the sum's shape and type, on the device that computes; its memory is given back.
    """

    def __init__(self, like: Tensor) -> None:
        like.untyped_storage().resize_(0)
        self.like = like
        self.sum: Tensor | None = None


class _Home:
    """Where one sum lives."""

    def __init__(self, slot: GradientSlot, place: Place) -> None:
        self.slot, self.place = slot, place
        self.has_sum = False
        self.sent: Ticket | None = None
        """The last copy home."""
        self.norm: Tensor | None = None
        """Norm of the sum, a scalar on the device."""


class HostGradients:
    """The gradients that live on the host.

    Args:
        slots: number of a block to where its sums are found.
    """

    def __init__(self, slots: Mapping[int, Sequence[GradientSlot]], arena: HostArena, link: Link) -> None:
        self._link = link
        self._homes = {
            block: [_Home(slot, arena.take(slot.like.nbytes)) for slot in slots[block]]
            for block in sorted(slots)
        }
        self._before = {after: block for block, after in itertools.pairwise(self._homes)}
        self._coming: dict[int, list[Ticket]] = {}
        self._leaving: list[tuple[Ticket, Tensor]] = []
        """Copies on their way, with what they read."""

    @property
    def blocks(self) -> list[int]:
        """Whose gradients live on the host."""
        return list(self._homes)

    def before_backward(self, block: int) -> None:
        """The gradient of the block's output is there."""
        if block not in self._homes:
            return
        self.arrive(block)
        before = self._before.get(block)
        if before is not None:
            self._start(before)

    def after_backward(self, block: int) -> None:
        """The gradient of the block's input is there."""
        self._wait_for_leaving()
        for home in self._homes.get(block, []):
            gradient = home.slot.sum
            if gradient is None:
                continue
            gradient = gradient.contiguous()
            (home.norm,) = torch._foreach_norm([gradient], 2, dtype=torch.float32)
            home.sent = self._link.send(gradient, home.place)
            self._leaving.append((home.sent, gradient))
            home.has_sum, home.slot.sum = True, None

    def norms(self) -> dict[Tensor, Tensor]:
        """Tensor (`like` of a slot) to the norm of its gradient, of those that have one."""
        return {
            home.slot.like: home.norm
            for homes in self._homes.values()
            for home in homes
            if home.has_sum and home.norm is not None
        }

    def at_home(self, block: int) -> list[tuple[Tensor, Ticket] | None]:
        """A block's sums in host memory, no copies, each with what the host finishes before it reads it; None: of a
        tensor without one. In the order of the slots, between the backward pass and `drop`."""
        return [
            (home.place.view(home.slot.like.shape, home.slot.like.dtype), home.sent)
            if home.has_sum and home.sent is not None
            else None
            for home in self._homes[block]
        ]

    def settle(self) -> None:
        """Every sum has left the device, for what the compute stream is told from now on."""
        self._wait_for_leaving()

    def fetch(self, block: int) -> None:
        """Begin to bring a block's sums back, for its update."""
        self._wait_for_leaving()
        self._start(block)

    def arrive(self, block: int) -> None:
        """A block's sums are here, for what the compute stream is told from now on."""
        self._start(block)
        for ticket in self._coming.pop(block, []):
            ticket.wait()

    def drop(self, block: int) -> None:
        """The block's update is over: no gradient any more, here or at home."""
        for home in self._homes.get(block, []):
            home.slot.sum, home.has_sum, home.norm, home.sent = None, False, None, None

    def clear(self) -> None:
        """After a step, or one that was broken off."""
        self._wait_for_leaving()
        for tickets in self._coming.values():
            for ticket in tickets:
                ticket.wait()
        self._coming.clear()
        for block in self._homes:
            self.drop(block)

    def _start(self, block: int) -> None:
        if block in self._coming or block not in self._homes:
            return
        tickets = []
        for home in self._homes[block]:
            if home.has_sum and home.slot.sum is None:
                like = home.slot.like
                home.slot.sum = coming = torch.empty(like.shape, dtype=like.dtype, device=like.device)
                tickets.append(self._link.fetch(home.place, coming))
        if tickets:
            self._coming[block] = tickets

    def _wait_for_leaving(self) -> None:
        for ticket, _ in self._leaving:
            ticket.wait()
        self._leaving = []
