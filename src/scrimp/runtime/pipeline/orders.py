"""What the ranks of a pipeline do in a step, in which order.

Problem  A rank must know when to run which micro-batch of which of its stages, and all ranks must send and receive in
         orders that never wait for one another in a circle.
Method   The order of passes is a schedule's: those of one stage on each rank are two lines each, the others are torch's
         (`torch.distributed.pipelining`), whose classes tell it without running anything. Between the passes go the
         transfers: all ranks' orders are played through together, and what a pass makes for another rank is noted, as
         sent and as received, on both at once. So any two ranks note their transfers in one order, and the whole has
         one in which each is possible: that in which it was played.
Choice   torch's own stages, which run such an order, want a batch as one tensor that they cut by rows, and shapes that
         they learn from a first pass; Scrimp's micro-batches come with documents on the host, differ in them, and are
         cut already. `scrimp.runtime.pipeline.stages` runs the order instead.
Checked  tests/runtime/pipeline/test_orders.py: torch's own orders, and every order played
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Literal

from scrimp.config.pipeline import Pipeline
from scrimp.planner.memory.stage_costs import Held

Pass = Literal["forward", "backward", "inputs", "weights"]
"""`backward` is `inputs` and `weights` in one: the gradients of a stage's input, and of its weights."""
Transfer = Literal["send", "receive"]
_OF_TORCH = {"F": "forward", "B": "backward", "I": "inputs", "W": "weights"}


@dataclass(frozen=True)
class Action:
    """One thing that a rank does."""

    kind: Pass
    """The pass whose result a transfer moves."""
    stage: int
    """That runs; of a transfer, that made what is moved."""
    micro_batch: int
    transfer: Transfer | None = None


def orders_of(pipeline: Pipeline, micro_batches: int) -> list[list[Action]]:
    """Passes and transfers of a step, by rank."""
    return with_transfers(passes_of(pipeline, micro_batches), pipeline)


def everything_forward(pipeline: Pipeline, micro_batches: int) -> list[list[Action]]:
    """GPipe's order, for stages of every schedule and any number of micro-batches: of a probe."""
    return with_transfers(_gpipe(pipeline, micro_batches), pipeline)


def passes_of(pipeline: Pipeline, micro_batches: int) -> list[list[Action]]:
    """The passes of a step, by rank."""
    if pipeline.schedule == "gpipe":
        return _gpipe(pipeline, micro_batches)
    if pipeline.schedule == "1f1b":
        return [_1f1b(rank, pipeline.ranks, micro_batches) for rank in range(pipeline.ranks)]
    return _of_torch(pipeline, micro_batches)


def held_by(order: Sequence[Action], pipeline: Pipeline, rank: int) -> tuple[Held, ...]:
    """What a rank holds, at every moment that differs."""
    in_flight, waiting = Counter[int](), Counter[int]()
    now = most_arrived = 0
    moments: dict[tuple[tuple[int, ...], ...], tuple[Counter[int], Counter[int]]] = {}
    stages = pipeline.stages_of(rank)
    for action in order:
        stage, kind = action.stage, action.kind
        if action.transfer is not None:
            now += action.transfer == "receive"
            most_arrived = max(most_arrived, now)
            continue
        if kind != "weights":
            in_flight[stage] += 1 if kind == "forward" else -1
        waiting[stage] += pipeline.splits_backward and kind in ("inputs", "backward")
        numbers = tuple(tuple(counts[one] for one in stages) for counts in (in_flight, waiting))
        moments.setdefault(numbers, (in_flight.copy(), waiting.copy()))
        waiting[stage] -= pipeline.splits_backward and kind in ("weights", "backward")
        before = stage + (-1 if kind == "forward" else 1)
        if kind != "weights" and 0 <= before < pipeline.num_stages and pipeline.rank_of(before) != rank:
            now -= 1
    return tuple(Held(flying, waits, most_arrived) for flying, waits in moments.values())


def _gpipe(pipeline: Pipeline, micro_batches: int) -> list[list[Action]]:
    orders = []
    for rank in range(pipeline.ranks):
        own, numbers = pipeline.stages_of(rank), range(micro_batches)
        order = [Action("forward", stage, number) for stage, number in itertools.product(own, numbers)]
        order += [
            Action("backward", stage, number) for stage, number in itertools.product(own[::-1], numbers)
        ]
        orders.append(order)
    return orders


def _1f1b(rank: int, ranks: int, micro_batches: int) -> list[Action]:
    ahead = min(ranks - 1 - rank, micro_batches)
    forward = [Action("forward", rank, number) for number in range(micro_batches)]
    backward = [Action("backward", rank, number) for number in range(micro_batches)]
    pairs = itertools.chain.from_iterable(zip(forward[ahead:], backward, strict=False))
    return [*forward[:ahead], *pairs, *backward[micro_batches - ahead :]]


def _of_torch(pipeline: Pipeline, micro_batches: int) -> list[list[Action]]:
    from torch.distributed import pipelining

    kind: Any = {
        "interleaved": pipelining.ScheduleInterleaved1F1B,
        "zbv": pipelining.ScheduleZBVZeroBubble,
        "dualpipev": pipelining.ScheduleDualPipeV,
    }[pipeline.schedule]
    # A schedule asks its stages for their numbers alone until it runs.
    stages = [
        SimpleNamespace(
            stage_index=stage,
            num_stages=pipeline.num_stages,
            group_size=pipeline.ranks,
            group_rank=0,
            is_first=stage == 0,
            is_last=stage == pipeline.num_stages - 1,
            submod=None,
            has_backward=True,
        )
        for stage in pipeline.stages_of(0)
    ]
    order = kind(stages, micro_batches).pipeline_order
    return [[action for one in order[rank] for action in _read(one)] for rank in range(pipeline.ranks)]


def _read(action: Any) -> list[Action]:
    """An action of torch's; None is a wait."""
    if action is None:
        return []
    if getattr(action, "sub_actions", None):
        return [one for part in action.sub_actions for one in _read(part)]
    return [Action(_OF_TORCH[action.computation_type.value], action.stage_index, action.microbatch_index)]  # type: ignore[arg-type]


def with_transfers(orders: Sequence[Sequence[Action]], pipeline: Pipeline) -> list[list[Action]]:
    """The same with what ranks send one another.

    Raises:
        ValueError: ranks wait for one another in a circle.
    """
    found: list[list[Action]] = [[] for _ in orders]
    waiting = [list(order)[::-1] for order in orders]
    done: set[tuple[str, int, int]] = set()
    while any(waiting):
        ready = [rank for rank, rest in enumerate(waiting) if rest and _is_ready(rest[-1], done, pipeline)]
        if not ready:
            raise ValueError(f"no rank can go on: {[rest[-1] for rest in waiting if rest]}")
        for rank in ready:
            action = waiting[rank].pop()
            found[rank].append(action)
            done |= {(kind, action.stage, action.micro_batch) for kind in _halves(action.kind)}
            peer = _reader(action, pipeline)
            if peer is not None and peer != rank:
                made = action.kind if action.kind == "forward" else "inputs"
                for who, transfer in ((rank, "send"), (peer, "receive")):
                    found[who].append(Action(made, action.stage, action.micro_batch, transfer))  # type: ignore[arg-type]
    return found


def _halves(kind: Pass) -> tuple[Pass, ...]:
    return ("inputs", "weights") if kind == "backward" else (kind,)


def _is_ready(action: Action, done: set[tuple[str, int, int]], pipeline: Pipeline) -> bool:
    stage, number = action.stage, action.micro_batch
    if action.kind == "forward":
        return stage == 0 or ("forward", stage - 1, number) in done
    if action.kind == "weights":
        return ("inputs", stage, number) in done
    is_last = stage == pipeline.num_stages - 1
    return ("forward", stage, number) in done and (is_last or ("inputs", stage + 1, number) in done)


def _reader(action: Action, pipeline: Pipeline) -> int | None:
    """The rank that reads what a pass makes; None: nobody does."""
    if action.kind == "weights":
        return None
    stage = action.stage + (1 if action.kind == "forward" else -1)
    return pipeline.rank_of(stage) if 0 <= stage < pipeline.num_stages else None
