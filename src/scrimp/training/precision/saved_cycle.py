"""What a checkpoint keeps of a run's planned formats, and the plan that a resumed run goes by.

The cycle's own part is `scrimp.cycle.state`; beside it stands the plan in force. Its formats stay, memory is as decided
now.

Checked  tests/training/precision/test_saved_cycle.py, tests/training/test_run_state.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from scrimp.cycle import CycleState, read_cycle
from scrimp.cycle.state import DO, ORIGIN, refuse_impossible
from scrimp.errors import CheckpointError
from scrimp.json_files import as_typed
from scrimp.planner import Plan
from scrimp.planner.precision import PrecisionPlan
from scrimp.training.precision.formats_in_plan import planned_recipes


@dataclass(frozen=True)
class _SavedPlan:
    """The plan as text."""

    plan: str


@dataclass(frozen=True)
class SavedCycle:
    """What a checkpoint keeps of a run whose formats are planned."""

    state: CycleState
    analysis: PrecisionPlan | None
    """The newest choice of formats with its costs; None before the first."""
    plan: Plan
    """The plan in force."""


def read_saved_cycle(saved: Mapping[str, Any] | None) -> SavedCycle:
    """What `RunCycle.to_state` gave a checkpoint.

    Raises:
        CheckpointError: a key is missing or unknown, or a value is of the wrong type or one that no run writes.
        PlanError: a plan inside cannot be read.
    """
    rest = dict(saved or {})
    texts = {name: rest.pop(name) for name in ("plan",) if name in rest}
    text = as_typed(texts, _SavedPlan, origin=ORIGIN, error=CheckpointError, do=DO).plan
    state, analysis = read_cycle(rest)
    plan = Plan.from_json(text)
    is_other = state.recipes.keys() != planned_recipes(plan).keys()
    refuse_impossible({"recipes of other layers than the plan's": is_other})
    return SavedCycle(state, analysis, plan)


def carried_on(here: Plan, saved: Plan, *, trains: bool = True) -> Plan:
    """A checkpoint's formats, and what they were predicted to cost, in the plan that is decided now.

    Args:
        here: of this device and its memory.
        saved: of the checkpoint.
        trains: whether a step is left; else the device is still the one that all of them ran on.
    """
    predicted = dataclasses.replace(
        here.predicted,
        loss_divergence=saved.predicted.loss_divergence,
        weight_divergence=saved.predicted.weight_divergence,
    )
    fingerprint = here.fingerprint if trains else saved.fingerprint
    measured = saved.measured if saved.fingerprint.device == fingerprint.device else None
    return dataclasses.replace(
        here, fingerprint=fingerprint, gemms=saved.gemms, predicted=predicted, measured=measured
    )
