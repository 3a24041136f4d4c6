"""Figures of curves: planted curves, and what pairs counted one by one say."""

from __future__ import annotations

import itertools
import math
import random
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.tasks import EarlySignal, early_signal
from scrimp.tasks.curves import autocorrelation, consistency, monotony, signal_to_noise

SCORES = st.lists(st.integers(-3, 3).map(float), min_size=3, max_size=9)


def test_a_rising_curve_has_monotony_and_autocorrelation_1_a_falling_one_minus_1() -> None:
    steps = [10, 20, 30, 50, 80, 130]
    assert monotony(steps, [math.log(step) for step in steps]) == pytest.approx(1)
    assert monotony(steps, [1 / step for step in steps]) == pytest.approx(-1)
    assert autocorrelation([0.25 + 0.1 * n for n in range(6)]) == pytest.approx(1)
    assert autocorrelation([0.25, 0.75] * 3) == pytest.approx(-1)


def test_noise_has_neither() -> None:
    generator, steps = random.Random(1), list(range(10))
    curves = [[generator.gauss(0, 1) for _ in steps] for _ in range(2000)]
    assert fmean(monotony(steps, curve) or 0 for curve in curves) == pytest.approx(0, abs=0.03)
    assert fmean(autocorrelation(curve) or 0 for curve in curves) == pytest.approx(-1 / 10, abs=0.04)


def test_a_constant_curve_is_defined() -> None:
    assert monotony([1, 2, 3], [0.25] * 3) == 0
    assert autocorrelation([0.25] * 3) == 0
    assert autocorrelation([0.25, 0.25, 0.5]) == 0
    assert consistency([0.25] * 3, [0.1, 0.2, 0.3]) == 0


def test_too_little_to_tell_is_none() -> None:
    assert monotony([1, 2], [0, 1]) is None
    assert autocorrelation([0, 1]) is None
    assert consistency([0.1], [0.2]) is None
    assert signal_to_noise([[0.1, 0.2]]) is None
    assert signal_to_noise([[0.1], [0.2]]) is None


@given(SCORES)
def test_spearman_is_pearson_of_counted_ranks(scores: list[float]) -> None:
    found = monotony(list(range(len(scores))), scores)
    if len(set(scores)) == 1:
        assert found == 0
        return
    # Rank: those below, and half of the others that are equal.
    ranks = [sum(o < s for o in scores) + sum(o == s for o in scores) / 2 for s in scores]
    x = [n - fmean(range(len(scores))) for n in range(len(scores))]
    y = [rank - fmean(ranks) for rank in ranks]
    expected = fmean(a * b for a, b in zip(x, y, strict=True)) / pstdev(x) / pstdev(y)
    assert found == pytest.approx(expected, abs=1e-12)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=8))
def test_kendall_is_what_pairs_say(models: list[tuple[int, int]]) -> None:
    early, last = [a for a, _ in models], [b for _, b in models]
    same = opposite = tied_early = tied_last = 0
    for (a, x), (b, y) in itertools.combinations(models, 2):
        same += (a < b and x < y) or (a > b and x > y)
        opposite += (a < b and x > y) or (a > b and x < y)
        tied_early += a == b
        tied_last += x == y
    pairs = len(models) * (len(models) - 1) // 2
    differ = math.sqrt((pairs - tied_early) * (pairs - tied_last))
    assert consistency(early, last) == pytest.approx((same - opposite) / differ if differ else 0)


def test_scipy_agrees() -> None:
    stats = pytest.importorskip("scipy.stats", reason="scipy is not installed")
    generator = random.Random(2)
    for _ in range(50):
        x = [generator.randrange(6) for _ in range(8)]
        y = [generator.randrange(6) for _ in range(8)]
        assert monotony(x, y) == pytest.approx(stats.spearmanr(x, y).statistic)
        assert consistency(x, y) == pytest.approx(stats.kendalltau(x, y).statistic)
        assert autocorrelation(x) == pytest.approx(stats.pearsonr(x[:-1], x[1:]).statistic)


def test_signal_to_noise_is_the_distance_of_models_over_the_pooled_scatter_of_seeds() -> None:
    # Variances 2 and 8 of two seeds each: pooled 5; means 3 and 13.
    assert signal_to_noise([[2, 4], [11, 15]]) == pytest.approx(10 / math.sqrt(5))
    assert signal_to_noise([[2, 4], [13]]) == pytest.approx(10 / math.sqrt(2))
    assert signal_to_noise([[1, 1], [2, 2]]) == math.inf
    assert signal_to_noise([[1, 3], [2, 2]]) == 0
    assert signal_to_noise([[1, 1], [1, 1]]) == 0


def planted(rises: bool, seed: int) -> list[dict[int, float]]:
    """Three models of two seeds at six checkpoints: a task that larger ones do better at, or chance."""
    generator = random.Random(seed)
    return [
        {step: 0.25 + rises * size * step / 1000 + generator.gauss(0, 0.005) for step in range(10, 70, 10)}
        for size in (1, 2, 3)
        for _ in range(2)
    ]


def test_a_task_that_tells_models_apart_stands_out_from_chance() -> None:
    models = ["small", "small", "middle", "middle", "large", "large"]
    good = early_signal(planted(True, 1), models)
    assert good.monotony is not None
    assert good.monotony > 0.95
    assert good.autocorrelation is not None
    assert good.autocorrelation > 0.8
    assert good.consistency == pytest.approx(1)
    assert good.signal_to_noise is not None
    assert good.signal_to_noise > 10
    chance = [early_signal(planted(False, seed), models) for seed in range(40)]
    assert abs(fmean(one.monotony or 0 for one in chance)) < 0.1
    assert abs(fmean(one.consistency or 0 for one in chance)) < 0.2
    assert fmean(one.signal_to_noise or 0 for one in chance) < 3


def test_steps_that_not_all_runs_have_compare_no_models() -> None:
    runs = [{10: 0.1, 20: 0.2, 30: 0.3}, {10: 0.3, 30: 0.1, 40: 0.9}]
    # Of the steps 10 and 30 the order turns round; each curve has its own three points.
    assert early_signal(runs, ["a", "b"]) == EarlySignal(0.75, pytest.approx(0), None, -1.0)
    apart = early_signal([{10: 0.1}, {20: 0.2}], ["a", "b"])
    assert apart == EarlySignal(None, None, None, None)
