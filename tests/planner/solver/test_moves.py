"""Small changes of a plan never break a limit and never cost more than they should."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from programs import all_plans, large_program, small_programs
from property_tests import examples

from scrimp.planner.solver.moves import improve, keep_current, repair
from scrimp.planner.solver.program import Limit, Program, solve
from scrimp.planner.solver.standard import propagate


@examples(60)
@given(small_programs())
def test_no_single_change_improves_an_improved_plan(program: Program) -> None:
    form = program.standard_form()
    plans = list(all_plans(program))
    for plan, cost in plans[:5]:
        better = improve(form, plan)
        assert form.holds(better)
        assert form.cost(better) <= cost * (1 + 1e-12)
        neighbours = [other for other, _ in plans if (other != better).sum() == 1]
        assert all(form.cost(other) >= form.cost(better) * (1 - 1e-12) for other in neighbours)


@pytest.mark.parametrize("seed", range(5))
def test_a_plan_that_breaks_limits_is_repaired_near_it(seed: int) -> None:
    form = propagate(large_program(seed, seconds=True).standard_form())
    assert form is not None
    cheapest = form.costs.argmin(axis=1)
    assert not form.holds(cheapest)
    repaired = repair(form, cheapest)
    assert repaired is not None
    assert form.holds(repaired)


def test_a_plan_that_cannot_be_repaired_is_none() -> None:
    program = Program(
        np.ones((2, 2)), (Limit("both", np.array([[0.0, 2.0], [0.0, 2.0]]), least=3.0, most=3.0),)
    )
    assert repair(program.standard_form(), np.array([0, 0])) is None


def test_of_equal_layers_those_stay_that_have_the_format_already() -> None:
    amounts = np.tile([0.0, 1.0], (10, 1))
    costs = np.tile([0.0, 0.3], (10, 1))
    form = Program(costs, (Limit("low", amounts, least=4.0),)).standard_form()
    current = np.array([0, 1, 0, 1, 0, 1, 0, 1, 0, 1])
    kept = keep_current(form, np.array([1, 1, 1, 1, 0, 0, 0, 0, 0, 0]), current)
    assert form.holds(kept)
    assert kept.sum() == 4
    assert (kept <= current).all()


def test_a_current_plan_that_is_as_cheap_stays_even_if_many_changes_lead_to_it() -> None:
    units = np.array([4.0, 1.0, 1.0, 2.0])
    amounts = np.stack([np.zeros(4), units], axis=1)
    form = Program(amounts, (Limit("low", amounts, least=4.0),)).standard_form()
    current = np.array([0, 1, 1, 1])
    np.testing.assert_array_equal(keep_current(form, np.array([1, 0, 0, 0]), current), current)


def test_a_dearer_format_is_not_kept() -> None:
    costs = np.array([[1.0, 1.0 + 1e-8], [1.0, 1.0 + 1e-10]])
    kept = keep_current(Program(costs).standard_form(), np.array([0, 0]), np.array([1, 1]))
    np.testing.assert_array_equal(kept, [0, 1])


def test_what_is_kept_together_costs_less_than_a_billionth() -> None:
    form = Program(np.tile([1.0, 1.0 + 4e-9], (1000, 1))).standard_form()
    cheapest, current = np.zeros(1000, dtype=np.int64), np.arange(1000) % 2
    kept = keep_current(form, cheapest, current)
    assert 0 < kept.sum() < current.sum()
    assert form.cost(kept) <= form.cost(cheapest) * (1 + 1e-9)


@examples(60)
@given(small_programs())
def test_keeping_the_current_plan_costs_nothing_and_breaks_nothing(program: Program) -> None:
    form = program.standard_form()
    plans = list(all_plans(program))
    for (plan, cost), (current, _) in zip(plans[:6], reversed(plans[-6:]), strict=True):
        kept = keep_current(form, plan, current)
        assert form.holds(kept)
        assert form.cost(kept) <= cost * (1 + 1e-9)
        assert set(np.flatnonzero(kept != plan)) <= set(np.flatnonzero(kept == current))


def test_the_plan_of_a_solver_cannot_be_improved_by_one_change() -> None:
    program = large_program(3, seconds=True)
    choices = solve(program, gap=0.02).choices
    np.testing.assert_array_equal(improve(program.standard_form(), choices), choices)
