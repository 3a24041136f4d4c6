"""Weights of some blocks live in host memory and are on the device while their block computes.

Method   In the order of execution, forward and then backward::

             before block i   its weights are waited for, and those of the next such block begin to come
             after block i    its weights leave; the two used last in forward stay, backward needs them first

         So at most two blocks of weights are on the device, and a copy has the time of one block to hide in.
Limits   Autocast copies fp32 weights to bf16: half of what leaves, kept for backward unless the block is recomputed.
Source   ProTrain's buffers (arXiv 2406.08334), LLMQ's double-buffered quantized weights; docs/memory.md
Checked  tests/runtime/memory/test_blocks.py
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from scrimp.runtime.memory.arena import HostArena, Place
from scrimp.runtime.memory.link import Link
from scrimp.runtime.memory.visiting import Guest, moved_to, on_device

BUFFERS = 2


class HostWeights:
    """The weights that live on the host.

    Args:
        parameters: number of a block to its parameters, on the host or the device.
        places: address to place of those that lie in the arena already; others are copied there.
    """

    def __init__(
        self,
        parameters: Mapping[int, Sequence[nn.Parameter]],
        arena: HostArena,
        link: Link,
        places: Mapping[int, Place] | None = None,
    ) -> None:
        known = places or {}
        self._guests = {
            block: [
                on_device(parameter, link, known.get(parameter.data_ptr()) or moved_to(arena, parameter))
                for parameter in parameters[block]
            ]
            for block in sorted(parameters)
        }
        order = list(self._guests)
        self._next = dict(itertools.pairwise(order))
        self._before = {after: block for block, after in self._next.items()}
        self._stay = set(order[-BUFFERS:])

    @property
    def blocks(self) -> list[int]:
        """Whose weights live on the host."""
        return list(self._guests)

    def before_forward(self, block: int) -> None:
        """The block is about to run."""
        if block not in self._guests:
            return
        if block not in self._before:  # the first of a pass: whatever an earlier pass left here goes
            self._leave_all_but(block)
        self._arrive(block, self._next.get(block))

    def after_forward(self, block: int) -> None:
        """The block has run."""
        if block in self._guests and not (block in self._stay and torch.is_grad_enabled()):
            self._leave(block)

    def before_backward(self, block: int) -> None:
        """The gradient of the block's output is there."""
        if block in self._guests:
            self._arrive(block, self._before.get(block))

    def after_backward(self, block: int) -> None:
        """The gradient of the block's input is there."""
        if block in self._guests:
            self._leave(block)

    def at_home(self) -> dict[Tensor, Tensor]:
        """Parameter to where its values are kept: what checkpoints write and read."""
        return {guest.tensor: guest.home for guests in self._guests.values() for guest in guests}

    def guests(self, block: int) -> list[Guest]:
        """The guests of one block; none where its weights are on the device."""
        return self._guests.get(block, [])

    def leave(self) -> None:
        """All of them: between steps, and after a step that was broken off."""
        self._leave_all_but(None)

    def _arrive(self, block: int, following: int | None) -> None:
        for guest in self._guests[block]:
            guest.ready()
        for guest in self._guests.get(following, []) if following is not None else []:
            guest.start()

    def _leave(self, block: int) -> None:
        for guest in self._guests[block]:
            guest.leave()

    def _leave_all_but(self, block: int | None) -> None:
        for other in self._guests:
            if other != block:
                self._leave(other)
