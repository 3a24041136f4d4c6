"""All that decides how a cycle goes on, as checkpoints keep it: on the same device, or on another.

Problem  Formats were chosen on the device of then. Harm is the model's, and hardly changes with the device; seconds
         are the device's own: what was fast there may be slow here.
Method   The formats of the checkpoint stay in force. On another device one sentence names both devices, and says when
         statistics are taken anew: where a budget is in seconds, as soon as `TIMED_STEPS` steps were timed here (GEMMs
         are timed before the first step); else by the calendar.
Exact    On the same device nothing is different from a run that was never interrupted. Step numbers are
         functions of the checkpoint and the settings, so that a run that moved and was killed continues the same.
Limits   A plan that waits for its step, or a promotion's pause, comes first.
Checked  tests/cycle/test_cycle_state.py; in real runs by tests/training/precision/test_precision_cycle.py, in a Trainer
         by tests/integrations/test_transformers_callback.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from scrimp.cycle.guard import GuardState, Recipes
from scrimp.cycle.settings import CycleSettings
from scrimp.errors import CheckpointError
from scrimp.json_files import as_typed
from scrimp.planner.precision import PrecisionPlan
from scrimp.precision import GEMMS, RECIPES

ORIGIN = "the checkpoint's precision"
DO = "use an older checkpoint"
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
    """Beside the calendar, from this step on: the current plan is by another device's seconds."""
    guard: GuardState = field(default_factory=GuardState)

    def must_measure(self, settings: CycleSettings, step: int) -> bool:
        """Whether statistics are taken before this step."""
        if step < self.guard.hold_until or self.waiting is not None:
            return False
        is_moved = self.measure_from is not None and step >= self.measure_from
        return settings.measures_at(step) or (is_moved and settings.is_in_time(step))

    def move(self, settings: CycleSettings, step: int, then: str, now: str, *, in_seconds: bool) -> str:
        """Go on upon another device; the sentence for people.

        Args:
            step: at which it goes on, of a run whose last one is known.
            then: name of the device of the checkpoint.
            now: of this one.
            in_seconds: whether the budget counts what GEMMs take on the device.
        """
        has_plan = self.first_switch is not None or self.waiting is not None
        if in_seconds:
            self.step_seconds = []
            self.measure_from = step + TIMED_STEPS if has_plan else None
        planned = "the plan was made" if has_plan else "the run began"
        free = dataclasses.replace(self, waiting=None)
        first = step if self.waiting is None else max(step, self.waiting.at)
        later = range(first, settings.steps or first)
        next_one = next((at for at in later if free.must_measure(settings, at)), None)
        then_what = "its formats stay" if next_one is None else f"measured anew at step {next_one:,}"
        return f"{planned} on {then}; this is {now}: {then_what}"


@dataclass
class _Saved(CycleState):
    """What a checkpoint keeps of a cycle."""

    analysis: str | None = None


def read_cycle(saved: Mapping[str, Any]) -> tuple[CycleState, PrecisionPlan | None]:
    """What `PrecisionCycle.to_state` gave a checkpoint: the state, and the newest plan with its costs; None before the
    first.

    Raises:
        CheckpointError: a key is missing or unknown, or a value is of the wrong type or one that no cycle writes.
        PlanError: a plan inside cannot be read.
    """
    found = as_typed(saved, _Saved, origin=ORIGIN, error=CheckpointError, do=DO)
    state = CycleState(**{each.name: getattr(found, each.name) for each in dataclasses.fields(CycleState)})
    if state.waiting is not None:
        if state.waiting.plan is None:
            raise CheckpointError(f"{ORIGIN}: the plan that is waiting is missing", do=DO)
        PrecisionPlan.from_json(state.waiting.plan)
    analysis = None if found.analysis is None else PrecisionPlan.from_json(found.analysis)
    num_formats, guard = len(state.previous_formats), state.guard
    names = {*state.previous_formats, *(name for row in state.recipes.values() for name in row)}
    unknown = names - set(RECIPES)
    planned = set() if analysis is None else set(analysis.layers)
    refuse_impossible(
        {
            f"{', '.join(sorted(unknown))} in recipes or previous_formats": bool(unknown),
            "recipes of other layers than the plan's": not planned <= state.recipes.keys(),
            "a first_switch without a plan": state.first_switch is not None and not planned,
            "guard.penalties": not guard.penalties.keys() <= state.recipes.keys()
            or any(len(row) != len(GEMMS) for row in guard.penalties.values()),
            "guard.losses, of another number than guard.norms": len(guard.losses) != len(guard.norms),
            "previous, of another shape than its formats": any(
                len(layer) != len(GEMMS) or any(len(row) != num_formats for row in layer)
                for layer in state.previous or ()
            ),
            "a waiting step below 0": state.waiting is not None and state.waiting.at < 0,
        }
    )
    return state, analysis


def refuse_impossible(found: Mapping[str, bool]) -> None:
    """Refuse values of the right type that no cycle writes.

    Args:
        found: what is wrong, and whether it is.
    """
    for what, is_wrong in found.items():
        if is_wrong:
            raise CheckpointError(f"{ORIGIN} is impossible", got=what, do=DO)
