"""Seconds of a step through a pipeline, by playing its schedule over the seconds of every stage.

Problem  Closed formulas of a schedule's bubble hold for equal stages alone. Embedding, head, uneven stages and formats
         of their own make stages differ, and the slowest one decides.
Method   Each rank runs its passes in the schedule's order (`pass_orders`); a pass begins when the rank is free and what
         it reads has come. Passes are played in the order in which they can run::

             begin(F s m) = max(end of the rank's pass before it, end(F s-1 m) + transfer)
             begin(B s m) = max(end of the rank's pass before it, end(B s+1 m) + transfer)
             begin(I s m)   as B; what the stage before reads is there when I is over
             begin(W s m) = end of the rank's pass before it

         Between two stages of one rank (the turn of a V) nothing is sent.
         From some micro-batch on each adds the same time: of long steps two shorter ones are played, whose difference
         is that of every further round (within 3 % of all that is played). With p ranks of v stages each, equal stages
         of f and b = i + w, and free transfers this is::

             1f1b, gpipe    (m + p - 1) (f + b)                  bubble (p - 1) / m
             interleaved    m v (f + b) + (p - 1) (f + b)        bubble (p - 1) / (m v)
             zbv, dualpipev 2 m (f + b) + (p - 1) f              where f = i = w
             dualpipev      at most 2 m (f + b) + (p - 1) (f + 2 b - 3 w)

Source   PTD-P, arXiv 2104.04473, section 2.2; zero bubble, arXiv 2401.10241; the last: deepseek-ai/DualPipe, README
Checked  tests/planner/layout/test_pipeline_times.py: the formulas, and steps that are played whole
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from scrimp.config.pipeline import V_SHAPED
from scrimp.errors import PlanError
from scrimp.planner.layout.pass_orders import (
    KINDS,
    SCHEDULES,
    Pass,
    PassKind,
    order_of,
    places_of,
    rank_of,
    stages_of,
)

_PLAYED = 6
"""Micro-batches for each rank that are played; the rest repeats the last rounds."""

Array = NDArray[np.float64]
Program = tuple[list[int], list[int], list[bool], list[int]]
"""For each pass: the number of its rank's pass before it, that of the pass whose result it reads, whether that result
is sent, and where its seconds are."""


@dataclass(frozen=True)
class StageSeconds:
    """One stage's passes of one micro-batch."""

    forward: float
    backward: float
    weights: float = 0.0
    """The part of the backward pass that makes gradients of weights: what W takes where a schedule splits it."""


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
    kind: PassKind
    begin: float
    end: float

    @property
    def is_forward(self) -> bool:
        """Whether it is no backward pass, nor half of one."""
        return self.kind == "F"


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
        stages: first to last; they lie on ranks as the schedule has them (`pass_orders.rank_of`).
        transfer: seconds of what a stage hands to the next one, on another rank.

    Raises:
        PlanError: a schedule that is not known, or that these micro-batches do not fit.
    """
    _check(len(stages), ranks, micro_batches, schedule)
    virtual = len(stages) // ranks
    busy = tuple(
        micro_batches
        * sum(stages[one].forward + stages[one].backward for one in stages_of(rank, ranks, virtual, schedule))
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
    ends, costs = _ends(stages, ranks, micro_batches, schedule, transfer), _costs(stages, schedule)
    orders = [iter(order_of(rank, ranks, virtual, micro_batches, schedule)) for rank in range(ranks)]
    found, width = [], len(costs) // len(stages)
    for cost, end in zip(program[3], ends[1:], strict=True):
        rank = rank_of(cost // width, ranks, schedule)
        kind, stage, number = next(orders[rank])
        found.append(PlayedPass(rank, stage, number, kind, end - costs[cost], end))
    return found


def _check(stages: int, ranks: int, micro_batches: int, schedule: str) -> None:
    virtual, rest = divmod(stages, ranks)
    several = {"interleaved": virtual >= 1} | dict.fromkeys(V_SHAPED, virtual == 2)
    if schedule not in SCHEDULES or rest or not several.get(schedule, virtual == 1):
        raise PlanError(
            f"no order of passes is known for schedule {schedule}",
            got=f"{stages} stages on {ranks} ranks",
            expected=f"one of {', '.join(SCHEDULES)}; several stages on a rank: interleaved, or two: "
            f"{', '.join(V_SHAPED)}",
        )
    if schedule == "interleaved" and micro_batches % ranks:
        raise PlanError(
            "interleaved stages need micro-batches in rounds of as many as there are ranks",
            got=f"{micro_batches} micro-batches on {ranks} ranks",
            expected=f"a multiple of {ranks}",
        )
    if schedule == "dualpipev" and micro_batches < stages:
        raise PlanError(
            "dualpipev needs as many micro-batches as there are stages",
            got=f"{micro_batches} micro-batches, {stages} stages on {ranks} ranks",
            expected=f"at least {stages}",
            do="lower micro_batch, or choose zbv, which takes fewer",
        )


def _played(
    stages: Sequence[StageSeconds], ranks: int, micro_batches: int, schedule: str, transfer: float
) -> float:
    return max(_ends(stages, ranks, micro_batches, schedule, transfer))


def _ends(
    stages: Sequence[StageSeconds], ranks: int, micro_batches: int, schedule: str, transfer: float
) -> list[float]:
    """When the passes of the program end, after the beginning of the step, which is the first."""
    costs = _costs(stages, schedule)
    ends = [0.0]
    add = ends.append
    program = _program(ranks, len(stages) // ranks, micro_batches, schedule)
    for before, needed, is_sent, cost in zip(*program, strict=True):
        free, come = ends[before], ends[needed]
        if is_sent:
            come += transfer
        add((free if free > come else come) + costs[cost])
    return ends


def _costs(stages: Sequence[StageSeconds], schedule: str) -> list[float]:
    """Seconds of every kind of pass, stage by stage."""
    if schedule in V_SHAPED:
        passes = [(one.forward, one.backward, one.backward - one.weights, one.weights) for one in stages]
        return [seconds for of_stage in passes for seconds in of_stage]
    return [seconds for one in stages for seconds in (one.forward, one.backward)]


@lru_cache(maxsize=256)
def _program(ranks: int, virtual: int, micro_batches: int, schedule: str) -> Program:
    """The passes of all ranks, each after those that it waits for. Number 0 is the beginning of the step."""
    if schedule in V_SHAPED:
        return _split_program(ranks, micro_batches, schedule)
    if virtual == 1:
        return _program_in_slots(ranks, micro_batches, schedule)
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


def _program_in_slots(ranks: int, micro_batches: int, schedule: str) -> Program:
    """The same of one stage a rank: in the order in which passes would begin if each took as long, one slot.

    Of 1f1b F r n begins in slot r + n while rank r has no backward pass to run (n < p - r), then in 2 n + r; B r n in
    2 p - 1 - r + 2 n. Of gpipe F r n begins in r + n, B r n as late as it mirrors that behind all forward passes.
    """
    m, p = micro_batches, ranks
    r, n = np.arange(p)[:, None], np.arange(m)[None]
    if schedule == "gpipe":
        slots = np.stack([r + n, m + 2 * (p - 1) - r + n])
    else:
        slots = np.stack([np.where(n < p - r, r + n, 2 * n + r), 2 * p - 1 - r + 2 * n])
    order = np.argsort(slots, axis=None, kind="stable")
    numbers = np.empty((2, p, m), dtype=np.int64)
    numbers.ravel()[order] = np.arange(1, order.size + 1)
    of_rank = np.sort(numbers.transpose(1, 0, 2).reshape(p, 2 * m), axis=1)
    befores = np.zeros(order.size + 1, dtype=np.int64)
    befores[of_rank[:, 1:]] = of_rank[:, :-1]
    # A forward pass reads that of the stage before, a backward pass that of the stage after, the last one's its own.
    needs = np.zeros((2, p, m), dtype=np.int64)
    needs[0, 1:], needs[1, :-1], needs[1, -1] = numbers[0, :-1], numbers[1, 1:], numbers[0, -1]
    costs = np.broadcast_to(np.arange(2)[:, None, None] + 2 * r, (2, p, m)).ravel()[order]
    sent = (p > 1) & (costs > 0) & (costs < 2 * p - 1)
    return befores[1:].tolist(), needs.ravel()[order].tolist(), sent.tolist(), costs.tolist()


def _waits(
    rank: int, ranks: int, virtual: int, micro_batches: int, schedule: str
) -> tuple[list[int], list[int], list[int]]:
    """The passes of a rank: the place of each, that of the pass whose result it reads, and where its seconds are."""
    m, end = micro_batches, 2 * ranks * virtual - 1
    places = places_of(rank, ranks, virtual, m, schedule)
    costs = [place // m for place in places]
    # A forward pass reads that of the stage before, a backward pass that of the stage after, the last one's its own.
    reads = [place + 2 * m if cost & 1 else place - 2 * m for place, cost in zip(places, costs, strict=True)]
    if rank == 0:
        reads = [read if cost else (end + 1) * m for cost, read in zip(costs, reads, strict=True)]
    if rank == ranks - 1:
        reads = [read - 3 * m if cost == end else read for cost, read in zip(costs, reads, strict=True)]
    return places, reads, costs


def _split_program(ranks: int, micro_batches: int, schedule: str) -> Program:
    """The same where backward passes are split, and ranks hold the stages of a V."""
    rows = [deque(order_of(rank, ranks, 2, micro_batches, schedule)) for rank in range(ranks)]
    numbers: dict[Pass, int] = {}
    found: Program = ([], [], [], [])
    befores, needs, sent, costs = found
    before = [0] * ranks
    while any(rows):
        ran = len(befores)
        for rank, row in enumerate(rows):
            while row:
                kind, stage, number = row[0]
                read = _read(kind, stage, number, 2 * ranks)
                if read is not None and read not in numbers:
                    break
                row.popleft()
                befores.append(before[rank])
                needs.append(0 if read is None else numbers[read])
                sent.append(read is not None and rank_of(read[1], ranks, schedule) != rank)
                costs.append(len(KINDS) * stage + KINDS.index(kind))
                before[rank] = numbers[kind, stage, number] = len(befores)
                if kind == "B":
                    numbers["I", stage, number] = len(befores)
        assert len(befores) > ran, "a circle of waits"
    return found


def _read(kind: PassKind, stage: int, number: int, stages: int) -> Pass | None:
    """The pass whose result a pass reads."""
    if kind == "F":
        return ("F", stage - 1, number) if stage else None
    if kind == "W":
        return "I", stage, number
    return ("F", stage, number) if stage == stages - 1 else ("I", stage + 1, number)
