"""Any set of limits, without a solver: prices on the limits, then a plan from the prices.

Problem  The last resort: no HiGHS, and limits that tables cannot hold. It must find a plan that holds all
         limits, and say how far from the best it may be.
Method   Every limit gets a price y >= 0 per unit of its amount. For any prices ::

             L(y) = sum_n min_p (cost[n,p] + y . weight[n,p]) - y . room   <=   the cheapest plan

         so the largest L is the bound; it equals that of the linear program. It is found by Newton's method on
         a smooth form, in which the minimum over p becomes ``-t log sum_p exp(-./t)``, while t falls to 0.
         The choices of least price are the plan to start with; it breaks some limits by a few decisions.
         `scrimp.planner.solver.moves` repairs, improves and exchanges. If greedy repair fails, prices are shaken
         (fixed seed) and it is tried again.
Limits   Limits so tight that only a few combinations hold them all may be missed.
Sources  Geoffrion, Lagrangean relaxation for integer programming (1974).
Checked  tests/planner/solver/test_relaxation.py: bound and plan against brute force and HiGHS.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.solver.moves import exchange, improve, repair
from scrimp.planner.solver.standard import (
    TOLERANCE,
    Choices,
    Floats,
    StandardForm,
    one_sided,
    propagate,
)

_COOLING = 4.0
_SETTLED = 1e-6
"""The temperature falls until the bound rises by less, relative to what it adds to the cheapest choices."""
_MOST_COOLINGS = 30
_NEWTON_STEPS = 12
_LONGEST = 1e3
"""Steps are at most so many times the largest price, costs being scaled to 1."""
_SHAKES = 30


@dataclass(frozen=True, eq=False)
class Relaxed:
    """Prices of the limits, and what they prove."""

    prices: Floats
    """[N, P] costs over the cheapest choice, with the limits' prices on top."""
    bound: float
    """No plan costs less."""
    infeasible: bool
    """Proven: even mixtures of formats cannot hold all limits."""

    @cached_property
    def dearer(self) -> Floats:
        """[N, P]: every plan with this choice costs at least this much more than the bound."""
        return np.asarray(self.prices - self.prices.min(axis=1, keepdims=True))


@dataclass(frozen=True, eq=False)
class Approximate:
    """A plan and its bound; no choices where none was found."""

    choices: Choices | None
    bound: float
    infeasible: bool


def solve_by_relaxation(form: StandardForm) -> Approximate:
    """A plan within about one decision per limit of the best, and a proven bound."""
    open_form = propagate(form)
    if open_form is None:
        return Approximate(None, form.base, True)
    relaxed = relax(open_form)
    if relaxed.infeasible:
        return Approximate(None, relaxed.bound, True)
    random = np.random.default_rng(0)
    for shake in range(_SHAKES):
        noise = random.lognormal(0.0, 0.1 * shake, form.costs.shape)
        start = np.where(open_form.allowed, relaxed.prices * noise, np.inf)
        choices = repair(open_form, start.argmin(axis=1), relaxed.prices)
        if choices is not None:
            choices = exchange(open_form, improve(open_form, choices), relaxed.prices)
            return Approximate(choices, min(relaxed.bound, form.cost(choices)), False)
    return Approximate(None, relaxed.bound, False)


def relax(form: StandardForm) -> Relaxed:
    """The best prices found while the temperature falls, for a form that `propagate` has been over."""
    rows = one_sided(form)
    room = rows.room + rows.slack
    weights = rows.weights.reshape(len(room), form.costs.size)
    scale = float(form.excess[form.allowed].max()) or 1.0
    costs = form.excess / scale
    dearest = float(np.where(form.allowed, costs, 0.0).max(axis=1).sum()) * (1.0 + TOLERANCE)
    y = best = np.zeros(len(room))
    value, temperature, infeasible = 0.0, 1.0, False
    for _ in range(_MOST_COOLINGS if len(room) else 0):
        y = _newton(costs, weights, room, y, temperature, dearest)
        exact = float((costs + _priced(weights, y, costs)).min(axis=1).sum() - y @ room)
        settled = value > 0.0 and exact <= value * (1.0 + _SETTLED)
        if exact > value:
            value, best = exact, y
        infeasible = _exceeds(value, dearest, best, room)
        if settled or infeasible:
            break
        temperature /= _COOLING
    prices = (costs + _priced(weights, best, costs)) * scale
    return Relaxed(prices, form.base + value * scale, infeasible)


def _priced(weights: Floats, y: Floats, costs: Floats) -> Floats:
    return np.asarray((y @ weights).reshape(costs.shape))


def _exceeds(value: float, dearest: float, y: Floats, room: Floats) -> bool:
    """A bound above the dearest plan, by more than rounding: there is no plan."""
    return value > dearest + TOLERANCE * float(y @ room)


def _newton(
    costs: Floats, weights: Floats, room: Floats, y: Floats, temperature: float, dearest: float
) -> Floats:
    """Prices that maximise the smooth form at one temperature, by projected Newton steps."""
    value, gradient, hessian = _smooth(costs, weights, room, y, temperature)
    for _ in range(_NEWTON_STEPS):
        free = (y > 0.0) | (gradient > 0.0)
        if not free.any() or _exceeds(value, dearest, y, room):
            break
        step = _newton_step(y, gradient, hessian, free)
        length = 1.0
        while length > 1e-8:
            tried = np.maximum(y + length * step, 0.0)
            found = _smooth(costs, weights, room, tried, temperature)
            if found[0] > value + max(1e-4 * float(gradient @ (tried - y)), 0.0):
                break
            length /= 4.0
        else:
            break
        gained, y = found[0] - value, tried
        value, gradient, hessian = found
        if gained <= 1e-3 * temperature:
            break
    return y


def _newton_step(y: Floats, gradient: Floats, hessian: Floats, free: NDArray[np.bool_]) -> Floats:
    """The step in the free prices; short enough not to overflow where the form is all but flat."""
    step = np.zeros_like(gradient)
    curvature = hessian[np.ix_(free, free)]
    ridge = 1e-9 * np.trace(curvature) + 1e-300
    curvature = curvature + ridge * np.eye(len(curvature))
    step[free] = np.linalg.lstsq(curvature, gradient[free], rcond=None)[0]
    longest = _LONGEST * (1.0 + float(y.max()))
    return np.clip(step, -longest, longest)


def _smooth(
    costs: Floats, weights: Floats, room: Floats, y: Floats, temperature: float
) -> tuple[float, Floats, Floats]:
    """Value, gradient [R] and negative Hessian [R, R] of the smooth form."""
    priced = costs + _priced(weights, y, costs)
    least = priced.min(axis=1, keepdims=True)
    shares = np.exp((least - priced) / temperature)
    norm = shares.sum(axis=1, keepdims=True)
    value = float((least - temperature * np.log(norm)).sum() - y @ room)
    shares /= norm
    mixed = weights * shares.ravel()
    means = mixed.reshape(len(y), *costs.shape).sum(axis=2)
    covariance = mixed @ weights.T - means @ means.T
    return value, means.sum(axis=1) - room, covariance / temperature
