"""The program solved by HiGHS: branch and bound on one thread, the same answer for the same input.

Method   A binary variable per allowed choice, a row per decision (its variables sum to one) and a row per
         limit, handed over as arrays. Amounts that are multiples of a common unit become integers, so that
         sums are exact; others are divided by their largest. Choices that no plan can afford are taken out first
         (`propagate`).
Core     The linear program (mixtures of choices) gives a bound, and for every choice what a plan with it costs more
         than the bound at least: its reduced cost. HiGHS first gets the few hundred choices where that is least; if its
         plan lies within the gap of the bound it is done, ten times as fast. Else choices that cannot be part of a
         better plan are taken out, and it gets more, in the end all: the bound is then its own.
Scale    HiGHS compares with absolute tolerances of 1e-7, and costs span many powers of ten: costs over those
         of the cheapest choices are scaled so that the largest is 1e4. If the plan found costs next to nothing
         on that scale, it is solved again without the choices that cost more than that plan.
Limits   HiGHS stops after `MOST_NODES` nodes of its tree, never by the clock: the plan would depend on it. A model of
         80 layers (1,680 decisions of 4 formats, 9 limits) is solved in the first few nodes, in 0.1 to 1 s.
Thread   HiGHS keeps one pool of workers per calling thread and refuses to change its size. Every run gets a
         thread of its own, so that it does not matter what else in the process uses HiGHS. The GIL is released.
Source   Huangfu and Hall, Parallelizing the dual revised simplex method (2018); https://highs.dev
Checked  tests/planner/solver/test_highs.py: against brute force and tables of the least cost.
"""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from scrimp.planner.solver.moves import improve, repair
from scrimp.planner.solver.standard import TOLERANCE, Choices, Floats, StandardForm, common_unit, propagate

if TYPE_CHECKING:
    import highspy

Status = Literal["solved", "infeasible", "nodes", "failed"]

MOST_NODES = 10_000
_LARGEST_COST = 1e4
_ENOUGH = 1e-3
"""A plan whose cost over the cheapest is less than this share of the largest cost is solved again, rescaled."""
_CORES = (250, 1000, 4000, None, None, None)
"""Choices that are open in each run, besides the best of each decision; None: all that are left."""
_MOST_UNITS = 1e6
_OPTIONS: dict[str, bool | int | float | str] = {
    "output_flag": False,
    "threads": 1,
    "parallel": "off",
    "random_seed": 0,
    "mip_abs_gap": 1e-9,
    "primal_feasibility_tolerance": 1e-9,
    "mip_feasibility_tolerance": 1e-9,
}


@dataclass(frozen=True, eq=False)
class Outcome:
    """What HiGHS found."""

    status: Status
    choices: Choices | None = None
    """The best plan known, if there is one: also where HiGHS stopped early."""
    bound: float = 0.0
    """No plan costs less."""
    note: str = ""
    """Why it did not solve the program."""


def solve_by_highs(form: StandardForm, *, gap: float, nodes: int = MOST_NODES) -> Outcome:
    """Solve to a relative gap, with at most so many nodes in each run, in a thread of its own.

    The choices of an outcome hold every limit. Never raises: a failure is an outcome.
    """
    answers: list[Outcome] = []

    def work() -> None:
        try:
            answers.append(_solve(form, gap, nodes))
        except Exception as error:  # whatever the library raises, the caller says so
            answers.append(Outcome("failed", bound=form.base, note=f"HiGHS raised {error!r}"))

    thread = threading.Thread(target=work, name="HiGHS", daemon=True)
    thread.start()
    thread.join()
    return answers[0]


def _solve(form: StandardForm, gap: float, nodes: int) -> Outcome:
    left = propagate(form)
    relaxed = None if left is None else _relax(left)
    if left is None or relaxed is None:
        return Outcome("infeasible")
    least, dearer = relaxed
    best, bound = None, least
    for size in _CORES:
        core = left.restricted(dearer <= _smallest(dearer[left.allowed], size))
        whole = bool((core.allowed == left.allowed).all())
        outcome = _run(core, gap, nodes)
        if outcome.choices is not None and (best is None or form.cost(outcome.choices) < form.cost(best)):
            best = outcome.choices
        if outcome.status in ("nodes", "failed"):
            bound = max(bound, outcome.bound) if whole else bound
            return Outcome(outcome.status, best, bound, outcome.note)
        if best is None:
            if whole:
                return Outcome("infeasible", bound=bound)
            continue
        cost = form.cost(best)
        if whole:  # an infeasible rest has no better plan
            bound = max(bound, cost if outcome.status == "infeasible" else min(cost, outcome.bound))
        spent = cost - form.base
        if cost - bound <= gap * cost or (whole and spent >= _ENOUGH * _largest_excess(core)):
            break
        affordable = left.excess <= spent + TOLERANCE * cost
        left = left.restricted(affordable & (dearer <= max(cost - least, 0.0) + TOLERANCE * cost))
    return Outcome("solved", best, bound)


def _smallest(values: Floats, count: int | None) -> float:
    """The `count`-th smallest of the values above 0; all if None or there are fewer."""
    values = np.sort(values[values > 0.0])
    return math.inf if count is None or count >= len(values) else float(values[count])


def _largest_excess(form: StandardForm) -> float:
    """The largest cost over the cheapest choice; 1 where all are equal."""
    return float(form.excess[form.allowed].max()) or 1.0


def _relax(form: StandardForm) -> tuple[float, Floats] | None:
    """What the linear program costs, and how much more a plan with each choice [N, P] does; None: there is no plan."""
    import highspy

    solver, factor = _solver(), _LARGEST_COST / _largest_excess(form)
    model = _model(form, factor)
    model.integrality_ = []
    solver.passModel(model)
    solver.run()
    status = solver.getModelStatus()
    if status == highspy.HighsModelStatus.kInfeasible:
        return None
    if status != highspy.HighsModelStatus.kOptimal:
        return form.base, form.excess
    dearer = np.full(form.costs.shape, math.inf)
    dearer[form.allowed] = np.maximum(np.asarray(solver.getSolution().col_dual) / factor, 0.0)
    return solver.getInfo().objective_function_value / factor, dearer


def _solver() -> Any:
    import highspy  # not before it is needed: half a second

    # What highspy 1.16 adds to its base class are callbacks, with a banner on standard output that no option stops.
    solver: Any = highspy.Highs.__base__()  # type: ignore[misc]
    for name, value in _OPTIONS.items():
        solver.setOptionValue(name, value)
    return solver


def _run(form: StandardForm, gap: float, nodes: int) -> Outcome:
    import highspy

    solver = _solver()
    solver.setOptionValue("mip_rel_gap", gap)
    solver.setOptionValue("mip_max_nodes", nodes)
    factor = _LARGEST_COST / _largest_excess(form)
    if solver.passModel(_model(form, factor)) == highspy.HighsStatus.kError:
        return Outcome("failed", bound=form.base, note="HiGHS refused the model")
    solver.run()
    status = solver.getModelStatus()
    if status in (highspy.HighsModelStatus.kInfeasible, highspy.HighsModelStatus.kUnboundedOrInfeasible):
        return Outcome("infeasible", bound=form.base)
    info = solver.getInfo()
    found = info.primal_solution_status == highspy.kSolutionStatusFeasible
    choices = _choices(form, np.asarray(solver.getSolution().col_value)) if found else None
    lowest = info.mip_dual_bound / factor
    bound = max(form.base, lowest) if math.isfinite(lowest) else form.base
    if status == highspy.HighsModelStatus.kOptimal and choices is not None:
        return Outcome("solved", choices, bound)
    if status == highspy.HighsModelStatus.kSolutionLimit:
        return Outcome("nodes", choices, bound, f"HiGHS stopped after {nodes:,} nodes")
    why = "left a limit broken" if found and choices is None else solver.modelStatusToString(status).lower()
    return Outcome("failed", choices, bound, f"HiGHS ended with: {why}")


def _choices(form: StandardForm, values: Floats) -> Choices | None:
    """The largest variable of each decision; limits that rounding broke are repaired, if that is possible."""
    chosen = np.full(form.costs.shape, -1.0)
    chosen[form.allowed] = values
    choices: Choices | None = chosen.argmax(axis=1)
    if choices is not None and not form.holds(choices):
        choices = repair(form, choices)
    return None if choices is None else improve(form, choices)


def _model(form: StandardForm, factor: float) -> highspy.HighsLp:
    """Columns are the allowed choices in order; rows are the decisions, then the limits."""
    import highspy

    decision = np.nonzero(form.allowed)[0]
    num_columns, num_rows = len(decision), len(form.costs)
    coefficients, lower, upper = _limit_rows(form)
    filled = [np.flatnonzero(row) for row in coefficients]
    lp: Any = highspy.HighsLp()
    lp.num_col_, lp.num_row_ = num_columns, num_rows + len(filled)
    lp.offset_ = form.base * factor
    lp.col_cost_ = form.excess[form.allowed] * factor
    lp.col_lower_, lp.col_upper_ = np.zeros(num_columns), np.ones(num_columns)
    lp.integrality_ = [highspy.HighsVarType.kInteger] * num_columns
    lp.row_lower_ = np.concatenate([np.ones(num_rows), lower])
    lp.row_upper_ = np.concatenate([np.ones(num_rows), upper])
    lengths = [*np.bincount(decision, minlength=num_rows), *(len(row) for row in filled)]
    matrix = lp.a_matrix_
    matrix.format_ = highspy.MatrixFormat.kRowwise
    matrix.start_ = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    matrix.index_ = np.concatenate([np.arange(num_columns), *filled]).astype(np.int32)
    values = [row[columns] for row, columns in zip(coefficients, filled, strict=True)]
    matrix.value_ = np.concatenate([np.ones(num_columns), *values])
    return lp  # type: ignore[no-any-return]


def _limit_rows(form: StandardForm) -> tuple[list[Floats], Floats, Floats]:
    """Per limit its coefficients by column, and both sides; whole numbers where there is a common unit."""
    coefficients, lower, upper = [], [], []
    for k in range(len(form.names)):
        amounts = form.over_lowest[k][form.allowed]
        already = form.lowest[k].sum()
        least, most = form.least[k] - already, form.most[k] - already
        unit = common_unit(amounts, _MOST_UNITS)
        if unit is not None:
            coefficients.append(np.rint(amounts / unit))
            lower.append(np.ceil((least - form.slack_least[k]) / unit))
            upper.append(np.floor((most + form.slack_most[k]) / unit))
        else:
            unit = float(amounts.max())
            coefficients.append(amounts / unit)
            lower.append((least - form.slack_least[k] / 2) / unit)
            upper.append((most + form.slack_most[k] / 2) / unit)
    return coefficients, np.array(lower), np.array(upper)
