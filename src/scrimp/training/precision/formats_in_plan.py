"""The plan of a run with formats of the cycle: those that it puts in force, or those of a checkpoint.

A checkpoint keeps the cycle's own state (`scrimp.cycle.state`) and the plan in force: its formats stay, memory is as
decided now.

Checked  tests/training/precision/test_formats_in_plan.py, tests/training/test_run_state.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from scrimp.cycle.guard import Recipes
from scrimp.cycle.question import recipes_in
from scrimp.cycle.state import DO, ORIGIN, CycleState, read_cycle, refuse_impossible
from scrimp.errors import CheckpointError, shortened
from scrimp.models import HEAD
from scrimp.planner import Plan
from scrimp.planner.precision import PrecisionPlan
from scrimp.precision import GEMMS, InputOrigin, PrecisionRules, is_router


def planned_recipes(plan: Plan) -> Recipes:
    """The formats of the layers whose formats are planned: all but the head, and routers of experts."""
    planned = (layer for layer in plan.gemms if layer != HEAD and not is_router(layer))
    return {layer: plan.gemms[layer].recipes for layer in planned}


def planned_origins(recipes: Recipes, origins: Mapping[str, InputOrigin]) -> dict[str, InputOrigin]:
    """Where the inputs of planned layers come from.

    Args:
        origins: of all layers of the model (`ModelSpec.origins`).
    """
    return {layer: origins[layer] for layer in recipes}


def replanned(
    plan: Plan,
    rules: PrecisionRules,
    recipes: Recipes,
    analysis: PrecisionPlan,
    layers: Mapping[str, InputOrigin],
) -> Plan:
    """A plan with other formats, their reasons and predictions.

    Args:
        layers: of the model (`ModelSpec.origins`).
    """
    gemms = dict(plan.gemms)
    for layer, row in recipes.items():
        precision = rules.with_recipes(layer, layers[layer], *row)
        reason = _reason(layer, row, analysis) if layer in analysis.layers else gemms[layer].reason
        gemms[layer] = dataclasses.replace(precision, reason=reason)
    loss, update = divergences_of(analysis, recipes)
    predicted = dataclasses.replace(plan.predicted, loss_divergence=loss, weight_divergence=update)
    return dataclasses.replace(plan, gemms=gemms, predicted=predicted)


def divergences_of(analysis: PrecisionPlan, recipes: Recipes) -> tuple[float | None, float | None]:
    """Divergences of loss and weights that an analysis predicts for formats, which need not be those that it chose."""
    chosen = recipes_in(analysis)

    def rescaled(predicted: float | None, part: str) -> float | None:
        new, old = (
            sum(
                getattr(row.gemms[gemm], part).get(recipe, 0.0)
                for layer, row in analysis.layers.items()
                for gemm, recipe in zip(GEMMS, choices[layer], strict=True)
            )
            for choices in ({**chosen, **recipes}, chosen)
        )
        # The parts are squares: a divergence is the root of their sum.
        return predicted if predicted is None or not old else predicted * math.sqrt(new / old)

    return (
        rescaled(analysis.predicted["loss_divergence"], "loss"),
        rescaled(analysis.predicted["weight_divergence"], "update"),
    )


def _reason(layer: str, row: tuple[str, str, str], analysis: PrecisionPlan) -> str:
    parts = []
    for gemm, name in zip(GEMMS, row, strict=True):
        found = analysis.layers[layer].gemms[gemm]
        if found.choice != name:
            parts.append(f"{gemm} promoted")
        elif name in found.harm:
            parts.append(f"{gemm} {found.harm[name]:.2g}")
    return f"{analysis.policy} at step {analysis.step}: harm {', '.join(parts)}"


def read_saved_cycle(saved: Mapping[str, Any] | None) -> tuple[CycleState, PrecisionPlan | None, Plan]:
    """What `PlanPrecision.to_state` gave a checkpoint: the cycle's state and newest plan, and the run's plan in force.

    Raises:
        CheckpointError: a key is missing or unknown, or a value is of the wrong type or one that no run writes.
        PlanError: a plan inside cannot be read.
    """
    rest = dict(saved or {})
    text = rest.pop("plan", None)
    if not isinstance(text, str):
        raise CheckpointError(f"{ORIGIN} has no plan", got=shortened(text), do=DO)
    (state, analysis), plan = read_cycle(rest), Plan.from_json(text)
    is_other = state.recipes.keys() != planned_recipes(plan).keys()
    refuse_impossible({"recipes of other layers than the plan's": is_other})
    return state, analysis, plan


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
