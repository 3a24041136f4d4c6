"""The budget of bytes that are kept of inputs, against every possible plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import profile
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.export import plan_for
from scrimp.planner.precision import Budget, PrecisionProfile, Question, choose, make_plan, plan_or_nearest
from scrimp.planner.precision.choose import allowed_by, is_within, share_of_saved_bytes
from scrimp.planner.precision.policies import costs_of
from scrimp.precision import saved_bytes

FAST = examples(10)
FIVE = ("bf16", "fp8", "mxfp8", "nvfp4", "mxfp4")


def kept(made: PrecisionProfile, formats: np.ndarray, saved: Any = None, layers: Any = None) -> float:
    """The share, counted layer by layer."""
    total = spent = 0.0
    for i in range(len(made.layers)) if layers is None else layers:
        rows, inputs = round(made.rows[i]), made.shapes[i][1]
        total += 2 * rows * inputs
        names = (saved[i] if saved else ()) or (made.formats[formats[i, 2]],)
        spent += sum(saved_bytes(name, rows, inputs) for name in names)
    return spent / total


def best_cost(question: Question, fits: Any) -> float:
    """Least cost of all plans that fit, by brute force over both layers."""
    made = question.profile
    count = len(made.formats)
    costs = costs_of(question.policy, made).reshape(len(made.layers), -1, count)
    per_gemm = question.policy == "snip"
    rows = list(itertools.product(range(count), repeat=3)) if per_gemm else [(p,) * 3 for p in range(count)]

    def cost(layer: int, row: tuple[int, ...]) -> float:
        return sum(costs[layer, j, row[j]] for j in range(3)) if per_gemm else float(costs[layer, 0, row[0]])

    each = [[(row, cost(layer, row)) for row in rows] for layer in range(len(made.layers))]
    # fprop and dgrad add no bytes: of rows with equal wgrad the cheapest is enough.
    if per_gemm and question.budget.saved_bytes is not None:
        each = [[min((one for one in few if one[0][2] == p), key=lambda one: one[1]) for p in range(count)]
                for few in each]  # fmt: skip
    return min(
        sum(price for _, price in plan)
        for plan in itertools.product(*each)
        if fits(np.array([row for row, _ in plan]))
    )


def cost_of(question: Question, formats: np.ndarray) -> float:
    costs = costs_of(question.policy, question.profile)
    if question.policy == "snip":
        return float(costs[np.arange(len(costs)), formats.reshape(-1)].sum())
    return float(costs[np.arange(len(costs)), formats[:, 0]].sum())


@FAST
@given(st.integers(0, 10**6), st.floats(0.35, 1.0), st.sampled_from(["snip", "snip-layer", "min-abs-err"]))
def test_of_five_formats_no_plan_within_the_bytes_is_cheaper(seed: int, most: float, policy: str) -> None:
    made = profile(3, FIVE, seed=seed)
    question = Question(made, Budget(saved_bytes=most), policy)
    found = choose(question).formats
    assert kept(made, found) <= most * (1 + 1e-9)
    assert share_of_saved_bytes(question, found) == pytest.approx(kept(made, found))
    best = best_cost(question, lambda formats: kept(made, formats) <= most)
    assert cost_of(question, found) <= best * (1 + 1e-3) + 1e-12
    assert is_within(question, found)


@FAST
@given(st.integers(0, 10**6), st.floats(0.0, 1.0), st.sampled_from(["snip", "snip-layer"]))
def test_of_five_formats_no_plan_with_enough_flops_in_4_bits_is_cheaper(
    seed: int, least: float, policy: str
) -> None:
    made = profile(2, FIVE, seed=seed)
    question = Question(made, Budget(fp4_flops=least), policy)

    def share(formats: np.ndarray) -> float:
        return float((made.flops[:, None] / 3 * (formats >= FIVE.index("nvfp4"))).sum())

    found = choose(question).formats
    assert share(found) >= least - 1e-9
    assert cost_of(question, found) <= best_cost(question, lambda one: share(one) >= least) * 1.001 + 1e-12


def test_what_is_fixed_counts() -> None:
    made = profile(4, FIVE, shapes=[(8, 8)] * 4)
    pinned = {made.layers[0]: {"wgrad": "bf16"}, made.layers[1]: {"wgrad": "fp8", "fprop": "bf16"}}
    allowed = allowed_by(made.layers, made.formats, pinned)
    question = Question(made, Budget(saved_bytes=0.6), allowed=allowed)
    found = choose(question).formats
    assert (found[0, 2], found[1, 2]) == (0, 1)
    assert kept(made, found) <= 0.6
    with pytest.raises(PlanError, match=r"what is kept of inputs for the backward pass.*at most 0\.4"):
        choose(dataclasses.replace(question, budget=Budget(saved_bytes=0.4)))


def test_what_rules_keep_of_inputs_counts_whatever_runs() -> None:
    made = profile(4, FIVE, shapes=[(8, 8)] * 4)
    saved = [("recompute",), ("bf16",), ("bf16", "fp8"), ()]
    question = Question(made, Budget(saved_bytes=0.85), saved=saved)
    found = choose(question).formats
    assert kept(made, found, saved) <= 0.85
    free = choose(Question(made, Budget(saved_bytes=1.0))).formats
    assert np.array_equal(found[:3], free[:3]), "their formats change no bytes"
    by_hand = (0 + 1 + 1 + saved_bytes("fp8", 96, 8) / (2 * 96 * 8)) / 4
    for name in FIVE:
        plan = make_plan(dataclasses.replace(question, policy=name))
        own = saved_bytes(name, 96, 8) / (2 * 96 * 8)
        assert plan.predicted["saved_bytes"] == pytest.approx(by_hand + own / 4)


def test_compiled_graphs_keep_eight_bits_of_any_code() -> None:
    made = dataclasses.replace(profile(4, FIVE), tokens=4096)
    eager, compiled = (
        make_plan(Question(made, Budget(saved_bytes=0.6), "nvfp4", is_compiled=is_compiled))
        for is_compiled in (False, True)
    )
    assert eager.predicted["saved_bytes"] == pytest.approx(0.28, abs=0.005)
    assert compiled.predicted["saved_bytes"] == pytest.approx(0.516, abs=0.005)
    with pytest.raises(PlanError, match=r"got at least 0\.51"):
        choose(Question(made, Budget(saved_bytes=0.4), is_compiled=True))


@pytest.mark.parametrize("policy", ["snip", "snip-layer"])
def test_every_stage_keeps_its_bytes(policy: str) -> None:
    made = profile(6, FIVE, seed=2)
    stages = (0, 0, 1, 1, 1, 2)
    question = Question(made, Budget(saved_bytes=0.55), policy, stages=stages)
    found = choose(question).formats
    for stage in range(3):
        assert kept(made, found, layers=[i for i, own in enumerate(stages) if own == stage]) <= 0.55
    with pytest.raises(PlanError, match=r"bf16, of stage 0.*of stage 2"):
        choose(dataclasses.replace(question, budget=Budget(saved_bytes=0.1)))


def test_a_budget_out_of_reach_says_what_can_be_reached() -> None:
    made = profile(4, ("bf16", "fp8"))
    question = Question(made, Budget(saved_bytes=0.3))
    least = kept(made, np.ones((4, 3), dtype=int))
    with pytest.raises(PlanError, match=r"as a share of its bytes in bf16.*expected at most 0\.3") as error:
        choose(question)
    reached = float(str(error.value.got).split()[2])
    assert reached == pytest.approx(least, rel=1e-5)
    choose(dataclasses.replace(question, budget=Budget(saved_bytes=reached)))


@pytest.mark.parametrize("policy", ["backward-first", "first-last", "layer-type", "last-blocks-matched"])
def test_policies_that_order_layers_know_no_bytes(policy: str) -> None:
    made = profile(tuple(f"blocks.{i}.mlp.down" for i in range(3)), FIVE)
    with pytest.raises(PlanError, match=f"{policy} knows only a share of FLOPs in 4 bits"):
        choose(Question(made, Budget(saved_bytes=0.5), policy))


@pytest.mark.parametrize("policy", ["snip", "snip-layer", "min-rel-err"])
@pytest.mark.parametrize("fixed", [None, "bf16"])
def test_the_nearest_plan_keeps_the_fewest_bytes(policy: str, fixed: str | None) -> None:
    made = profile(4, FIVE, seed=4)
    pinned = {} if fixed is None else {made.layers[1]: dict.fromkeys(("fprop", "dgrad", "wgrad"), fixed)}
    allowed = allowed_by(made.layers, made.formats, pinned)
    question = Question(made, Budget(saved_bytes=0.01), policy, allowed=allowed)
    found = plan_or_nearest(question, step=3)
    assert found.reason.startswith("the smallest plan: no plan can meet what is kept")
    assert (found.policy, found.budget) == (policy, {"saved_bytes": 0.01})
    formats = np.array([[FIVE.index(name) for name in one.recipes] for one in found.precisions.values()])
    fewest = [
        min(range(len(FIVE)), key=lambda p: saved_bytes(FIVE[p], 96, inputs)) for _, inputs in made.shapes
    ]
    expected = [0 if fixed and i == 1 else p for i, p in enumerate(fewest)]
    assert formats[:, 2].tolist() == expected
    if policy == "snip" and fixed is None:
        assert (formats[:, :2] == 0).all(), "products that keep nothing do no harm"


def test_layers_without_statistics_keep_the_highest_format_in_the_nearest_plan_too() -> None:
    made = profile(3, FIVE)
    made.batches[0].x[1] = math.nan
    found = plan_or_nearest(Question(made, Budget(saved_bytes=0.01)), step=3)
    assert found.reason.startswith("the nearest plan: ")
    assert [one.wgrad == "bf16" for one in found.precisions.values()] == [False, True, False]


def test_experts_count_by_their_rows() -> None:
    made = dataclasses.replace(
        profile(3, FIVE, shapes=[(8, 16), (8, 16), (16, 8)]), experts=(1, 4, 4), met=(1.0, 2.0, 2.0)
    )
    plan = make_plan(Question(made, Budget(saved_bytes=1.0), "fp8"))
    sizes = [(96, 16), (192, 16), (192, 8)]
    spent = sum(saved_bytes("fp8", *size) for size in sizes)
    assert plan.predicted["saved_bytes"] == pytest.approx(spent / sum(2 * a * b for a, b in sizes))


def test_other_trainers_keep_inputs_in_their_own_way() -> None:
    made = profile(4, ("bf16", "fp8_tensor", "mxfp8"))
    with pytest.raises(PlanError, match="torchao keeps them in its own way"):
        plan_for(Question(made, Budget(saved_bytes=0.6)), "torchao", step=1)
    plan = plan_for(Question(made, Budget(divergence=1.0)), "torchao", step=1)
    assert plan.predicted["saved_bytes"] is None
