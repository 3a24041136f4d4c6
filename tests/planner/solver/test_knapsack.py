"""Tables against every plan there is, the specification's own loop, and HiGHS."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from programs import cheapest, large_program, linear_sizes, share_limit, small_programs, stages

from scrimp.planner.solver.highs import solve_by_highs
from scrimp.planner.solver.knapsack import solve_by_knapsack
from scrimp.planner.solver.nesting import CannotTabulateError
from scrimp.planner.solver.program import Limit, Program


def specified_loop(high: np.ndarray, low: np.ndarray, units: list[int], share: float) -> float:
    """Section 7 of the specification, entry by entry: index c counts units outside FP4."""
    cap = math.floor((1.0 - share) * sum(units) + 1e-9)
    best = [0.0] + [math.inf] * cap
    for one, other, unit in zip(high, low, units, strict=True):
        best = [min(best[c] + other, best[c - unit] + one if c >= unit else math.inf) for c in range(cap + 1)]
    return min(best)


@pytest.mark.parametrize("model", ["TinyLlama", "3B", "7B", "70B"])
@pytest.mark.parametrize("share", [0.5, 0.75])
def test_fp8_or_fp4_per_layer_equals_the_specified_loop_and_highs(model: str, share: float) -> None:
    sizes = linear_sizes(model)
    costs = np.random.default_rng(7).lognormal(0.0, 1.0, (len(sizes), 2)) * [0.02, 1.0]
    form = Program(costs, (share_limit(sizes, [False, True], share),)).standard_form()
    units = np.rint(sizes / sizes.min() * {"3B": 10, "7B": 16}.get(model, 1)).astype(int).tolist()
    expected = specified_loop(costs[:, 0], costs[:, 1], units, share)
    found = solve_by_knapsack(form)
    assert found.exact
    assert found.choices is not None
    assert form.holds(found.choices)
    assert form.cost(found.choices) == pytest.approx(expected, rel=1e-12)
    by_highs = solve_by_highs(form, gap=0.0, time_limit=20.0).choices
    assert by_highs is not None
    assert form.cost(by_highs) == pytest.approx(expected, rel=1e-9)


@settings(deadline=None, max_examples=100)
@given(small_programs(nested=True))
def test_nested_limits_of_whole_units_give_the_cheapest_plan(program: Program) -> None:
    form, best = program.standard_form(), cheapest(program)
    found = solve_by_knapsack(form)
    if not found.exact:
        assert found.choices is None or form.holds(found.choices)
        assert best is None or found.bound <= best * (1 + 1e-9)
    elif best is None:
        assert found.choices is None
    else:
        assert found.choices is not None
        assert form.holds(found.choices)
        assert form.cost(found.choices) == pytest.approx(best, rel=1e-9)
        assert found.bound == pytest.approx(best, rel=1e-9)


def test_limits_in_limits_in_limits_give_the_plan_of_highs() -> None:
    random = np.random.default_rng(4)
    units = random.integers(1, 9, 48).astype(float)
    costs = random.lognormal(0.0, 1.0, (48, 3)) * [0.01, 1.0, 0.3]
    amounts = units[:, None] * [0.0, 2.0, 1.0]
    limits = [Limit("all", amounts, least=1.1 * units.sum(), most=1.2 * units.sum())]
    for count in (2, 4, 8):
        for part in stages(48, count):
            inside = np.where(part[:, None], amounts / count, 0.0)
            limits.append(Limit(f"one of {count}", inside, least=0.8 * units[part].sum() / count))
    form = Program(costs, tuple(limits)).standard_form()
    found, by_highs = solve_by_knapsack(form), solve_by_highs(form, gap=0.0, time_limit=20.0)
    assert found.exact
    assert found.choices is not None
    assert by_highs.choices is not None
    assert form.cost(found.choices) == pytest.approx(form.cost(by_highs.choices), rel=1e-9)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("per_stage", [False, True])
def test_seconds_are_rounded_and_come_within_two_ten_thousandths_of_highs(seed: int, per_stage: bool) -> None:
    random = np.random.default_rng(seed)
    costs = random.lognormal(0.0, 1.0, (240, 6)) * [0.0, 0.01, 0.02, 0.7, 1.0, 1.1]
    seconds = random.choice([1.0, 8.0, 28.0], 240)[:, None] * random.lognormal(0.0, 0.1, (240, 6))
    seconds *= [4.0, 2.2, 2.1, 1.3, 1.2, 1.1]
    limits = []
    for part in stages(240, 4) if per_stage else stages(240, 1):
        inside = np.where(part[:, None], seconds, 0.0)
        limits.append(Limit("seconds", inside, most=1.3 * inside.min(axis=1).sum()))
    form = Program(costs, tuple(limits)).standard_form()
    found, by_highs = solve_by_knapsack(form), solve_by_highs(form, gap=1e-5, time_limit=30.0)
    assert not found.exact
    assert found.choices is not None
    assert by_highs.choices is not None
    assert form.holds(found.choices)
    assert found.bound <= form.cost(by_highs.choices)
    assert form.cost(found.choices) <= form.cost(by_highs.choices) * (1 + 2e-4)


def test_two_phases_of_unequal_length_are_refined_to_the_same_precision() -> None:
    random = np.random.default_rng(0)
    phase = np.repeat([0.95, 0.05], 400)[:, None]
    harm = phase * random.lognormal(0.0, 3.0, (800, 1))
    costs = harm * random.lognormal(0.0, 0.3, (800, 4)) * [0.0, 0.02, 1.0, 1.2]
    seconds = phase * random.choice([1.0, 8.0, 28.0], (800, 1)) * random.lognormal(0.0, 0.05, (800, 4))
    seconds *= [4.0, 2.1, 1.2, 1.1]
    form = Program(costs, (Limit("seconds", seconds, most=1.25 * seconds.min(axis=1).sum()),)).standard_form()
    found, by_highs = solve_by_knapsack(form), solve_by_highs(form, gap=1e-5, time_limit=30.0)
    assert found.choices is not None
    assert by_highs.choices is not None
    assert form.cost(found.choices) <= form.cost(by_highs.choices) * (1 + 2e-4)


def test_a_least_and_a_most_on_seconds_both_hold() -> None:
    random = np.random.default_rng(5)
    seconds = random.lognormal(0.0, 1.0, (60, 3))
    total = np.sort(seconds, axis=1)[:, 1].sum()
    limit = Limit("seconds", seconds, least=total, most=total * (1 + 1e-4))
    form = Program(random.lognormal(0.0, 1.0, (60, 3)), (limit,)).standard_form()
    found = solve_by_knapsack(form)
    assert found.choices is not None
    assert form.holds(found.choices)


def test_limits_that_overlap_are_refused_by_name() -> None:
    with pytest.raises(CannotTabulateError, match=r"(seconds of stage|the FP4 share).*(proportion|overlap)"):
        solve_by_knapsack(large_program(0, seconds=True).standard_form())
    ones = np.ones((3, 2)) * [0.0, 1.0]
    limits = (
        Limit("first two", ones * [[1], [1], [0]], least=1),
        Limit("last two", ones * [[0], [1], [1]], least=1),
    )
    with pytest.raises(CannotTabulateError, match="first two and last two overlap"):
        solve_by_knapsack(Program(np.ones((3, 2)), limits).standard_form())


def test_a_limit_that_nothing_can_break_does_not_count_as_overlapping() -> None:
    program = large_program(0)
    loose = Limit("bytes", np.random.default_rng(0).random((80, 4)), most=1000.0)
    found = solve_by_knapsack(Program(program.costs, (*program.limits, loose)).standard_form())
    assert found.exact


def test_of_equally_cheap_plans_the_one_with_least_changes_is_found() -> None:
    units = np.array([4.0, 1.0, 1.0, 2.0, 4.0])
    costs = np.stack([np.zeros(5), units], axis=1)
    form = Program(costs, (Limit("low", np.stack([np.zeros(5), units], 1), least=4.0),)).standard_form()
    for current in ([0, 1, 1, 1, 0], [1, 0, 0, 0, 0], [0, 0, 0, 0, 1]):
        found = solve_by_knapsack(form, np.array(current))
        np.testing.assert_array_equal(found.choices, current)
    near = solve_by_knapsack(form, np.array([0, 1, 1, 1, 1])).choices
    assert near is not None
    assert form.cost(near) == 4.0
    assert (near != [0, 1, 1, 1, 1]).sum() == 1
