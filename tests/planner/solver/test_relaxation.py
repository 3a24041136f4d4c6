"""Bounds and plans from prices on the limits, against every plan there is and against HiGHS."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from programs import all_plans, cheapest, large_program, small_programs

from scrimp.planner.solver.highs import solve_by_highs
from scrimp.planner.solver.program import Limit, Program
from scrimp.planner.solver.relaxation import relax, solve_by_relaxation
from scrimp.planner.solver.standard import propagate


@settings(deadline=None, max_examples=100)
@given(small_programs())
def test_bounds_hold_for_all_plans_and_for_those_with_each_choice(program: Program) -> None:
    form = propagate(program.standard_form())
    if form is None:
        assert cheapest(program) is None
        return
    relaxed = relax(form)
    for plan, cost in all_plans(program):
        assert not relaxed.infeasible
        dearer = relaxed.dearer[np.arange(len(plan)), plan].max()
        assert relaxed.bound + dearer <= cost * (1 + 1e-9) + 1e-12


@settings(deadline=None, max_examples=100)
@given(small_programs())
def test_its_plan_is_a_plan_and_no_better_than_the_best(program: Program) -> None:
    best, found = cheapest(program), solve_by_relaxation(program.standard_form())
    if found.choices is None:
        assert not (found.infeasible and best is not None)
        return
    assert program.standard_form().holds(found.choices)
    assert best is not None
    assert best <= program.standard_form().cost(found.choices) * (1 + 1e-9)


@pytest.mark.parametrize("seconds", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_it_comes_close_to_the_best_plan_of_many_decisions(seed: int, seconds: bool) -> None:
    form = large_program(seed, count=300, seconds=seconds).standard_form()
    found = solve_by_relaxation(form)
    best = solve_by_highs(form, gap=1e-4, time_limit=30.0)
    assert found.choices is not None
    assert best.choices is not None
    assert form.holds(found.choices)
    assert found.bound <= form.cost(best.choices)
    assert form.cost(found.choices) <= 1.02 * form.cost(best.choices)
    assert form.cost(found.choices) - found.bound <= 0.03 * form.cost(found.choices)


def test_without_limits_every_decision_takes_its_cheapest_choice() -> None:
    costs = np.random.default_rng(0).random((30, 4))
    found = solve_by_relaxation(Program(costs).standard_form())
    np.testing.assert_array_equal(found.choices, costs.argmin(axis=1))
    assert found.bound == pytest.approx(costs.min(axis=1).sum(), rel=1e-12)


@pytest.mark.parametrize("share", [0.5, 0.97])
def test_a_limit_that_takes_nearly_everything_is_not_taken_for_impossible(share: float) -> None:
    costs = np.tile([0.0, 1.0], (1000, 1))
    form = Program(costs, (Limit("low", costs, least=1000.0 * share),)).standard_form()
    found = solve_by_relaxation(form)
    assert found.choices is not None
    assert form.cost(found.choices) == 1000.0 * share
    assert found.bound == pytest.approx(1000.0 * share, rel=1e-5)


def test_limits_that_not_even_mixtures_hold_are_proven_impossible() -> None:
    random = np.random.default_rng(0)
    amounts = random.random((200, 3))
    low, high = Limit("low", amounts, least=120.0), Limit("high", amounts**2, most=60.0)
    found = solve_by_relaxation(Program(random.random((200, 3)), (low, high)).standard_form())
    assert found.choices is None
    assert found.infeasible
