"""The plan of a run with the formats that the cycle puts in force.

Checked  tests/training/precision/test_formats_in_plan.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from scrimp.cycle.guard import Recipes
from scrimp.cycle.question import recipes_in
from scrimp.models import HEAD
from scrimp.planner import Plan
from scrimp.planner.precision import PrecisionPlan
from scrimp.precision import GEMMS, InputOrigin, PrecisionRules


def planned_recipes(plan: Plan) -> Recipes:
    """The formats of the layers whose formats are planned: all but the head."""
    return {layer: choice.recipes for layer, choice in plan.gemms.items() if layer != HEAD}


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
