"""From settings, statistics and the state of a run to the question that the planner answers.

Everything here is a function of its arguments, without tensors or files.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from scrimp.config import Architecture, ResolvedConfig
from scrimp.config.snip import BUDGETS, WHOLE_LAYERS, chosen_steps
from scrimp.errors import PlanError
from scrimp.models import HEAD, spec_of
from scrimp.planner import Plan
from scrimp.planner.precision import Budget, PrecisionPlan, PrecisionProfile, Question, Weights, split
from scrimp.planner.precision.over_time import at_share
from scrimp.precision import GEMMS, RECIPES, InputOrigin, PrecisionRules
from scrimp.training.precision.gemm_seconds import StepTimes, open_formats
from scrimp.training.precision.guard import Recipes

LOW_BITS = 4
_SMOOTHED = ("snip", "snip-layer")
"""Policies whose costs are the harm that plans record: only those are smoothed with the last plan's."""


@dataclass(frozen=True)
class Horizon:
    """Where a run stands."""

    step: int
    first_switch: int | None
    """Step at which the first plan came into force."""
    spent: float
    """Share of FLOPs in 4 bits, summed over the steps since, up to the switch that is being planned."""


def is_due(config: ResolvedConfig, step: int) -> bool:
    """Whether a plan is measured before this step: the first, every so many after it, chosen ones, and where the
    final share begins."""
    snip, cadence = config.snip, config.cadence
    first, every = cadence.first, cadence.every
    if step == first or step in chosen_steps(snip.at):
        return True
    if snip.final_share and step > first and step == final_step(config) - cadence.delay:
        return True
    return step > first and every > 0 and (step - first) % every == 0


def final_step(config: ResolvedConfig) -> int:
    """Step at which the final share of the run begins."""
    return config.train.steps - round(config.snip.final_share * config.train.steps)


def shares_of(architecture: Architecture) -> dict[str, float]:
    """Layer to its share of the blocks' linear FLOPs."""
    linears = spec_of(architecture).layers()
    sizes = {layer: float(linear.parameters) for layer, linear in linears.items() if layer != HEAD}
    total = sum(sizes.values())
    return {layer: size / total for layer, size in sizes.items()}


def are_low(recipes: tuple[str, ...]) -> list[bool]:
    """Which of a layer's recipes have 4 bits."""
    return [RECIPES[name].bits <= LOW_BITS for name in recipes]


def low_share(recipes: Recipes, shares: Mapping[str, float]) -> float:
    """Share of FLOPs in 4 bits."""
    return sum(shares[layer] * sum(are_low(row)) / len(GEMMS) for layer, row in recipes.items())


def recipes_in(found: PrecisionPlan) -> Recipes:
    """What an analysis chose."""
    return {layer: choice.recipes for layer, choice in found.precisions.items()}


def harm_in(analysis: PrecisionPlan | None, recipes: Recipes) -> dict[str, tuple[float, float, float]]:
    """Layer to the predicted harm of each GEMM in a given format; none of a format that was no candidate."""
    found = {}
    for layer, row in (analysis.layers if analysis else {}).items():
        harms = [
            row.gemms[gemm].harm.get(name, 0.0) for gemm, name in zip(GEMMS, recipes[layer], strict=True)
        ]
        found[layer] = (harms[0], harms[1], harms[2])
    return found


def formats_to_measure(
    config: ResolvedConfig, pinned: Mapping[str, Mapping[str, str]], now: Iterable[str]
) -> tuple[str, ...]:
    """The candidates, and what rules fix or is in force: its cost is needed too."""
    fixed = [name for gemms in pinned.values() for name in gemms.values()]
    return tuple(dict.fromkeys([*config.candidates, *fixed, *now]))


def refuse_unreachable_share(
    config: ResolvedConfig, architecture: Architecture, pinned: Mapping[str, Mapping[str, str]]
) -> None:
    """Refuse a budget that the rules leave no room for, before anything is measured.

    Raises:
        PlanError: with the largest share that can be reached.
    """
    share = config.budget.fp4_flops
    if not share:
        return
    has_low = any(RECIPES[name].bits <= LOW_BITS for name in config.candidates)
    reached, whole = 0.0, config.snip.policy.partition(":")[0] in WHOLE_LAYERS
    for layer, flops in shares_of(architecture).items():
        names = [pinned.get(layer, {}).get(gemm) for gemm in GEMMS]
        low = [has_low if name is None else RECIPES[name].bits <= LOW_BITS for name in names]
        if whole and not all(low):
            low = [False] * len(GEMMS)
        reached += flops * sum(low) / len(GEMMS)
    if share > reached + 1e-9:
        raise PlanError(
            "budget.fp4_flops cannot be reached",
            got=f"{share:g}",
            expected=f"at most {reached:.4f}: the rules of precision fix the other GEMMs"
            + (f", and {config.snip.policy} gives a layer one format" if whole else ""),
            do="lower the budget, or fix fewer layers",
        )


def ask(
    config: ResolvedConfig,
    profile: PrecisionProfile,
    horizon: Horizon,
    pinned: Mapping[str, Mapping[str, str]],
    current: Recipes,
    previous: list[Any] | None,
    penalties: Mapping[str, list[float]],
    times: StepTimes | None = None,
) -> Question:
    """The question after a measurement.

    Args:
        times: where a budget is in seconds: the table, and what a step takes beside it.
    """
    snip, seconds, useful, in_bf16 = config.snip, None, None, None
    if times is not None:
        seconds = times.seconds(profile.shapes, profile.formats)
        useful = times.candidates(profile.shapes, profile.formats)
        in_bf16 = times.seconds(profile.shapes, [config.precision_rules.compute])[:, :, 0]
    index = profile.formats.index
    question = Question(
        profile=profile,
        budget=Budget(**{name: getattr(config.budget, name) for name in BUDGETS}),
        seconds=seconds,
        other_seconds=0.0 if times is None else times.other or 0.0,
        bf16_seconds=in_bf16,
        policy=snip.policy,
        weights=Weights(snip.loss_weight, snip.update_weight, snip.curvature_weight),
        allowed=open_formats(config, profile.layers, profile.formats, pinned, useful),
        penalties=np.array([penalties.get(layer, [1.0] * len(GEMMS)) for layer in profile.layers]),
        current=np.array([[index(name) for name in current[layer]] for layer in profile.layers])
        if horizon.first_switch is not None
        else None,
        previous=None if previous is None or snip.policy not in _SMOOTHED else np.array(previous),
    )
    return _in_its_phase(config, question, horizon)


def _in_its_phase(config: ResolvedConfig, question: Question, horizon: Horizon) -> Question:
    """The budget of the phase that the run is in, where its last part may have another one."""
    share, snip = question.budget.fp4_flops, config.snip
    if not snip.final_share or share is None:
        return question
    begins = horizon.step + config.cadence.delay
    since = begins if horizon.first_switch is None else horizon.first_switch
    left = max(1, config.train.steps - begins)
    # What must still be done so that the whole run since its first plan keeps the budget.
    owed = (share * (config.train.steps - since) - horizon.spent) / left
    question = at_share(question, owed)
    final = min(left, max(0, config.train.steps - max(begins, final_step(config))))
    try:
        phases = split(question, left - final, final, snip.final_weight)
    except PlanError:  # no plan keeps it, as solving the question itself will say
        return question
    return at_share(question, phases.main if left > final else phases.final)


def replanned(
    plan: Plan,
    rules: PrecisionRules,
    recipes: Recipes,
    analysis: PrecisionPlan | None,
    layers: Mapping[str, InputOrigin],
) -> Plan:
    """A plan with other formats, their reasons and predictions.

    Args:
        layers: of the model (`ModelSpec.origins`).
    """
    gemms = dict(plan.gemms)
    for layer, row in recipes.items():
        precision = rules.with_recipes(layer, layers[layer], *row)
        gemms[layer] = dataclasses.replace(precision, reason=_reason(layer, row, analysis, plan))
    predicted = plan.predicted
    if analysis is not None:
        loss, update = divergences_of(analysis, recipes)
        predicted = dataclasses.replace(predicted, loss_divergence=loss, weight_divergence=update)
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


def _reason(layer: str, row: tuple[str, str, str], analysis: PrecisionPlan | None, plan: Plan) -> str:
    if analysis is None or layer not in analysis.layers:
        return plan.gemms[layer].reason
    parts = []
    for gemm, name in zip(GEMMS, row, strict=True):
        found = analysis.layers[layer].gemms[gemm]
        if found.choice != name:
            parts.append(f"{gemm} promoted")
        elif name in found.harm:
            parts.append(f"{gemm} {found.harm[name]:.2g}")
    return f"{analysis.policy} at step {analysis.step}: harm {', '.join(parts)}"
