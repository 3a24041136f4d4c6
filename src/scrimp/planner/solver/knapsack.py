"""The program solved exactly by tables, where limits share one amount: the fallback without a solver.

Problem  Choose a format per decision so that sums of one amount (FLOPs, seconds) stay within limits: one over
         everything, and one for each pipeline stage.
Method   Amounts are counted in whole units from the end of their range that has less room: units over the least,
         or under the most, that the decisions can add. `scrimp.planner.solver.cost_tables` then holds the least cost
         by units, a table per limit. The best plan is read from the table of the widest limit.
         Amounts without a common unit (measured seconds) are rounded to a 50 000th of the room of the widest
         limit. The plan is checked with real sums, and a limit that it breaks is narrowed by the overrun, until
         all hold. Exchanges use what rounding left. The relaxation's bound shows which choices no cheaper plan
         has; without them there is less room, and units are finer: it is solved again while that helps.
         Ties: it is solved again with every change against the current plan costing 1e-9 of the plan's cost
         over the number of decisions.
Limits   Limits must be nested or disjoint, and nested ones in proportion. Others are refused.
Checked  tests/planner/solver/test_knapsack.py: against brute force and HiGHS.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from scrimp.planner.solver.cost_tables import Spans, build_table, count_cells, read_table
from scrimp.planner.solver.moves import exchange, improve
from scrimp.planner.solver.nesting import CannotTabulateError, Group, Measure, measure, nested_groups
from scrimp.planner.solver.relaxation import relax
from scrimp.planner.solver.standard import TOLERANCE, Choices, Floats, StandardForm, propagate

_RESOLUTION = 50_000
_MOST_CELLS = 600_000_000
_ROUNDS = 40
_REFINEMENTS = 4
_CLOSE = 2e-4
"""Relative to the bound: plans of rounded amounts that are closer are not refined."""


@dataclass(frozen=True, eq=False)
class Tabulated:
    """The plan of the tables."""

    choices: Choices | None
    """None: there is no plan, if `exact`; else none was found."""
    bound: float
    """No plan costs less."""
    exact: bool
    """All amounts had a common unit."""


def solve_by_knapsack(form: StandardForm, current: Choices | None = None) -> Tabulated:
    """The cheapest plan; of equally cheap ones that which changes least against `current` [N].

    Raises:
        CannotTabulateError: limits that overlap, are out of proportion, or need too large tables.
    """
    open_form = propagate(form)
    if open_form is None:
        return Tabulated(None, form.base, True)
    trees = _trees(open_form)
    exact = all(scale.unit is not None for _, scale in trees)
    choices = _fill(open_form, trees)
    if choices is None:
        return Tabulated(None, form.base, exact)
    bound = form.cost(choices)
    if not exact:
        choices, bound = _refine(open_form, choices)
    cost = form.cost(choices)
    if exact and current is not None and (choices != current).any():
        kept = _fill(_prefer(open_form, current, cost), trees)
        if kept is not None and form.cost(kept) <= cost * (1.0 + TOLERANCE):
            choices = kept
    return Tabulated(choices, min(bound, cost), exact)


def _trees(form: StandardForm) -> list[tuple[Group, Measure]]:
    return [(tree, measure(form, tree)) for tree in nested_groups(form)]


def _refine(form: StandardForm, choices: Choices) -> tuple[Choices, float]:
    """What rounding left: a plan no dearer, and a bound.

    Choices that a cheaper plan cannot have are taken out, which leaves less room to divide into units.
    """
    relaxed = relax(form)
    for _ in range(_REFINEMENTS):
        choices = exchange(form, improve(form, choices), relaxed.prices)
        above = form.cost(choices) - relaxed.bound
        narrowed = form.restricted(relaxed.dearer <= above * (1.0 + TOLERANCE))
        if above <= _CLOSE * form.cost(choices):
            break
        finer = _fill(narrowed, _trees(narrowed))
        if finer is None or form.cost(finer) >= form.cost(choices):
            break
        choices = finer
    return choices, relaxed.bound


def _prefer(form: StandardForm, current: Choices, cost: float) -> StandardForm:
    """The form with changes against the current plan a trifle dearer."""
    positive = form.excess[form.allowed & (form.excess > 0.0)]
    total = cost or float(positive.min(initial=1.0))
    changed = np.arange(form.costs.shape[1]) != current[:, None]
    return form.with_costs(form.excess + TOLERANCE * total / len(form.costs) * changed)


def _fill(form: StandardForm, trees: list[tuple[Group, Measure]]) -> Choices | None:
    """Choices of all decisions: tree by tree, and the cheapest where no limit is."""
    choices = np.asarray(form.costs.argmin(axis=1), dtype=np.int64)
    for tree, scale in trees:
        found = _solve_exactly(form, tree, scale) if scale.unit else _solve_rounded(form, tree, scale)
        if found is None:
            return None
        decisions = tree.decisions
        choices[decisions] = found[decisions]
    return choices


def _solve_exactly(form: StandardForm, tree: Group, scale: Measure) -> Choices | None:
    unit = scale.unit or 1.0
    return _read(form, tree, np.rint(scale.amounts / unit), _spans(tree, scale, unit, with_slack=True))


def _solve_rounded(form: StandardForm, tree: Group, scale: Measure) -> Choices | None:
    """Rounded to the nearest and narrowed until the real sums hold; then rounded up, if that never comes."""
    unit = max(scale.high[tree.limit], scale.slack[tree.limit]) / _RESOLUTION
    spans = _spans(tree, scale, unit, with_slack=False)
    for _ in range(_ROUNDS):
        choices = _read(form, tree, np.rint(scale.amounts / unit), spans)
        if choices is None:
            break
        overruns = _overruns(tree, scale, choices)
        if not overruns:
            return choices
        for limit, (short, over) in overruns.items():
            low, high = spans[limit]
            spans[limit] = low + math.ceil(short / unit), high - math.ceil(over / unit)
    rounded_up = np.ceil(scale.amounts / unit)
    choices = _read(form, tree, rounded_up, _spans(tree, scale, unit, with_slack=False))
    return None if choices is None or _overruns(tree, scale, choices) else choices


def _spans(tree: Group, scale: Measure, unit: float, *, with_slack: bool) -> Spans:
    """Whole units that every limit of the tree allows."""
    spans = {}
    for group in tree.walk():
        k = group.limit
        slack = scale.slack[k] if with_slack else 0.0
        spans[k] = math.ceil((scale.low[k] - slack) / unit), math.floor((scale.high[k] + slack) / unit)
    return spans


def _overruns(tree: Group, scale: Measure, choices: Choices) -> dict[int, tuple[float, float]]:
    """Broken limits, with what is short of the low end and over the high end, one of them 0."""
    broken = {}
    for group in tree.walk():
        k, decisions = group.limit, group.decisions
        total = float(scale.amounts[decisions, choices[decisions]].sum())
        short, over = scale.low[k] - total, total - scale.high[k]
        if max(short, over) > scale.slack[k]:
            broken[k] = max(short, 0.0), max(over, 0.0)
    return broken


def _read(form: StandardForm, tree: Group, units: Floats, spans: Spans) -> Choices | None:
    """The best plan of the tree's table [N]; None if there is none."""
    counts = np.where(form.allowed, units, -1.0).astype(np.int64)
    cells = count_cells(tree, counts, spans)
    if cells > _MOST_CELLS:
        raise CannotTabulateError(f"tables of {cells:,} cells are too large")
    table = build_table(tree, counts, form.excess, spans)
    if not np.isfinite(table.best).any():
        return None
    choices = np.zeros(len(counts), dtype=np.int64)
    read_table(table, int(table.best.argmin()), counts, choices)
    return choices
