"""Small changes of a plan: one or two decisions at a time, never breaking a limit.

Method   `repair` changes the decision that costs least per share of a broken limit that it mends, until all
         hold or nothing helps. `improve` makes the change that saves most while all hold, until none saves.
         `keep_current` undoes changes against the current plan that save nothing, one by one and in pairs.
         All are greedy and deterministic: the first of equals wins.
Limits   Ties of three and more changes are not undone unless the current plan as a whole is as cheap.
Checked  tests/planner/solver/test_moves.py.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.solver.standard import TOLERANCE, Choices, Floats, OneSided, StandardForm, one_sided


def repair(form: StandardForm, choices: Choices) -> Choices | None:
    """A plan near `choices` that holds all limits, or None if the greedy way leads to none.

    Args:
        choices: [N], all allowed.
    """
    rows, prices = one_sided(form), form.excess
    choices = choices.copy()
    while True:
        totals = rows.totals(choices)
        if form.holds(choices):
            return choices
        over = rows.over(totals).sum()
        mended = over - rows.over(_after(rows, choices, totals)).sum(axis=0)
        helps = form.allowed & (mended > 1e-12 * over)
        if not helps.any():
            return None
        price = np.maximum(prices - prices[form.rows, choices][:, None], 0.0)
        rate = np.where(helps, price, math.inf) / np.where(helps, mended, 1.0)
        _change(choices, int(rate.argmin()), form)


def improve(form: StandardForm, choices: Choices) -> Choices:
    """The plan after all single changes that save cost, the largest saving first."""
    rows = one_sided(form)
    choices = choices.copy()
    while True:
        saved = _saved(form, choices)
        saved = np.where(rows.fits(_after(rows, choices, rows.totals(choices))), saved, 0.0)
        if saved.max() <= 0.0:
            return choices
        _change(choices, int(saved.argmax()), form)


def keep_current(form: StandardForm, choices: Choices, current: Choices) -> Choices:
    """The plan without changes against `current` that save nothing.

    All that is undone together raises the cost by at most 1e-9 of it. Choices of `current` that are not
    allowed any more are no ties.
    """
    allowance = TOLERANCE * form.cost(choices)
    if form.holds(current) and form.cost(current) <= form.cost(choices) + allowance:
        return current.copy()
    choices = choices.copy()
    rows = one_sided(form)
    undone = True
    while undone:
        undone = False
        for n in np.flatnonzero(choices != current):
            if choices[n] == current[n] or not form.allowed[n, current[n]]:
                continue
            group, added = _undo(form, rows, choices, current, int(n), allowance)
            if group is not None:
                choices[group] = current[group]
                allowance -= max(added, 0.0)
                undone = True
    return choices


def _undo(
    form: StandardForm, rows: OneSided, choices: Choices, current: Choices, n: int, allowance: float
) -> tuple[NDArray[np.int64] | None, float]:
    """Decision `n`, alone or with a partner, whose change back costs no more than allowed; and that cost."""
    others = np.flatnonzero((choices != current) & form.allowed[form.rows, current])
    added = form.costs[others, current[others]] - form.costs[others, choices[others]]
    shift = rows.weights[:, others, current[others]] - rows.weights[:, others, choices[others]]
    here = int(np.searchsorted(others, n))
    together = np.where(others == n, 0.0, added) + added[here]
    moved = np.where(others == n, 0.0, shift) + shift[:, here : here + 1]
    fits = (together <= allowance) & rows.fits(rows.totals(choices)[:, None] + moved)
    if fits[here]:
        return np.array([n]), float(added[here])
    if not fits.any():
        return None, 0.0
    partner = int(fits.argmax())
    return np.array([n, others[partner]]), float(together[partner])


def _after(rows: OneSided, choices: Choices, totals: Floats) -> Floats:
    """[R, N, P] sums after one change."""
    chosen = rows.weights[:, np.arange(len(choices)), choices]
    return (totals[:, None] - chosen)[:, :, None] + rows.weights


def _saved(form: StandardForm, choices: Choices) -> Floats:
    """[N, P] what one change saves; 0 where it is none or not allowed."""
    saved = form.excess[form.rows, choices][:, None] - form.excess
    return np.where(form.allowed, saved, 0.0)


def _change(choices: Choices, flat: int, form: StandardForm) -> None:
    decision, choice = divmod(flat, form.costs.shape[1])
    choices[decision] = choice
