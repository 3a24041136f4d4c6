"""Budgets: what they mean, what they leave to GEMMs, and how their refusals name them."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from profiles import names, profile
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.planner.precision import Budget, Question, Weights, choose, make_plan, plan_or_nearest
from scrimp.planner.precision.policies import costs_of

FAST = examples(15)
BF16, FP8, FP4 = range(3)
RATES = np.array([1.0, 0.5, 0.25])
"""Seconds of a GEMM in bf16, fp8, nvfp4 of what bf16 takes."""


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({}, "needs one budget - got none"),
        ({"fp4_flops": 0.5, "divergence": 1.0}, "needs one budget - got fp4_flops 0.5, divergence 1.0"),
        ({"fp4_flops": 1.5}, "fp4_flops is out of range - got 1.5, expected a share from 0 to 1"),
        ({"step_seconds": -1.0}, "step_seconds is out of range - got -1.0, expected a number that is not"),
        ({"speedup": 0.5}, "speedup is out of range - got 0.5, expected a factor of 1 or more"),
        ({"divergence": 2.0}, "divergence is out of range - got 2.0, expected a share from 0 to 1"),
        ({"saved_bytes": 0.0}, "saved_bytes is out of range - got 0.0, expected a share above 0, to 1"),
        ({"saved_bytes": 1.01}, "saved_bytes is out of range - got 1.01, expected a share above 0, to 1"),
        ({"divergence": float("nan")}, "divergence is out of range"),
    ],
)
def test_budgets_that_mean_nothing_are_refused(entries: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Budget(**entries)


@FAST
@given(st.floats(0.0, 1.0), st.floats(0.01, 1.0), st.floats(1.0, 10.0))
def test_a_step_time_and_a_speedup_leave_the_same_seconds_where_they_mean_the_same(
    other: float, in_bf16: float, factor: float
) -> None:
    by_speed = Budget(speedup=factor).seconds_left(other, in_bf16)
    by_time = Budget(step_seconds=(other + in_bf16) / factor).seconds_left(other, in_bf16)
    assert by_time == pytest.approx(by_speed, abs=1e-12)
    assert by_speed >= 0
    assert other + by_speed <= (other + in_bf16) / factor + 1e-9 or by_speed == 0


# -- times -------------------------------------------------------------------------------------


def timed(layers: int, **changes: Any) -> Question:
    made = profile(layers, seed=3)
    seconds = np.random.default_rng(1).uniform(1, 2, (layers, 3, 1)) * RATES
    return Question(made, Budget(speedup=1.0), seconds=seconds, **changes)


def spent(question: Question, formats: np.ndarray) -> float:
    assert question.seconds is not None
    return float(np.take_along_axis(question.seconds, formats[:, :, None], 2).sum())


@FAST
@given(st.floats(1.0, 3.9))
def test_a_speedup_is_over_the_bf16_column(factor: float) -> None:
    question = dataclasses.replace(timed(4), budget=Budget(speedup=factor))
    in_bf16 = spent(question, np.zeros((4, 3), dtype=int))
    by_speed = choose(question).formats
    by_time = choose(dataclasses.replace(question, budget=Budget(step_seconds=in_bf16 / factor))).formats
    assert np.array_equal(by_speed, by_time)
    assert spent(question, by_speed) <= in_bf16 / factor * (1 + 1e-6)


def test_other_work_of_a_step_is_part_of_its_time() -> None:
    question = dataclasses.replace(timed(4), budget=Budget(speedup=2.0), other_seconds=3.0)
    in_bf16 = spent(question, np.zeros((4, 3), dtype=int))
    plan = make_plan(question)
    assert plan.predicted["step_seconds"] == pytest.approx(3.0 + spent(question, choose(question).formats))
    assert plan.predicted["step_seconds"] <= (3.0 + in_bf16) / 2 + 1e-6
    assert plan.budget == {"speedup": 2.0}


def test_each_stage_of_a_pipeline_keeps_the_speedup() -> None:
    question = dataclasses.replace(timed(4), budget=Budget(speedup=2.0), stages=(0, 0, 1, 1))
    found, seconds = choose(question).formats, question.seconds
    assert seconds is not None
    for stage in (slice(0, 2), slice(2, 4)):
        taken = np.take_along_axis(seconds, found[:, :, None], 2)[stage].sum()
        assert taken <= seconds[stage, :, BF16].sum() / 2 * (1 + 1e-6)


def test_a_speedup_out_of_reach_names_itself_and_what_it_is_over() -> None:
    question = timed(4, other_seconds=0.5)
    with pytest.raises(PlanError, match=r"for a speedup of 5 over .* s with GEMMs in bf16, beside 0.5 s of"):
        choose(dataclasses.replace(question, budget=Budget(speedup=5.0)))


def test_a_speedup_without_times_of_bf16_is_refused_by_name() -> None:
    made = profile(4, ("fp8", "nvfp4"))
    question = Question(made, Budget(speedup=2.0), seconds=np.ones((4, 3, 2)))
    with pytest.raises(
        PlanError, match=r"budget speedup is over bf16.*got times of fp8, nvfp4.*step_seconds"
    ):
        choose(question)
    with pytest.raises(PlanError, match="budget speedup needs measured times"):
        choose(dataclasses.replace(question, seconds=None))
    given_apart = dataclasses.replace(question, bf16_seconds=np.full((4, 3), 2.0))
    assert choose(given_apart).formats.shape == (4, 3)


def test_the_nearest_plan_to_a_speedup_is_the_fastest_and_keeps_the_users_budget() -> None:
    question = dataclasses.replace(timed(4), budget=Budget(speedup=50.0))
    found = plan_or_nearest(question, step=1)
    assert {gemm.choice for row in found.layers.values() for gemm in row.gemms.values()} == {"nvfp4"}
    assert found.budget == {"speedup": 50.0}
    assert found.reason.startswith("the fastest plan: ")


# -- divergence --------------------------------------------------------------------------------


@pytest.mark.parametrize("weights", [Weights(), Weights(0.5, 3.0), Weights(0.0, 1.0)])
@pytest.mark.parametrize("policy", ["snip", "snip-layer", "snip-paper", "min-abs-err", "random:2"])
def test_a_budget_of_divergence_is_a_share_whatever_the_weights(policy: str, weights: Weights) -> None:
    made = profile(names(2), seed=5)
    everything = costs_of(policy, made, weights=weights)[:, FP4].sum()
    choice = choose(Question(made, Budget(divergence=0.3), policy, weights=weights))
    harm = np.take_along_axis(choice.costs, choice.formats[:, :, None], 2).sum()
    assert 0 < harm <= 0.3 * everything * (1 + 1e-6)
    assert (choose(Question(made, Budget(divergence=1.0), policy, weights=weights)).formats == FP4).all()


def test_a_divergence_out_of_reach_is_refused_in_the_users_unit() -> None:
    made = profile(4).select(("fp8", "nvfp4"))
    costs = costs_of("snip", made)
    least = costs.min(axis=1).sum() / costs[:, 1].sum()
    with pytest.raises(
        PlanError, match=r"the predicted divergence - got at least .*expected at most 0.01"
    ) as e:
        choose(Question(made, Budget(divergence=0.01)))
    reached = float(str(e.value.got).split()[2])
    assert reached == pytest.approx(least, rel=1e-5)
    choose(Question(made, Budget(divergence=reached)))


def test_no_limit_of_divergence_gives_the_fastest_plan() -> None:
    question = dataclasses.replace(timed(4), budget=Budget(divergence=math.inf))
    assert (choose(question).formats == FP4).all()
    assert make_plan(dataclasses.replace(question, budget=Budget(divergence=0.25))).budget == {
        "divergence": 0.25
    }
