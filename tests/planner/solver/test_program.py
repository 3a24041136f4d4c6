"""The door: the cheapest plan what a user did wrong, and what went wrong."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from programs import (
    Floats,
    all_plans,
    cheapest,
    holds,
    large_program,
    linear_sizes,
    share_limit,
    small_programs,
    stages,
    tangled_program,
)
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.planner.solver.program import Limit, Program, solve

LOW = [False, False, True, True]


def llama_70b(seed: int) -> Program:
    """80 layers x 7 linears x 3 GEMMs x 4 formats, 8 stages with a least FP4 share, and one over all."""
    random = np.random.default_rng(seed)
    sizes = np.repeat(linear_sizes("70B"), 3)
    harm = random.lognormal(0.0, 1.0, (len(sizes), 1)) * random.lognormal(0.0, 0.3, (len(sizes), 4))
    limits = [share_limit(sizes, LOW, 0.75)]
    limits += [share_limit(sizes, LOW, 0.6, stage) for stage in stages(len(sizes), 8)]
    return Program(harm * [0.0, 0.02, 1.0, 1.2], tuple(limits))


@examples(100)
@given(small_programs())
def test_a_plan_is_the_cheapest_within_the_limits(program: Program) -> None:
    best = cheapest(program)
    if best is None:
        with pytest.raises(PlanError):
            solve(program, gap=0.0)
        return
    solution = solve(program, gap=0.0)
    assert all(holds(limit, solution.choices) for limit in program.limits)
    assert solution.cost == pytest.approx(
        math.fsum(program.costs[np.arange(len(program.costs)), solution.choices])
    )
    assert solution.bound <= best * (1 + 1e-9)
    assert solution.cost == pytest.approx(best, rel=1e-9)


@examples(60)
@given(small_programs())
def test_the_current_plan_stays_where_it_is_as_cheap_as_any(program: Program) -> None:
    plans = list(all_plans(program))
    best = min((cost for _, cost in plans), default=0.0)
    for current in [plan for plan, cost in plans if cost <= best * (1 + 1e-12)][:4]:
        np.testing.assert_array_equal(solve(program, current=current).choices, current)


def test_a_70b_model_in_eight_stages_is_solved_to_the_gap() -> None:
    solution = solve(llama_70b(0))
    assert solution.note == ""
    assert solution.gap <= 1e-3
    assert all(holds(limit, solution.choices) for limit in llama_70b(0).limits)


def test_equal_input_gives_equal_plans() -> None:
    program = large_program(5, seconds=True)
    np.testing.assert_array_equal(solve(program).choices, solve(program).choices)


def test_a_plan_that_was_stopped_early_says_so_and_how_far_it_may_be_off() -> None:
    program = tangled_program(0)
    solution = solve(program, gap=0.0, nodes=1)
    assert solution.note == "HiGHS stopped after 1 nodes; the plan is the best until then"
    assert all(holds(limit, solution.choices) for limit in program.limits)
    assert 0.0 < solution.gap < 0.5


def narrow_program(seed: int) -> Program:
    """A range of seconds so narrow that hardly a plan lies in it."""
    random = np.random.default_rng(seed)
    seconds, costs = random.lognormal(0.0, 1.0, (5, 3)), random.random((5, 3))
    total = seconds[np.arange(5), random.integers(0, 3, 5)].sum()
    return Program(costs, (Limit("seconds", seconds, least=total, most=total * (1 + 1e-7)),))


@pytest.mark.parametrize("seed", [4, 6])
def test_the_only_plan_in_a_narrow_range_is_found(seed: int) -> None:
    assert solve(narrow_program(seed)).cost == pytest.approx(cheapest(narrow_program(seed)))


def test_decisions_without_limits_take_their_cheapest_format() -> None:
    costs = np.random.default_rng(1).random((20, 5))
    np.testing.assert_array_equal(solve(Program(costs)).choices, costs.argmin(axis=1))


def test_a_format_that_is_not_allowed_needs_no_amount() -> None:
    costs = np.array([[1.0, math.inf], [1.0, 2.0]])
    seconds = np.array([[3.0, math.nan], [3.0, 1.0]])
    solution = solve(Program(costs, (Limit("seconds", seconds, most=4.0),)))
    np.testing.assert_array_equal(solution.choices, [0, 1])


def test_a_current_format_that_is_not_allowed_any_more_is_left() -> None:
    costs = np.array([[1.0, math.inf, 1.0], [1.0, 1.0, 1.0]])
    np.testing.assert_array_equal(solve(Program(costs), current=np.array([1, 2])).choices, [0, 2])


def test_plans_that_cost_nothing_have_no_gap() -> None:
    solution = solve(Program(np.zeros((4, 3)), (Limit("low", np.tile([0.0, 1.0, 1.0], (4, 1)), least=2.0),)))
    assert (solution.cost, solution.bound, solution.gap) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("costs", "message"),
    [
        (np.zeros((0, 3)), "a row per decision"),
        (np.zeros((3, 0)), "a row per decision"),
        (np.zeros(3), "a row per decision"),
        (np.array([[1.0, 2.0], [1.0, math.nan]]), "the cost of format 1 in decision 1 is not a number"),
        (np.array([[1.0, 2.0], [-1.0, 0.0]]), "the cost of format 0 in decision 1 is negative"),
        (np.array([[1.0, -math.inf]]), "the cost of format 1 in decision 0 is negative"),
        (np.array([[1.0, 2.0], [math.inf, math.inf]]), "decision 1 has no format to choose from"),
    ],
)
def test_costs_that_make_no_sense_are_refused(costs: Floats, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Program(costs)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (Limit("bytes", np.zeros((2, 3))), "amounts of the limit bytes do not fit"),
        (
            Limit("bytes", np.array([[1.0, math.nan], [0.0, 0.0]])),
            "bytes: no amount for format 1 in decision 0",
        ),
        (Limit("bytes", np.zeros((2, 2)), least=2.0, most=1.0), "bytes has no range"),
        (Limit("bytes", np.zeros((2, 2)), least=math.nan), "bytes has no range"),
        (Limit("bytes", np.zeros((2, 2)), least=math.inf), "bytes has no range"),
    ],
)
def test_limits_that_make_no_sense_are_refused_by_name(limit: Limit, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Program(np.ones((2, 2)), (limit,))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"gap": -0.1}, "gap is out of range"),
        ({"gap": math.nan}, "gap is out of range"),
        ({"current": np.array([0, 1, 0])}, "does not fit the program"),
        ({"current": np.array([0.0, 1.0])}, "does not fit the program"),
        ({"current": np.array([0, 2])}, "formats that the program does not know"),
        ({"current": np.array([-1, 0])}, "formats that the program does not know"),
    ],
)
def test_arguments_out_of_range_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        solve(Program(np.ones((2, 2))), **arguments)  # type: ignore[arg-type]
