"""From settings, statistics and the state of a cycle to the question that the planner answers.

Everything here is a function of its arguments, without tensors or files.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from scrimp.cycle.guard import Recipes
from scrimp.cycle.settings import CycleSettings
from scrimp.cycle.state import CycleState
from scrimp.cycle.step_times import StepTimes, open_formats
from scrimp.errors import PlanError
from scrimp.planner.precision import PrecisionPlan, PrecisionProfile, Question, split
from scrimp.planner.precision.choose import LOW_BITS
from scrimp.planner.precision.over_time import at_share
from scrimp.precision import GEMMS, RECIPES

_SMOOTHED = ("snip", "snip-layer")
"""Policies whose costs are the harm that plans record: only those are smoothed with the last plan's."""


def low_share(recipes: Recipes, shares: Mapping[str, float]) -> float:
    """Share of FLOPs in 4 bits.

    Args:
        shares: of FLOPs, by layer.
    """
    return sum(
        shares[layer] * sum(RECIPES[name].bits <= LOW_BITS for name in row) / len(GEMMS)
        for layer, row in recipes.items()
    )


def recipes_in(found: PrecisionPlan) -> Recipes:
    """What an analysis chose."""
    return {layer: choice.recipes for layer, choice in found.precisions.items()}


def harm_in(analysis: PrecisionPlan, recipes: Recipes) -> dict[str, tuple[float, float, float]]:
    """Layer to the predicted harm of each GEMM in a given format; none of a format that was no candidate."""
    found = {}
    for layer, row in analysis.layers.items():
        harms = [
            row.gemms[gemm].harm.get(name, 0.0) for gemm, name in zip(GEMMS, recipes[layer], strict=True)
        ]
        found[layer] = (harms[0], harms[1], harms[2])
    return found


def formats_to_measure(settings: CycleSettings, recipes: Recipes) -> tuple[str, ...]:
    """The candidates, and what rules fix or is in force: its cost is needed too."""
    fixed = [name for gemms in settings.pinned.values() for name in gemms.values()]
    now = [name for row in recipes.values() for name in row]
    return tuple(dict.fromkeys([*settings.formats, *fixed, *now]))


def ask(
    settings: CycleSettings,
    profile: PrecisionProfile,
    state: CycleState,
    step: int,
    times: StepTimes | None = None,
) -> Question:
    """The question after a measurement.

    Args:
        state: of the cycle; what is spent, up to the switch that is being planned.
        step: before which was measured.
        times: where a budget is in seconds: the table, and what a step takes beside it.
    """
    seconds, useful, in_bf16 = None, None, None
    if times is not None:
        seconds = times.seconds(profile.shapes, profile.formats)
        useful = times.candidates(profile.shapes, profile.formats)
        in_bf16 = times.seconds(profile.shapes, [settings.compute])[:, :, 0]
    index = profile.formats.index
    is_smoothed = settings.is_smoothed and settings.policy in _SMOOTHED
    has_previous = state.previous is not None and state.previous_formats == list(profile.formats)
    penalties = state.guard.penalties
    question = Question(
        profile=profile,
        budget=settings.budget,
        seconds=seconds,
        other_seconds=0.0 if times is None else times.other or 0.0,
        bf16_seconds=in_bf16,
        policy=settings.policy,
        stages=[settings.stages[layer] for layer in profile.layers] if settings.stages else None,
        saved=[settings.saved.get(layer, ()) for layer in profile.layers] if settings.saved else None,
        is_compiled=settings.is_compiled,
        weights=settings.weights,
        allowed=open_formats(settings.formats, profile.layers, profile.formats, settings.pinned, useful),
        penalties=np.array([penalties.get(layer, [1.0] * len(GEMMS)) for layer in profile.layers]),
        current=np.array([[index(name) for name in state.recipes[layer]] for layer in profile.layers])
        if state.first_switch is not None
        else None,
        previous=np.array(state.previous) if is_smoothed and has_previous else None,
    )
    return _in_its_phase(settings, question, state, step)


def _in_its_phase(settings: CycleSettings, question: Question, state: CycleState, step: int) -> Question:
    """The budget of the phase that the run is in, where its last part may have another one."""
    share = question.budget.fp4_flops
    if not settings.final_share or share is None:
        return question
    begins, final = step + settings.delay, settings.final_steps
    since = begins if state.first_switch is None else state.first_switch
    left = max(1, final.stop - begins)
    # What must still be done so that the whole run since its first plan keeps the budget.
    owed = (share * (final.stop - since) - state.spent) / left
    question = at_share(question, owed)
    final_left = min(left, max(0, final.stop - max(begins, final.start)))
    try:
        phases = split(question, left - final_left, final_left, settings.final_weight)
    except PlanError:  # no plan keeps it, as solving the question itself will say
        return question
    return at_share(question, phases.main if left > final_left else phases.final)
