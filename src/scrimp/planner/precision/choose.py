"""From a profile and a budget to a format for every GEMM.

The one place where statistics, policy, budget and solver meet. A decision is a GEMM, or a layer, which takes a row
of a menu: one format for its three GEMMs, or what another trainer runs together. What a user has
fixed by a rule is no decision, but counts in the budget (`budget`). Layers whose statistics are not finite keep
the highest format that was measured, unless they are fixed, and `without_statistics` names them.

Checked  tests/planner/precision/test_choose.py

Shapes: L layers, P formats, M rows of a menu.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError
from scrimp.planner.precision.budget import Budget
from scrimp.planner.precision.divergence import Method, Weights
from scrimp.planner.precision.kept_inputs import bf16_bytes, kept_bytes
from scrimp.planner.precision.policies import (
    costs_of,
    extremes,
    harm_of_lowest,
    is_per_gemm,
    last_blocks,
    order_of,
    order_of_gemms,
    protect,
    protect_blocks,
)
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.planner.solver import Limit, Program, Solution, UnreachableError, solve
from scrimp.precision import GEMMS, HIGH_PRECISION, recipe

Array = NDArray[np.float64]
LOW_BITS = 4
_MOST_NAMED = 8
_SAVED_WORDS = "what is kept of inputs for the backward pass, as a share of its bytes in bf16,"
_INDEX = {str(gemm): index for index, gemm in enumerate(GEMMS)}


@dataclass(frozen=True, eq=False)
class Question:
    """All that a choice depends on."""

    profile: PrecisionProfile
    budget: Budget
    policy: str = "snip"
    weights: Weights = field(default_factory=Weights)
    method: Method = field(default_factory=Method)
    stages: Sequence[int] | None = None
    """Pipeline stage of each layer; None: one."""
    seconds: Array | None = None
    """[L, 3, P], measured, of each GEMM in each format."""
    other_seconds: float = 0.0
    """Seconds that a step takes beside the planned GEMMs; they count in a budget of time."""
    bf16_seconds: Array | None = None
    """[L, 3], what a speed-up is over; None: the bf16 column of `seconds`."""
    allowed: NDArray[np.bool_] | None = None
    """[L, 3, P], formats that a GEMM may have."""
    together: Sequence[tuple[str, str, str]] | None = None
    """Recipes that a layer's fprop, dgrad and wgrad may have together; None: any."""
    saved: Sequence[tuple[str, ...]] | None = None
    """All that is kept of each layer's input whatever it runs in; empty where that is what its wgrad reads."""
    is_compiled: bool = False
    """Whether layers run in compiled graphs, which keep codes of all recipes in as many bytes."""
    penalties: Array | None = None
    """[L, 3], factors on costs: what earlier trouble taught."""
    current: NDArray[np.int64] | None = None
    """[L, 3], the current plan: ties keep it."""
    previous: Array | None = None
    """[L, 3, P], costs of the last choice: half of them count beside the new ones."""
    switching: Array | None = None
    """[L, 3, P], what leaving the current format costs: how unsure the statistics are."""


@dataclass(frozen=True, eq=False)
class Choice:
    """A format for every GEMM."""

    formats: NDArray[np.int64]
    """[L, 3], indices of the profile's formats."""
    costs: Array
    """[L, 3, P], without penalties and costs of switching; those of a layer's decision stand at its fprop."""
    fp4_flops: float
    """Share of the planned layers' FLOPs in 4 bits."""
    solution: Solution | None
    """None for a policy that orders layers."""

    def recipes(self, profile: PrecisionProfile) -> dict[str, tuple[str, str, str]]:
        """Layer to the recipes of fprop, dgrad and wgrad."""
        return {
            layer: (profile.formats[row[0]], profile.formats[row[1]], profile.formats[row[2]])
            for layer, row in zip(profile.layers, self.formats.tolist(), strict=True)
        }


def choose(question: Question) -> Choice:
    """Solve.

    Raises:
        PlanError: the budget cannot be reached (says what can), or the policy does not exist.
    """
    profile, policy = question.profile, question.policy
    if not is_solved(question):
        return _by_order(question, order_of(policy, profile.layers))
    costs, menu = _costs(question), menu_of(question)
    _refuse_split_layers(question, menu)
    program = _program(question, priced(question, costs))
    current = None if question.current is None else _decisions(question.current, menu)
    solution = solve(program, current=current)
    formats = solution.choices.reshape(-1, len(GEMMS)) if menu is None else menu[solution.choices]
    return Choice(formats, costs, share_in_4_bits(profile, formats), solution)


def menu_of(question: Question) -> NDArray[np.int64] | None:
    """[M, 3], what a layer's GEMMs may have, as indices of formats; None: each GEMM is a decision of its own.

    Raises:
        PlanError: no candidates go together.
    """
    formats = question.profile.formats
    menu: list[tuple[int, ...]] | None = None
    if question.together is not None:
        known = [row for row in question.together if set(row) <= set(formats)]
        menu = [tuple(formats.index(name) for name in row) for row in known]
    if not is_per_gemm(question.policy):
        whole: list[tuple[int, ...]] = [(p,) * len(GEMMS) for p in range(len(formats))]
        menu = whole if menu is None else [row for row in whole if row in menu]
    if menu is None:
        return None
    if not menu:
        alone = [row[0] for row in question.together or () if len(set(row)) == 1]
        raise PlanError(
            "no candidates go together in one layer where the plan is to run",
            got=", ".join(formats),
            expected=f"candidates such as {', '.join(alone)}",
        )
    return np.array(menu, dtype=np.int64)


def _refuse_split_layers(question: Question, menu: NDArray[np.int64] | None) -> None:
    """Refuse rules that no row of the menu keeps."""
    if menu is None:
        return
    has_one: list[bool] = np.any(_by_menu(allowed_in(question), menu, np.logical_and), axis=1).tolist()
    split = [layer for layer, is_whole in zip(question.profile.layers, has_one, strict=True) if not is_whole]
    if split and question.together is not None:
        raise PlanError(
            "rules fix GEMMs to formats that do not go together where the plan is to run",
            got=", ".join(split[:4]),
            do="fix whole layers, to a format of the target",
        )
    if split:
        raise PlanError(
            f"{question.policy} gives a layer one format, and rules fix its GEMMs to different ones",
            got=", ".join(split[:4]),
            do="use the policy snip, or fix whole layers",
        )


def is_solved(question: Question) -> bool:
    """Whether the policy has costs to solve with, or names layers in an order of its own."""
    policy, profile = question.policy, question.profile
    names_layers = policy == "last-blocks" or policy in profile.formats
    return not names_layers and order_of(policy, profile.layers) is None


def is_within(question: Question, formats: NDArray[np.int64]) -> bool:
    """Whether a plan keeps the budget, and gives no GEMM a format that it may not have."""
    program = _program(question, priced(question, _costs(question)))
    chosen = _decisions(formats, menu_of(question))
    if chosen is None:
        return False
    rows = np.arange(len(chosen))
    totals = [(limit, float(np.asarray(limit.amounts)[rows, chosen].sum())) for limit in program.limits]
    fits = all(limit.least - 1e-9 <= total <= limit.most + 1e-9 for limit, total in totals)
    return fits and bool(np.isfinite(program.costs[rows, chosen]).all())


def harm_of(costs: Array, formats: NDArray[np.int64]) -> float:
    """Summed costs of a plan, from [L, 3, P]."""
    return float(np.take_along_axis(costs, formats[:, :, None], axis=2).sum())


def _costs(question: Question) -> Array:
    """[L, 3, P] by the policy, smoothed with those of the last choice."""
    costs = costs_of(question.policy, question.profile, weights=question.weights, method=question.method)
    spread = _spread(costs, len(question.profile.layers), is_per_gemm(question.policy))
    if question.previous is None or question.previous.shape != spread.shape:
        return spread
    return 0.5 * spread + 0.5 * question.previous


def priced(question: Question, costs: Array) -> Array:
    """What is minimised: with penalties, costs of switching, and without what is not allowed."""
    if question.penalties is not None:
        # A layer's cost stands at its fprop: trouble with any of its GEMMs counts there.
        factors = question.penalties
        if not is_per_gemm(question.policy):
            factors = np.broadcast_to(factors.max(axis=1, keepdims=True), factors.shape)
        costs = costs * factors[:, :, None]
    if question.switching is not None:
        costs = costs + question.switching
    return np.where(allowed_in(question), costs, np.inf)


def share_in_4_bits(profile: PrecisionProfile, formats: NDArray[np.int64]) -> float:
    """Share of the planned layers' FLOPs that run in 4 bits."""
    low = is_low(profile.formats)
    return float((profile.flops[:, None] / len(GEMMS) * low[formats]).sum())


def share_of_saved_bytes(question: Question, formats: NDArray[np.int64]) -> float:
    """What a plan keeps of all inputs, as a share of their bytes in bf16."""
    amounts = _saved_amounts(question, np.ones(len(question.profile.layers), dtype=bool))
    return float(np.take_along_axis(amounts, formats[:, :, None], axis=2).sum())


def _saved_amounts(question: Question, inside: NDArray[np.bool_]) -> Array:
    """[L, 3, P], share of the bytes in bf16 of the inputs of the layers inside, [L], that a GEMM adds."""
    profile = question.profile
    kept = kept_bytes(profile, question.saved, compiled=question.is_compiled)
    shares: Array = np.where(inside[:, None, None], kept, 0.0) / bf16_bytes(profile)[inside].sum()
    return shares


def low_flops(question: Question) -> Array:
    """[L, 3, P], share of the planned layers' FLOPs that a GEMM adds in 4 bits."""
    profile = question.profile
    flops = profile.flops[:, None, None] / len(GEMMS) * is_low(profile.formats)[None, None, :]
    return np.broadcast_to(flops, (len(profile.layers), len(GEMMS), len(profile.formats)))


def is_low(formats: Sequence[str]) -> NDArray[np.bool_]:
    """[P], which formats have 4 bits."""
    return np.array([recipe(name).bits <= LOW_BITS for name in formats])


def allowed_by(
    layers: Sequence[str], formats: Sequence[str], pinned: Mapping[str, Mapping[str, str]]
) -> NDArray[np.bool_]:
    """[L, 3, P], all formats but where a GEMM is pinned to one.

    Args:
        pinned: layer to GEMM to recipe.
    """
    allowed = np.ones((len(layers), len(GEMMS), len(formats)), dtype=bool)
    for layer, gemms in pinned.items():
        for gemm, name in gemms.items():
            if name not in formats:
                raise PlanError(
                    f"{layer}.{gemm} is fixed to a format that was not measured",
                    got=name,
                    expected=", ".join(formats),
                )
            row = allowed[layers.index(layer), _INDEX[gemm]]
            row[:] = False
            row[formats.index(name)] = True
    return allowed


def allowed_in(question: Question) -> NDArray[np.bool_]:
    """[L, 3, P], formats that each GEMM may have: of layers without statistics the highest alone."""
    profile = question.profile
    shape = (len(profile.layers), len(GEMMS), len(profile.formats))
    allowed = np.ones(shape, dtype=bool) if question.allowed is None else question.allowed.copy()
    safest = _safest(profile)
    for layer in profile.unusable():
        open_ = allowed[profile.layers.index(layer)]
        open_[open_.sum(axis=1) > 1] = np.arange(shape[2]) == safest
    return allowed


def _safest(profile: PrecisionProfile) -> int:
    return max(range(len(profile.formats)), key=lambda p: recipe(profile.formats[p]).bits)


def without_statistics(question: Question) -> str:
    """Which layers were not planned, as their statistics are not finite, and what they run in; "" for none."""
    profile, allowed = question.profile, question.allowed
    layers = [
        layer
        for layer in profile.unusable()
        if allowed is None or (allowed[profile.layers.index(layer)].sum(axis=1) > 1).any()
    ]
    if not layers or len(profile.formats) < 2:
        return ""
    subject, verb = ("1 layer", "it stays") if len(layers) == 1 else (f"{len(layers)} layers", "they stay")
    more = f" and {len(layers) - _MOST_NAMED} more" if len(layers) > _MOST_NAMED else ""
    named = ", ".join(layers[:_MOST_NAMED]) + more
    return f"statistics of {subject} are not finite, {verb} in {profile.formats[_safest(profile)]}: {named}"


def _spread(costs: Array, num_layers: int, per_gemm: bool) -> Array:
    """[L, 3, P]; the cost of a whole layer is put on its fprop."""
    if per_gemm:
        return costs.reshape(num_layers, len(GEMMS), -1)
    spread = np.zeros((num_layers, len(GEMMS), costs.shape[-1]))
    spread[:, 0] = costs
    return spread


def _decisions(formats: NDArray[np.int64], menu: NDArray[np.int64] | None) -> NDArray[np.int64] | None:
    """[N] from a plan's formats [L, 3]; None where a layer's are not on the menu."""
    if menu is None:
        return formats.reshape(-1)
    is_row = (formats[:, None, :] == menu[None, :, :]).all(axis=2)
    return is_row.argmax(axis=1) if is_row.any(axis=1).all() else None


def _program(question: Question, costs: Array) -> Program:
    profile, budget = question.profile, question.budget
    low = low_flops(question)
    if budget.divergence is not None:
        return _within_harm(question, costs, low)
    stages = _stages(question)
    many = len(set(stages.tolist())) > 1
    limits = []
    for stage in sorted(set(stages.tolist())):
        inside, where = stages == stage, f" of stage {stage}" if many else ""
        if budget.fp4_flops is not None:
            total = float(profile.flops[inside].sum())
            amounts = by_decision(question, np.where(inside[:, None, None], low, 0.0)) / total
            limits.append(Limit(f"the share of FLOPs in 4 bits{where}", amounts, least=budget.fp4_flops))
        elif budget.saved_bytes is not None:
            amounts = by_decision(question, _saved_amounts(question, inside))
            limits.append(Limit(f"{_SAVED_WORDS}{where}", amounts, most=budget.saved_bytes))
        else:
            limits.append(_time_limit(question, inside, where))
    return Program(by_decision(question, costs), tuple(limits))


def _within_harm(question: Question, costs: Array, low: Array) -> Program:
    """The fastest plan, or the one with most FLOPs in 4 bits, under a share of what the lowest format costs."""
    harm, most = by_decision(question, costs), question.budget.divergence
    gain = by_decision(question, low.max() - low if question.seconds is None else question.seconds)
    slowness = np.where(np.isfinite(harm), gain, np.inf)
    if most is None or np.isinf(most):
        return Program(slowness)
    whole = harm_of_lowest(question.policy, question.profile, question.weights)
    return Program(slowness, (Limit("the predicted divergence", _finite(harm) / whole, most=most),))


def _time_limit(question: Question, inside: NDArray[np.bool_], where: str) -> Limit:
    """What the planned GEMMs of a pipeline stage may take; `inside` is [L]."""
    budget, seconds, other = question.budget, question.seconds, question.other_seconds
    name, value = next(iter(budget.given.items()))
    if seconds is None:
        raise PlanError(f"budget {name} needs measured times of the GEMMs", got="none")
    in_bf16 = 0.0
    if budget.speedup is not None:
        in_bf16 = float(_in_bf16(question, seconds)[inside].sum())
        where += f", for a speedup of {value:g} over {other + in_bf16:.3g} s with GEMMs in bf16"
    if other:
        where += f", beside {other:.3g} s of other work"
    return Limit(
        f"the seconds per step of all planned GEMMs{where}",
        by_decision(question, np.where(inside[:, None, None], seconds, 0.0)),
        most=budget.seconds_left(other, in_bf16),
    )


def _in_bf16(question: Question, seconds: Array) -> Array:
    """[L, 3]."""
    if question.bf16_seconds is not None:
        return question.bf16_seconds
    formats = question.profile.formats
    if "bf16" not in formats:
        raise PlanError(
            "budget speedup is over bf16, whose times are not in the table",
            got=f"times of {', '.join(formats)}",
            expected="a column of bf16 too",
            do="measure with bf16 among the formats, or give step_seconds",
        )
    return seconds[:, :, formats.index("bf16")]


def by_decision(question: Question, values: Array) -> Array:
    """[N, P] or [N, M], a row per decision, from what each GEMM has in each format, [L, 3, P]."""
    menu = menu_of(question)
    return values.reshape(-1, values.shape[-1]) if menu is None else _by_menu(values, menu, np.add)


def _by_menu(values: NDArray[Any], menu: NDArray[np.int64], join: np.ufunc) -> NDArray[Any]:
    """[L, M], the three GEMMs of a layer joined."""
    joined: NDArray[Any] = join.reduce([values[:, gemm, menu[:, gemm]] for gemm in range(len(GEMMS))])
    return joined


def _stages(question: Question) -> NDArray[np.int64]:
    """[L]."""
    if question.stages is None:
        return np.zeros(len(question.profile.layers), dtype=np.int64)
    return np.asarray(question.stages, dtype=np.int64)


def _finite(values: Array) -> Array:
    return np.where(np.isfinite(values), values, 0.0)


def _by_order(question: Question, order: Sequence[int] | None) -> Choice:
    """Policies that name layers or GEMMs: uniform, an order of protection, NVIDIA's last blocks."""
    profile, policy = question.profile, question.policy
    high, low = extremes(profile.formats)
    chosen = np.full(len(profile.layers), low)
    if policy in profile.formats:
        chosen[:] = profile.formats.index(policy)
    elif order is None:
        plain = [p for p, name in enumerate(profile.formats) if name in HIGH_PRECISION]
        chosen[last_blocks(profile.layers, profile.flops)] = plain[0] if plain else high
    else:
        return _of_gemms(question, np.where(_protected(question, order, low), high, low))
    return _of_gemms(question, np.repeat(chosen[:, None], len(GEMMS), 1))


def _of_gemms(question: Question, chosen: NDArray[np.int64]) -> Choice:
    """A choice of formats [L, 3] where they are allowed."""
    profile, policy = question.profile, question.policy
    formats = _as_allowed(chosen, allowed_in(question), profile.formats)
    if question.together is not None and _decisions(formats, menu_of(question)) is None:
        used = dict.fromkeys(profile.formats[p] for p in formats.reshape(-1).tolist())
        raise PlanError(
            f"the formats of policy {policy} do not go together where the plan is to run",
            got=", ".join(used),
            do="use the policy snip or snip-layer, or other candidates",
        )
    shape = (len(profile.layers), len(GEMMS), len(profile.formats))
    return Choice(formats, np.zeros(shape), share_in_4_bits(profile, formats), None)


def _protected(question: Question, order: Sequence[int], low: int) -> NDArray[np.bool_]:
    """[L, 3], which GEMMs an order keeps from 4 bits, stage by stage; what may not have them anyway is kept first."""
    profile, share = question.profile, question.budget.fp4_flops
    if share is None:
        raise PlanError(
            f"{question.policy} knows only a share of FLOPs in 4 bits", expected="budget fp4_flops"
        )
    can_be_low = allowed_in(question)[:, :, low] * is_low(profile.formats)[low]
    kept = np.zeros(can_be_low.shape, dtype=bool)
    stages = _stages(question)
    for stage in set(stages.tolist()):
        inside = stages == stage
        flops = (profile.flops * inside / profile.flops[inside].sum())[:, None] / len(GEMMS) * can_be_low
        most = float(flops.sum())
        if most < share - 1e-9:
            raise UnreachableError(
                "no plan can meet the share of FLOPs in 4 bits",
                got=f"at most {most:g}",
                expected=f"{share:g}",
            )
        kept |= inside[:, None] & _kept_of_stage(
            question, [i for i in order if inside[i]], flops, share + 1.0 - most
        )
    return kept


def _kept_of_stage(
    question: Question, order: Sequence[int], flops: Array, unprotected: float
) -> NDArray[np.bool_]:
    """[L, 3], of one stage: whole layers in order, then single GEMMs where the plan may split layers.

    Args:
        flops: [L, 3], shares of those that can be in 4 bits.
    """
    policy, layers = question.policy, flops.sum(axis=1)
    if policy == "last-blocks-matched":
        whole = protect_blocks(question.profile.layers, layers, unprotected)
        return np.repeat(whole[:, None], len(GEMMS), 1)
    whole = np.zeros(len(layers), dtype=bool)
    if not is_per_gemm(policy):
        whole = protect(order, layers, unprotected)
    kept = np.repeat(whole[:, None], len(GEMMS), 1)
    if question.together is not None and not is_per_gemm(policy):
        return kept
    gemms = order_of_gemms(policy, order, np.flatnonzero(~whole).tolist())
    left = unprotected + float(layers[whole].sum())
    return kept | protect(gemms, flops.reshape(-1), left).reshape(kept.shape)


def _as_allowed(
    formats: NDArray[np.int64], allowed: NDArray[np.bool_], names: Sequence[str]
) -> NDArray[np.int64]:
    """[L, 3], with the highest allowed format where the chosen one is not allowed."""
    bits = np.array([recipe(name).bits for name in names])
    highest = np.where(allowed, bits, -1).argmax(axis=2)
    return np.where(np.take_along_axis(allowed, formats[:, :, None], axis=2)[:, :, 0], formats, highest)
