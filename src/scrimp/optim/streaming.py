"""AdamW of which the states of some blocks live in host memory: they visit the device, or the CPU updates them.

Problem  Moments and master weights are most of a large model's memory, and are read once in a step.
Method   The first two blocks of which anything lives on the host begin to come; what is on the device is updated
         meanwhile, as ever. Then, block by block, first to last::

             wait for block k's states, gradients and weights; for block k - 1's to have left
             let those of block k + 1 come
             clip, update on the device, send the new states and weights home

         so at most two blocks are on the device, one computing and one on its way. Sums of gradients come back
         from where their backward passes left them (`scrimp.runtime.memory.gradients`), with the norms that were
         taken then, so that clipping is the one of a resident run.

         Blocks of `Homes.cpu` never come. Beside their states a copy of their weights lives on the host; the thread
         of `cpu_update` updates all of it in place from the gradients' homes, last block first, while
         the device updates the others; then new weights go to the device, where weights live there.
Exact    Every tensor sees the same operations in the same order: bit-equal to `AdamW` where device and CPU round
         alike; of a GPU and a CPU fused kernels do not.
Limits   An update waits for the last backward pass, as clipping by a global norm demands, and
         skipping a step whose norm is not finite. SNIP's statistics read moments and gradients of all layers
         at once: a plan does not put both together.
Source   LLMQ streams optimizer states the same way; docs/memory.md
Checked  tests/optim/test_streaming.py, test_cpu_update.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from scrimp.config import OptimizerConfig
from scrimp.errors import PlanError
from scrimp.optim.adamw import AdamW, moment_format
from scrimp.optim.cpu_update import CpuUpdates
from scrimp.optim.moments import Moments
from scrimp.parts import TensorPart
from scrimp.runtime.memory import (
    HeldGradient,
    HostArena,
    HostGradients,
    HostWeights,
    Link,
    OwnGradient,
    Place,
    Ticket,
)
from scrimp.runtime.memory.gradients import GradientSlot
from scrimp.runtime.memory.visiting import Guest, settle
from scrimp.statistics import UpdateRule

_BUFFERS = 2
"""Blocks that are on the device at once for their update."""


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
    """Whose states visit the device."""
    cpu: frozenset[int] = frozenset()
    """Whose states stay where they are, for the CPU."""
    masters: bool = True
    """Whether master weights visit with the other states."""

    def __post_init__(self) -> None:
        if not self.cpu <= self.gradients or self.cpu & self.optimizer:
            raise PlanError(
                "the CPU updates blocks whose gradients and optimizer states are both on the host",
                got=f"blocks {sorted(self.cpu)}, gradients of {sorted(self.gradients)} on the host",
            )

    @property
    def away(self) -> list[int]:
        """Blocks of which anything is not on the device."""
        return sorted({*self.weights.blocks, *self.gradients, *self.optimizer, *self.cpu})

    @property
    def streamed(self) -> list[int]:
        """Those blocks of `away` that the device updates."""
        return [block for block in self.away if block not in self.cpu]


@dataclass(frozen=True)
class _HostWeight:
    """The values of a parameter that the CPU updates."""

    parameter: nn.Parameter
    place: Place
    lives_on_device: bool

    @property
    def values(self) -> Tensor:
        return self.place.view(self.parameter.shape, self.parameter.dtype)


class StreamedAdamW(AdamW):
    """`AdamW` with homes for some of its tensors.

    Args:
        homes: for what.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        settings: OptimizerConfig,
        homes: Homes,
        *,
        seed: int = 0,
    ) -> None:
        self._homes = homes
        self._guests: dict[str, dict[str, Guest]] = {}
        """Parameter to the guests among its tensors, by their name in a checkpoint."""
        self._names: dict[int, list[str]] = {block: [] for block in homes.away}
        self._host_weights: dict[str, _HostWeight] = {}
        """Host values of the parameters that the CPU updates."""
        super().__init__(parameters, settings, seed=seed)
        slots = {block: [self.slot(name) for name in self._names[block]] for block in sorted(homes.gradients)}
        self.host_gradients = HostGradients(slots, homes.arena, homes.link)
        self._cpu = CpuUpdates(sorted(homes.cpu))

    def _add(self, name: str, parameter: nn.Parameter) -> None:
        block = self._homes.block_of(name)
        if block is None or block not in self._names:
            super()._add(name, parameter)
            return
        self._names[block].append(name)
        if block in self._homes.cpu:
            self._add_on_cpu(name, parameter, block)
            return
        weights = [guest for guest in self._homes.weights.guests(block) if guest.tensor is parameter]
        for guest in weights:
            guest.ready()  # a master is a copy of it
        super()._add(name, parameter)
        for guest in weights:
            guest.leave()
        if block in self._homes.optimizer:
            tensors = dict(self._state(name) if self._homes.masters else self._moments[name].tensors())
            guests = settle(list(tensors.values()), self._homes.arena, self._homes.link)
            self._guests[name] = dict(zip(tensors, guests, strict=True))

    def _add_on_cpu(self, name: str, parameter: nn.Parameter, block: int) -> None:
        """States of a parameter in the arena, where its update finds them."""
        guest = next((one for one in self._homes.weights.guests(block) if one.tensor is parameter), None)
        place = self._homes.arena.take(parameter.nbytes) if guest is None else guest.place
        weight = self._host_weights[name] = _HostWeight(parameter, place, guest is None)
        if guest is None:
            weight.values.copy_(parameter.detach())
        target: Tensor = weight.values
        slot: GradientSlot = OwnGradient(parameter)
        if self._settings.master_weights:
            target = self._settled(target.float())
            like = torch.empty(parameter.shape, dtype=torch.float32, device=parameter.device)
            slot = HeldGradient(like)
        self._targets[name] = target
        zeros = Moments.zeros(moment_format(self._settings, target.dtype), target).tensors()
        self._moments[name] = Moments.over({key: self._settled(tensor) for key, tensor in zeros.items()})
        self._collect(name, parameter, slot)

    def _settled(self, tensor: Tensor) -> Tensor:
        """A copy of a host tensor in the arena."""
        home = self._homes.arena.take(tensor.nbytes).view(tensor.shape, tensor.dtype)
        return home.copy_(tensor)

    # -- a step --------------------------------------------------------------------------------

    def _norms(self) -> dict[str, Tensor]:
        """With those of the gradients that are at home."""
        here, at_home = super()._norms(), self.host_gradients.norms()
        norms = {name: here.get(name, at_home.get(self.slot(name).like)) for name in self._targets}
        return {name: norm for name, norm in norms.items() if norm is not None}

    def step(self, lr: float) -> None:
        """One update at learning rate `lr`; gradients that live on the host are gone afterwards.

        What fails on the CPU is raised here.
        """
        try:
            self._begin_on_cpu(lr)
            for block in self._homes.streamed[:_BUFFERS]:
                self._start(block)
            away = {name for names in self._names.values() for name in names}
            self._update_names([name for name in self._targets if name not in away], lr)
            self._stream(lr)
            self._finish_on_cpu()
        except BaseException:
            self._cpu.stop()  # the state is of no step, but nothing of it still runs
            raise
        self.num_updates += 1

    def _stream(self, lr: float) -> None:
        """Update on the device what comes for it."""
        leaving: tuple[list[Guest], list[Ticket]] = ([], [])
        blocks = self._homes.streamed
        for number, block in enumerate(blocks):
            self._ready(block)
            _finish(*leaving)
            if number + 1 < len(blocks):
                self._start(blocks[number + 1])
            self._update_names(self._names[block], lr)
            self.host_gradients.drop(block)
            guests = self._visitors(block)
            leaving = guests, [guest.save() for guest in guests]
        _finish(*leaving)

    def zero_grad(self) -> None:
        """Free the gradients, here and at home."""
        super().zero_grad()
        self.host_gradients.clear()

    def close(self) -> None:
        """End the CPU's thread."""
        self._cpu.close()

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

    # -- on the CPU ----------------------------------------------------------------------------

    def _begin_on_cpu(self, lr: float) -> None:
        """Begin with the last block, whose gradients came first."""
        self.host_gradients.settle()
        for block in reversed(self._cpu.blocks):
            sums = dict(zip(self._names[block], self.host_gradients.at_home(block), strict=True))
            found = {name: sum_ for name, sum_ in sums.items() if sum_ is not None}
            self._cpu.begin(block, partial(self._update_on_cpu, block, found, lr))

    @torch.no_grad()
    def _update_on_cpu(self, block: int, sums: Mapping[str, tuple[Tensor, Ticket]], lr: float) -> None:
        """One block, in the CPU's thread: reads and writes nothing but what lives on the host."""
        for _, sent in sums.values():
            sent.finish()
        self._update_by({name: sum_ for name, (sum_, _) in sums.items()}, lr)
        if self._settings.master_weights:
            for name in self._names[block]:
                self._host_weights[name].values.copy_(self._targets[name])

    def _finish_on_cpu(self) -> None:
        """Wait for the CPU, and send new weights to where they live."""
        coming: list[Ticket] = []
        for block in reversed(self._cpu.blocks):
            self._cpu.finish(block)
            weights = [self._host_weights[name] for name in self._names[block]]
            coming += [
                self._homes.link.fetch(one.place, one.parameter.data)
                for one in weights
                if one.lives_on_device
            ]
            self.host_gradients.drop(block)
        for ticket in coming:
            ticket.wait()

    # -- state ---------------------------------------------------------------------------------

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """Name and storage of every state tensor, at home where it has one."""
        self._homes.link.finish()
        for name in self._targets:
            guests = self._guests.get(name, {})
            for suffix, tensor in self._state(name):
                guest = guests.get(suffix)
                yield f"{name}.{suffix}", self.state_part(name, tensor if guest is None else guest.home)

    def restore_updates(self, num_updates: int) -> None:
        """Restore like `AdamW.restore_updates`, and copy the device's weights to the CPU's again."""
        super().restore_updates(num_updates)
        for weight in self._host_weights.values():
            if weight.lives_on_device:
                weight.values.copy_(weight.parameter.detach())

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
