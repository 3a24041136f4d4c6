"""Which limits lie inside which, and one measure for all of a tree.

Method   A limit covers the decisions whose choices differ in its amount. Sorted by size, every limit must lie
         inside, or apart from, every one before it. Inside means in proportion: the amounts of a stage may be
         shares of the stage's FLOPs while the wider limit counts shares of all. Limits that no plan can break
         are left out.
         A tree is measured in the amounts of its widest limit, over the least of every decision or, where that
         leaves less room, under the most.
Checked  tests/planner/solver/test_knapsack.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.solver.standard import Floats, StandardForm, common_unit

_MOST_UNITS = 200_000
_SAME = 1e-9
"""Relative to the largest: amounts that differ by less are in proportion."""


class CannotTabulateError(Exception):
    """The limits are of another kind than tables can hold; the message says how."""


@dataclass(eq=False)
class Group:
    """A limit, and the limits inside it."""

    limit: int
    """Its number in the form."""
    decisions: NDArray[np.int64]
    """All that it covers."""
    ratio: float
    """Its amounts over those of the widest limit around it."""
    inner: list[Group] = field(default_factory=list)

    @property
    def own(self) -> NDArray[np.int64]:
        """The decisions that no limit inside covers."""
        covered = [group.decisions for group in self.inner]
        return np.setdiff1d(self.decisions, np.concatenate(covered)) if covered else self.decisions

    def walk(self) -> Iterator[Group]:
        """This group and all inside."""
        yield self
        for group in self.inner:
            yield from group.walk()


@dataclass(frozen=True, eq=False)
class Measure:
    """Amounts of a tree, and the range of each of its limits in them, by the limit's number."""

    amounts: Floats
    """[N, P], at least 0, least 0 in every decision."""
    low: dict[int, float]
    high: dict[int, float]
    slack: dict[int, float]
    unit: float | None
    """What all amounts are multiples of; None if nothing is."""


def nested_groups(form: StandardForm) -> list[Group]:
    """The widest limits, each with those inside it.

    Raises:
        CannotTabulateError: limits that overlap, or nested ones out of proportion.
    """
    rise = form.over_lowest
    largest = rise.max(axis=(1, 2), initial=0.0)
    covers = rise.max(axis=2) > 1e-12 * largest[:, None]
    binding = (form.most < form.highest.sum(axis=1)) | (form.least > form.lowest.sum(axis=1))
    order = [k for k in np.argsort(-covers.sum(axis=1), kind="stable") if binding[k] and covers[k].any()]
    roots: list[Group] = []
    placed: list[tuple[Group, int]] = []
    for k in map(int, order):
        around = None
        for group, root in placed:
            both = covers[k] & covers[group.limit]
            if (both == covers[k]).all():
                around = group, root
            elif both.any():
                raise CannotTabulateError(f"{form.names[group.limit]} and {form.names[k]} overlap")
        root = k if around is None else around[1]
        ratio = float(rise[k].sum() / rise[root][covers[k]].sum())
        if (np.abs(rise[k] - ratio * rise[root])[covers[k]] > _SAME * largest[k]).any():
            raise CannotTabulateError(f"{form.names[k]} is not in proportion to {form.names[root]}")
        new = Group(k, np.flatnonzero(covers[k]), ratio)
        (roots if around is None else around[0].inner).append(new)
        placed.append((new, root))
    return roots


def measure(form: StandardForm, tree: Group) -> Measure:
    """Amounts and ranges of a tree, from the end that leaves less room in its widest limit."""
    rise = form.over_lowest[tree.limit]
    top = rise.max(axis=1)
    low, high, slack = {}, {}, {}
    for group in tree.walk():
        k, ratio = group.limit, group.ratio
        already, total = form.lowest[k].sum(), float(top[group.decisions].sum())
        low[k] = max(0.0, float(form.least[k] - already) / ratio)
        high[k] = min(total, float(form.most[k] - already) / ratio)
        slack[k] = float(max(form.slack_least[k] * (form.least[k] > -np.inf), form.slack_most[k])) / ratio
    amounts = rise
    if float(top[tree.decisions].sum()) - low[tree.limit] < high[tree.limit]:
        amounts = np.where(form.allowed, top[:, None] - rise, 0.0)
        for group in tree.walk():
            k, total = group.limit, float(top[group.decisions].sum())
            low[k], high[k] = total - high[k], total - low[k]
    covered = amounts[tree.decisions][form.allowed[tree.decisions]]
    unit = common_unit(covered, _MOST_UNITS)
    if unit is not None and high[tree.limit] > _MOST_UNITS * unit:
        unit = None
    return Measure(amounts, low, high, slack, unit)
