"""Ratios, profiles and scores: by hand, beside AlgoPerf's own script, on a grid, and what holds of any table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.study.time_to_result import MOST, profile, ratios, score, time_of

INF = math.inf
Runs = Mapping[str, Mapping[str, Sequence[Sequence[float]]]]
"""By workload and submission: of each seed the times of its trials."""


def single(*times: float) -> list[list[float]]:
    """One trial for each seed."""
    return [[time] for time in times]


HELD_OUT = {"a2": "a", "d2": "d"}
SELF_TUNED: Runs = {
    "a": {"p": single(100, 120, 110), "q": single(110, 100, 130), "r": single(55, 50, 60)},
    "b": {"p": single(60, 60, 60), "q": single(150, 140, 160), "r": single(INF, 61, 241)},
    "c": {"p": single(50, INF, INF), "q": single(80, 90, 85), "r": single(340, 341, 339)},
    "d": {"p": single(30, 30, 90), "q": single(90, 75, 60), "r": single(33, 30, 27)},
    "a2": {"p": single(200, 210, 220), "q": single(100, INF, 105), "r": single(INF, INF, 40)},
    "d2": {"p": single(40, 44, 48), "q": single(INF, INF, 50), "r": single(160, 161, 159)},
}
TUNED: Runs = {
    "a": {"x": [[100, 80], [INF, 90], [70, INF]], "y": [[160, 160], [170, 240], [300, 150]]},
    "b": {"x": [[INF, INF], [40, 50], [INF, INF]], "y": [[200, 180], [190, INF], [INF, 176]]},
}
# What `compute_performance_profiles(..., min_tau=1, max_tau=4, num_points=100)` and `compute_leaderboard_score(...,
# normalize=True)` of mlcommons/algorithmic-efficiency, commit 2c90454, print of these two tables: the score, and the
# profile at 1, 2, 3 and 4.
ALGOPERF = {
    "self": {
        "p": (0.75, [0.75, 0.75, 0.75, 0.75]),
        "q": (0.625, [0.5, 0.5, 0.75, 0.75]),
        "r": (0.251263, [0.25, 0.25, 0.25, 0.5]),
    },
    "external": {"x": (0.5, [0.5, 0.5, 0.5, 0.5]), "y": (0.835859, [0.5, 1.0, 1.0, 1.0])},
}


def times(runs: Runs) -> dict[str, dict[str, float]]:
    return {w: {name: time_of(seeds) for name, seeds in row.items()} for w, row in runs.items()}


def of_one(found: Mapping[str, Mapping[str, float]], name: str) -> list[float]:
    return [row[name] for row in found.values()]


def on_a_grid(values: Sequence[float], points: int) -> float:
    """The integral as AlgoPerf takes it: the trapezoidal rule."""
    grid = np.linspace(1, MOST, points)
    shares = (np.asarray(values)[:, None] <= grid).mean(axis=0)
    return float(np.trapezoid(shares, grid) / (MOST - 1))


def test_times_are_medians_over_seeds_of_the_best_trial() -> None:
    assert time_of([[INF, 90], [80, 100], [INF, INF]]) == 90
    assert time_of([[INF], [80], [INF]]) == INF  # on most seeds never
    assert time_of([[10], [INF]]) == INF
    assert time_of([[10], [20]]) == 15


def test_ratios_by_hand() -> None:
    found = ratios(times(SELF_TUNED), HELD_OUT)
    # a: r, which had 55, never got there on a2; p and q tie at 110. b: r takes more than 4 x 60. c: p failed on most
    # seeds; 340 is exactly 4 x 85. d: q failed on d2; r took 160 there, less than 4 x 44.
    assert found == {
        "a": {"p": 1.0, "q": 1.0, "r": INF},
        "b": {"p": 1.0, "q": 2.5, "r": INF},
        "c": {"p": INF, "q": 1.0, "r": 4.0},
        "d": {"p": 1.0, "q": INF, "r": 1.0},
    }
    assert score(of_one(found, "q")) == pytest.approx((1 + (4 - 2.5) / 3 + 1 + 0) / 4)


def test_a_workload_that_nobody_solves_counts_for_nobody() -> None:
    found = ratios({"a": {"p": INF, "q": INF}, "b": {"p": 10.0, "q": 20.0}}, {})
    assert found["a"] == {"p": INF, "q": INF}
    assert (score(of_one(found, "p")), score(of_one(found, "q"))) == pytest.approx((1 / 2, 1 / 3))


def test_a_held_out_variant_is_no_workload_and_counts_only_for_who_solved_its_workload() -> None:
    # q never solved a, so that its 10 on a2 does not make p's 50 slow.
    table = {"a": {"p": 100.0, "q": INF}, "a2": {"p": 50.0, "q": 10.0}}
    assert ratios(table, {"a2": "a"}) == {"a": {"p": 1.0, "q": INF}}
    # Where q solved it, p is more than four times slower on a2, and loses a.
    table["a"]["q"] = 120.0
    assert ratios(table, {"a2": "a"}) == {"a": {"p": INF, "q": 1.0}}


@pytest.mark.parametrize(
    ("rules", "runs", "held_out"), [("self", SELF_TUNED, HELD_OUT), ("external", TUNED, {})]
)
def test_algoperfs_own_script_prints_the_same(rules: str, runs: Runs, held_out: dict[str, str]) -> None:
    found = ratios(times(runs), held_out)
    for name, (theirs, shares) in ALGOPERF[rules].items():
        mine = of_one(found, name)
        assert [profile(mine, tau) for tau in (1, 2, 3, 4)] == shares
        assert on_a_grid(mine, 100) == pytest.approx(theirs, abs=1e-6)
        assert abs(score(mine) - theirs) <= 1 / 198


TIMES = st.one_of(st.just(INF), st.integers(1, 400).map(float))
RATIOS = st.lists(st.one_of(st.just(INF), st.floats(1, 6)), min_size=1, max_size=9)


@given(RATIOS)
def test_the_score_is_the_area_below_the_profile(values: list[float]) -> None:
    found = score(values)
    assert 0 <= found <= 1
    assert on_a_grid(values, 30_001) == pytest.approx(found, abs=1 / 30_000)
    shares = [profile(values, tau) for tau in np.linspace(1, MOST, 40)]
    assert shares == sorted(shares)


@given(
    st.dictionaries(st.sampled_from("abcd"), st.tuples(TIMES, TIMES, TIMES), min_size=1),
    st.sampled_from([0.5, 4.0, 1024.0]),
    st.booleans(),
)
def test_scores_have_no_unit_and_being_faster_never_costs(
    table: dict[str, tuple[float, float, float]], unit: float, has_variant: bool
) -> None:
    rows = {w: dict(zip("pqr", row, strict=True)) for w, row in table.items()}
    first = next(iter(rows))
    held_out = {first + "2": first} if has_variant else {}
    if has_variant:
        rows[first + "2"] = {"p": 30.0, "q": rows[first]["p"], "r": INF}
    found = ratios(rows, held_out)
    scaled = {w: {name: unit * time for name, time in row.items()} for w, row in rows.items()}
    assert ratios(scaled, held_out) == found
    faster = {w: row | {"p": row["p"] / 2} for w, row in rows.items()}
    assert score(of_one(ratios(faster, held_out), "p")) >= score(of_one(found, "p"))
    for row in found.values():
        solved = [one for one in row.values() if one < INF]
        assert not solved or min(solved) == 1
