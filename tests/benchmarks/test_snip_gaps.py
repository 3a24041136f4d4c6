"""How sure the SNIP study is: quantiles, ranks, gaps to bf16, and what is concluded from them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from snip_damage import _weighted, interval, rank_correlation
from snip_gaps import Cells, Estimate, at_most_half, below_baselines, below_layers, t_quantile
from snip_lab import spearman
from snip_material import SETTING, cell, everywhere, runs

# -- statistics --------------------------------------------------------------------------------


@pytest.mark.parametrize("degrees", [1, 2, 3, 5, 10, 11, 20, 100])
def test_97_5_per_cent_of_students_distribution_lie_below_the_quantile(degrees: int) -> None:
    scale = math.gamma((degrees + 1) / 2) / (math.sqrt(degrees * math.pi) * math.gamma(degrees / 2))
    t = np.linspace(0.0, t_quantile(degrees), 200_001)
    density = scale * (1 + t**2 / degrees) ** (-(degrees + 1) / 2)
    assert 0.5 + np.trapezoid(density, t) == pytest.approx(0.975, abs=2e-5)


def test_an_interval_is_the_students_and_one_seed_has_none() -> None:
    assert Estimate((1.0,)).interval is None
    assert Estimate((1.0, math.inf)).interval is None
    low, high = Estimate((1.0, 2.0, 3.0)).interval or (0.0, 0.0)
    assert (low, high) == (pytest.approx(2 - 4.303 / math.sqrt(3)), pytest.approx(2 + 4.303 / math.sqrt(3)))


small = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), min_size=2, max_size=12)


@given(small)
def test_ties_have_their_mean_rank(items: list[tuple[int, int]]) -> None:
    sides = [[pair[k] for pair in items] for k in (0, 1)]
    ranks = [[sum(v < w for v in s) + (sum(v == w for v in s) + 1) / 2 for w in s] for s in sides]
    a, b = (np.array(rank) - np.mean(rank) for rank in ranks)
    found = rank_correlation(*(np.array(side, dtype=float) for side in sides))
    if (a**2).sum() * (b**2).sum() == 0:
        assert math.isnan(found)
    else:
        assert found == pytest.approx((a * b).sum() / math.sqrt((a**2).sum() * (b**2).sum()))


@given(small, st.randoms(use_true_random=False))
def test_an_item_that_is_drawn_twice_counts_as_two(items: list[tuple[int, int]], random: Any) -> None:
    counts = [random.randint(0, 3) for _ in items]
    a, b = (np.array([pair[k] for pair in items], dtype=float) for k in (0, 1))
    found = _weighted(a, b, np.array([counts], dtype=float))[0] if sum(counts) else math.nan
    expected = rank_correlation(np.repeat(a, counts), np.repeat(b, counts)) if sum(counts) else math.nan
    assert found == pytest.approx(expected, nan_ok=True)


def test_the_bootstrap_is_sure_of_an_order_and_unsure_of_noise() -> None:
    order, noise = np.arange(40.0), np.random.default_rng(3).normal(size=40)
    assert interval(order, order**3) == (pytest.approx(1.0), pytest.approx(1.0))
    low, high = interval(order, noise)
    assert low < 0 < high
    assert 2 * 1.96 / math.sqrt(39) == pytest.approx(high - low, rel=0.25)  # the textbook's width


def test_ranks_agree_with_the_labs_where_nothing_is_tied() -> None:
    a, b = np.random.default_rng(5).normal(size=(2, 30))
    assert rank_correlation(a, a + b) == pytest.approx(spearman(a, a + b))


# -- gaps --------------------------------------------------------------------------------------


def test_gaps_are_in_per_cent_of_bf16_of_the_same_seed() -> None:
    control = cell("bf16", 0.0, 1, held_out=2.0, losses=(3.0,) * 38 + (2.0, 4.0))
    ours = cell("snip", 0.0, 1, held_out=2.02, in_plan=2.1, losses=(9.0,) * 38 + (2.2, 4.2))
    cells = Cells([control, ours, cell("bf16", 50.0, 0)])
    found = {m: cells.gaps(SETTING, "0.75", "snip", m)[1] for m in ("held_out", "in_plan", "training")}
    assert found == pytest.approx({"held_out": 1.0, "in_plan": 5.0, "training": 7.5})


def test_a_run_without_control_has_no_gap_and_a_diverged_one_an_infinite() -> None:
    cells = Cells([cell("snip", 1.0, 0), cell("bf16", 0.0, 1), cell("snip", 0.0, 1, held_out=math.nan)])
    assert cells.gaps(SETTING, "0.75", "snip") == {1: math.inf}


def test_draws_of_random_are_one_policy_and_fixed_ones_stand_at_every_budget() -> None:
    drawn = [cell("random:1", 1.0), cell("random:2", 3.0), cell("random:1", 9.0, budget="0.5")]
    cells = Cells([cell("bf16", 0.0), cell("fp8", 0.5), *drawn])
    assert cells.gaps(SETTING, "0.75", "random") == {0: pytest.approx(2.0)}
    assert cells.gaps(SETTING, "0.5", "fp8") == cells.gaps(SETTING, "0.75", "fp8") == {0: pytest.approx(0.5)}


def test_a_difference_is_of_common_seeds_only() -> None:
    gaps = {"snip": {0: 1.0, 1: 2.0}, "first-last": {1: 2.5, 2: 9.0}}
    cells = Cells(
        [cell("bf16", 0.0, seed) for seed in range(3)]
        + [cell(policy, gap, seed) for policy, by_seed in gaps.items() for seed, gap in by_seed.items()]
    )
    found = cells.difference(SETTING, "0.75", "snip", "first-last")
    assert found is not None
    assert found.values == (pytest.approx(-0.5),)


# -- expectations ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("worst", "expected", "won"),
    [(0.2, "yes", "6 of 6"), (0.05, "no", "5 of 6"), (math.nan, "yes", "6 of 6")],
)
def test_snip_must_be_below_every_baseline(worst: float, expected: str, won: str) -> None:
    found = below_baselines(runs({"snip": 0.1, **everywhere(0.3), "min-rel-err": worst}), SETTING, "0.75")
    assert found.answer == expected
    assert f"below {won}" in found.note


def test_baselines_that_have_not_run_are_named() -> None:
    found = below_baselines(runs({"snip": 0.1, "first-last": 0.2}), SETTING, "0.75")
    assert found.answer == "yes"
    assert "not measured: layer-type, min-abs-err" in found.note
    assert below_baselines(runs({"snip": 0.1}), SETTING, "0.75").answer == "not measured"


@pytest.mark.parametrize(
    ("snip", "best", "expected"),
    [(0.1, 0.21, "yes"), (0.1, 0.19, "no"), (0.1, -0.01, "cannot be said"), (-0.1, 0.2, "yes")],
)
def test_half_is_of_the_best_baseline(snip: float, best: float, expected: str) -> None:
    found = at_most_half(runs({"snip": snip, **everywhere(0.9), "layer-type": best}), SETTING, "0.75")
    assert found.answer == expected
    assert "layer-type" in found.figure


def test_per_gemm_is_compared_with_per_layer() -> None:
    answers = [
        below_layers(runs({"snip": 0.1, "snip-layer": layer}), SETTING, "0.75").answer
        for layer in (0.2, 0.05)
    ]
    assert answers == ["yes", "no"]
    assert below_layers(runs({"snip": 0.1}), SETTING, "0.75").answer == "not measured"
