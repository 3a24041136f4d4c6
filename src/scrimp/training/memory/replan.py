"""A plan whose blocks change while the run goes on: one place for what changes with them.

Blocks, their reason, and all figures that were predicted of a step are the new plan's: what is compared or read
later is what runs. States, budget and formats stay.

Checked  tests/training/memory/test_out_of_memory.py, tests/training/memory/test_memory_check.py
"""

from __future__ import annotations

import dataclasses

from scrimp.config import Config
from scrimp.planner import Plan
from scrimp.planner.memory.account import StepAccount
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.plan import rows_of
from scrimp.runtime import Executable
from scrimp.runtime.memory import largest_step
from scrimp.training.memory.limits import compiled_share

ROUNDED = 1024
"""Bytes, at most, that whole numbers and the alignment took from the arena when it was made."""


def replanned(
    plan: Plan, before: StepAccount, found: MemoryDecision, *, reason: str, seconds: float | None
) -> Plan:
    """A plan with other activations.

    Args:
        before: the account of `plan`. Its figures may hold more than that, a checkpoint's copy, which no plan changes.
        seconds: of a step; None: not predicted.
    """
    blocks, _ = rows_of(found.placement, reason)
    old = plan.predicted
    device = (old.peak_device_bytes or before.peak) + found.account.peak - before.peak
    host = (old.peak_host_bytes or before.host_peak) + found.account.host_peak - before.host_peak
    predicted = dataclasses.replace(
        old, peak_device_bytes=device, peak_host_bytes=host or None, step_seconds=seconds
    )
    return dataclasses.replace(plan, blocks=blocks, predicted=predicted)


def most_on_host(executable: Executable, config: Config) -> int:
    """Bytes that a step may take by its account in the host memory that the run has taken."""
    if executable.host is None:
        return 0
    # A byte less than the plan takes would leave no plan at all.
    return int(largest_step(executable.host.arena.capacity + ROUNDED) / compiled_share(config))
