"""Says which limits no plan can meet, and how far plans can come.

Method   One limit alone: the sum of the least, or the most, that every decision can add. Limits that only fail
         together: limits, then single sides, are left out one by one; what can be left out with still no plan is
         not to blame. Those that remain fail together, and all but one can be met. For each of them HiGHS then
         finds the amount that is nearest to it while the others hold.
         Amounts are rounded to the side that can be reached: a limit set to the printed number works.
Checked  tests/planner/solver/test_reach.py: against brute force.
"""

from __future__ import annotations

from decimal import ROUND_CEILING, ROUND_FLOOR, Context
from typing import Literal

import numpy as np

from scrimp.errors import PlanError
from scrimp.planner.solver.highs import solve_by_highs
from scrimp.planner.solver.standard import StandardForm

Side = tuple[int, Literal["least", "most"]]

_DIGITS = 6
_MOST_NAMED = 8


class UnreachableError(PlanError):
    """Limits that no plan can meet; says which, and what can be reached."""


def refuse_unreachable(form: StandardForm) -> None:
    """Refuse limits that no plan can meet, whatever the others are.

    Raises:
        UnreachableError: naming each, and what can be reached.
    """
    most, least = form.highest.sum(axis=1), form.lowest.sum(axis=1)
    failed: dict[Side, float] = {}
    for k in range(len(form.names)):
        if most[k] < form.least[k] - form.slack_least[k]:
            failed[k, "least"] = float(most[k])
        elif least[k] > form.most[k] + form.slack_most[k]:
            failed[k, "most"] = float(least[k])
    if failed:
        named = list(failed)[:_MOST_NAMED]
        raise UnreachableError(
            f"no plan can meet {_listed([form.names[k] for k, _ in failed])}",
            got="; ".join(_reached(form, side, failed[side], len(failed) > 1) for side in named),
            expected="; ".join(_wanted(form, side, len(failed) > 1) for side in named),
            do="ask for what can be reached",
        )


def explain(form: StandardForm) -> UnreachableError:
    """The error for limits that can only be met one without the other."""
    blamed = _blamed(form)
    many = len(blamed) > 1
    names = [form.names[k] for k in dict.fromkeys(k for k, _ in blamed)]
    got = []
    for side in blamed[:_MOST_NAMED]:
        amount = _nearest(form, blamed, side)
        if amount is not None:
            got.append(_reached(form, side, amount, True) + (" while the others hold" if many else ""))
    return UnreachableError(
        f"no plan can meet {_listed(names)}{' together' if many else ''}",
        got="; ".join(got) or None,
        expected="; ".join(_wanted(form, side, True) for side in blamed[:_MOST_NAMED]),
        do="loosen one of them" if many else "ask for what can be reached",
    )


def _blamed(form: StandardForm) -> list[Side]:
    """Sides that fail together, none of them without the others."""
    needed = _sides(form)
    for k in range(len(form.names)):
        needed = _without(form, needed, [side for side in needed if side[0] == k])
    for side in list(needed):
        needed = _without(form, needed, [side])
    return sorted(needed)


def _sides(form: StandardForm) -> list[Side]:
    least: list[Side] = [(k, "least") for k in np.flatnonzero(np.isfinite(form.least)).tolist()]
    return least + [(k, "most") for k in np.flatnonzero(np.isfinite(form.most)).tolist()]


def _without(form: StandardForm, needed: list[Side], left_out: list[Side]) -> list[Side]:
    """The sides needed less those left out, if there still is no plan."""
    rest = [side for side in needed if side not in left_out]
    if not left_out or not rest:
        return needed
    outcome = solve_by_highs(_only(form, rest).with_costs(np.zeros_like(form.costs)), gap=1.0)
    return rest if outcome.status == "infeasible" else needed


def _nearest(form: StandardForm, blamed: list[Side], side: Side) -> float | None:
    """The amount nearest to a side that can be had while the others hold; None if none is known."""
    k, end = side
    rest = _only(form, [other for other in blamed if other != side])
    short = form.highest[k][:, None] - form.amounts[k]
    costs = short if end == "least" else form.over_lowest[k]
    outcome = solve_by_highs(rest.with_costs(costs), gap=0.0)
    return None if outcome.choices is None else float(form.totals(outcome.choices)[k])


def _only(form: StandardForm, sides: list[Side]) -> StandardForm:
    kept = form
    for k in range(len(form.names)):
        for end in ("least", "most"):
            if (k, end) not in sides:
                kept = kept.without_side(k, end)
    return kept


def _reached(form: StandardForm, side: Side, amount: float, named: bool) -> str:
    k, end = side
    limit = "most" if end == "least" else "least"
    prefix = f"{form.names[k]}: " if named else ""
    return f"{prefix}at {limit} {_rounded(amount, up=end == 'most')} can be reached"


def _wanted(form: StandardForm, side: Side, named: bool) -> str:
    k, end = side
    bound = form.least[k] if end == "least" else form.most[k]
    prefix = f"{form.names[k]}: " if named else ""
    return f"{prefix}at {end} {bound:.{_DIGITS}g}"


def _rounded(amount: float, *, up: bool) -> str:
    """Six digits, rounded up or down; what float64 loses in a sum is not rounded away."""
    digits = Context(prec=12).create_decimal(repr(amount))
    context = Context(prec=_DIGITS, rounding=ROUND_CEILING if up else ROUND_FLOOR)
    return f"{float(context.plus(digits)):.{_DIGITS}g}"


def _listed(names: list[str]) -> str:
    if len(names) > _MOST_NAMED:
        return ", ".join(names[:_MOST_NAMED]) + f" and {len(names) - _MOST_NAMED} more"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
