"""AdamW of which the states of some blocks live in host memory, and visit the device for their update.

Problem  Moments and master weights are most of a large model's memory, and are read once in a step.
Method   What is on the device is updated as ever. Then, block by block, whatever of it lives on the host::

             wait for block k's states, gradients and weights; for block k - 1's to have left
             let those of block k + 1 come
             clip, update on the device, send the new states and weights home

         so at most two blocks are on the device, one computing and one on its way. Sums of gradients come back
         from where their backward passes left them (`scrimp.runtime.memory.gradients`), with the norms that were
         taken then, so that clipping is the one of a resident run.
Exact    Every tensor sees the same operations in the same order: bit-equal to `AdamW`.
Limits   The update waits for the last backward pass, as clipping by a global norm demands. SNIP's statistics read
         moments and gradients of all layers at once: a plan does not put both together.
Source   LLMQ streams optimizer states the same way; docs/memory.md
Checked  tests/train/optimizer/test_streaming.py
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from scrimp.config import TrainConfig
from scrimp.errors import PlanError
from scrimp.profiler.statistics import UpdateRule
from scrimp.runtime.memory import HostArena, HostGradients, HostWeights, Link, Ticket
from scrimp.runtime.memory.visiting import Guest, settle
from scrimp.train.optimizer.adamw import AdamW


@dataclass(frozen=True)
class Homes:
    """What of which blocks lives on the host."""

    arena: HostArena
    link: Link
    block_of: Callable[[str], int | None]
    """Parameter's name to its block; None: of none."""
    weights: HostWeights
    gradients: frozenset[int]
    optimizer: frozenset[int]

    @property
    def streamed(self) -> list[int]:
        """Blocks of which anything is not on the device."""
        return sorted({*self.weights.blocks, *self.gradients, *self.optimizer})


class StreamedAdamW(AdamW):
    """`AdamW` with homes for some of its tensors.

    Args:
        homes: for what.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        train: TrainConfig,
        homes: Homes,
        *,
        seed: int = 0,
    ) -> None:
        self._homes = homes
        self._guests: dict[str, dict[str, Guest]] = {}
        """Parameter to the guests among its tensors, by their name in a checkpoint."""
        self._names: dict[int, list[str]] = {block: [] for block in homes.streamed}
        self._clip_factor = 1.0
        super().__init__(parameters, train, seed=seed)
        slots = {block: [self.slot(name) for name in self._names[block]] for block in sorted(homes.gradients)}
        self.host_gradients = HostGradients(slots, homes.arena, homes.link)

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        block = self._homes.block_of(name)
        if block is None or block not in self._names:
            super()._add(name, parameter)
            return
        self._names[block].append(name)
        weights = [guest for guest in self._homes.weights.guests(block) if guest.tensor is parameter]
        for guest in weights:
            guest.ready()  # a master is a copy of it
        super()._add(name, parameter)
        for guest in weights:
            guest.leave()
        if block in self._homes.optimizer:
            tensors = dict(self._state(name))
            guests = settle(list(tensors.values()), self._homes.arena, self._homes.link)
            self._guests[name] = dict(zip(tensors, guests, strict=True))

    # -- a step --------------------------------------------------------------------------------

    def gradient_norm(self) -> float:
        """Global 2-norm of all gradients, here and at home; waits for the device."""
        at_home = self.host_gradients.norms()
        here = super().gradients()
        norms = dict(zip(here, torch._foreach_norm(list(here.values()), 2, dtype=torch.float32), strict=True))
        in_order = [norms.get(name, at_home.get(target)) for name, target in self._targets.items()]
        return float(torch.linalg.vector_norm(torch.stack([norm for norm in in_order if norm is not None])))

    def clip(self, norm: float, limit: float) -> None:
        """As `AdamW.clip`; gradients at home are scaled when they come."""
        super().clip(norm, limit)
        clips = limit > 0 and math.isfinite(norm) and norm > limit
        self._clip_factor = limit / norm if clips else 1.0

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`; gradients that live on the host are gone afterwards."""
        streamed = [name for names in self._names.values() for name in names]
        self._update_names([name for name in self._targets if name not in set(streamed)], lr)
        leaving: tuple[list[Guest], list[Ticket]] = ([], [])
        blocks = list(self._names)
        for number, block in enumerate(blocks):
            self._start(block)
            self._ready(block)
            _finish(*leaving)
            if number + 1 < len(blocks):
                self._start(blocks[number + 1])
            self._update_names(self._names[block], lr)
            self.host_gradients.drop(block)
            guests = self._visitors(block)
            leaving = guests, [guest.save() for guest in guests]
        _finish(*leaving)
        self.num_updates += 1

    def zero_grad(self) -> None:
        """Free the gradients, here and at home."""
        super().zero_grad()
        self.host_gradients.clear()
        self._clip_factor = 1.0

    def _visitors(self, block: int) -> list[Guest]:
        states = [guest for name in self._names[block] for guest in self._guests.get(name, {}).values()]
        return [*states, *self._homes.weights.guests(block)]

    def _start(self, block: int) -> None:
        self.host_gradients.fetch(block)
        for guest in self._visitors(block):
            guest.start()

    def _ready(self, block: int) -> None:
        for guest in self._visitors(block):
            guest.ready()
        if block in self._homes.gradients:
            self.host_gradients.arrive(block)
            if self._clip_factor != 1.0:
                here = super().gradients()
                torch._foreach_mul_(
                    [here[name] for name in self._names[block] if name in here], self._clip_factor
                )

    # -- state ---------------------------------------------------------------------------------

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and storage of every state tensor, at home where it has one."""
        self._homes.link.finish()
        for name in self._targets:
            guests = self._guests.get(name, {})
            for suffix, tensor in self._state(name):
                guest = guests.get(suffix)
                yield f"{name}.{suffix}", tensor if guest is None else guest.home

    def rule(self, name: str) -> UpdateRule:
        """Refused: statistics need all states on the device.

        Raises:
            PlanError: always.
        """
        raise PlanError(
            "statistics of precision need the states of all blocks on the device",
            got=f"states of {len(self._names)} blocks on the host",
            do="leave memory.weights, memory.gradients and memory.optimizer at device with precision snip",
        )


def _finish(guests: list[Guest], tickets: list[Ticket]) -> None:
    for ticket in tickets:
        ticket.wait()
    for guest in guests:
        guest.leave()
