"""A lower bound of a step's seconds without simulating it: no lane can be faster than its work.

With C the model's computing, U the updates on the device, up and down the bytes of a micro-batch, up', down' those of
the update, A the CPU's Adam, link(up, down) the least seconds for bytes both ways, which run at lower rates together::

    every micro-batch but the last    max(C, link(up, down))
    the last, with the update         max(C + max(U, link(up', down'), A that waits for the norm), A,
                                          link(up + up', down + down'))

What CPU Adam sends back comes after backward, whenever Adam began: it is part of up'.

Checked  tests/planner/bytes/test_search.py: never above the simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from scrimp.planner.bytes.costs import StepCosts
from scrimp.planner.bytes.machine import Machine, Setup
from scrimp.planner.bytes.states import States, class_of
from scrimp.planner.bytes.timeline import (
    cpu_numbers,
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
    up: int
    """Bytes of one micro-batch, without activations and sums of gradients."""
    gradients: int
    """Bytes of gradients that leave; their sums come in from the second micro-batch on."""
    update_up: int
    update_down: int
    returned: int
    """Bytes of new weights from CPU Adam."""
    update: float
    """Seconds of all updates on the device."""
    adam: float
    """Seconds of CPU Adam."""
    waits: bool
    """Whether it begins after the backward pass."""

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
                numbers += cpu_numbers(kind, states)
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
            up=sum(away) + sum(away[:-2]),
            gradients=gradients,
            update_up=up,
            update_down=down,
            returned=returned,
            update=traffic / machine.device_memory,
            adam=numbers / (machine.cpu_adam or math.inf),
            waits=setup.clips and not states.is_early,
        )

    def seconds(self, passes: float, offloaded: float = 0) -> float:
        """Of a step whose blocks compute and offload so much (seconds, bytes) per micro-batch."""
        count = self.setup.micro_batches
        compute = passes + self.ends
        down = self.gradients + offloaded
        first = self.up + offloaded
        later = first + self.gradients
        total = 0.0
        if count > 1:
            total = max(compute, self._link(first, down))
            total += (count - 2) * max(compute, self._link(later, down))
        up = (later if count > 1 else first) + self.update_up + self.returned
        return total + max(compute + self._after(), self.adam, self._link(up, down + self.update_down))

    def _after(self) -> float:
        """Of the update that no backward pass hides."""
        after = max(self.update, self._link(self.update_up + self.returned, self.update_down))
        return max(after, self.adam) if self.waits else after

    def _link(self, up: float, down: float) -> float:
        """Least seconds for bytes both ways: as long as possible together, or never."""
        link = self.machine
        together = min(up / link.upload_together, down / link.download_together)
        saved = link.upload_together / link.upload + link.download_together / link.download - 1
        return up / link.upload + down / link.download - together * max(saved, 0.0)

    def passes_within(self, seconds: float) -> float:
        """The most seconds that the blocks may compute per micro-batch in a step of so many."""
        return (seconds - self._after()) / self.setup.micro_batches - self.ends
