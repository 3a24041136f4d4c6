"""Corrects what was known of a step by a step that was measured, so that the plan can be made anew.

Problem  Blocks were timed alone, or not at all; clocks fall under load; a link is shared. What the plan weighed is then
         wrong by a factor, and so is what it chose.
Method   One measured number corrects one unknown. Computing is the usual suspect, so all seconds of blocks and ends
         take the factor f with which the timeline gives what was measured (bisection: the timeline rises with f). Where
         even almost no computing would take longer than the measured step, the copies were believed too slow as well:
         then computing and all rates of the machine take the ratio of measured and predicted, which gives it.

         Bytes that were measured above the account (a library's workspace) are there beside any other plan: the limit
         falls by as much. Less than the account may be slack of the present plan alone: the limit stays.
Limits   One factor for all kinds of computing.
Checked  tests/planner/memory/test_correct.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

from scrimp.planner.memory.costs import BlockCost, StepCosts
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.machine import Machine
from scrimp.planner.memory.timeline import step_timeline

LEAST, MOST = 1 / 64, 64.0
"""Factors beyond which a measurement says that something else is wrong."""
_HALVINGS = 50


def corrected(decision: MemoryDecision, *, seconds: float | None, device_bytes: int | None) -> MemoryDecision:
    """What is decided, by figures that say what was measured.

    Args:
        seconds: of a step by this decision; None: not measured.
        device_bytes: its peak; None: not measured.
    """
    costs, machine = decision.costs, decision.machine
    if seconds is not None:
        costs, machine = _by_seconds(decision, seconds)
    if device_bytes is not None:
        more = max(0, device_bytes - decision.account.peak)
        machine = dataclasses.replace(machine, device_bytes=max(0, machine.device_bytes - more))
    return dataclasses.replace(decision, costs=costs, machine=machine)


def _by_seconds(decision: MemoryDecision, seconds: float) -> tuple[StepCosts, Machine]:
    def by_computing(factor: float) -> float:
        return _seconds(decision, scaled_costs(decision.costs, factor), decision.machine)

    if by_computing(LEAST) < seconds:
        return scaled_costs(decision.costs, _factor(by_computing, seconds)), decision.machine
    ratio = seconds / decision.seconds
    return scaled_costs(decision.costs, ratio), scaled_rates(decision.machine, 1 / ratio)


def _seconds(decision: MemoryDecision, costs: StepCosts, machine: Machine) -> float:
    return step_timeline(costs, decision.placement, decision.setup, machine).seconds


def _factor(seconds_of: Callable[[float], float], seconds: float) -> float:
    """The factor between `LEAST` and `MOST` at which a rising function gives the seconds, or the nearer end."""
    low, high = LEAST, MOST
    for _ in range(_HALVINGS):
        middle = math.sqrt(low * high)
        if seconds_of(middle) < seconds:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)


def scaled_costs(costs: StepCosts, factor: float) -> StepCosts:
    """All computing takes so many times as long."""

    def scaled(cost: BlockCost) -> BlockCost:
        return dataclasses.replace(
            cost,
            forward_seconds=factor * cost.forward_seconds,
            backward_seconds=factor * cost.backward_seconds,
        )

    classes = tuple(
        dataclasses.replace(kind, choices={name: scaled(cost) for name, cost in kind.choices.items()})
        for kind in costs.classes
    )
    ends = dataclasses.replace(costs.ends, seconds=factor * costs.ends.seconds)
    return dataclasses.replace(costs, classes=classes, ends=ends)


def scaled_rates(machine: Machine, factor: float) -> Machine:
    """Everything that moves bytes, and CPU Adam, is so many times as fast."""
    return dataclasses.replace(
        machine,
        upload=factor * machine.upload,
        download=factor * machine.download,
        upload_together=factor * machine.upload_together,
        download_together=factor * machine.download_together,
        device_memory=factor * machine.device_memory,
        cpu_adam=None if machine.cpu_adam is None else factor * machine.cpu_adam,
    )
