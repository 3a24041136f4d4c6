"""Tables of the least cost by units spent.

Method   For decisions one after the other, with whole units [N, P] ::

             new[c] = min over p of (best[c - units[n,p]] + cost[n,p])

         and for groups of decisions by min-plus convolution ::

             joined[c] = min over a of (one[c - a] + other[a])

         Beside every entry stands the choice, or a, that led to it; reading follows them backwards. A table
         ends at the most units that its limit allows, and is infinite below the least. Of choices with equal
         units only the cheapest is tried.
Cost     Time and memory N x units, the convolution units of one group x units of the other; one vector
         operation per choice, or per entry of the shorter table.
Checked  tests/planner/solver/test_knapsack.py.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.solver.nesting import Group
from scrimp.planner.solver.standard import Choices, Floats

Units = NDArray[np.int64]
Spans = dict[int, tuple[int, int]]
"""Number of a limit to the least and the most units that it allows."""


@dataclass(frozen=True, eq=False)
class Table:
    """Least cost by units, and how it came about."""

    best: Floats
    """[C] least cost of exactly c units; infinite where there is none."""
    own: NDArray[np.int64]
    """The decisions that were added one by one."""
    chosen: list[NDArray[np.unsignedinteger]]
    """For each of them its choice by units."""
    joined: list[tuple[Table, NDArray[np.int32]]]
    """Tables inside, and the units that each has of a total."""


def count_cells(tree: Group, units: Units, spans: Spans) -> int:
    """Entries of all tables of single decisions, at most."""
    cells = 0
    for group in tree.walk():
        most = int(units[group.own].max(axis=1, initial=0).sum())
        cells += len(group.own) * (max(min(most, spans[group.limit][1]), 0) + 1)
    return cells


def build_table(group: Group, units: Units, costs: Floats, spans: Spans, cap: int | None = None) -> Table:
    """The table of a limit with all inside.

    Args:
        units: [N, P], -1 where a choice is not allowed.
        costs: [N, P].
        cap: units beyond which nobody around will look.
    """
    low, high = spans[group.limit]
    high = high if cap is None else min(high, cap)
    own = group.own
    best, chosen = _add_decisions(units[own], costs[own], high)
    joined = []
    for inside in group.inner:
        table = build_table(inside, units, costs, spans, high)
        best, taken = _join(best, table.best, high)
        joined.append((table, taken))
    best[: max(low, 0)] = math.inf
    return Table(best, own, chosen, joined)


def read_table(table: Table, units_spent: int, units: Units, choices: Choices) -> None:
    """Write the choices [N] behind one entry."""
    for inside, taken in reversed(table.joined):
        read_table(inside, int(taken[units_spent]), units, choices)
        units_spent -= int(taken[units_spent])
    for decision, chosen in zip(reversed(table.own), reversed(table.chosen), strict=True):
        choices[decision] = chosen[units_spent]
        units_spent -= int(units[decision, choices[decision]])


def _add_decisions(
    units: Units, costs: Floats, high: int
) -> tuple[Floats, list[NDArray[np.unsignedinteger]]]:
    best = np.zeros(1 if high >= 0 else 0)
    chosen: list[NDArray[np.unsignedinteger]] = []
    kind = np.min_scalar_type(units.shape[1])
    for row, prices in zip(units, costs, strict=True):
        length = min(len(best) + int(row.max()), high + 1)
        new, choice = np.full(length, math.inf), np.zeros(length, dtype=kind)
        for p in _cheapest_by_units(row, prices):
            reached = best[: max(length - row[p], 0)] + prices[p]
            end = row[p] + len(reached)
            better = reached < new[row[p] : end]
            np.copyto(new[row[p] : end], reached, where=better)
            np.copyto(choice[row[p] : end], p, where=better)
        best = new
        chosen.append(choice)
    return best, chosen


def _cheapest_by_units(row: Units, prices: Floats) -> list[int]:
    """The choices that are worth a look, fewest units first."""
    best: dict[int, int] = {}
    for p, count in enumerate(row.tolist()):
        if count >= 0 and (count not in best or prices[p] < prices[best[count]]):
            best[count] = p
    return [best[count] for count in sorted(best)]


def _join(one: Floats, other: Floats, high: int) -> tuple[Floats, NDArray[np.int32]]:
    """Least cost of two tables together, and the units that `other` has in it."""
    length = max(min(len(one) + len(other) - 1, high + 1), 0)
    best, taken = np.full(length, math.inf), np.zeros(length, dtype=np.int32)
    swapped = len(one) < len(other)
    short, long = (one, other) if swapped else (other, one)
    for count in np.flatnonzero(np.isfinite(short)).tolist():
        reached = long[: max(length - count, 0)] + short[count]
        span = slice(count, count + len(reached))
        better = reached < best[span]
        np.copyto(best[span], reached, where=better)
        np.copyto(taken[span], np.arange(len(reached)) if swapped else count, where=better)
    return best, taken
