"""The cost of deciding otherwise, against a plain search over all moves."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.precision import GEMMS, RECIPES
from scrimp.report.precision_choices import (
    certainty_of,
    flop_shares,
    moves,
    nearest,
    next_best,
    total_harm,
)
from scrimp.report.precision_record import Analysis, GemmAnalysis, PlanAt

FORMATS = ("bf16", "fp8", "fp4", "nvfp4")
HARMS = st.floats(0, 10, allow_nan=False)


@st.composite
def plans(draw):
    """A plan of up to four layers with harms, shares and choices of all kinds."""
    layers = [f"blocks.{index}.x" for index in range(draw(st.integers(1, 4)))]
    gemms, choices = {}, {}
    for layer in layers:
        choices[layer] = tuple(draw(st.sampled_from(FORMATS)) for _ in GEMMS)
        for gemm, choice in zip(GEMMS, choices[layer], strict=True):
            offered = draw(st.sets(st.sampled_from(FORMATS), min_size=1)) | {choice}
            harm = {name: draw(HARMS) for name in sorted(offered)}
            gemms[layer, gemm] = GemmAnalysis(choice=choice, harm=harm, loss={}, update={}, certainty=0.5)
    shares = {layer: draw(st.floats(0.01, 0.5)) for layer in layers}
    return plan_of(choices, gemms, shares)


def plan_of(choices, gemms, shares):
    analysis = Analysis(
        step=1, measured_at=1, policy="", granularity="", formats=(), budget={}, predicted={}, measured={},
        certainty=None, solver="", solver_note="", gap=None, seconds={}, shares=shares, stages={}, gemms=gemms,
        choices=choices,
    )  # fmt: skip
    return PlanAt(step=1, choices=choices, analysis=analysis)


def harm_of(plan, layer, gemm, name):
    """Total harm if one GEMM had another format: the sum done again from the start."""
    total = 0.0
    for (other_layer, other_gemm), found in plan.analysis.gemms.items():
        mine = name if (other_layer, other_gemm) == (layer, gemm) else plan.recipe(other_layer, other_gemm)
        total += found.harm[mine]
    return total


@examples(60)
@given(plans())
def test_a_move_changes_the_total_by_what_it_says(plan):
    total = total_harm(plan)
    for (layer, gemm), found in plan.analysis.gemms.items():
        seen = {move.other: move.change for move in moves(plan, layer, gemm)}
        assert set(seen) == set(found.harm) - {plan.recipe(layer, gemm)}
        for other, change in seen.items():
            assert total + change == pytest.approx(harm_of(plan, layer, gemm, other), abs=1e-9)


@examples(60)
@given(plans())
def test_the_next_best_changes_least(plan):
    for layer, gemm in plan.analysis.gemms:
        found = moves(plan, layer, gemm)
        best = next_best(found)
        assert (best is None) == (not found)
        assert best is None or abs(best.change) == min(abs(move.change) for move in found)


@examples(60)
@given(plans(), st.sampled_from(["promotion", "demotion", "swap"]), st.integers(1, 5))
def test_the_nearest_moves_are_those_with_the_least_rate(plan, direction, count):
    rates = {}
    for (layer, gemm), found in plan.analysis.gemms.items():
        now = plan.recipe(layer, gemm)
        for other, harm in found.harm.items():
            bits = RECIPES[other].bits - RECIPES[now].bits
            way = "swap" if bits == 0 else "promotion" if bits > 0 else "demotion"
            if other != now and way == direction:
                rate = (harm - found.harm[now]) / (100 * plan.analysis.shares[layer] / 3)
                rates[layer, gemm] = min(rate, rates.get((layer, gemm), math.inf))
    seen = nearest(plan, direction, count)
    assert [move.rate for move in seen] == pytest.approx(sorted(rates.values())[:count])
    assert len({(move.layer, move.gemm) for move in seen}) == len(seen) == min(count, len(rates))
    assert all(move.direction == direction for move in seen)


def gemm(choice, **harm):
    return GemmAnalysis(choice=choice, harm=harm, loss={}, update={}, certainty=0.7)


def test_without_shares_the_change_ranks():
    gemms = {("a", "fprop"): gemm("fp4", fp4=5.0, fp8=1.0), ("b", "fprop"): gemm("fp4", fp4=9.0, fp8=1.0)}
    plan = plan_of({"a": ("fp4",) * 3, "b": ("fp4",) * 3}, gemms, {})
    found = nearest(plan, "promotion", 9)
    assert [(move.layer, move.rate, move.share) for move in found] == [("b", -8.0, None), ("a", -4.0, None)]


def test_what_the_analysis_does_not_know_has_no_figures():
    plan = plan_of({"a": ("mxfp4", "fp8", "")}, {("a", "fprop"): gemm("fp4", fp4=1.0)}, {"a": 1.0})
    assert moves(plan, "a", "fprop") == []
    assert moves(plan, "a", "dgrad") == []
    assert moves(plan, "b", "fprop") == []
    assert total_harm(plan) is None
    assert nearest(plan, "demotion", 3) == []


def test_a_choice_that_was_overruled_has_no_certainty():
    plan = plan_of({"a": ("fp8",) * 3}, {("a", "fprop"): gemm("fp4", fp4=1.0, fp8=0.1)}, {"a": 1.0})
    assert certainty_of(plan, "a", "fprop") is None
    kept = plan_of({"a": ("fp4",) * 3}, plan.analysis.gemms, {})
    assert certainty_of(kept, "a", "fprop") == 0.7


def test_shares_are_of_flops_and_without_them_of_gemms():
    plan = PlanAt(step=None, choices={"a": ("fp4", "fp8", "fp8"), "b": ("fp4", "fp4", "fp4")})
    assert flop_shares(plan, {"a": 30.0, "b": 10.0, "elsewhere": 5.0}) == pytest.approx(
        {"fp4": 0.5, "fp8": 0.5}
    )
    assert flop_shares(plan, None) == pytest.approx({"fp4": 4 / 6, "fp8": 2 / 6})
    assert flop_shares(plan, {"elsewhere": 1.0}) == {}
