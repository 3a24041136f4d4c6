"""A small event simulation: tasks in lanes that work at the same time.

Each lane (compute, upload, download, cpu) works through its tasks in the order in which they were added, one at a
time; a task waits for those named in `after`. A copy's rate changes whenever the other direction starts or stops. So,
with every lane's seconds at the rates that it really had::

    longest lane <= seconds <= sum of lanes

The time in which the model does not compute is booked on the kind of task that it waits for at that moment: per kind,
exposed is never more than busy, and computing + all exposed = seconds.

Checked  tests/planner/memory/test_stream_simulator.py
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from scrimp.planner.memory.machine import Machine

Kind = Literal["compute", "weights", "activations", "gradients", "update"]
KINDS: tuple[Kind, ...] = ("compute", "weights", "activations", "gradients", "update")
COMPUTE, UPLOAD, DOWNLOAD, CPU = range(4)
LANES = ("compute", "upload", "download", "cpu")


@dataclass(frozen=True)
class Run:
    """What a simulation found, all in seconds."""

    seconds: float
    lanes: tuple[float, ...]
    """Busy, by lane."""
    busy: dict[Kind, float]
    """By kind; two lanes that work on one kind at once count twice."""
    exposed: dict[Kind, float]
    """By kind: while the model does not compute."""


@dataclass
class Lanes:
    """Tasks to simulate; one is known by its number."""

    amounts: list[float] = field(default_factory=list)
    """Seconds, or bytes of a copy."""
    kinds: list[Kind] = field(default_factory=list)
    after: list[tuple[int, ...]] = field(default_factory=list)
    lane_of: list[int] = field(default_factory=list)
    queues: tuple[list[int], ...] = field(default_factory=lambda: ([], [], [], []))

    def add(self, lane: int, amount: float, kind: Kind, after: Sequence[int | None] = ()) -> int:
        """A task behind those of its lane: seconds of compute and cpu, bytes of a copy. None in `after` is nothing."""
        number = len(self.amounts)
        self.amounts.append(amount)
        self.kinds.append(kind)
        self.after.append(tuple([task for task in after if task is not None]))
        self.lane_of.append(lane)
        self.queues[lane].append(number)
        return number

    def run(self, machine: Machine) -> Run:
        """Simulate all tasks.

        Raises:
            RuntimeError: tasks wait for each other.
        """
        work, kinds = _Simulation(self, machine), self.kinds
        seconds, lanes = 0.0, [0.0] * 4
        busy: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        exposed: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
        for step in work.steps():
            for lane, task in enumerate(work.current):
                if task >= 0:
                    lanes[lane] += step
                    busy[kinds[task]] += step
            waited_for = kinds[work.current[COMPUTE] if work.current[COMPUTE] >= 0 else work.culprit()]
            if waited_for != "compute":
                exposed[waited_for] += step
            seconds += step
        return Run(seconds, tuple(lanes), busy, exposed)

    def seconds(self, machine: Machine) -> float:
        """The seconds of `run` alone: what a search asks for."""
        return sum(_Simulation(self, machine).steps())


class _Simulation:
    def __init__(self, tasks: Lanes, machine: Machine) -> None:
        self.tasks = tasks
        self.waits = [len(after) for after in tasks.after]
        self.before: list[list[int]] = [[] for _ in self.waits]
        for task, after in enumerate(tasks.after):
            for other in after:
                self.before[other].append(task)
        self.heads = [0, 0, 0, 0]
        """By lane, how many of its tasks are done."""
        self.current = [-1, -1, -1, -1]
        """The task that each lane works on; -1: none."""
        self.ends = [math.inf] * 4
        """When these are done if no rate changes."""
        self.alone = (1.0, machine.upload, machine.download, 1.0)
        self.together = (1.0, machine.upload_together, machine.download_together, 1.0)

    def steps(self) -> Iterator[float]:
        """Seconds in which no task begins or ends, one after the other; `current` says what is at work in them."""
        now, ends, current, rates = 0.0, self.ends, self.current, self.alone
        self._start([CPU, DOWNLOAD, UPLOAD, COMPUTE], now, rates)
        while True:
            both = current[UPLOAD] >= 0 and current[DOWNLOAD] >= 0
            if both != (rates is self.together):
                before, rates = rates, self.together if both else self.alone
                for lane in (UPLOAD, DOWNLOAD):
                    ends[lane] = now + (ends[lane] - now) * (before[lane] / rates[lane])
            end = min(ends)
            if end == math.inf:
                break
            if end > now:
                yield end - now
                now = end
            lane = ends.index(end)
            task, current[lane], ends[lane] = current[lane], -1, math.inf
            self.heads[lane] += 1
            self._start([*self._freed(task), lane], now, rates)
        if any(head < len(queue) for head, queue in zip(self.heads, self.tasks.queues, strict=True)):
            raise RuntimeError("tasks wait for each other")

    def _freed(self, task: int) -> list[int]:
        """Lanes of the tasks that waited for nothing but this one, which is done."""
        waits, found = self.waits, []
        for other in self.before[task]:
            waits[other] -= 1
            if not waits[other]:
                found.append(self.tasks.lane_of[other])
        return found

    def _start(self, lanes: list[int], now: float, rates: Sequence[float]) -> None:
        """Let those of these lanes that are idle work on their next task, if it may begin. What has nothing left is
        done, which may let others start."""
        while lanes:
            lane = lanes.pop()
            queue, head = self.tasks.queues[lane], self.heads[lane]
            while self.current[lane] < 0 and head < len(queue) and not self.waits[queue[head]]:
                task = queue[head]
                amount = self.tasks.amounts[task]
                if amount > 0.0:
                    self.current[lane], self.ends[lane] = task, now + amount / rates[lane]
                else:
                    head += 1
                    lanes += self._freed(task)
            self.heads[lane] = head

    def culprit(self) -> int:
        """The task at work that the model waits for, where its own lane has none."""
        current, queue, head = self.current, self.tasks.queues[COMPUTE], self.heads[COMPUTE]
        if head < len(queue):
            for other in self.tasks.after[queue[head]]:
                lane = self.tasks.lane_of[other]
                if 0 <= current[lane] <= other:
                    return current[lane]
        return next(task for task in reversed(current) if task >= 0)
