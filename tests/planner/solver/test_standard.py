"""The arrays that solvers share: tolerances, choices that no plan can afford, common units."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from programs import all_plans, linear_sizes, small_programs
from property_tests import examples

from scrimp.planner.solver.program import Limit, Program
from scrimp.planner.solver.standard import common_unit, one_sided, propagate


@examples(100)
@given(small_programs())
def test_no_choice_of_a_plan_is_taken_out(program: Program) -> None:
    form = propagate(program.standard_form())
    for plan, _ in all_plans(program):
        assert form is not None
        assert form.allowed[np.arange(len(plan)), plan].all()


@examples(100)
@given(small_programs())
def test_one_sided_limits_hold_exactly_where_the_limits_do(program: Program) -> None:
    form = program.standard_form()
    assume(propagate(form) is not None)
    rows = one_sided(form)
    random = np.random.default_rng(0)
    for _ in range(20):
        plan = np.array([random.choice(np.flatnonzero(row)) for row in form.allowed])
        assert bool(rows.fits(rows.totals(plan))) == form.holds(plan)


def test_a_choice_that_alone_breaks_a_limit_is_taken_out() -> None:
    program = Program(
        np.zeros((2, 3)), (Limit("bytes", np.array([[1.0, 5.0, 2.0], [1.0, 1.0, 4.0]]), most=5.0),)
    )
    form = propagate(program.standard_form())
    assert form is not None
    np.testing.assert_array_equal(form.allowed, [[True, False, True], [True, True, True]])


@pytest.mark.parametrize("factor", [1e-18, 1.0, 1e15])
def test_a_limit_holds_to_a_billionth(factor: float) -> None:
    limit = Limit("seconds", np.array([[0.5], [0.5]]) * factor, most=factor * (1.0 - 9e-10))
    assert Program(np.ones((2, 1)), (limit,)).standard_form().holds(np.array([0, 0]))
    limit = Limit("seconds", np.array([[0.5], [0.5]]) * factor, most=factor * (1.0 - 2e-9))
    assert not Program(np.ones((2, 1)), (limit,)).standard_form().holds(np.array([0, 0]))


def test_what_a_sum_loses_breaks_no_limit() -> None:
    random = np.random.default_rng(0)
    amounts = random.normal(0.0, 1e6, (2000, 1))
    amounts[0] -= math.fsum(amounts[:, 0]) - 1e-3
    total = math.fsum(amounts[:, 0])
    program = Program(np.ones((2000, 1)), (Limit("difference", amounts, least=total, most=total),))
    assert amounts.sum() != total
    assert program.standard_form().holds(np.zeros(2000, dtype=np.int64))


@pytest.mark.parametrize(("model", "units"), [("TinyLlama", 1848), ("3B", 3146), ("7B", 6176), ("70B", 8160)])
def test_sizes_of_linear_layers_have_the_published_units(model: str, units: int) -> None:
    sizes = linear_sizes(model)
    unit = common_unit(sizes, 1e5)
    assert unit is not None
    assert round(sizes.sum() / unit) == units
    shares = sizes / sizes.sum()
    assert common_unit(shares, 1e5) == pytest.approx(1.0 / units, rel=1e-12)


@given(
    st.lists(st.integers(0, 5000), min_size=1, max_size=20).filter(any),
    st.floats(1e-12, 1e12),
)
def test_the_common_unit_is_the_greatest_common_divisor(counts: list[int], unit: float) -> None:
    found = common_unit(np.array(counts) * unit, 1e5)
    assert found == pytest.approx(math.gcd(*counts) * unit, rel=1e-9)


def test_measured_amounts_have_no_common_unit() -> None:
    assert common_unit(np.random.default_rng(0).lognormal(0.0, 1.0, 50), 1e5) is None
