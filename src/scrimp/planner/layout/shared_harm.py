"""Which of its plans each stage of a pipeline takes, where all of them share one limit of harm.

Problem  The slowest stage counts in every micro-batch, the others once::

             minimise  (m - 1) max_s t_s + sum_s t_s    with  sum_s harm_s <= limit

Method   t_s[h] is the least seconds of a stage's plans (`knapsack.Stage.frontier`) with at most h cells of harm. For
         every T that some stage can take, the least sum of seconds with none above T is a min-plus sum over stages. It
         falls with T: of all T between two, none is better than (m - 1) times the lower one and the sum of the higher
         one. Harm is rounded up to whole cells there; afterwards the slowest stage and each other one in turn share
         out theirs, and what is left, once more without cells.
Limits   Of two stages' plans the best are found. Of S > 2 stages those found are as good as the best that leave S cells
         of harm to spare; where no plans leave that, they may be further from the best.
Source   (m - 1) max + sum: Alpa (arXiv 2201.12023, section 5.1)
Checked  tests/planner/layout/test_knapsack.py: all choices of small cases

Shapes: P plans of a stage, H cells of harm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.layout.knapsack import Frontier, Indices, falling

Array = NDArray[np.float64]
_ROUND = 1e-9


def spread(
    stages: Sequence[Frontier], fixed: Sequence[float], micro_batches: int, limit: float, cells: int
) -> list[int] | None:
    """Which plan each stage takes in the fastest step; None where all have too much harm together.

    Args:
        fixed: seconds of each stage besides its blocks.
        limit: of all stages' harm.
    """
    found = _in_cells(stages, fixed, micro_batches, limit, cells if limit > 0 else 0)
    if found is None:
        found = [int(np.lexsort((one.seconds, one.harm))[0]) for one in stages]
        if _harm(stages, found) > limit * (1.0 + _ROUND):
            return None
    return _shared_again(stages, fixed, micro_batches - 1, limit, found) if limit > 0 else found


def _in_cells(
    stages: Sequence[Frontier], fixed: Sequence[float], micro_batches: int, limit: float, cells: int
) -> list[int] | None:
    """The same with each stage's harm rounded up to whole cells."""
    rows = [_on_grid(one, limit, cells) for one in stages]
    seconds = [row + base for (row, _), base in zip(rows, fixed, strict=True)]
    if any(not np.isfinite(one[-1]) for one in seconds):
        return None
    tops = np.unique(np.concatenate(seconds))
    slowest = max(float(one[-1]) for one in seconds)
    tops = tops[(tops >= slowest) & np.isfinite(tops)]

    def within(top: float) -> tuple[float, list[int]]:
        return _least_sum([np.where(one <= top, one, np.inf) for one in seconds])

    least, found = within(tops[-1])
    best, after = (micro_batches - 1) * float(tops[-1]) + least, micro_batches - 1
    # Tops from the first number up to the second, whose least sum is the third: none of them has less.
    open_ones = [(0, len(tops) - 1, least)]
    while open_ones:
        low, high, least = open_ones.pop()
        if low == high or after * tops[low] + least >= best:
            continue
        middle = (low + high) // 2
        total, parts = within(tops[middle])
        if after * tops[middle] + total < best:
            best, found = after * float(tops[middle]) + total, parts
        open_ones.append((middle + 1, high, least))
        if np.isfinite(total):  # else harm is more than there is, for all to be as fast as that
            open_ones.append((low, middle, total))
    return [int(row[1][at]) for row, at in zip(rows, found, strict=True)] if np.isfinite(best) else None


def _harm(stages: Sequence[Frontier], taken: Sequence[int]) -> float:
    """The harm of these plans together."""
    return sum(float(one.harm[plan]) for one, plan in zip(stages, taken, strict=True))


def _shared_again(
    stages: Sequence[Frontier], fixed: Sequence[float], after: int, limit: float, taken: Sequence[int]
) -> list[int]:
    """Plans of a step that is as fast or faster: the slowest stage and another one take the best pair of plans that the
    harm of the rest leaves them; so with each other one in turn.

    Args:
        after: how often the slowest stage counts besides.
        taken: plans whose harm is within the limit.
    """
    found, kept = list(taken), [falling(one.seconds, one.harm) for one in stages]
    seconds = [one.seconds[own] + base for one, own, base in zip(stages, kept, fixed, strict=True)]
    harm = [one.harm[own] for one, own in zip(stages, kept, strict=True)]
    now = [float(one.seconds[plan]) + base for one, plan, base in zip(stages, found, fixed, strict=True)]
    for other in range(len(stages)):
        slowest = now.index(max(now))
        if slowest == other:
            continue
        pair = slowest, other
        rest = [at for at in range(len(stages)) if at not in pair]
        left = limit * (1.0 + _ROUND) - _harm([stages[at] for at in rest], [found[at] for at in rest])
        top = max((now[at] for at in rest), default=0.0)
        better = _best_pair([seconds[at] for at in pair], [harm[at] for at in pair], after, top, left)
        if better is None or better[0] >= after * now[slowest] + now[slowest] + now[other]:
            continue
        for at, plan in zip(pair, better[1], strict=True):
            found[at], now[at] = int(kept[at][plan]), float(seconds[at][plan])
    return found


def _best_pair(
    seconds: Sequence[Array], harm: Sequence[Array], after: int, top: float, left: float
) -> tuple[float, tuple[int, int]] | None:
    """Which plan each of two stages takes where both may do so much harm together, and what it costs; None where all
    do more.

    Args:
        seconds: of each stage's plans, of which those of more harm are faster.
        after: how often the slowest of all stages counts besides.
        top: seconds of the slowest of the others.
    """
    # Beside each plan of the one, the other takes the fastest that is left.
    beside = np.searchsorted(harm[1], left - harm[0], side="right") - 1
    may = np.flatnonzero(beside >= 0)
    if not len(may):
        return None
    one, other = seconds[0][may], seconds[1][beside[may]]
    costs = after * np.maximum(np.maximum(one, other), top) + one + other
    best = int(costs.argmin())
    return float(costs[best]), (int(may[best]), int(beside[may[best]]))


def _on_grid(stage: Frontier, limit: float, cells: int) -> tuple[Array, Indices]:
    """[H + 1] least seconds, and the plan, with at most so many cells of harm."""
    unit = limit / cells if cells else 1.0
    places = np.ceil(stage.harm / unit - _ROUND).astype(np.int64)
    seconds, plans = np.full(cells + 1, np.inf), np.zeros(cells + 1, dtype=np.int64)
    # Plans of more harm come later and are faster.
    for plan in np.argsort(-stage.seconds, kind="stable"):
        if places[plan] <= cells:
            seconds[places[plan] :] = stage.seconds[plan]
            plans[places[plan] :] = plan
    return seconds, plans


def _least_sum(stages: Sequence[Array]) -> tuple[float, list[int]]:
    """The least sum of one value of each, with places that add up to at most the last one; none is larger at a later
    place."""
    best, places = stages[0], []
    number = len(best)
    for one in stages[1:]:
        # Of equal values the first place does.
        first = np.flatnonzero(one < np.concatenate([[np.inf], one[:-1]]))
        if not len(first):
            return np.inf, []
        # [place of this one, places of all so far]: what those before it take with what is left.
        padded = np.concatenate([np.full(number - 1, np.inf), best])
        shifted = np.ndarray((number, number), np.float64, padded, 0, padded.strides * 2)
        sums = shifted[number - 1 - first] + one[first, None]
        taken = sums.argmin(axis=0)
        places.append(first[taken])
        best = sums[taken, np.arange(number)]
    if not np.isfinite(best[-1]):
        return np.inf, []
    at, found = number - 1, []
    for taken in reversed(places):
        found.append(int(taken[at]))
        at -= found[-1]
    return float(best[-1]), [at, *found[::-1]]
