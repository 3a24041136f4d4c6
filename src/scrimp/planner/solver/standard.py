"""The program as arrays, and what every solver asks of it.

Problem  Solvers must agree on what a limit means: a sum of a thousand rounded numbers never meets it to the
         last bit, and amounts range from shares of one to FLOPs of 1e20.
Method   One object keeps costs [N, P] and amounts [K, N, P] of N decisions, P formats and K limits. A limit
         holds if its sum passes the bound by no more than ::

             1e-9 |bound| + 1e-13 sum_n max_p |amount|       (the largest amount stands for a bound of 0)

         the first the promise to the user, the second what float64 loses in the sum.
         `propagate` takes out choices that no plan can afford: whose amount, with the least (or most) that all
         other decisions can add, already breaks a limit. What is left is of the size of the limit itself.
Checked  tests/planner/solver/test_standard.py: against brute force.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Choices = NDArray[np.int64]

TOLERANCE = 1e-9
"""Relative to its bound: how far a sum may pass a limit, and how far costs that count as equal may differ."""
_LOST_IN_SUMS = 1e-13


@dataclass(frozen=True, eq=False)
class StandardForm:
    """Costs, amounts and limits of one program; see the module."""

    costs: Floats
    """[N, P], at least 0; infinite where a choice is not allowed."""
    amounts: Floats
    """[K, N, P]; 0 where a choice is not allowed."""
    least: Floats
    """[K], -inf where there is none."""
    most: Floats
    """[K], inf where there is none."""
    names: tuple[str, ...]
    """K names for errors."""

    @cached_property
    def allowed(self) -> NDArray[np.bool_]:
        """[N, P]: the choices with a finite cost."""
        return np.isfinite(self.costs)

    @cached_property
    def rows(self) -> Choices:
        """0 .. N-1: `array[rows, choices]` reads what is chosen."""
        return np.arange(len(self.costs))

    @cached_property
    def base(self) -> float:
        """What the cheapest choices cost: nothing can cost less."""
        return float(self.costs.min(axis=1).sum())

    @cached_property
    def excess(self) -> Floats:
        """[N, P] costs over the cheapest choice of each decision."""
        return np.asarray(self.costs - self.costs.min(axis=1, keepdims=True))

    @cached_property
    def lowest(self) -> Floats:
        """[K, N] least amount of each decision."""
        return np.asarray(np.where(self.allowed, self.amounts, math.inf).min(axis=2))

    @cached_property
    def highest(self) -> Floats:
        """[K, N] largest amount of each decision."""
        return np.asarray(np.where(self.allowed, self.amounts, -math.inf).max(axis=2))

    @cached_property
    def over_lowest(self) -> Floats:
        """[K, N, P] amounts over the least of each decision; 0 where not allowed."""
        return np.where(self.allowed, self.amounts - self.lowest[:, :, None], 0.0)

    @cached_property
    def slack_least(self) -> Floats:
        """[K] how far below `least` a sum may be."""
        return self._slack(self.least)

    @cached_property
    def slack_most(self) -> Floats:
        """[K] how far above `most` a sum may be."""
        return self._slack(self.most)

    def _slack(self, bounds: Floats) -> Floats:
        largest = np.abs(self.amounts).max(axis=2)
        scale = np.where(bounds == 0.0, largest.max(axis=1, initial=0.0), np.abs(bounds))
        scale = np.where(np.isfinite(scale), scale, 0.0)
        return np.asarray(TOLERANCE * scale + _LOST_IN_SUMS * largest.sum(axis=1))

    def cost(self, choices: Choices) -> float:
        """Total cost of a choice per decision."""
        return float(self.costs[self.rows, choices].sum())

    def totals(self, choices: Choices) -> Floats:
        """[K] sums of the limits' amounts."""
        return np.asarray(self.amounts[:, self.rows, choices].sum(axis=1))

    def overruns(self, choices: Choices) -> Floats:
        """[K] how far each sum lies outside its limit; 0 where it holds within the tolerance."""
        totals = self.totals(choices)
        short, over = self.least - totals, totals - self.most
        return np.where(short > self.slack_least, short, np.where(over > self.slack_most, over, 0.0))

    def holds(self, choices: Choices) -> bool:
        """Every choice is allowed and every limit holds."""
        return bool(self.allowed[self.rows, choices].all() and not self.overruns(choices).any())

    def with_costs(self, costs: Floats) -> StandardForm:
        """The same limits with other costs where a choice is allowed."""
        return dataclasses.replace(self, costs=np.where(self.allowed, costs, math.inf))

    def restricted(self, allowed: NDArray[np.bool_]) -> StandardForm:
        """Without the other choices."""
        allowed = allowed & self.allowed
        return dataclasses.replace(
            self, costs=np.where(allowed, self.costs, math.inf), amounts=np.where(allowed, self.amounts, 0.0)
        )

    def without_side(self, limit: int, side: Literal["least", "most"]) -> StandardForm:
        """Without one side of one limit."""
        least, most = self.least.copy(), self.most.copy()
        if side == "least":
            least[limit] = -math.inf
        else:
            most[limit] = math.inf
        return dataclasses.replace(self, least=least, most=most)


def propagate(form: StandardForm) -> StandardForm | None:
    """Without choices that break a limit whatever the others are; None if a decision has none left."""
    while True:
        room = form.most - form.lowest.sum(axis=1) + form.slack_most
        need = form.highest.sum(axis=1) - form.least + form.slack_least
        rise = form.amounts - form.lowest[:, :, None]
        fall = form.highest[:, :, None] - form.amounts
        breaks = (rise > room[:, None, None]) | (fall > need[:, None, None])
        allowed = form.allowed & ~breaks.any(axis=0)
        if not allowed.any(axis=1).all():
            return None
        if (allowed == form.allowed).all():
            return form
        form = form.restricted(allowed)


@dataclass(frozen=True, eq=False)
class OneSided:
    """Limits as `sum of weights <= room`, weights at least 0: what moves and multipliers work on."""

    weights: Floats
    """[R, N, P]."""
    room: Floats
    """[R]: 1 wherever there is any room at all."""
    slack: Floats
    """[R] how far above its room a sum may be."""

    def totals(self, choices: Choices) -> Floats:
        """[R] sums."""
        return np.asarray(self.weights[:, np.arange(len(choices)), choices].sum(axis=1))

    def over(self, totals: Floats) -> Floats:
        """What sums [R, ...] have above their room; slack is not counted as room."""
        return np.maximum(totals - self.room.reshape(-1, *[1] * (totals.ndim - 1)), 0.0)

    def fits(self, totals: Floats) -> NDArray[np.bool_]:
        """Whether all sums [R, ...] hold."""
        limit = (self.room + self.slack).reshape(-1, *[1] * (totals.ndim - 1))
        return np.asarray((totals <= limit).all(axis=0))


def one_sided(form: StandardForm) -> OneSided:
    """Both sides of every limit, less what the decisions add anyway, over the room that is left.

    A side that no plan can break is left out.
    """
    sides = []
    for k in range(len(form.names)):
        fall = np.where(form.allowed, form.highest[k][:, None] - form.amounts[k], 0.0)
        most = (form.most[k] - form.lowest[k].sum(), form.over_lowest[k], form.slack_most[k])
        least = (form.highest[k].sum() - form.least[k], fall, form.slack_least[k])
        for room, amounts, slack in (most, least):
            if amounts.any() and room < amounts.max(axis=1).sum():
                scale = room if room > slack else amounts.max()
                sides.append((amounts / scale, room / scale, slack / scale))
    weights = np.array([side[0] for side in sides]).reshape(-1, *form.costs.shape)
    return OneSided(weights, np.array([side[1] for side in sides]), np.array([side[2] for side in sides]))


def common_unit(values: Floats, most_units: float) -> float | None:
    """The largest unit that all values (at least 0) are multiples of.

    None if there is none, or the largest value is more than `most_units` of it.
    """
    largest = float(values.max(initial=0.0))
    if largest == 0.0:
        return 1.0
    noise = 1e-10 * largest
    values = np.unique(values[values > noise])
    unit = largest
    while (odd := np.abs(values - np.rint(values / unit) * unit) > noise).any():
        value = float(values[odd][0])
        while value > noise:
            unit, value = value, abs(math.remainder(unit, value))
        if largest > most_units * unit:
            return None
        unit = largest / round(largest / unit)  # what rounding added up on the way
    counts = np.rint(values / unit)
    unit = float(values.sum() / counts.sum())
    return unit if (np.abs(values / unit - counts) < 1e-6).all() else None
