"""A lower bound of a step's seconds without simulating it: in no phase can a lane be faster than its work.

Phases follow each other: every copy down is over before the head, whose end every copy up for the backward pass waits
for; an update on the device begins when all gradients are where they live. With F and B the blocks' forward and
backward computing, H the head's, up and down the bytes of a phase, U the updates on the device, A the CPU's Adam,
link(up, down) the least seconds for bytes both ways, which run at lower rates together::

    every micro-batch    max(F, link(weights, activations))
                         + H + max(B, link(weights + activations + sums of gradients, gradients))
    the update           max(U, link(up, down)); A after the last B

What nothing can hide belongs to F and B: the first block's weights on their way up, the last block's sum of gradients
before its backward pass, the first block's gradients down. Of F and B only the sum P is known, and that F is between f
and g: max(F, x) + max(P - F, y) is at least each of P, x + y, f + y and P - g + x. What CPU Adam sends back comes after
backward.

Checked  tests/planner/memory/test_search.py: never above the simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.placement import States
from scrimp.planner.memory.states import class_of
from scrimp.planner.memory.timeline import (
    parameters_of,
    resident_update_bytes,
    streamed_bytes,
    update_bytes,
)


@dataclass(frozen=True)
class Bound:
    """Lower bounds of one placement of states, for any activations."""

    setup: Setup
    machine: Machine
    ends: float
    """Seconds of head and embedding."""
    forward: tuple[float, float]
    """Least and most seconds of all forward passes of blocks, whatever they choose."""
    up: tuple[int, int]
    """Bytes of weights for the forward and the backward pass of one micro-batch."""
    gradients: int
    """Bytes of gradients that leave; their sums come in from the second micro-batch on."""
    bare: tuple[float, float, float]
    """Seconds of copies that nothing hides: the first block's weights, the last block's sum of gradients, the first
    block's gradients."""
    update_up: int
    update_down: int
    returned: int
    """Bytes of new weights from CPU Adam."""
    update: float
    """Seconds of all updates on the device."""
    adam: float
    """Seconds of CPU Adam."""

    @classmethod
    def of(cls, costs: StepCosts, states: States, setup: Setup, machine: Machine) -> Bound:
        """The bound's figures for one placement."""
        up = down = returned = gradients = 0
        numbers = 0.0
        traffic = resident_update_bytes(costs, states)
        for i in range(len(costs.blocks)):
            kind = class_of(costs, i)
            gradients += kind.gradients * states.gradients[i]
            if states.on_cpu(i):
                numbers += parameters_of(kind)
                returned += kind.weights * (not states.weights[i])
            elif states.streams(i):
                traffic += update_bytes(kind)
                block_up, block_down = streamed_bytes(kind, states, i)
                up, down = up + block_up, down + block_down
        away = [class_of(costs, i).weights for i, host in enumerate(states.weights) if host]
        return cls(
            setup=setup,
            machine=machine,
            ends=costs.ends.seconds,
            forward=_forward(costs),
            up=(sum(away), sum(away[:-2])),
            gradients=gradients,
            bare=_bare(costs, states, machine),
            update_up=up,
            update_down=down,
            returned=returned,
            update=traffic / machine.device_memory,
            adam=numbers / (machine.cpu_adam or math.inf),
        )

    def seconds(self, passes: float, offloaded: float = 0) -> float:
        """Least seconds of a step whose blocks compute and offload so much (seconds, bytes) per micro-batch."""
        later = self.setup.micro_batches - 1
        total = self._micro_batch(passes, offloaded, 0)
        if later:
            total += later * self._micro_batch(passes, offloaded, self.gradients)
        adam = (later + 1) * (passes + self.ends) + self.adam
        return max(total + self._on_device(), adam)

    def _micro_batch(self, passes: float, offloaded: float, sums: int) -> float:
        """Both passes and the head, with sums of gradients that come back."""
        (least, most), (forward, backward) = self.forward, self.up
        before, sum_, after = self.bare
        bare = after + (sum_ if sums else 0.0)
        down = self._link(forward, offloaded)
        up = self._link(backward + offloaded + sums, self.gradients)
        seconds = (passes + before + bare, down + up, least + before + up, passes - most + bare + down)
        return self.ends + max(seconds)

    def _on_device(self) -> float:
        """Least seconds of the device's updates, which no backward pass hides."""
        return max(self.update, self._link(self.update_up + self.returned, self.update_down))

    def _link(self, up: float, down: float) -> float:
        """Least seconds for bytes both ways: as long as possible together, or never."""
        link = self.machine
        together = min(up / link.upload_together, down / link.download_together)
        saved = link.upload_together / link.upload + link.download_together / link.download - 1
        return up / link.upload + down / link.download - together * max(saved, 0.0)

    def passes_within(self, seconds: float) -> float:
        """The most seconds that the blocks may compute per micro-batch in a step of so many."""
        after = max(self._on_device(), self.adam)
        return (seconds - after) / self.setup.micro_batches - self.ends


def least_passes(costs: StepCosts) -> float:
    """Seconds of all blocks' passes in a micro-batch, each at its fastest choice."""
    kinds = [
        min(one.forward_seconds + one.backward_seconds for one in kind.choices.values())
        for kind in costs.classes
    ]
    return sum(kinds[number] for number in costs.blocks)


def least_seconds(costs: StepCosts, setup: Setup) -> float:
    """Least seconds of a step, wherever its states and activations are: what its blocks and ends compute."""
    return setup.micro_batches * (least_passes(costs) + costs.ends.seconds)


def _forward(costs: StepCosts) -> tuple[float, float]:
    """Least and most seconds of all blocks' forward passes."""
    kinds = [[choice.forward_seconds for choice in kind.choices.values()] for kind in costs.classes]
    return sum(min(kinds[number]) for number in costs.blocks), sum(
        max(kinds[number]) for number in costs.blocks
    )


def _bare(costs: StepCosts, states: States, machine: Machine) -> tuple[float, float, float]:
    first, last = class_of(costs, 0), class_of(costs, len(costs.blocks) - 1)
    return (
        first.weights * states.weights[0] / machine.upload,
        last.gradients * states.gradients[-1] / machine.upload,
        first.gradients * states.gradients[0] / machine.download,
    )
