"""The order of a pipeline's passes beside torch's, and played: nobody waits for ever, and every pass runs once."""

from __future__ import annotations

import itertools
from collections import Counter
from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import ScheduleGPipe

from scrimp.config.pipeline import Pipeline, fewest
from scrimp.config.schema import LayoutConfig, PipelineScheduleName
from scrimp.runtime.pipeline.orders import (
    Action,
    everything_forward,
    held_by,
    orders_of,
    passes_of,
    with_transfers,
)

STAGES: dict[PipelineScheduleName, int] = {"gpipe": 1, "1f1b": 1, "interleaved": 3, "zbv": 2, "dualpipev": 2}


def pipeline(schedule: PipelineScheduleName, ranks: int) -> Pipeline:
    return Pipeline(ranks, schedule, tuple(range(at, at + 1) for at in range(ranks * STAGES[schedule])))


@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 2), (2, 5), (4, 9)])
def test_gpipe_is_torchs_order(ranks: int, micro_batches: int) -> None:
    stage = SimpleNamespace(num_stages=ranks, has_backward=True, is_first=True, is_last=False, submod=None)
    expected = ScheduleGPipe(stage, micro_batches)._get_pipeline_order()  # type: ignore[arg-type]
    assert expected is not None
    for rank, order in enumerate(passes_of(pipeline("gpipe", ranks), micro_batches)):
        assert words(order) == [str(one) for one in expected[rank] if one and "REDUCE" not in str(one)]


def test_1f1b_by_hand() -> None:
    # torch's own list of it lacks the last rank's first forward pass (docs/lab-log.md).
    first, second, last = map(words, passes_of(pipeline("1f1b", 3), 4))
    assert first == ["0F0", "0F1", "0F2", "0B0", "0F3", "0B1", "0B2", "0B3"]
    assert second == ["1F0", "1F1", "1B0", "1F2", "1B1", "1F3", "1B2", "1B3"]
    assert last == ["2F0", "2B0", "2F1", "2B1", "2F2", "2B2", "2F3", "2B3"]


def words(order: list[Action]) -> list[str]:
    return [f"{one.stage}{one.kind[0].upper()}{one.micro_batch}" for one in order]


@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 3])
@pytest.mark.parametrize("is_probe", [False, True])
def test_every_pass_runs_once_after_what_it_reads(
    schedule: PipelineScheduleName, ranks: int, rounds: int, is_probe: bool
) -> None:
    pipe = pipeline(schedule, ranks)
    micro_batches = rounds * fewest(LayoutConfig(pp=ranks, schedule=schedule))
    orders = (everything_forward if is_probe else orders_of)(pipe, micro_batches)
    passes = Counter[tuple[str, int, int]]()
    for rank, order in enumerate(orders):
        have = set[tuple[str, int, int]]()
        for one in order:
            key = one.kind, one.stage, one.micro_batch
            if one.transfer == "receive":
                assert pipe.rank_of(one.stage) != rank
                have.add(key)
            elif one.transfer == "send":
                assert key in have
            else:
                passes.update(_halves(one))
                assert _read(one, pipe) <= have
                have |= _halves(one)
    every = {(kind, s, m) for kind in ("forward", "inputs", "weights") for s, m in _all(pipe, micro_batches)}
    assert passes == Counter(every)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", STAGES)
@pytest.mark.parametrize(("ranks", "rounds"), [(16, 2), (64, 1)])
def test_large_pipelines_run_every_pass_once_and_hold_what_the_formulas_say(
    schedule: PipelineScheduleName, ranks: int, rounds: int
) -> None:
    """Playing all ranks' orders together ends, so that nobody waits in a circle (`with_transfers` refuses it else)."""
    pipe = pipeline(schedule, ranks)
    count = rounds * fewest(LayoutConfig(pp=ranks, schedule=schedule))
    orders = orders_of(pipe, count)
    passes = Counter(half for order in orders for one in order if not one.transfer for half in _halves(one))
    every = {(kind, s, m) for kind in ("forward", "inputs", "weights") for s, m in _all(pipe, count)}
    assert passes == Counter(every)
    found = [in_flight(order) for order in orders]
    assert found == [most_in_flight(schedule, ranks, rank, count) for rank in range(ranks)]


def in_flight(order: list[Action]) -> int:
    """Most forward passes of a rank whose backward pass is not yet over, of all of its stages together."""
    changes = {"forward": 1, "backward": -1, "inputs": -1, "weights": 0}
    return max(itertools.accumulate(changes[one.kind] for one in order if not one.transfer))


def most_in_flight(schedule: PipelineScheduleName, ranks: int, rank: int, micro_batches: int) -> int:
    """Passes of a rank's stages whose activations are kept at once: papers' formulas, in stages times micro-batches.

    1F1B p - r (PTD-P), interleaved (v - 1) p + 2 (p - r - 1) + 1 (PTD-P's warm-up and one more), the V-shaped ones
    2p (zero bubble) and a pass more (DualPipeV), and never more than all.
    """
    most = {
        "gpipe": micro_batches,
        "1f1b": ranks - rank,
        "interleaved": (STAGES["interleaved"] - 1) * ranks + 2 * (ranks - rank - 1) + 1,
        "zbv": 2 * ranks,
        "dualpipev": 2 * ranks + 1,
    }
    return min(most[schedule], STAGES[schedule] * micro_batches)


@pytest.mark.parametrize("schedule", STAGES)
def test_any_two_ranks_note_their_transfers_in_one_order(schedule: PipelineScheduleName) -> None:
    pipe = pipeline(schedule, 4)
    notes = [
        [(one, _peer(one, pipe, rank)) for one in order if one.transfer]
        for rank, order in enumerate(orders_of(pipe, 8))
    ]
    for rank in range(4):
        for peer in range(4):
            mine = [(one.kind, one.stage, one.micro_batch) for one, other in notes[rank] if other == peer]
            theirs = [(one.kind, one.stage, one.micro_batch) for one, other in notes[peer] if other == rank]
            assert mine == theirs


def test_what_a_rank_holds() -> None:
    pipe = pipeline("1f1b", 4)
    held = [held_by(order, pipe, rank) for rank, order in enumerate(orders_of(pipe, 12))]
    assert [max(one.in_flight[rank] for one in found) for rank, found in enumerate(held)] == [4, 3, 2, 1]
    assert not any(one.waiting[rank] for rank, found in enumerate(held) for one in found)
    pipe = pipeline("gpipe", 4)
    assert max(one.in_flight[3] for one in held_by(orders_of(pipe, 12)[3], pipe, 3)) == 12
    pipe = pipeline("zbv", 4)
    held = [held_by(order, pipe, rank) for rank, order in enumerate(orders_of(pipe, 12))]
    # Of the way there and back together no rank holds more than the first of 1F1B would of as many stages.
    both = [
        [sum((Counter(one.in_flight) + Counter(one.waiting)).values()) for one in found] for found in held
    ]
    assert [max(found) for found in both] == [8, 8, 8, 8]
    assert max(count for found in held for one in found for count in one.waiting.values()) > 1


def test_an_order_that_cannot_run_is_refused() -> None:
    pipe = pipeline("gpipe", 2)
    with pytest.raises(ValueError, match="no rank can go on"):
        with_transfers([[Action("backward", 0, 0), Action("forward", 0, 0)], []], pipe)


def _halves(one: Action) -> set[tuple[str, int, int]]:
    kinds = ("inputs", "weights") if one.kind == "backward" else (one.kind,)
    return {(kind, one.stage, one.micro_batch) for kind in kinds}


def _read(one: Action, pipe: Pipeline) -> set[tuple[str, int, int]]:
    stage, number = one.stage, one.micro_batch
    if one.kind == "forward":
        return {("forward", stage - 1, number)} if stage else set()
    if one.kind == "weights":
        return {("inputs", stage, number)}
    after = {("inputs", stage + 1, number)} if stage + 1 < pipe.num_stages else set()
    return {("forward", stage, number)} | after


def _all(pipe: Pipeline, micro_batches: int) -> list[tuple[int, int]]:
    return [(stage, number) for stage in range(pipe.num_stages) for number in range(micro_batches)]


def _peer(one: Action, pipe: Pipeline, rank: int) -> int:
    made, read = pipe.rank_of(one.stage), pipe.rank_of(one.stage + (1 if one.kind == "forward" else -1))
    return read if made == rank else made
