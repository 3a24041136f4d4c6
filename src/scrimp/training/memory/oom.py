"""When a step runs out of memory after all: a plan that takes less, and the same step again.

Problem  The account counts tensors. A library's workspace, another process on the device or fragments of the
         allocator's can be more than was left, at step 1 or at step 40 000.
Method   The passes of the step are given up, their gradients thrown away: nothing of the run's state has changed. The
         planner finds the fastest activations that take `STEP` less than those of now by the same account, on the
         device or in the arena of host memory, whichever ran out; the other keeps its limit, and states stay where
         they are. Blocks change between two attempts, the event log says why. Rounding noise has the step as its
         address and recomputation changes no number, so the run goes on as it would have.
Ranks    Of several ranks one that runs out of memory ends the run: the others wait in the model's collectives, and
         cannot take the step again.
Limits   What the update of the weights runs out of is not caught: it has begun to change them. The arena's limit falls
         no lower than what the states take there.
Checked  tests/training/memory/test_out_of_memory.py, in a process that really has no more memory
"""

from __future__ import annotations

import dataclasses

import torch

from scrimp.planner import Plan
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.machine import Machine
from scrimp.planner.memory.search import find
from scrimp.planner.memory.search_space import Split
from scrimp.planner.memory.states import floor_of
from scrimp.runtime import Executable
from scrimp.runtime.memory import ArenaTooSmallError
from scrimp.training.memory.decide import decision_of
from scrimp.training.memory.replan import most_on_host, replanned
from scrimp.training.setup import Decisions

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

    def plan_of_less(self, plan: Plan, step: int, trouble: Exception) -> Plan | None:
        """A plan whose blocks take less than those of `plan`; None where there is none.

        Args:
            step: number of the step that ran out of memory.
            trouble: what it ran into, which says whether device or host had no room.
        """
        try:
            return self._plan_of_less(plan, step, is_host=isinstance(trouble, ArenaTooSmallError))
        except (RuntimeError, MemoryError) as error:
            if not isinstance(error, MemoryError) and not is_out_of_memory(error):
                raise
            return None  # not even a plan can be made

    def _plan_of_less(self, plan: Plan, step: int, *, is_host: bool) -> Plan | None:
        now = self._now or self._decision_of(plan)
        machine = _with_less(now, is_host=is_host)
        if machine is None:
            return None
        found = find(now.costs, machine, now.setup, Split.of(now.placement.states))
        if found is None:
            return None
        self._now = found
        account, before = now.account, plan.predicted.step_seconds
        where = f"{account.host_peak:,} bytes predicted in the arena on the host"
        if not is_host:
            where = f"{account.peak:,} bytes predicted on the device"
        reason = f"out of memory in step {step:,} with {where}"
        # Costs may come from other measurements than the plan's: the ratio of two of their predictions is theirs alone.
        seconds = None if before is None else before * found.seconds / now.seconds
        return replanned(plan, account, found, reason=reason, seconds=seconds)

    def _decision_of(self, plan: Plan) -> MemoryDecision:
        """The current plan, within the memory that the run may take."""
        decisions = self._decisions
        now = decision_of(plan, decisions.config, decisions.architecture, decisions.device)
        machine = dataclasses.replace(
            now.machine,
            device_bytes=max(now.account.peak, decisions.memory.machine.device_bytes),
            host_bytes=most_on_host(self._executable, decisions.config),
        )
        return dataclasses.replace(now, machine=machine)


def _with_less(now: MemoryDecision, *, is_host: bool) -> Machine | None:
    """The machine with less of what ran out than is taken now; None where activations take none of it."""
    if not is_host:
        return dataclasses.replace(now.machine, device_bytes=int((1 - STEP) * now.account.peak))
    states = floor_of(now.costs, now.placement.states, now.setup.accumulates).host
    if now.account.host_peak <= states:
        return None
    return dataclasses.replace(now.machine, host_bytes=max(states, int((1 - STEP) * now.account.host_peak)))
