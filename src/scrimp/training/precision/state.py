"""How a run of planned precision goes on from a checkpoint: on the same device, or on another.

Problem  Formats were chosen on the device of then. Harm is the model's, and hardly changes with the device; seconds
         are the device's own: what was fast there may be slow here.
Method   The formats of the checkpoint stay in force, and memory is as decided now. On another device one
         event and one line name both devices, and say when statistics are taken anew: where a budget is in seconds,
         as soon as `TIMED_STEPS` steps were timed here (GEMMs are timed before the first step); else by the calendar.
Exact    On the same device nothing is different from a run that was never interrupted. Step numbers are
         functions of the checkpoint and the configuration, so that a run that moved and was killed continues the same.
Limits   A plan that waits for its step, or a promotion's pause, comes first.
Checked  tests/training/precision/test_precision_state.py; in real runs by
         tests/training/precision/test_precision_cycle.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scrimp.config import ResolvedConfig
from scrimp.errors import CheckpointError
from scrimp.json_files import as_typed
from scrimp.planner import Plan
from scrimp.planner.precision import PrecisionPlan
from scrimp.precision import GEMMS, RECIPES
from scrimp.training.precision.guard import GuardState, Recipes
from scrimp.training.precision.question import is_due

_ORIGIN = "the checkpoint's precision"
_DO = "use an older checkpoint"
TIMED_STEPS = 10
"""After a move the first ones are slow: their median is what counts."""


@dataclass
class Waiting:
    """A plan that was asked for, and is put in force later."""

    at: int
    """The step of the switch."""
    plan: str | None = None
    """What to switch to, as JSON; None while it is being solved."""


@dataclass
class CycleState:
    """All that decides how a run goes on; JSON values."""

    recipes: Recipes
    """Current recipes of the planned layers."""
    previous: list[list[list[float]]] | None = None
    """Costs of the last statistics, [L][3][P], and the P formats that they are of."""
    previous_formats: list[str] = field(default_factory=list)
    first_switch: int | None = None
    spent: float = 0.0
    """Share of FLOPs in 4 bits, summed over the steps since the first plan."""
    waiting: Waiting | None = None
    step_seconds: list[float] = field(default_factory=list)
    """Times of the last steps, kept until the seconds beside the GEMMs are known."""
    measure_from: int | None = None
    """Beside the calendar, from this step on: the plan of now is by another device's seconds."""
    guard: GuardState = field(default_factory=GuardState)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> CycleState:
        """The state that a checkpoint keeps.

        Raises:
            CheckpointError: a key is missing or unknown, or a value has the wrong type.
        """
        return as_typed(saved, cls, origin=_ORIGIN, error=CheckpointError, do=_DO)

    def must_measure(self, config: ResolvedConfig, step: int) -> bool:
        """Whether statistics are taken before this step."""
        if step < self.guard.hold_until or self.waiting is not None:
            return False
        return is_due(config, step) or (self.measure_from is not None and step >= self.measure_from)

    def move(self, config: ResolvedConfig, step: int, then: str, now: str, *, in_seconds: bool) -> str:
        """Go on upon another device; the sentence for people.

        Args:
            step: at which it goes on.
            then: name of the device of the checkpoint.
            now: of this one.
            in_seconds: whether the budget counts what GEMMs take on the device.
        """
        has_plan = self.first_switch is not None or self.waiting is not None
        if in_seconds:
            self.step_seconds = []
            self.measure_from = step + TIMED_STEPS if has_plan else None
        planned = "the plan was made" if has_plan else "the run began"
        next_one = self._next_measurement(config, step)
        then_what = "its formats stay" if next_one is None else f"measured anew at step {next_one:,}"
        return f"{planned} on {then}; this is {now}: {then_what}"

    def _next_measurement(self, config: ResolvedConfig, step: int) -> int | None:
        free = dataclasses.replace(self, waiting=None)
        first = step if self.waiting is None else max(step, self.waiting.at)
        return next((at for at in range(first, config.train.steps) if free.must_measure(config, at)), None)


@dataclass(frozen=True)
class _SavedPlans:
    """The saved plans as texts."""

    plan: str
    analysis: str | None


@dataclass(frozen=True)
class SavedCycle:
    """What a checkpoint keeps of a precision cycle."""

    state: CycleState
    plan: Plan
    """The plan in force."""
    analysis: PrecisionPlan | None
    """The last choice of formats with its costs; None before the first."""


def read_cycle(saved: Mapping[str, Any] | None) -> SavedCycle:
    """What `PrecisionCycle.to_state` gave a checkpoint.

    Raises:
        CheckpointError: a key is missing or unknown, or a value has the wrong type.
        PlanError: a plan inside cannot be read.
    """
    rest = dict(saved or {})
    names = [field.name for field in dataclasses.fields(_SavedPlans)]
    texts = {name: rest.pop(name) for name in names if name in rest}
    plans = as_typed(texts, _SavedPlans, origin=_ORIGIN, error=CheckpointError, do=_DO)
    state = CycleState.from_json(rest)
    if state.waiting is not None:
        if state.waiting.plan is None:
            raise CheckpointError(f"{_ORIGIN}: the plan that is waiting is missing", do=_DO)
        PrecisionPlan.from_json(state.waiting.plan)
    analysis = None if plans.analysis is None else PrecisionPlan.from_json(plans.analysis)
    plan = Plan.from_json(plans.plan)
    _refuse_impossible(state, plan)
    return SavedCycle(state, plan, analysis)


def planned_recipes(plan: Plan) -> Recipes:
    """The formats of the layers whose formats are planned: all but the head."""
    return {layer: choice.recipes for layer, choice in plan.gemms.items() if layer != "head"}


def _refuse_impossible(state: CycleState, plan: Plan) -> None:
    """Values of the right type that no run writes."""
    layers, guard = planned_recipes(plan), state.guard
    num_formats = len(state.previous_formats)
    names = {*state.previous_formats, *(name for row in state.recipes.values() for name in row)}
    wrong = {
        f"{', '.join(sorted(names - set(RECIPES)))} in recipes or previous_formats": not names
        <= set(RECIPES),
        "recipes of other layers than the plan's": state.recipes.keys() != layers.keys(),
        "guard.penalties": not guard.penalties.keys() <= layers.keys()
        or any(len(row) != len(GEMMS) for row in guard.penalties.values()),
        "guard.losses, of another number than guard.norms": len(guard.losses) != len(guard.norms),
        "previous, of another shape than its formats": any(
            len(layer) != len(GEMMS) or any(len(row) != num_formats for row in layer)
            for layer in state.previous or ()
        ),
        "a waiting step below 0": state.waiting is not None and state.waiting.at < 0,
    }
    for what, is_wrong in wrong.items():
        if is_wrong:
            raise CheckpointError(f"{_ORIGIN} is impossible", got=what, do=_DO)


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
