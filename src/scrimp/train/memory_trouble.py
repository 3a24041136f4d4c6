"""When a step runs out of memory after all: a plan that takes less, and the same step again.

Problem  The account counts tensors. A library's workspace, another process on the device or fragments of the
         allocator's can be more than was left, at step 1 or at step 40 000.
Method   The passes of the step are given up, their gradients thrown away: nothing of the run's state has changed. The
         planner finds the fastest activations that take `STEP` less than those of now by the same account, states
         staying where they are; blocks change between two attempts, the event log says why. Rounding noise has the
         step as its address and recomputation changes no number, so the run goes on as it would have.
Limits   What the update of the weights runs out of is not caught: it has begun to change them. Memory that is wanted in
         host memory beyond the arena is given up the same way.
Checked  tests/train/test_memory_trouble.py, in a process that really has no more memory
"""

from __future__ import annotations

import dataclasses

import torch

from scrimp.planner import Plan
from scrimp.planner.bytes.decision import MemoryDecision
from scrimp.planner.bytes.search import find
from scrimp.planner.bytes.splits import Split
from scrimp.planner.schema import BlockChoice
from scrimp.runtime import Executable
from scrimp.runtime.memory import ArenaTooSmallError
from scrimp.train.memory_plan import changed_peak, decision_of
from scrimp.train.setup import Decisions

STEP = 0.1
"""Share of the predicted peak that the next plan takes less, at least."""
_CPU_WORDS = ("DefaultCPUAllocator: can't allocate memory", "DefaultCPUAllocator: not enough memory")


def is_out_of_memory(error: Exception) -> bool:
    """Whether device or host had no room for a tensor."""
    if isinstance(error, (torch.OutOfMemoryError, ArenaTooSmallError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _CPU_WORDS)


class MemoryTrouble:
    """Finds plans that take less and less, for one run."""

    def __init__(self, decisions: Decisions, executable: Executable) -> None:
        self._decisions, self._executable = decisions, executable
        self._now: MemoryDecision | None = None

    def plan_of_less(self, plan: Plan, step: int) -> Plan | None:
        """A plan whose blocks take less than those of `plan`; None where there is none.

        Args:
            step: number of the step that ran out of memory.
        """
        try:
            return self._plan_of_less(plan, step)
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, MemoryError) or is_out_of_memory(error):
                return None  # not even a plan can be made
            raise

    def _plan_of_less(self, plan: Plan, step: int) -> Plan | None:
        now = self._now or decision_of(
            plan, self._decisions.config, self._decisions.architecture, self._decisions.device
        )
        host = self._executable.host
        machine = dataclasses.replace(
            now.machine,
            device_bytes=int((1 - STEP) * now.account.peak),
            host_bytes=0 if host is None else host.arena.capacity,
        )
        states = now.states
        split = Split(sum(states.weights), sum(states.gradients), sum(states.optimizer), states.update)
        found = find(now.costs, machine, now.setup, split)
        if found is None:
            return None
        reason = f"out of memory in step {step:,} with {now.account.peak:,} bytes predicted"
        self._now = now.changed(found, reason)
        blocks = {str(i): BlockChoice(name, reason) for i, name in enumerate(found.activations)}
        peak = changed_peak(plan, now.account.peak, found.device_bytes)
        predicted = dataclasses.replace(plan.predicted, peak_device_bytes=peak)
        return dataclasses.replace(plan, blocks=blocks, predicted=predicted)
