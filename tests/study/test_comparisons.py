"""The statistics of a study against other people's: mpmath, printed tables, and simulated studies."""

from __future__ import annotations

import math

import mpmath
import numpy as np
import pytest

from scrimp.study.comparisons import (
    MOST_PAIRS,
    compare,
    has_bootstrap,
    interval_of,
    pairs_for_bootstrap,
    pairs_needed,
    power_of,
    share_of_error,
    t_cdf,
    t_quantile,
    visible_difference,
)

PRINTED = {(0.975, 1): 12.706, (0.975, 2): 4.303, (0.975, 4): 2.776, (0.995, 9): 3.250, (0.95, 30): 1.697}
"""Quantiles of Student's t as tables have them."""


@pytest.mark.parametrize("case", PRINTED)
def test_quantiles_of_t_are_those_of_tables(case: tuple[float, int]) -> None:
    assert t_quantile(*case) == pytest.approx(PRINTED[case], abs=5e-4)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 1000, 9999])
@pytest.mark.parametrize("t", [0.01, 0.7, 2.0, 9.0, 80.0])
def test_probabilities_of_t_are_those_of_mpmath(freedom: int, t: float) -> None:
    tail = mpmath.betainc(freedom / 2, 0.5, 0, freedom / (freedom + t * t), regularized=True) / 2
    assert 1 - t_cdf(t, freedom) == pytest.approx(float(tail), rel=1e-9, abs=1e-14)


@pytest.mark.parametrize("freedom", [1, 2, 5, 50, 2000])
@pytest.mark.parametrize("alpha", [0.05, 0.05 / 12])
def test_without_a_difference_a_test_errs_as_often_as_it_says(freedom: int, alpha: float) -> None:
    assert power_of(freedom + 1, 0.0, alpha=alpha) == pytest.approx(alpha, rel=1e-6)


@pytest.mark.parametrize(("pairs", "effect"), [(2, 3.0), (3, 2.0), (5, 1.2), (20, 0.6)])
def test_power_is_that_of_simulated_studies(pairs: int, effect: float) -> None:
    draws = np.random.default_rng(1).normal(effect, 1.0, size=(100_000, pairs))
    t = draws.mean(axis=1) / draws.std(axis=1, ddof=1) * math.sqrt(pairs)
    found = (np.abs(t) > t_quantile(0.975, pairs - 1)).mean()
    assert power_of(pairs, effect, alpha=0.05) == pytest.approx(found, abs=0.006)


def test_the_visible_difference_is_seen_with_just_that_power() -> None:
    for pairs in (2, 3, 10, 200):
        visible = visible_difference(pairs, 0.3, alpha=0.05, power=0.8)
        assert visible is not None
        assert power_of(pairs, visible / 0.3, alpha=0.05) == pytest.approx(0.8, abs=1e-9)
    assert visible_difference(1, 0.3, alpha=0.05, power=0.8) is None


def test_the_pairs_that_a_difference_takes_are_the_fewest() -> None:
    # Of an effect of 0.5 textbooks say 34 pairs, of 1.0 they say 10 (Cohen, two-sided, 0.05, power 0.8).
    assert pairs_needed(0.5, 1.0, alpha=0.05, power=0.8) == 34
    assert pairs_needed(-1.0, 1.0, alpha=0.05, power=0.8) == 10
    assert pairs_needed(1e-6, 1.0, alpha=0.05, power=0.8) is None
    assert power_of(MOST_PAIRS, 0.03, alpha=0.05) > 0.8


@pytest.mark.parametrize("interval", ["t", "bootstrap"])
@pytest.mark.parametrize("pairs", [6, 12])
@pytest.mark.every(2)
def test_intervals_hold_the_true_mean_as_often_as_they_say(interval: str, pairs: int) -> None:
    draws, times = np.random.default_rng(2), 400
    held = 0
    for _ in range(times):
        low, high = interval_of(draws.normal(0.2, 1.0, pairs).tolist(), interval, 0.1)  # type: ignore[arg-type]
        held += low <= 0.2 <= high
    assert held / times == pytest.approx(0.9, abs=0.045)


def test_bootstrap_intervals_of_lopsided_differences_lean_to_their_side() -> None:
    values = [0.0, 0.1, 0.1, 0.2, 0.2, 0.3, 2.5, 0.1]
    mean = sum(values) / len(values)
    low, high = interval_of(values, "bootstrap", 0.05)
    assert high - mean > mean - low
    assert low >= min(values)
    assert interval_of(values, "bootstrap", 0.05) == (low, high)  # the same draws every time


def test_a_bootstrap_interval_does_not_depend_on_the_order_of_pairs() -> None:
    values = [0.3, -1.2, 2.5, 0.9, 0.1, -0.4, 1.8, 3.1, 0.2, -0.9]
    assert interval_of(values, "bootstrap", 0.01) == interval_of(values[::-1], "bootstrap", 0.01)


@pytest.mark.parametrize(("count", "alpha"), [(10, 0.01), pytest.param(20, 0.002, marks=pytest.mark.slow)])
def test_bootstrap_intervals_of_small_errors_are_nearly_as_wide_as_those_of_t(
    count: int, alpha: float
) -> None:
    random = np.random.default_rng(0)
    shares = []
    for _ in range(60):
        values = random.normal(size=count).tolist()
        low, high = interval_of(values, "bootstrap", alpha)
        least, most = interval_of(values, "t", alpha)
        shares.append((high - low) / (most - least))
    assert 0.9 < np.mean(shares) < 1.0


def test_where_too_few_samples_lie_beyond_an_interval_there_is_no_bootstrap() -> None:
    assert has_bootstrap(10, 0.01)
    assert not has_bootstrap(10, 0.002)
    assert not has_bootstrap(5, 0.05)
    found = compare(dict(enumerate(range(12))), interval="bootstrap", confidence=0.9996, power=0.8)
    assert found.interval == "t"


def test_bootstrap_needs_enough_differences() -> None:
    assert pairs_for_bootstrap(0.05) == 6  # 2^-5 is 3 %
    assert pairs_for_bootstrap(0.125) == 4


@pytest.mark.parametrize(
    ("values", "matters", "verdict"),
    [
        ([-0.5, -0.52, -0.49], None, "lower"),
        ([0.5, 0.52, 0.49], None, "higher"),
        ([0.5, -0.52, 0.1], None, "cannot tell"),
        ([0.001, -0.002, 0.001], 0.05, "same"),
        ([0.001, -0.002, 0.001], 0.003, "cannot tell"),
        ([0.001, 0.0011, 0.0012], 0.05, "same"),
        ([-0.1, -0.11, -0.12], 0.05, "lower"),
        ([0.0, 0.0, 0.0], None, "same"),
        ([0.3], None, "cannot tell"),
        ([], None, "cannot tell"),
    ],
)
def test_verdicts(values: list[float], matters: float | None, verdict: str) -> None:
    found = compare(dict(enumerate(values)), interval="t", confidence=0.95, power=0.8, matters=matters)
    assert found.verdict == verdict
    assert (found.more_pairs is None) == (verdict != "cannot tell" or len(values) < 2)


def test_the_runs_that_would_tell_are_counted_from_those_that_there_are() -> None:
    values = [0.9, -1.1, 1.3, 0.4]
    found = compare(dict(enumerate(values)), interval="t", confidence=0.95, power=0.8)
    assert found.mean is not None
    assert found.scatter is not None
    needed = pairs_needed(found.mean, found.scatter, alpha=0.05, power=0.8)
    assert needed is not None
    assert found.more_pairs == needed - 4
    # A difference that matters, larger than the one that was found, takes fewer.
    other = compare(dict(enumerate(values)), interval="t", confidence=0.95, power=0.8, matters=1.0)
    assert other.more_pairs is not None
    assert other.more_pairs < needed - 4


def test_the_runs_that_would_tell_are_those_of_the_next_look() -> None:
    values = dict(enumerate([0.9, -1.1, 1.3, 0.4]))
    found = compare(values, interval="t", confidence=0.95, power=0.8, next_confidence=0.99)
    assert found.mean is not None
    assert found.scatter is not None
    needed = pairs_needed(found.mean, found.scatter, alpha=0.01, power=0.8)
    assert needed is not None
    assert found.more_pairs == needed - 4


def test_one_more_run_at_least_is_asked_for() -> None:
    found = compare({0: 1.0, 1: 2.9}, interval="t", confidence=0.95, power=0.05)
    assert (found.verdict, found.more_pairs) == ("cannot tell", 1)


def test_all_comparisons_together() -> None:
    assert share_of_error(0.95, 5) == pytest.approx(0.99)
    assert share_of_error(0.95, 0) == 0.95
