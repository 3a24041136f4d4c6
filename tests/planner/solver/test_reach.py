"""Limits that no plan can meet are named, with what can be reached."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import assume, given
from programs import all_plans, cheapest, large_program, share_limit, small_programs, stages
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.planner.solver.program import Limit, Program, solve


def refusal(program: Program) -> PlanError:
    with pytest.raises(PlanError) as caught:
        solve(program)
    return caught.value


def test_a_share_out_of_reach_says_what_can_be_reached() -> None:
    sizes = np.array([8.0, 1.0, 1.0, 8.0, 28.0, 28.0, 28.0])
    costs = np.tile([0.0, 1.0], (7, 1))
    costs[3:5, 1] = np.inf
    error = refusal(Program(costs, (share_limit(sizes, [False, True], 0.75),)))
    assert error.what == "no plan can meet the FP4 share"
    assert error.args[0].count("at most 0.647058 can be reached") == 1  # 66 of 102, rounded down
    assert "at least 0.75" in str(error)


def test_every_stage_out_of_reach_is_named() -> None:
    sizes, costs = np.ones(8), np.tile([0.0, 1.0], (8, 1))
    costs[[2, 3, 6], 1] = np.inf
    limits = tuple(share_limit(sizes, [False, True], 0.75, stage) for stage in stages(8, 4))
    error = str(refusal(Program(costs, limits)))
    assert "the FP4 share of the stage from 2 and the FP4 share of the stage from 6" in error
    assert "the FP4 share of the stage from 2: at most 0 can be reached" in error
    assert "the FP4 share of the stage from 6: at most 0.5 can be reached" in error


def test_what_is_said_to_be_reachable_is() -> None:
    sizes = np.random.default_rng(0).lognormal(0.0, 1.0, 40)
    costs = np.where(np.arange(80).reshape(40, 2) % 3 == 1, np.inf, 1.0)
    error = refusal(Program(costs, (share_limit(sizes, [False, True], 0.9),)))
    number = re.search(r"at most ([\d.e-]+) can", str(error))
    assert number is not None
    solve(Program(costs, (share_limit(sizes, [False, True], float(number[1])),)))


def test_limits_that_fail_together_are_told_from_the_others() -> None:
    program = large_program(0, seconds=True)
    low = np.zeros((80, 4))
    low[:, 2:] = 1.0
    few = Limit("GEMMs in 4 bits", low, most=20.0)
    error = refusal(Program(program.costs, (*program.limits[1:], program.limits[0], few)))
    assert error.what == "no plan can meet the FP4 share and GEMMs in 4 bits together"


@examples(60)
@given(small_programs(missed=0.8))
def test_blamed_limits_fail_together_and_none_of_them_is_needless(program: Program) -> None:
    assume(cheapest(program) is None)
    error = refusal(program)
    blamed = [limit for limit in program.limits if re.search(rf"\b{limit.name}\b", error.what)]
    assert blamed
    assert cheapest(Program(program.costs, tuple(blamed))) is None
    if "together" in error.what:
        for rest in itertools.combinations(blamed, len(blamed) - 1):
            assert cheapest(Program(program.costs, rest)) is not None


def test_the_nearest_amount_is_found_while_the_others_hold() -> None:
    random = np.random.default_rng(3)
    first, second = random.lognormal(0.0, 1.0, (6, 3)), random.lognormal(0.0, 1.0, (6, 3))
    most = 1.1 * first.min(axis=1).sum()
    reachable = max(
        second[np.arange(6), plan].sum()
        for plan, _ in all_plans(Program(np.ones((6, 3)), (Limit("bytes", first, most=most),)))
    )
    wanted = (reachable + second.max(axis=1).sum()) / 2
    limits = (Limit("bytes", first, most=most), Limit("speed", second, least=wanted))
    error = refusal(Program(np.ones((6, 3)), limits))
    number = re.search(r"speed: at most ([\d.e-]+) can be reached while the others hold", str(error))
    assert number is not None
    assert float(number[1]) == pytest.approx(reachable, rel=1e-5)
    assert float(number[1]) <= reachable


def test_a_range_between_two_sums_is_refused() -> None:
    limit = Limit("units", np.array([[0.0, 4.0], [0.0, 4.0]]), least=5.0, most=7.0)
    error = refusal(Program(np.ones((2, 2)), (limit,)))
    assert "units: at most 4 can be reached" in str(error)
    assert "units: at least 8 can be reached" in str(error)
