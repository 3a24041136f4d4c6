"""HiGHS against every plan there is, and against tables of the least cost on larger programs."""

from __future__ import annotations

import dataclasses
import math
import threading

import highspy
import numpy as np
import pytest
from hypothesis import given
from programs import cheapest, large_program, least_cost, small_programs, tangled_program
from property_tests import examples

from scrimp.planner.solver.highs import solve_by_highs
from scrimp.planner.solver.program import Limit, Program


@examples(100)
@given(small_programs())
def test_it_finds_the_cheapest_plan_or_proves_that_there_is_none(program: Program) -> None:
    form, best = program.standard_form(), cheapest(program)
    outcome = solve_by_highs(form, gap=0.0)
    if best is None:
        assert outcome.status == "infeasible"
        return
    assert outcome.status == "solved"
    assert outcome.choices is not None
    assert form.holds(outcome.choices)
    assert form.cost(outcome.choices) == pytest.approx(best, rel=1e-9)
    assert outcome.bound <= best * (1 + 1e-9)


@pytest.mark.parametrize("seed", range(5))
def test_it_agrees_with_the_tables(seed: int) -> None:
    random = np.random.default_rng(seed)
    units = random.choice([1, 8, 28], (400, 1)) * np.array([0, 0, 1, 1])
    costs = large_program(seed, count=400).costs
    low = Limit("low", units.astype(float), least=0.7 * units.sum() / 2)
    form = Program(costs, (low,)).standard_form()
    least = least_cost(costs, units, math.ceil(low.least))
    for gap in (1e-3, 0.0):
        outcome = solve_by_highs(form, gap=gap)
        assert outcome.choices is not None
        assert outcome.bound <= least * (1 + 1e-9)
        assert form.cost(outcome.choices) <= least * (1 + gap + 1e-9)
        assert form.cost(outcome.choices) - outcome.bound <= (gap + 1e-9) * form.cost(outcome.choices)


@pytest.mark.parametrize("seed", range(3))
def test_costs_may_span_fifteen_powers_of_ten(seed: int) -> None:
    random = np.random.default_rng(seed)
    units = random.integers(1, 30, (60, 1)) * np.array([0, 1])
    costs = np.stack([np.zeros(60), 10.0 ** random.uniform(-12, 3, 60)], axis=1)
    low = Limit("low", units.astype(float), least=0.3 * units.sum())
    form, least = Program(costs, (low,)).standard_form(), least_cost(costs, units, math.ceil(low.least))
    outcome = solve_by_highs(form, gap=0.0)
    assert outcome.choices is not None
    assert least < 1e-6
    assert form.cost(outcome.choices) == pytest.approx(least, rel=1e-7)


@pytest.mark.slow
def test_real_amounts_hold_their_limits_to_a_billionth() -> None:
    for seed in range(6):
        program = large_program(seed, seconds=True)
        outcome = solve_by_highs(program.standard_form(), gap=1e-4)
        assert outcome.choices is not None
        for limit in program.limits:
            total = limit.amounts[np.arange(80), outcome.choices].sum()
            assert limit.least * (1 - 1e-9) <= total <= limit.most * (1 + 1e-9)


def test_the_plan_is_the_same_in_every_thread_and_beside_other_models() -> None:
    form = large_program(1, seconds=True).standard_form()
    first = solve_by_highs(form, gap=1e-3).choices
    other = highspy.Highs()
    other.setOptionValue("output_flag", False)
    other.setOptionValue("threads", 2)
    other.minimize(other.addVariable(0.0, 1.0))
    again = [solve_by_highs(form, gap=1e-3).choices]
    thread = threading.Thread(target=lambda: again.append(solve_by_highs(form, gap=1e-3).choices))
    thread.start()
    thread.join()
    for choices in again:
        np.testing.assert_array_equal(choices, first)


def test_nothing_is_written_to_standard_output(capfd: pytest.CaptureFixture[str]) -> None:
    """Where `--json` has its document."""
    assert solve_by_highs(large_program(1).standard_form(), gap=1e-3).status == "solved"
    assert capfd.readouterr().out == ""


def test_stopping_early_is_an_outcome_that_does_not_depend_on_the_clock() -> None:
    form = tangled_program(0).standard_form()
    first, again = (solve_by_highs(form, gap=0.0, nodes=1) for _ in range(2))
    assert first.status == again.status == "nodes"
    assert first.note == "HiGHS stopped after 1 nodes"
    np.testing.assert_array_equal(first.choices, again.choices)


def test_a_bound_is_never_above_the_cost_when_limits_barely_hold() -> None:
    form = large_program(2).standard_form()
    tight = dataclasses.replace(form, least=form.highest.sum(axis=1))
    outcome = solve_by_highs(tight, gap=1e-3)
    assert outcome.choices is not None
    assert set(outcome.choices.tolist()) == {2, 3}
    np.testing.assert_array_equal(outcome.choices, np.where(form.costs[:, 2] <= form.costs[:, 3], 2, 3))
    assert outcome.bound <= tight.cost(outcome.choices) * (1 + 1e-12)
