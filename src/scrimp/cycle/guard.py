"""When low precision goes wrong: signs of trouble, evidence, and promotion.

Signs      a loss above the mean of the last 100 steps by 4 deviations; a gradient norm above 3 times their median;
           a step that was not finite.
Evidence   data have outliers too. A sign only asks for a probe of the batch that showed it
           (`scrimp.statistics`); probes also come every `snip.probe_every` steps. The plan is to blame
           where the loss in its formats is more than 2 % above that in bf16, or the noise in the gradient is more
           than twice the gradient; of a step that is not finite no more evidence is asked.
Doubt      after a switch the measured weight divergence may lie far from the predicted one, below as well as above:
           formats that are not in force harm nothing. That alone proves nothing either, for predictions err by more
           than their intervals (docs/lab-log.md): it asks for a proof of every planned GEMM in the next step, which
           stops a run that lies. Far is outside of the prediction's interval for one batch: the mean of n batches is
           known to D exp(+-h), one more batch, as a probe is, to D exp(+-h sqrt(n + 1)). Of one batch alone there
           is no interval, and only a plan that changes nothing at all is doubted.
Promotion  first the GEMMs that cost most for their FLOPs go up one format (4 bits to 8, 8 to 16) until a tenth
           of the FLOPs has moved; the second time all of 4 bits go to the candidate of most bits; the third to bf16.
           GEMMs that a rule fixes stay.
           No plan is made for 2,000 steps; later plans count a promoted GEMM's cost four times.

The windows decide what happens, so they are part of the checkpoint.
Source   the guards of SNIP's reconstruction, section 8; evidence before promotion is Scrimp's.
Checked  tests/cycle/test_guard.py
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scrimp.planner.precision import PrecisionPlan
from scrimp.precision import GEMMS, RECIPES
from scrimp.statistics import Probe

WINDOW = 100
MIN_VALUES = 20
DEVIATIONS = 4.0
NORM_RATIO = 3.0
LOSS_GAP = 0.02
LEAST_GRADIENT_TO_NOISE = 0.5
MOVED_SHARE = 0.1
HOLD_STEPS = 2000
PENALTY = 4.0
REST_STEPS = 20
"""After a sign that a probe did not confirm, no other is looked at for so long."""

Recipes = dict[str, tuple[str, str, str]]


@dataclass
class GuardState:
    """What the guard remembers; plain values, for the checkpoint."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    alarms: int = 0
    hold_until: int = 0
    """No plan is made before this step."""
    rest_until: int = 0
    penalties: dict[str, list[float]] = field(default_factory=dict)
    """Layer to a factor for each GEMM."""


def sign_of_trouble(state: GuardState, step: int, loss: float, norm: float) -> str | None:
    """Look at one step, and remember it."""
    if not (math.isfinite(loss) and math.isfinite(norm)):
        return f"loss {loss}, gradient norm {norm}"
    sentence = None
    if len(state.losses) >= MIN_VALUES and step >= state.rest_until:
        mean, deviation = statistics.fmean(state.losses), statistics.pstdev(state.losses)
        median = statistics.median(state.norms)
        if loss > mean + DEVIATIONS * max(deviation, 1e-3 * abs(mean)):
            sentence = f"loss {loss:.4g} against a mean of {mean:.4g} over {len(state.losses)} steps"
        elif norm > NORM_RATIO * median > 0:
            sentence = f"gradient norm {norm:.3g}, {norm / median:.1f} times the median"
    state.losses = [*state.losses, loss][-WINDOW:]
    state.norms = [*state.norms, norm][-WINDOW:]
    return sentence


def verdict(found: Probe) -> str | None:
    """Why the plan is to blame, or None."""
    if not found.is_finite:
        return (
            "the plan's loss or gradient is not finite, that of bf16 is"
            if math.isfinite(found.loss)
            else None
        )
    if found.loss_gap > LOSS_GAP:
        return f"the loss in the plan's formats is {found.loss_gap:.1%} above that in bf16"
    if found.gradient_to_noise < LEAST_GRADIENT_TO_NOISE:
        return f"the gradient is only {found.gradient_to_noise:.2f} times the quantization noise in it"
    return None


def doubt(found: PrecisionPlan, measured: float) -> str | None:
    """Why a measured weight divergence asks for a proof of the plan's numbers, or None."""
    predicted = found.predicted.get("weight_divergence")
    if not predicted or not math.isfinite(measured):
        return None
    if measured == 0:
        return f"the next update is the same in bf16, where the plan was predicted to change it by {predicted:.2g}"
    if "weight_divergence" not in found.intervals or not found.batches:
        return None
    low, high = (
        predicted * (bound / predicted) ** math.sqrt(found.batches + 1)
        for bound in found.intervals["weight_divergence"]
    )
    if low <= measured <= high:
        return None
    return (
        f"the plan changes the next update by {measured:.2g}, far {'below' if measured < low else 'above'} the "
        f"{predicted:.2g} predicted ({low:.2g} to {high:.2g} for one batch)"
    )


def promote(
    current: Recipes,
    harm: dict[str, tuple[float, float, float]],
    shares: dict[str, float],
    alarms: int,
    *,
    candidates: Sequence[str],
    pinned: Mapping[str, Mapping[str, str]] | None = None,
) -> Recipes:
    """The formats after another alarm.

    Args:
        current: of the planned layers.
        harm: predicted cost of each GEMM in its present format; missing layers cost nothing.
        shares: of FLOPs, by layer.
        alarms: 1 for the first.
        candidates: what four bits go up to; bf16 where all have four.
        pinned: layer to the GEMMs that a rule fixes: they are left alone.
    """
    above = [name for name in candidates if RECIPES[name].bits >= 8] or ["bf16"]
    next_one, best = (find(above, key=lambda name: RECIPES[name].bits) for find in (min, max))
    fixed = pinned or {}
    gemms = [
        (harm.get(layer, (0.0, 0.0, 0.0))[j] / max(shares[layer], 1e-12), layer, j)
        for layer, recipes in current.items()
        for j, gemm in enumerate(GEMMS)
        if RECIPES[recipes[j]].bits < 16 and gemm not in fixed.get(layer, {})
    ]
    promoted, moved = {layer: list(recipes) for layer, recipes in current.items()}, 0.0
    for _, layer, j in sorted(gemms, key=lambda item: (-item[0], item[1], item[2])):
        has_four_bits = RECIPES[promoted[layer][j]].bits < 8
        if alarms >= 3:
            promoted[layer][j] = "bf16"
        elif alarms == 2:
            promoted[layer][j] = best if has_four_bits else promoted[layer][j]
        elif moved < MOVED_SHARE:
            promoted[layer][j] = next_one if has_four_bits else "bf16"
            moved += shares[layer] / len(GEMMS)
    return {layer: (row[0], row[1], row[2]) for layer, row in promoted.items()}


def learn(state: GuardState, before: Recipes, after: Recipes) -> None:
    """Count what was promoted as costlier from now on."""
    for layer, recipes in after.items():
        factors = state.penalties.get(layer, [1.0] * len(GEMMS))
        for j, (old, new) in enumerate(zip(before[layer], recipes, strict=True)):
            if old != new:
                factors[j] *= PENALTY
        if any(factor != 1.0 for factor in factors):
            state.penalties[layer] = factors
