"""Choices against every possible plan: cheapest within the budget, and nothing that was not allowed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import FORMATS, names, profile, with_statistics
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.planner.precision.choose import (
    Budget,
    Choice,
    Question,
    allowed_by,
    choose,
    harm_of,
    is_low,
    is_within,
    share_in_4_bits,
)
from scrimp.planner.precision.policies import costs_of, order_of, protect
from scrimp.planner.precision.profile import PrecisionProfile

FAST = examples(12)
SHARE = Budget(fp4_flops=0.5)
BF16, FP8, FP4 = range(3)


def share(made: PrecisionProfile, formats: np.ndarray) -> float:
    """The share of FLOPs in 4 bits, counted GEMM by GEMM."""
    total = spent = 0.0
    for (outputs, inputs), row in zip(made.shapes, formats.tolist(), strict=True):
        for p in row:
            total += outputs * inputs
            spent += outputs * inputs * (made.formats[p] == "nvfp4")
    return spent / total


def plans(made: PrecisionProfile, per_gemm: bool) -> list[np.ndarray]:
    """All, [L, 3]."""
    count = 3 * len(made.layers) if per_gemm else len(made.layers)
    every = itertools.product(range(len(made.formats)), repeat=count)
    return [
        np.array(one).reshape(-1, 3) if per_gemm else np.repeat(np.array(one)[:, None], 3, 1) for one in every
    ]


def cost(question: Question, formats: np.ndarray) -> float:
    """The cost by the policy alone."""
    costs = costs_of(question.policy, question.profile, weights=question.weights, method=question.method)
    if question.policy == "snip":
        return float(costs[np.arange(len(costs)), formats.reshape(-1)].sum())
    return float(costs[np.arange(len(costs)), formats[:, 0]].sum())


# -- budgets -----------------------------------------------------------------------------------


@FAST
@given(
    st.integers(0, 10**6),
    st.floats(0, 1),
    st.sampled_from(["snip", "snip-layer", "snip-paper", "min-rel-err"]),
)
def test_no_plan_with_enough_flops_in_4_bits_is_cheaper(seed: int, least: float, policy: str) -> None:
    made = profile(2 if policy == "snip" else 4, seed=seed)
    question = Question(made, Budget(fp4_flops=least), policy)
    choice = choose(question)
    assert share(made, choice.formats) >= least - 1e-6
    assert choice.fp4_flops == pytest.approx(share(made, choice.formats))
    best = min(
        cost(question, f) for f in plans(made, policy == "snip") if share(made, f) >= least * (1 - 1e-9)
    )
    assert cost(question, choice.formats) <= best * (1 + 1e-3) + 1e-12
    assert harm_of(choice.costs, choice.formats) == pytest.approx(cost(question, choice.formats))
    assert is_within(question, choice.formats)


@FAST
@given(st.integers(0, 10**6), st.floats(0, 1), st.sampled_from(["snip", "snip-layer", "min-rel-err"]))
def test_what_goes_together_in_a_layer_is_kept_and_nothing_on_that_menu_is_cheaper(
    seed: int, least: float, policy: str
) -> None:
    made = profile(3, seed=seed)
    together = [("nvfp4", "nvfp4", "nvfp4"), ("fp8", "fp8", "bf16"), ("fp8", "fp8", "fp8"), ("mxfp8",) * 3]
    question = Question(made, Budget(fp4_flops=least), policy, together=together)
    choice = choose(question)
    assert all(row in together for row in choice.recipes(made).values())
    on_menu = [
        formats
        for formats in plans(made, False) + ([] if policy != "snip" else list(_mixed_plans(made)))
        if all(tuple(made.formats[p] for p in row) in together for row in formats.tolist())
        and share(made, formats) >= least * (1 - 1e-9)
    ]
    assert share(made, choice.formats) >= least - 1e-6
    assert cost(question, choice.formats) <= min(cost(question, f) for f in on_menu) * (1 + 1e-3) + 1e-12
    assert is_within(question, choice.formats)
    assert not is_within(question, np.full((3, 3), BF16)), "bf16 alone is not on the menu"


def _mixed_plans(made: PrecisionProfile) -> Iterator[np.ndarray]:
    rows = [np.full(3, BF16), np.full(3, FP8), np.full(3, FP4), np.array([FP8, FP8, BF16])]
    return (np.array(one) for one in itertools.product(rows, repeat=len(made.layers)))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"together": [("mxfp8",) * 3]}, "no candidates go together.*such as mxfp8"),
        ({"together": [("fp8",) * 3], "policy": "nvfp4"}, "policy nvfp4 do not go together"),
        ({"together": [("fp8",) * 3], "budget": SHARE}, "share of FLOPs in 4 bits"),
    ],
)
def test_a_menu_that_leaves_no_plan_is_refused(options: dict[str, Any], words: str) -> None:
    made = profile(2)
    with pytest.raises(PlanError, match=words):
        choose(Question(**{"profile": made, "budget": Budget(fp4_flops=0.0), **options}))


def test_rules_that_no_row_of_the_menu_keeps_are_named() -> None:
    made = profile(2)
    allowed = allowed_by(made.layers, made.formats, {made.layers[1]: {"fprop": "fp8", "dgrad": "nvfp4"}})
    together = [("fp8",) * 3, ("nvfp4",) * 3]
    with pytest.raises(PlanError, match=f"do not go together.*{made.layers[1]}"):
        choose(Question(made, Budget(fp4_flops=0.0), allowed=allowed, together=together))


@FAST
@given(st.integers(0, 10**6), st.floats(0, 1))
@pytest.mark.slow
def test_no_plan_within_the_seconds_is_cheaper(seed: int, tightness: float) -> None:
    made = profile(2, seed=seed)
    seconds = np.random.default_rng(seed).uniform(1, 2, (2, 3, 3)) * np.array([4.0, 2.0, 1.0])
    fastest, slowest = seconds.min(-1).sum(), seconds.max(-1).sum()
    budget = Budget(step_seconds=float(fastest + tightness * (slowest - fastest)))
    question = Question(made, budget, seconds=seconds)
    choice = choose(question)

    def spent(formats: np.ndarray) -> float:
        return float(np.take_along_axis(seconds, formats[:, :, None], 2).sum())

    assert spent(choice.formats) <= (budget.step_seconds or 0) * (1 + 1e-6)
    best = min(cost(question, f) for f in plans(made, True) if spent(f) <= (budget.step_seconds or 0) + 1e-9)
    assert cost(question, choice.formats) <= best * (1 + 1e-3) + 1e-12


@FAST
@given(st.integers(0, 10**6), st.floats(0, 1), st.booleans())
@pytest.mark.slow
def test_no_plan_within_that_share_of_the_lowest_formats_harm_is_faster(
    seed: int, harm: float, has_times: bool
) -> None:
    made = profile(2, seed=seed)
    seconds = np.random.default_rng(seed).uniform(1, 2, (2, 3, 3)) if has_times else None
    question = Question(made, Budget(divergence=harm), seconds=seconds)
    choice = choose(question)

    def slowness(formats: np.ndarray) -> float:
        if seconds is None:
            return 1 - share(made, formats)
        return float(np.take_along_axis(seconds, formats[:, :, None], 2).sum())

    whole = cost(question, np.full((2, 3), FP4))
    assert cost(question, choice.formats) <= harm * whole + 1e-6
    best = min(slowness(f) for f in plans(made, True) if cost(question, f) <= harm * whole)
    assert slowness(choice.formats) <= best * (1 + 1e-3) + (0.0 if has_times else 0.006)  # the solver's gap


@pytest.mark.parametrize("policy", ["snip", "snip-layer", "first-last"])
def test_every_stage_has_its_share(policy: str) -> None:
    made = profile(names(4), seed=3, shapes=[(8, 8)] * 16)
    stages = [0] * 8 + [1] * 4 + [2] * 4
    choice = choose(Question(made, Budget(fp4_flops=0.5), policy, stages=stages))
    for stage in range(3):
        inside = np.array(stages) == stage
        assert (choice.formats[inside] == FP4).mean() >= 0.5 - 1e-9
    alone = choose(Question(made, Budget(fp4_flops=0.5), policy))
    assert (alone.formats == FP4).mean() >= 0.5 - 1e-9
    assert (alone.formats != choice.formats).any()


def test_every_stage_has_its_seconds() -> None:
    made = profile(4, shapes=[(8, 8)] * 4)
    seconds = np.broadcast_to(np.array([4.0, 2.0, 1.0]), (4, 3, 3))
    stages = [0, 0, 0, 1]
    choice = choose(Question(made, Budget(step_seconds=12.0), stages=stages, seconds=seconds))
    spent = np.take_along_axis(seconds, choice.formats[:, :, None], 2)[:, :, 0].sum(1)
    assert spent[:3].sum() <= 12.0
    assert spent[3] == 12.0  # which fits with everything in bf16, and costs nothing


# -- what is not free --------------------------------------------------------------------------


def test_fixed_gemms_stay_and_count() -> None:
    made = profile(4, shapes=[(8, 8)] * 4)
    pinned = {made.layers[0]: {"fprop": "bf16", "wgrad": "nvfp4"}, made.layers[3]: {"dgrad": "fp8"}}
    allowed = allowed_by(made.layers, made.formats, pinned)
    assert allowed.sum() == 4 * 3 * 3 - 2 * 3
    question = Question(made, Budget(fp4_flops=10 / 12), allowed=allowed)
    choice = choose(question)
    # 10 of 12 GEMMs in 4 bits, and two may not be: all others are.
    expected = np.full((4, 3), FP4)
    expected[0, 0], expected[3, 1] = BF16, FP8
    assert np.array_equal(choice.formats, expected)
    assert is_within(question, expected)
    assert not is_within(question, np.full((4, 3), FP4))
    assert not is_within(question, np.full((4, 3), BF16))
    with pytest.raises(PlanError, match=r"share of FLOPs in 4 bits.*0\.83333.*0\.9"):
        choose(replace(question, budget=Budget(fp4_flops=0.9)))


@pytest.mark.parametrize("policy", ["first-last", "layer-type", "last-blocks", "fp8", "nvfp4", "snip-layer"])
def test_no_policy_takes_a_format_that_is_not_allowed(policy: str) -> None:
    made = profile(names(4), shapes=[(8, 8)] * 16)
    pinned = {
        "blocks.0.mlp.down": dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16"),
        "blocks.2.attention.qkv": dict.fromkeys(("fprop", "dgrad", "wgrad"), "nvfp4"),
        "blocks.1.mlp.down": dict.fromkeys(("fprop", "dgrad", "wgrad"), "fp8"),
    }
    choice = choose(
        Question(made, Budget(fp4_flops=0.75), policy, allowed=allowed_by(made.layers, made.formats, pinned))
    )
    recipes = choice.recipes(made)
    for layer, gemms in pinned.items():
        assert recipes[layer] == tuple(gemms.values())
    if policy in ("first-last", "layer-type", "snip-layer"):
        assert 0.75 <= share_in_4_bits(made, choice.formats) < 0.76


def test_an_order_counts_what_is_fixed_in_its_budget() -> None:
    made = profile(names(2), shapes=[(8, 8)] * 8)
    pinned = {"blocks.1.mlp.gate_up": dict.fromkeys(("fprop", "dgrad", "wgrad"), "bf16")}
    question = Question(
        made, Budget(fp4_flops=0.75), "layer-type", allowed=allowed_by(made.layers, made.formats, pinned)
    )
    recipes = choose(question).recipes(made)
    high = [layer for layer, row in recipes.items() if row != ("nvfp4",) * 3]
    assert high == ["blocks.1.mlp.gate_up", "blocks.1.mlp.down"]  # without it both downs would have been kept
    with pytest.raises(PlanError, match=r"share of FLOPs in 4 bits - got at most 0\.875, expected 0\.9"):
        choose(replace(question, budget=Budget(fp4_flops=0.9)))


def test_a_gemm_cannot_be_fixed_to_what_was_not_measured() -> None:
    made = profile(1)
    with pytest.raises(PlanError, match=r"blocks\.0\.layer\.fprop is fixed .* got mxfp4, expected bf16, fp8"):
        allowed_by(made.layers, made.formats, {"blocks.0.layer": {"fprop": "mxfp4"}})


def without_statistics(value: float, layer: int = 1) -> PrecisionProfile:
    """One block, in which one number of one layer is none."""
    made = profile(names(1), shapes=[(8, 8)] * 4)
    errors = made.batches[0].errors.copy()
    errors[layer, 1, 2, 0] = value
    return with_statistics(made, errors=errors, results=errors)


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize(
    "policy", ["snip", "snip-layer", "snip-paper", "min-abs-err", "random:1", "first-last", "nvfp4"]
)
def test_layers_with_statistics_that_are_none_keep_the_highest_format(policy: str, value: float) -> None:
    choice = choose(Question(without_statistics(value), SHARE, policy))
    assert (choice.formats[1] == BF16).all()
    assert (choice.formats[[0, 2, 3]] == FP4).any()
    assert np.isfinite(choice.costs).all()


@pytest.mark.parametrize("policy", ["snip", "first-last", "nvfp4"])
def test_but_what_is_fixed_is_fixed(policy: str) -> None:
    made = without_statistics(np.nan)
    allowed = allowed_by(made.layers, made.formats, {made.layers[1]: {"wgrad": "fp8"}})
    assert choose(Question(made, SHARE, policy, allowed=allowed)).formats[1].tolist() == [BF16, BF16, FP8]


def test_where_nothing_is_known_no_budget_of_flops_can_be_reached() -> None:
    made = with_statistics(profile(2), loss=np.nan)
    with pytest.raises(PlanError, match="share of FLOPs in 4 bits"):
        choose(Question(made, SHARE))
    assert (choose(Question(made, Budget(divergence=1.0))).formats == BF16).all()


# -- what changes costs ------------------------------------------------------------------------


def test_penalties_make_gemms_dearer() -> None:
    made = profile(4, shapes=[(8, 8)] * 4, seed=1)
    question = Question(made, SHARE)
    low = np.argwhere(choose(question).formats == FP4)
    penalties = np.ones((4, 3))
    penalties[tuple(low[0])] = 1e6
    found = choose(replace(question, penalties=penalties))
    assert found.formats[tuple(low[0])] != FP4
    assert np.array_equal(found.costs, choose(question).costs)


@pytest.mark.parametrize("gemm", range(3))
def test_trouble_with_any_gemm_makes_a_layer_dearer(gemm: int) -> None:
    made = profile(4, shapes=[(8, 8)] * 4, seed=1)
    question = Question(made, SHARE, "snip-layer")
    layer = int(np.argmax(choose(question).formats[:, 0] == FP4))
    penalties = np.ones((4, 3))
    penalties[layer, gemm] = 1e6
    assert choose(replace(question, penalties=penalties)).formats[layer, 0] != FP4


def test_costs_of_switching_keep_the_current_plan() -> None:
    made = profile(4, shapes=[(8, 8)] * 4, seed=1)
    best = choose(Question(made, SHARE)).formats
    current = np.roll(best, 1, axis=0)
    switching = np.where(np.arange(3) == current[:, :, None], 0.0, 1e3)
    found = choose(Question(made, SHARE, current=current, switching=switching))
    assert np.array_equal(found.formats, current)


def test_ties_keep_the_current_plan() -> None:
    made = profile(4, formats=("fp8", "nvfp4"), shapes=[(8, 8)] * 4)
    flat = np.ones_like(made.batches[0].errors)
    even = with_statistics(
        made,
        errors=flat,
        results=flat,
        losses=np.zeros_like(made.batches[0].losses),
        forward=np.ones((2, 2, 6, 4)),
        backward=np.ones((2, 2, 6, 4)),
        sensitivity=np.ones((2, 6)),
        curvature=np.zeros(4),
        **dict.fromkeys(("x", "w", "y", "g", "gx", "gw"), np.ones(4)),
    )
    for seed in range(5):
        current = np.random.default_rng(seed).permutation([0, 1] * 6).reshape(4, 3)
        assert np.array_equal(choose(Question(even, SHARE, current=current)).formats, current)


def test_costs_of_the_last_choice_count_half() -> None:
    made = profile(4, seed=1)
    question, previous = Question(made, SHARE), np.random.default_rng(0).uniform(size=(4, 3, 3))
    before, after = choose(question).costs, choose(replace(question, previous=previous)).costs
    assert np.allclose(after, 0.5 * before + 0.5 * previous)
    other_shape = choose(replace(question, previous=previous[:, :, :2])).costs
    assert np.array_equal(other_shape, before)


# -- policies that order layers ----------------------------------------------------------------


@pytest.mark.parametrize("policy", ["first-last", "layer-type"])
@pytest.mark.parametrize("least", [0.25, 0.5, 0.75, 0.8])
def test_orders_protect_while_there_is_room(policy: str, least: float) -> None:
    made = profile(names(3), seed=2)
    choice = choose(Question(made, Budget(fp4_flops=least), policy))
    order = order_of(policy, made.layers)
    assert order is not None
    kept = protect(order, made.flops, least)
    assert (choice.formats[kept] == FP8).all()
    assert not (choice.formats[~kept] == FP8).all(axis=1).any(), "a layer that fits is kept whole"
    assert np.isin(choice.formats, (FP8, FP4)).all()
    assert_filled(made, choice.formats, least)
    assert choice.solution is None
    whole = choose(Question(made, Budget(fp4_flops=least), policy, together=[("fp8",) * 3, ("nvfp4",) * 3]))
    assert np.array_equal(whole.formats, np.repeat(np.where(kept, FP8, FP4)[:, None], 3, 1))


def assert_filled(made: PrecisionProfile, formats: np.ndarray, least: float) -> None:
    """The budget is kept, and no further GEMM could leave 4 bits."""
    found = share(made, formats)
    smallest = min(flops / 3 for flops, row in zip(made.flops, formats == FP4, strict=True) if row.any())
    assert least - 1e-9 <= found < least + smallest


@pytest.mark.parametrize("least", [0.25, 0.5, 0.7, 0.75, 0.9])
def test_forward_products_are_protected_from_both_ends_before_any_backward_product(least: float) -> None:
    made = profile(names(3), seed=2)
    found = choose(Question(made, Budget(fp4_flops=least), "backward-first")).formats
    assert_filled(made, found, least)
    order = order_of("first-last", made.layers)
    assert order is not None
    fprop_only = protect(order, made.flops / 3, least)
    assert np.array_equal(found[:, 0] == FP8, fprop_only)
    room = 1 - least - (made.flops / 3)[fprop_only].sum()
    assert ((found[:, 1:] == FP4) | (made.flops[:, None] / 3 <= room + 1e-9)).all(), "what fprop leaves"


@FAST
@given(st.integers(0, 10**6), st.floats(0, 1))
def test_orders_of_pipeline_stages_fill_each_stage(seed: int, least: float) -> None:
    made = profile(names(2), seed=seed)
    stages = [0] * 4 + [1] * 4
    for policy in ("first-last", "layer-type", "backward-first"):
        found = choose(Question(made, Budget(fp4_flops=least), policy, stages=stages)).formats
        for stage in (0, 1):
            inside = np.array(stages) == stage
            low = (made.flops[inside, None] / 3 * (found[inside] == FP4)).sum() / made.flops[inside].sum()
            assert low >= least - 1e-9


def test_the_last_blocks_are_in_the_reference_format_whatever_the_budget() -> None:
    made = profile(names(10), shapes=[(8, 8)] * 40)
    for budget in (Budget(fp4_flops=0.25), Budget(fp4_flops=1.0)):
        found = choose(Question(made, budget, "last-blocks"))
        assert (found.formats[:32] == FP4).all()
        assert (found.formats[32:] == BF16).all()
        assert found.fp4_flops == pytest.approx(0.8)
    without = made.select(("nvfp4", "fp8"))
    assert (choose(Question(without, SHARE, "last-blocks")).formats[32:] == 1).all()


@pytest.mark.parametrize("policy", FORMATS)
def test_uniform_plans_are_uniform(policy: str) -> None:
    made = profile(3)
    choice = choose(Question(made, SHARE, policy))
    assert set(choice.recipes(made).values()) == {(policy,) * 3}
    assert choice.fp4_flops == pytest.approx(float(policy == "nvfp4"))


def test_an_order_needs_a_share_of_flops() -> None:
    with pytest.raises(PlanError, match="first-last knows only a share of FLOPs"):
        choose(Question(profile(names(1)), Budget(divergence=1.0), "first-last"))


# -- refusals ----------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["snip", "snip-layer", "first-last"])
def test_a_budget_out_of_reach_says_what_can_be_reached(policy: str) -> None:
    made = profile(4, formats=("bf16", "fp8"))
    with pytest.raises(PlanError, match=r"share of FLOPs in 4 bits.*at most 0.*0\.5"):
        choose(Question(made, SHARE, policy))


def test_seconds_out_of_reach_say_what_can_be_reached() -> None:
    made = profile(2)
    seconds = np.ones((2, 3, 3))
    with pytest.raises(PlanError, match=r"seconds per step.*at least 6.*at most 5"):
        choose(Question(made, Budget(step_seconds=5.0), seconds=seconds))
    with pytest.raises(PlanError, match="needs measured times"):
        choose(Question(made, Budget(step_seconds=5.0)))


def test_unknown_policies_are_refused() -> None:
    with pytest.raises(PlanError, match="there is no such policy - got snap"):
        choose(Question(profile(2), SHARE, "snap"))


def test_formats_of_4_bits_are_known() -> None:
    assert is_low(("bf16", "fp8", "nvfp4", "mxfp4", "fp4", "mxfp8")).tolist() == [
        False,
        False,
        True,
        True,
        True,
        False,
    ]
    assert isinstance(choose(Question(profile(1), SHARE)), Choice)


def test_one_format_per_layer_does_not_go_with_rules_that_split_a_layer() -> None:
    made = profile(names(1))
    layer = made.layers[0]
    allowed = allowed_by(made.layers, made.formats, {layer: {"fprop": "fp8", "wgrad": "nvfp4"}})
    with pytest.raises(PlanError, match="different ones") as error:
        choose(Question(made, SHARE, "snip-layer", allowed=allowed))
    assert layer in str(error.value.got)
    assert choose(Question(made, SHARE, "snip", allowed=allowed)).formats[0, 0] == FP8
