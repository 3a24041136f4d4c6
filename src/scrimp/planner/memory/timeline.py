"""Seconds of a step from its costs: what copies hide under computing, and what they do not.

Problem  Offloaded bytes cost nothing while the model computes longer than they travel, and all of their time otherwise.
Method   A simulation of lanes (`stream_simulator`): compute, upload, download, CPU Adam, with these rules::

             forward of i    waits for its weights (two buffers: they start when the block before the last user is
                             done) and for the activations that blocks before i - 1 sent
             head            waits for all activations that were sent
             backward of i   waits for its weights (the two blocks used last are still there), its activations (they
                             start when the backward pass of i + 1 begins, the last block's after the head), the sum
                             of its gradients so far (from the second micro-batch on), and a free gradient buffer
             gradients       leave after the block's backward pass
             update          after the whole backward pass and the gradients' last copy; streamed
                             blocks come in, are updated and leave through two buffers, first block first; the first
                             two come while the device updates what lives there. CPU Adam goes last block first; its
                             new weights are copied back after the device's updates if they live there.

         With one kind of copy, uniform blocks and computing C, copying P seconds per block this is ProTrain's
         sum of max(C_i, P_i), plus the first copy or the last block, which nothing can hide: P + (L - 1) max(C, P) + C;
         and T_fwd + max(T_bwd + T_device_update, T_cpu_update) up to the last block's copies.

Limits   Copies of a micro-batch are waited for before the next one begins. A streamed update does not overlap backward.
         An update on the device is bound by its memory: weights and states read and written, gradients read.
Source   docs/memory.md; ProTrain section 3 (chunk prefetch, T_iter); LLMQ's double buffering.
Checked  tests/planner/memory/test_timeline.py
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scrimp.planner.memory.costs import BlockClass, BlockCost, StepCosts, chosen_costs
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.states import class_of
from scrimp.planner.memory.stream_simulator import COMPUTE, CPU, DOWNLOAD, LANES, UPLOAD, Kind, Lanes, Run


@dataclass(frozen=True)
class Timeline:
    """Predicted seconds of one optimizer step."""

    seconds: float
    compute: float
    """Seconds in which the model computes: forward, backward, what is made again."""
    lanes: Mapping[str, float]
    """Busy, by lane: compute (updates on the device too), upload, download, cpu."""
    exposed: Mapping[str, float]
    """By kind (weights, activations, gradients, update): while the model does not compute."""
    hidden: Mapping[str, float]
    """By kind: under computing."""


def step_timeline(costs: StepCosts, placement: Placement, setup: Setup, machine: Machine) -> Timeline:
    """The timeline of a step.

    Raises:
        PlanError: a placement of another model.
    """
    phases = _phases(costs, placement, setup, machine)
    return _add([(times, lanes.run(machine)) for times, lanes in phases])


def step_seconds(costs: StepCosts, placement: Placement, setup: Setup, machine: Machine) -> float:
    """The timeline's seconds alone, in half of the time; errors as of `step_timeline`."""
    phases = _phases(costs, placement, setup, machine)
    return sum(times * lanes.seconds(machine) for times, lanes in phases)


def _phases(
    costs: StepCosts, placement: Placement, setup: Setup, machine: Machine
) -> list[tuple[int, Lanes]]:
    """How often each phase of a step runs: all copies of one are over when the next begins, but for CPU Adam's."""
    states, later = placement.states, setup.micro_batches - 1
    step = _Step(costs, states, chosen_costs(costs, placement.activations), machine)
    sums = later > 0 and any(states.gradients)
    # Of each kind of backward pass, (sums come in, CPU Adam begins under it): how many there are.
    passes = Counter([(sums, any(map(states.on_cpu, range(len(costs.blocks)))))])
    if later:
        passes[False, False] += 1
        passes[sums, False] += later - 1
    found = [(later + 1, step.forward())]
    found += [
        (times, step.backward(sums=come, updates=adam)) for (come, adam), times in passes.items() if times
    ]
    if not any(adam for _, adam in passes):
        found.append((1, step.update()))
    return found


def parameters_of(kind: BlockClass) -> int:
    """Numbers of a block's weights."""
    return kind.parameters or kind.gradients // 2


def update_bytes(kind: BlockClass) -> int:
    """Traffic of the device's memory when it updates a block."""
    return 2 * kind.trained + kind.gradients + 2 * kind.optimizer


def streamed_bytes(kind: BlockClass, states: States, block: int) -> tuple[int, int]:
    """Bytes up and down of one block's update on the device."""
    down = kind.weights * states.weights[block] + kind.optimizer * states.optimizer[block]
    return down + kind.gradients * states.gradients[block], down


def resident_update_bytes(costs: StepCosts, states: States) -> int:
    """Traffic of the device's memory for all that is updated without the host."""
    ends = costs.ends
    total = 2 * ends.trained + ends.gradients + 2 * ends.optimizer
    for i in range(len(costs.blocks)):
        if not states.streams(i) and not states.on_cpu(i):
            total += update_bytes(class_of(costs, i))
    return total


def _add(runs: Sequence[tuple[int, Run]]) -> Timeline:
    """Runs one after the other, each so many times."""
    kinds: tuple[Kind, ...] = ("weights", "activations", "gradients", "update")
    exposed = {str(kind): math.fsum(times * run.exposed[kind] for times, run in runs) for kind in kinds}
    busy = {str(kind): math.fsum(times * run.busy[kind] for times, run in runs) for kind in kinds}
    return Timeline(
        seconds=sum(times * run.seconds for times, run in runs),
        compute=sum(times * run.busy["compute"] for times, run in runs),
        lanes={name: sum(times * run.lanes[i] for times, run in runs) for i, name in enumerate(LANES)},
        exposed=exposed,
        hidden={kind: max(0.0, busy[kind] - exposed[kind]) for kind in exposed},
    )


class _Step:
    """Builds the tasks of each phase."""

    def __init__(
        self, costs: StepCosts, states: States, blocks: Sequence[BlockCost], machine: Machine
    ) -> None:
        self.costs, self.states, self.blocks, self.machine = costs, states, blocks, machine
        self.classes = [class_of(costs, i) for i in range(len(blocks))]
        self.away = [i for i, host in enumerate(states.weights) if host]

    def forward(self) -> Lanes:
        """All blocks' forward passes, and the head."""
        lanes = Lanes()
        add = lanes.add
        forward: list[int] = []
        sent: dict[int, int] = {}
        settled: int | None = None
        free = _Buffers()
        for i, block in enumerate(self.blocks):
            weights = None
            if self.states.weights[i]:
                weights = add(UPLOAD, self.classes[i].weights, "weights", [free.wait()])
            forward.append(add(COMPUTE, block.forward_seconds, "compute", [weights, settled]))
            if self.states.weights[i]:
                free.used(forward[-1])
            settled = sent.get(i - 1, settled)
            if block.host:
                sent[i] = add(DOWNLOAD, block.host, "activations", [forward[-1]])
        add(COMPUTE, self.costs.ends.seconds, "compute", list(sent.values())[-1:])
        return lanes

    def backward(self, *, sums: bool, updates: bool) -> Lanes:
        """All blocks' backward passes.

        Args:
            sums: those of gradients come in.
            updates: the update follows.
        """
        lanes = Lanes()
        add = lanes.add
        gradients: dict[int, int] = {}
        weights, leaving = _Buffers(still_there=self.away[-2:]), _Buffers()
        begins: int | None = None
        before: int | None = None
        for i in reversed(range(len(self.blocks))):
            block, kind = self.blocks[i], self.classes[i]
            needs: list[int | None] = []
            if self.states.weights[i] and not weights.has(i):
                needs.append(add(UPLOAD, kind.weights, "weights", [weights.wait()]))
            if block.host:
                needs.append(add(UPLOAD, block.host, "activations", [begins]))
            room = leaving.wait() if self.states.gradients[i] else None
            if self.states.gradients[i] and sums:
                needs.append(add(UPLOAD, kind.gradients, "gradients", [room]))
            end = add(COMPUTE, block.backward_seconds, "compute", [*needs, room])
            begins, before = before, end
            if self.states.weights[i]:
                weights.used(end)
            if self.states.gradients[i]:
                gradients[i] = add(DOWNLOAD, kind.gradients, "gradients", [end])
                leaving.used(gradients[i])
        if updates:
            self._add_update(lanes, before, gradients)
        return lanes

    def update(self) -> Lanes:
        """What the device updates, where the CPU updates nothing."""
        lanes = Lanes()
        self._add_update(lanes, None, {})
        return lanes

    def _add_update(self, lanes: Lanes, end: int | None, gradients: Mapping[int, int]) -> None:
        """Tasks of the update.

        Args:
            end: the last backward pass.
            gradients: copies down, by block.
        """
        done = self._add_device_update(lanes, [end, *list(gradients.values())[-1:]])
        for i in reversed(range(len(self.blocks))):
            if self.states.on_cpu(i):
                kind = self.classes[i]
                seconds = parameters_of(kind) / (self.machine.cpu_adam or math.inf)
                adam = lanes.add(CPU, seconds, "update", [gradients[i], end])
                if not self.states.weights[i]:
                    lanes.add(UPLOAD, kind.weights, "update", [adam, done])

    def _add_device_update(self, lanes: Lanes, begins: Sequence[int | None]) -> int:
        """What is there, then what comes for it; the last task."""
        add, states, memory = lanes.add, self.states, self.machine.device_memory
        last = add(COMPUTE, resident_update_bytes(self.costs, states) / memory, "update", begins)
        free = _Buffers()
        for i, kind in enumerate(self.classes):
            if states.streams(i):
                up, down = streamed_bytes(kind, states, i)
                come = add(UPLOAD, up, "update", [*begins, free.wait()])
                done = add(COMPUTE, update_bytes(kind) / memory, "update", [come, last])
                last = add(DOWNLOAD, down, "update", [done])
                free.used(last)
        return last


class _Buffers:
    """Two buffers that are taken in turn: the next copy waits for the one before the last user."""

    def __init__(self, still_there: Sequence[int] = ()) -> None:
        self._users: list[int] = []
        self._still_there = set(still_there)

    def has(self, block: int) -> bool:
        """Whether the block's weights were left from the pass before."""
        return block in self._still_there

    def used(self, task: int) -> None:
        """The task after whose end the buffer is free."""
        self._users.append(task)

    def wait(self) -> int | None:
        """The task to wait for before a buffer is filled."""
        return self._users[-2] if len(self._users) > 1 else None
