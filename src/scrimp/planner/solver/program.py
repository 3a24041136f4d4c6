"""The integer program: one format per decision, least cost, within limits.

Problem  A decision is a GEMM (or a layer, or a GEMM in one phase of training); a choice is a format. Every
         choice has a cost, the harm that it does, and adds amounts to limits: FLOPs in FP4 of its pipeline
         stage, seconds per step, bytes ::

             min  sum_n cost[n, choice[n]]
             s.t. least_k <= sum_n amount_k[n, choice[n]] <= most_k        for every limit k

Method   HiGHS (`scrimp.planner.solver.highs`). Where it fails or runs out of time, the plan is that of the tables
         (`knapsack`), or where limits overlap in ways that tables cannot hold, of the relaxation (`relaxation`);
         a note says so. What HiGHS had found by then is not used: it depends on the clock.
         Every plan is checked against all limits, to 1e-9 of each.
Ties     Of plans whose costs differ by less than 1e-9, the one nearest to the current plan.
Limits   The same input gives the same plan, except where time runs out. One thread.
Sources  SNIP (arXiv 2602.01410); the budgets per stage and in seconds are Scrimp's.
Checked  tests/planner/solver/test_program.py: against brute force.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError
from scrimp.planner.solver.highs import Outcome, solve_by_highs
from scrimp.planner.solver.knapsack import solve_by_knapsack
from scrimp.planner.solver.moves import keep_current
from scrimp.planner.solver.nesting import CannotTabulateError
from scrimp.planner.solver.reach import explain, refuse_unreachable
from scrimp.planner.solver.relaxation import solve_by_relaxation
from scrimp.planner.solver.standard import Choices, Floats, StandardForm

SOLVERS = ("auto", "highs", "knapsack", "relaxation")


@dataclass(frozen=True, eq=False)
class Limit:
    """What all choices together may or must add up to."""

    name: str
    """In words, for errors: "the FP4 share of stage 2", "seconds per step"."""
    amounts: Floats
    """[N, P] what choosing format p for decision n adds; 0 in decisions that the limit does not concern."""
    least: float = -math.inf
    most: float = math.inf


@dataclass(frozen=True, eq=False)
class Program:
    """Costs and limits; checked when it is made.

    Raises:
        PlanError: no decisions, shapes that do not fit, a decision without a choice, or values that are not
            numbers or out of range; named.
    """

    costs: Floats
    """[N, P], at least 0; infinite where a choice is not allowed."""
    limits: Sequence[Limit] = ()

    def __post_init__(self) -> None:
        costs = np.asarray(self.costs, dtype=np.float64)
        _check_costs(costs)
        for limit in self.limits:
            _check_limit(limit, costs)

    def standard_form(self) -> StandardForm:
        """The arrays that solvers read."""
        costs = np.array(self.costs, dtype=np.float64)
        amounts = [np.where(np.isfinite(costs), limit.amounts, 0.0) for limit in self.limits]
        return StandardForm(
            costs=costs,
            amounts=np.array(amounts, dtype=np.float64).reshape(-1, *costs.shape),
            least=np.array([limit.least for limit in self.limits], dtype=np.float64),
            most=np.array([limit.most for limit in self.limits], dtype=np.float64),
            names=tuple(limit.name for limit in self.limits),
        )


@dataclass(frozen=True, eq=False)
class Solution:
    """A plan that holds every limit."""

    choices: Choices
    """[N] the format of each decision."""
    cost: float
    """Sum of the costs chosen."""
    bound: float
    """Proven: no plan costs less."""
    solver: str
    """HiGHS, knapsack or relaxation."""
    seconds: float
    """Wall-clock time of the whole call."""
    note: str = ""
    """Why this is not the plan that was asked for, if it is not."""

    @property
    def gap(self) -> float:
        """How much cheaper the best plan might be, relative to this one."""
        return (self.cost - self.bound) / self.cost if self.cost > 0.0 else 0.0


@dataclass(frozen=True, eq=False)
class _Answer:
    choices: Choices
    bound: float
    solver: str
    note: str = ""


def solve(
    program: Program,
    *,
    current: NDArray[np.int64] | None = None,
    gap: float = 1e-3,
    time_limit: float = 60.0,
    solver: str = "auto",
) -> Solution:
    """The cheapest plan within the limits.

    Args:
        current: [N] the plan that ties keep.
        gap: relative, at which HiGHS may stop. The knapsack's is 0, or whatever rounding leaves.
        time_limit: seconds for HiGHS.
        solver: auto, or one by name: highs, knapsack, relaxation.

    Raises:
        PlanError: limits that no plan can meet (named, with what can be reached); none found though one may
            exist; an argument out of range.
    """
    started = time.perf_counter()
    form = program.standard_form()
    _check_arguments(gap, time_limit, solver)
    kept = None if current is None else _checked_current(current, form)
    refuse_unreachable(form)
    if solver == "knapsack":
        answer = _tables(form, kept)
    elif solver == "relaxation":
        answer = _relaxation(form)
    else:
        answer = _highs(form, kept, gap, time_limit, fall_back=solver == "auto")
    choices = answer.choices if kept is None else keep_current(form, answer.choices, kept)
    if not form.holds(choices):
        raise RuntimeError(f"{answer.solver} broke a limit: {form.overruns(choices)}")
    cost = form.cost(choices)
    seconds = time.perf_counter() - started
    return Solution(choices, cost, min(answer.bound, cost), answer.solver, seconds, answer.note)


def _highs(
    form: StandardForm, current: Choices | None, gap: float, time_limit: float, *, fall_back: bool
) -> _Answer:
    outcome = solve_by_highs(form, gap=gap, time_limit=time_limit)
    if outcome.status == "infeasible":
        raise explain(form)
    if outcome.status == "solved" and outcome.choices is not None:
        return _Answer(outcome.choices, outcome.bound, "HiGHS")
    why = f"HiGHS reached its limit of {time_limit:g} s" if outcome.status == "time" else outcome.note
    if not fall_back:
        return _unfinished(outcome, why)
    try:
        answer = _tables(form, current)
    except _NothingFound:
        return _unfinished(outcome, why)
    note = "; ".join(part for part in (why, answer.note, f"the plan is that of the {answer.solver}") if part)
    return _Answer(answer.choices, answer.bound, answer.solver, note)


class _NothingFound(PlanError):  # noqa: N818 - a PlanError to users, told apart here only
    """A solver ended without a plan and without a proof that there is none."""


def _unfinished(outcome: Outcome, why: str) -> _Answer:
    """What HiGHS had when it stopped."""
    if outcome.choices is None:
        raise _NothingFound(f"no plan was found: {why}", do="give it more time, or loosen a limit")
    return _Answer(outcome.choices, outcome.bound, "HiGHS", f"{why}; the plan is the best until then")


def _tables(form: StandardForm, current: Choices | None) -> _Answer:
    """The knapsack's plan, or the relaxation's where tables cannot hold the limits."""
    try:
        found = solve_by_knapsack(form, current)
    except CannotTabulateError as error:
        answer = _relaxation(form)
        return _Answer(answer.choices, answer.bound, answer.solver, f"no tables for these limits: {error}")
    if found.choices is not None:
        return _Answer(found.choices, found.bound, "knapsack")
    if found.exact:
        raise explain(form)
    answer = _relaxation(form)
    return _Answer(answer.choices, answer.bound, answer.solver, "no plan was found with rounded amounts")


def _relaxation(form: StandardForm) -> _Answer:
    found = solve_by_relaxation(form)
    if found.choices is not None:
        return _Answer(found.choices, found.bound, "relaxation")
    if found.infeasible:
        raise explain(form)
    raise _NothingFound("the relaxation found no plan within the limits", do="loosen a limit, or use HiGHS")


def _check_costs(costs: Floats) -> None:
    if costs.ndim != 2 or costs.size == 0:
        shape = list(costs.shape)
        raise PlanError("costs need a row per decision and a column per format", got=shape, expected="[N, P]")
    for wrong, what in (
        (np.isnan(costs), "is not a number"),
        (costs < 0.0, "is negative"),
    ):
        if wrong.any():
            n, p = np.argwhere(wrong)[0].tolist()
            raise PlanError(
                f"the cost of format {p} in decision {n} {what}", got=costs[n, p], expected="0 or more"
            )
    none = ~np.isfinite(costs).any(axis=1)
    if none.any():
        raise PlanError(f"decision {int(none.argmax())} has no format to choose from", got="infinite costs")


def _check_limit(limit: Limit, costs: Floats) -> None:
    amounts = np.asarray(limit.amounts, dtype=np.float64)
    if amounts.shape != costs.shape:
        raise PlanError(
            f"amounts of the limit {limit.name} do not fit the costs",
            got=list(amounts.shape),
            expected=list(costs.shape),
        )
    wrong = np.isfinite(costs) & ~np.isfinite(amounts)
    if wrong.any():
        n, p = np.argwhere(wrong)[0].tolist()
        raise PlanError(f"{limit.name}: no amount for format {p} in decision {n}", got=amounts[n, p])
    if not (limit.least <= limit.most and limit.least < math.inf and limit.most > -math.inf):
        raise PlanError(
            f"{limit.name} has no range", got=f"at least {limit.least:g} and at most {limit.most:g}"
        )


def _check_arguments(gap: float, time_limit: float, solver: str) -> None:
    if solver not in SOLVERS:
        raise PlanError("there is no such solver", got=solver, expected=", ".join(SOLVERS))
    if not 0.0 <= gap < 1.0:
        raise PlanError("the gap is out of range", got=gap, expected="at least 0 and below 1")
    if not time_limit > 0.0:
        raise PlanError("the time limit is out of range", got=time_limit, expected="more than 0 seconds")


def _checked_current(current: NDArray[np.int64], form: StandardForm) -> Choices:
    choices = np.asarray(current)
    num_decisions, num_formats = form.costs.shape
    if choices.shape != (num_decisions,) or not np.issubdtype(choices.dtype, np.integer):
        raise PlanError(
            "the current plan does not fit the program",
            got=f"{choices.dtype} {list(choices.shape)}",
            expected=f"integers [{num_decisions}]",
        )
    if choices.min() < 0 or choices.max() >= num_formats:
        raise PlanError(
            "the current plan has formats that the program does not know",
            got=f"{choices.min()} to {choices.max()}",
            expected=f"0 to {num_formats - 1}",
        )
    return choices.astype(np.int64)
