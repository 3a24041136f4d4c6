"""Intervals of predicted divergences: they hold the truth as often as they say, and their centre is the prediction."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import given
from profiles import profile, profiles
from property_tests import examples

from scrimp.planner.precision import Budget, PrecisionProfile, Question, choose, make_plan
from scrimp.planner.precision.interval import LEVEL, intervals, root_interval, student

HALF = Budget(fp4_flops=0.5)


@pytest.mark.parametrize("number", [2, 3, 5, 16, 40])
@pytest.mark.parametrize("spread", [0.1, 0.5])
def test_it_holds_the_truth_as_often_as_it_says(number: int, spread: float) -> None:
    """Batches whose squares and sizes are skewed and go together, as a noisy gradient makes them."""
    generator, hits, draws = np.random.default_rng(number), 0, 2000
    truth = math.exp(spread**2 / 2 + (spread / 2) ** 2 / 2 + spread * spread / 4)  # E[a b] for a, b as below
    sizes_mean = math.exp((spread / 2) ** 2 / 2)
    for _ in range(draws):
        shared = generator.normal(size=number)
        sizes = np.exp(spread / 2 * shared)
        squares = sizes * np.exp(spread * (0.5 * shared + math.sqrt(0.75) * generator.normal(size=number)))
        low, high = root_interval(squares, sizes)
        hits += low <= math.sqrt(truth / sizes_mean) <= high
    assert hits / draws >= LEVEL - 0.04


def test_equal_batches_leave_no_doubt() -> None:
    assert root_interval(np.full(4, 0.09), np.ones(4)) == pytest.approx((0.3, 0.3))


def test_sizes_that_vary_with_the_squares_make_no_doubt_of_their_ratio() -> None:
    sizes = np.array([1.0, 3.0, 9.0])
    assert root_interval(0.04 * sizes, sizes) == pytest.approx((0.2, 0.2))


def test_quantiles_fall_towards_the_normals() -> None:
    values = [student(freedom) for freedom in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(1.972, abs=0.001)  # of 199 degrees of freedom


@examples(30)
@given(profiles(batches=4))
def test_the_prediction_is_the_middle_of_its_interval(made: PrecisionProfile) -> None:
    plan = make_plan(Question(made, HALF), draws=1)
    assert plan.batches == len(made.batches)
    if plan.batches == 1:
        assert plan.intervals == {}
        return
    for name, (low, high) in plan.intervals.items():
        assert math.sqrt(low * high) == pytest.approx(plan.predicted[name])
    assert set(plan.intervals) == {"loss_divergence", "weight_divergence"}


def test_more_batches_narrow_it() -> None:
    widths = []
    for batches in (2, 4, 16):
        asked = Question(profile(6, ("fp8", "nvfp4"), batches=batches), HALF)
        low, high = intervals(asked, choose(asked).formats)["weight_divergence"]
        widths.append(math.log(high / low))
    assert widths == sorted(widths, reverse=True)


def test_statistics_that_are_no_numbers_have_no_interval() -> None:
    made = profile(3, ("fp8", "nvfp4"), batches=2)
    bad = dataclasses.replace(made.batches[0], loss=math.nan)
    asked = Question(dataclasses.replace(made, batches=(bad, made.batches[1])), Budget(fp4_flops=0.0))
    found = intervals(asked, np.zeros((3, 3), dtype=np.int64))
    assert all(math.isfinite(bound) for pair in found.values() for bound in pair)
