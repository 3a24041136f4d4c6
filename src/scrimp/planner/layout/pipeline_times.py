"""Seconds of a step through a pipeline, by playing its schedule over the seconds of every stage.

Problem  Closed formulas of a schedule's bubble hold for equal stages alone. Embedding, head, uneven stages and formats
         of their own make stages differ, and the slowest one decides.
Method   Each rank runs its passes in the schedule's order; a pass begins when the rank is free and what it reads has
         come. Passes are played in the order in which they can run::

             begin(F s m) = max(end of the rank's pass before it, end(F s-1 m) + transfer)
             begin(B s m) = max(end of the rank's pass before it, end(B s+1 m) + transfer)

         From some micro-batch on each adds the same time: of long steps two shorter ones are played, whose difference
         is that of every further round (within 3 % of all that is played). With p ranks of v stages each, equal stages
         and free transfers this is::

             1f1b, gpipe    (m + p - 1) (f + b)                  bubble (p - 1) / m
             interleaved    m v (f + b) + (p - 1) (f + b)        bubble (p - 1) / (m v)

Source   PTD-P, arXiv 2104.04473, section 2.2
Checked  tests/planner/layout/test_pipeline_times.py: the formulas, and steps that are played whole
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import PlanError

SCHEDULES = ("gpipe", "1f1b", "interleaved")
_PLAYED = 6
"""Micro-batches for each rank that are played; the rest repeats the last rounds."""

Array = NDArray[np.float64]
Program = tuple[list[int], list[int], list[bool], list[int]]
"""Of each pass: the number of its rank's pass before it, of the pass whose result it reads, whether that is sent, and
where its seconds are."""
Pass = tuple[bool, int, int]
"""Whether forward; which of the rank's stages; which micro-batch."""


@dataclass(frozen=True)
class StageSeconds:
    """One stage's passes of one micro-batch."""

    forward: float
    backward: float


@dataclass(frozen=True)
class PipelineSeconds:
    """A step."""

    total: float
    """From the first pass to the end of the last one on any rank."""
    busy: tuple[float, ...]
    """That each rank computes."""

    @property
    def bubble(self) -> float:
        """That the busiest rank waits."""
        return self.total - max(self.busy)


@dataclass(frozen=True)
class PlayedPass:
    """One pass of one rank, in seconds from the beginning of the step."""

    rank: int
    stage: int
    micro_batch: int
    is_forward: bool
    begin: float
    end: float


def pipeline_seconds(
    stages: Sequence[StageSeconds],
    *,
    ranks: int,
    micro_batches: int,
    schedule: str,
    transfer: float = 0.0,
) -> PipelineSeconds:
    """A step of so many micro-batches.

    Args:
        stages: first to last; stage s lies on rank s mod `ranks`.
        transfer: seconds of what a stage hands to the next one, on another rank.

    Raises:
        PlanError: a schedule that is not known, or that these micro-batches do not fit.
    """
    _check(len(stages), ranks, micro_batches, schedule)
    busy = tuple(
        micro_batches * sum(one.forward + one.backward for one in stages[rank::ranks])
        for rank in range(ranks)
    )
    if ranks == 1:
        return PipelineSeconds(busy[0], busy)
    most = _PLAYED * ranks
    if micro_batches <= most + ranks:
        return PipelineSeconds(_played(stages, ranks, micro_batches, schedule, transfer), busy)
    short = most + micro_batches % ranks
    one, other = (_played(stages, ranks, short + add, schedule, transfer) for add in (0, ranks))
    return PipelineSeconds(one + (micro_batches - short) / ranks * (other - one), busy)


def least_rounds(ranks: int, virtual: int, micro_batches: int) -> float:
    """A step takes no less than so many times what a rank takes on average for a micro-batch, whatever stages take.

    Of 1f1b with m > p this is m + p - 1: no step is shorter than any chain of passes that wait for each other, and so
    than none of their averages. One chain for each rank r goes down the first micro-batch and up to r, stays there
    until its last forward pass, and goes down and up with the last micro-batch. With weights R_r / (m - p + r),
    R_r = (m - 1) (m - p - 1) / (p (m - p + r - 1)), every stage is m + p - 1 times on average in one of them, over p.
    Of all others half of the waiting is counted.
    """
    share = 1.0 if virtual == 1 and micro_batches > ranks else 0.5
    return micro_batches + share * (ranks - 1) / virtual


@lru_cache(maxsize=4096)
def least_weights(ranks: int, virtual: int, micro_batches: int, *, counted: float = 1.0) -> Array:
    """[W, R] A step takes no less than the ranks' seconds of a micro-batch, times any of these rows.

    All ranks alike, as of `least_rounds`; the first or the last one, which has all micro-batches after another and,
    where each rank has one stage, the passes of those before it around them; and means of these.

    Args:
        counted: how much a second counts in which a rank waits.
    """
    waits = counted * (least_rounds(ranks, virtual, micro_batches) - micro_batches)
    alike = np.full(ranks, (micro_batches + waits) / ranks)
    if ranks == 1:
        return alike[None]
    first, last = np.zeros(ranks), np.full(ranks, counted if virtual == 1 else 0.0)
    first[0] = last[-1] = micro_batches
    return np.stack(
        [alike] + [alike + share * (one - alike) for one in (first, last) for share in (0.25, 0.5, 0.75, 1.0)]
    )


def played_passes(
    stages: Sequence[StageSeconds],
    *,
    ranks: int,
    micro_batches: int,
    schedule: str,
    transfer: float = 0.0,
) -> list[PlayedPass]:
    """Every pass of such a step, with its beginning and its end; arguments and refusals are those of
    `pipeline_seconds`."""
    _check(len(stages), ranks, micro_batches, schedule)
    virtual = len(stages) // ranks
    program = _program(ranks, virtual, micro_batches, schedule)
    ends = _ends(stages, ranks, micro_batches, schedule, transfer)
    orders = [iter(order_of(rank, ranks, virtual, micro_batches, schedule)) for rank in range(ranks)]
    found = []
    for cost, end in zip(program[3], ends[1:], strict=True):
        stage, is_backward = divmod(cost, 2)
        rank = stage % ranks
        _, _, number = next(orders[rank])
        one = stages[stage]
        seconds = one.backward if is_backward else one.forward
        found.append(PlayedPass(rank, stage, number, not is_backward, end - seconds, end))
    return found


def _check(stages: int, ranks: int, micro_batches: int, schedule: str) -> None:
    virtual, rest = divmod(stages, ranks)
    if schedule not in SCHEDULES or rest or (schedule != "interleaved" and virtual > 1):
        raise PlanError(
            f"no order of passes is known for schedule {schedule}",
            got=f"{stages} stages on {ranks} ranks",
            expected=f"one of {', '.join(SCHEDULES)}; several stages on a rank: interleaved",
        )
    if schedule == "interleaved" and micro_batches % ranks:
        raise PlanError(
            "interleaved stages need micro-batches in rounds of as many as there are ranks",
            got=f"{micro_batches} micro-batches on {ranks} ranks",
            expected=f"a multiple of {ranks}",
        )


def order_of(rank: int, ranks: int, virtual: int, micro_batches: int, schedule: str) -> tuple[Pass, ...]:
    """The passes of a rank."""
    places = _order(rank, ranks, virtual, micro_batches, schedule)
    rounds = ((place // micro_batches, place % micro_batches) for place in places)
    return tuple((cost % 2 == 0, cost // 2 // ranks, number) for cost, number in rounds)


def _order(rank: int, ranks: int, virtual: int, micro_batches: int, schedule: str) -> list[int]:
    """The same as places among the passes of all ranks: these go by 2 stage + 1 where backward, and then by
    micro-batch."""
    m, total, after = micro_batches, micro_batches * virtual, ranks - 1 - rank
    # Rounds of as many micro-batches as ranks go through one stage after another; of one stage all are one round.
    each = ranks if virtual > 1 else m
    forward, backward = (
        [
            (2 * (stage * ranks + rank) + is_backward) * m + number
            for begin in range(0, m, each)
            for stage in range(virtual)[:: -1 if is_backward else 1]
            for number in range(begin, begin + each)
        ]
        for is_backward in (False, True)
    )
    if schedule == "gpipe":
        return forward + backward
    ahead = min(after if virtual == 1 else 2 * after + (virtual - 1) * ranks, total)
    found = [0] * (2 * total)
    found[:ahead], found[ahead + 2 * (total - ahead) :] = forward[:ahead], backward[total - ahead :]
    turns = slice(ahead, ahead + 2 * (total - ahead))
    found[turns.start : turns.stop : 2] = forward[ahead:]
    found[turns.start + 1 : turns.stop : 2] = backward[: total - ahead]
    return found


def _played(
    stages: Sequence[StageSeconds], ranks: int, micro_batches: int, schedule: str, transfer: float
) -> float:
    return max(_ends(stages, ranks, micro_batches, schedule, transfer))


def _ends(
    stages: Sequence[StageSeconds], ranks: int, micro_batches: int, schedule: str, transfer: float
) -> list[float]:
    """When the passes of the program end, after the beginning of the step, which is the first."""
    costs = [seconds for one in stages for seconds in (one.forward, one.backward)]
    ends = [0.0]
    add = ends.append
    program = _program(ranks, len(stages) // ranks, micro_batches, schedule)
    for before, needed, is_sent, cost in zip(*program, strict=True):
        free, come = ends[before], ends[needed]
        if is_sent:
            come += transfer
        add((free if free > come else come) + costs[cost])
    return ends


@lru_cache(maxsize=256)
def _program(ranks: int, virtual: int, micro_batches: int, schedule: str) -> Program:
    """The passes of all ranks, each after those that it waits for. Number 0 is the beginning of the step."""
    rows = [_waits(rank, ranks, virtual, micro_batches, schedule) for rank in range(ranks)]
    # Of every pass of every stage its number, 0 where it did not run yet; behind them one for what waits for nothing.
    numbers = [0] * (2 * ranks * virtual * micro_batches) + [-1]
    found: Program = ([], [], [], [])
    befores, needs, sent, costs = found
    before, at, waiting = [0] * ranks, [0] * ranks, list(range(ranks))
    while waiting:
        rank = waiting.pop(0)
        places, reads, own_costs = rows[rank]
        begin, last = at[rank], before[rank]
        index, number = begin, len(reads)
        while index < number and (needed := numbers[reads[index]]):
            befores.append(last)
            needs.append(needed)
            last = numbers[places[index]] = len(befores)
            index += 1
        costs += own_costs[begin:index]
        before[rank], at[rank] = last, index
        if index > begin:
            # Its neighbours may go on.
            waiting += [one for one in ((rank - 1) % ranks, (rank + 1) % ranks) if one not in waiting]
    assert all(index == len(row[0]) for index, row in zip(at, rows, strict=True)), "a circle of waits"
    end = 2 * ranks * virtual - 1
    # All but the first stage's forward and the last one's backward passes read what another rank sends.
    sent += [ranks > 1 and 0 < cost < end for cost in costs]
    needs[:] = [needed if needed > 0 else 0 for needed in needs]
    return found


def _waits(
    rank: int, ranks: int, virtual: int, micro_batches: int, schedule: str
) -> tuple[list[int], list[int], list[int]]:
    """The passes of a rank: the place of each, that of the pass whose result it reads, and where its seconds are."""
    m, end = micro_batches, 2 * ranks * virtual - 1
    places = _order(rank, ranks, virtual, m, schedule)
    costs = [place // m for place in places]
    # A forward pass reads that of the stage before, a backward pass that of the stage after, the last one's its own.
    reads = [place + 2 * m if cost & 1 else place - 2 * m for place, cost in zip(places, costs, strict=True)]
    if rank == 0:
        reads = [read if cost else (end + 1) * m for cost, read in zip(costs, reads, strict=True)]
    if rank == ranks - 1:
        reads = [read - 3 * m if cost == end else read for cost, read in zip(costs, reads, strict=True)]
    return places, reads, costs
