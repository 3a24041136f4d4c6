"""Which of its choices each block takes: a dynamic program within a stage, and another one between stages.

Problem  Each of n blocks takes one of K choices (a format for its products, what is made again, what leaves), each with
         seconds, bytes and harm. The bytes of a stage have a limit of their own; harm has one over all stages; and the
         slowest stage counts in every micro-batch, the others once::

             minimise  (m - 1) max_s t_s + sum_s t_s    with  bytes_s <= room_s,  sum_s harm_s <= budget

Method   Within a stage, F[h, b] is the least seconds of the blocks so far with at most h cells of harm and b cells of
         bytes; a block adds::

             F'[h, b] = min over k of F[h - harm_k, b - bytes_k] + seconds_k

         Between stages, each has a frontier t_s[h]. For every T that some stage can take, the least sum of seconds with
         none above T is a min-plus sum over stages; T grows until (m - 1) T alone spoils the best.
         A choice that is not better than another in anything is left out first: whatever has it could have the other.
Limits   Bytes and harm are rounded up to cells, so that no limit is exceeded. A cell's size is
         such that the steps from a block's least to its other choices are rounded least.
Cost     n K cells operations, vectorised.
Source   PKU-Galvatron (arXiv 2211.13878, section 4.2) has the program over bytes; (m - 1) max + sum: Alpa
         (arXiv 2201.12023, section 5.1)
Checked  tests/planner/layout/test_knapsack.py: all choices of small cases

Shapes: K choices of a block, H cells of harm, B cells of bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_ROUND = 1e-9


@dataclass(frozen=True, eq=False)
class Choices:
    """What one block can take: [K] of each."""

    seconds: Array
    bytes: Array
    harm: Array


@dataclass(frozen=True)
class Cells:
    """How finely bytes and harm are counted."""

    bytes: int = 256
    harm: int = 48


@dataclass(frozen=True, eq=False)
class Frontier:
    """The least seconds of a stage for every cell of harm."""

    seconds: Array
    """[H + 1], falling; infinite where its bytes have no room."""
    taken: list[NDArray[np.uint8]]
    """For each block [H + 1, B + 1]: its choice."""
    steps: list[tuple[NDArray[np.int64], NDArray[np.int64]]]
    """For each block the cells of harm and of bytes of its choices."""

    def choices(self, harm: int) -> list[int]:
        """What each block takes where so many cells of harm are allowed."""
        found, cells = [], self.taken[0].shape[1] - 1 if self.taken else 0
        for taken, (harms, sizes) in zip(reversed(self.taken), reversed(self.steps), strict=True):
            choice = int(taken[harm, cells])
            harm, cells = harm - int(harms[choice]), cells - int(sizes[choice])
            found.append(choice)
        return found[::-1]


def useful(choices: Choices) -> NDArray[np.int64]:
    """Those that no other one is at least as good as in everything; of equal ones the first."""
    figures = np.stack([choices.seconds, choices.bytes, choices.harm], axis=1)
    order = np.lexsort(figures.T[::-1])
    sorted_ = figures[order]
    # Whatever is as good in everything comes before in this order.
    as_good = np.tril((sorted_[None] <= sorted_[:, None]).all(axis=2), k=-1)
    return np.sort(order[~as_good.any(axis=1)])


def cell(increments: Array, room: float, cells: int) -> float:
    """The size of a cell: a whole part of some increment, the one that all are rounded up least by.

    Args:
        increments: of choices over the least one of their block.
        cells: at most so many fill the room, and at least half as many.
    """
    increments = np.unique(increments[increments > 0])
    if room <= 0 or not len(increments):
        return 1.0
    finest = room / cells
    parts = [one / np.arange(max(1, np.ceil(one / finest / 2)), one / finest + 1) for one in increments]
    sizes = np.concatenate(parts)
    rounded = _up(increments[:, None], sizes) * sizes
    return float(sizes[(rounded - increments[:, None]).sum(axis=0).argmin()])


def frontier(blocks: Sequence[Choices], room: float, harm_cell: float, cells: Cells) -> Frontier:
    """The least seconds of a stage whose blocks' bytes have this room.

    Args:
        harm_cell: size of a cell of harm.
    """
    if not blocks:
        return Frontier(np.zeros(cells.harm + 1) if room >= 0 else np.full(cells.harm + 1, np.inf), [], [])
    least = sum(float(one.bytes.min()) for one in blocks)
    steps = [one.bytes - one.bytes.min() for one in blocks]
    size = cell(np.concatenate(steps), room - least, cells.bytes)
    width = int((room - least) / size + _ROUND) if room >= least else -1
    if width < 0:
        return Frontier(np.full(cells.harm + 1, np.inf), [], [])
    # More cells than all blocks can fill are of no use.
    width = min(width, sum(int(_up(step, size).max()) for step in steps))
    best = np.zeros((cells.harm + 1, width + 1))
    taken, counted = [], []
    for one, step in zip(blocks, steps, strict=True):
        sizes, harms = _up(step, size), _up(one.harm, harm_cell)
        best, choice = _with_block(best, one.seconds, harms, sizes)
        taken.append(choice)
        counted.append((harms, sizes))
    return Frontier(best[:, -1], taken, counted)


def spread(stages: Sequence[Array], fixed: Sequence[float], micro_batches: int) -> list[int] | None:
    """Cells of harm of each stage in the fastest step; None where a stage has no room.

    Args:
        stages: seconds of each for every cell of harm; see `Frontier`.
        fixed: seconds of each stage besides its blocks.
    """
    seconds = [one + base for one, base in zip(stages, fixed, strict=True)]
    if any(not np.isfinite(one[-1]) for one in seconds):
        return None
    fastest = sum(float(one[-1]) for one in seconds)
    slowest = max(float(one[-1]) for one in seconds)
    tops = np.unique(np.concatenate(seconds))
    best, found = np.inf, None
    for top in tops[(tops >= slowest) & np.isfinite(tops)]:
        if (micro_batches - 1) * top + fastest >= best:
            break
        if sum(int((one > top).sum()) for one in seconds) >= len(seconds[0]):
            continue  # More harm than there is, for all to be as fast as that.
        total, parts = _least_sum([np.where(one <= top, one, np.inf) for one in seconds])
        if (micro_batches - 1) * top + total < best:
            best, found = (micro_batches - 1) * top + total, parts
    return found


def _least_sum(stages: Sequence[Array]) -> tuple[float, list[int]]:
    """The least sum of one value of each, with places that add up to at most the last one."""
    best, places = stages[0], []
    number = len(best)
    rest = np.arange(number)[None] - np.arange(number)[:, None]
    """[place of this one, places of all so far]: what is left for those before it."""
    for one in stages[1:]:
        sums = np.where(rest >= 0, best[rest], np.inf) + one[:, None]
        places.append(sums.argmin(axis=0))
        best = sums.min(axis=0)
    at, found = number - 1, []
    for taken in reversed(places):
        found.append(int(taken[at]))
        at -= found[-1]
    return float(best[-1]), [at, *found[::-1]]


def _with_block(
    best: Array, seconds: Array, harms: NDArray[np.int64], sizes: NDArray[np.int64]
) -> tuple[Array, NDArray[np.uint8]]:
    high, wide = best.shape
    found = np.full_like(best, np.inf)
    taken = np.zeros(best.shape, dtype=np.uint8)
    for index, (more, harm, size) in enumerate(zip(seconds, harms, sizes, strict=True)):
        if harm >= high or size >= wide:
            continue
        sums = best[: high - harm, : wide - size] + more
        place = found[harm:, size:]
        np.copyto(taken[harm:, size:], index, where=sums < place)
        np.minimum(place, sums, out=place)
    return found, taken


def _up(values: Array, size: float | Array) -> NDArray[np.int64]:
    return np.ceil(values / size - _ROUND).astype(np.int64)
