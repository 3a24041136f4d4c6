"""The integer program: one format per decision, least cost, within limits.

Problem  A decision is a GEMM (or a layer, or a GEMM in one phase of training); a choice is a format. Every
         choice has a cost, the harm that it does, and adds amounts to limits: FLOPs in FP4 of its pipeline
         stage, seconds per step, bytes ::

             min  sum_n cost[n, choice[n]]
             s.t. least_k <= sum_n amount_k[n, choice[n]] <= most_k        for every limit k

Method   HiGHS (`scrimp.planner.solver.highs`), to a gap of a thousandth. Where it stops after its most nodes, the plan
         is the best that it had, and a note says so. Every plan is checked against all limits, to 1e-9 of each.
Ties     Of plans whose costs differ by less than 1e-9, the one nearest to the current plan.
Limits   The same input gives the same plan. One thread.
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
from scrimp.planner.solver.highs import MOST_NODES, solve_by_highs
from scrimp.planner.solver.moves import keep_current
from scrimp.planner.solver.reach import explain, refuse_unreachable
from scrimp.planner.solver.standard import Choices, Floats, StandardForm


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
    seconds: float
    """Wall-clock time of the whole call."""
    note: str = ""
    """Why this is not the plan that was asked for, if it is not."""

    @property
    def gap(self) -> float:
        """How much cheaper the best plan might be, relative to this one."""
        return (self.cost - self.bound) / self.cost if self.cost > 0.0 else 0.0


def solve(
    program: Program,
    *,
    current: NDArray[np.int64] | None = None,
    gap: float = 1e-3,
    nodes: int = MOST_NODES,
) -> Solution:
    """The cheapest plan within the limits.

    Args:
        current: [N] the plan that ties keep.
        gap: relative, at which HiGHS may stop.
        nodes: of its tree, after which it does stop.

    Raises:
        PlanError: limits that no plan can meet (named, with what can be reached); none found though one may
            exist; an argument out of range.
    """
    started = time.perf_counter()
    form = program.standard_form()
    if not 0.0 <= gap < 1.0:
        raise PlanError("the gap is out of range", got=gap, expected="at least 0 and below 1")
    kept = None if current is None else _checked_current(current, form)
    refuse_unreachable(form)
    found = solve_by_highs(form, gap=gap, nodes=nodes)
    if found.status == "infeasible":
        raise explain(form)
    if found.choices is None:
        raise PlanError(f"no plan was found: {found.note}", do="loosen a limit")
    choices = found.choices if kept is None else keep_current(form, found.choices, kept)
    if not form.holds(choices):
        raise RuntimeError(f"HiGHS broke a limit: {form.overruns(choices)}")
    cost = form.cost(choices)
    note = f"{found.note}; the plan is the best until then" if found.note else ""
    return Solution(choices, cost, min(found.bound, cost), time.perf_counter() - started, note)


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
