"""Micro-batches that a rank holds, beside what the runtime counts of the orders that it runs."""

from __future__ import annotations

import itertools

import pytest
from published_settings import setting

from scrimp.config.pipeline import Pipeline
from scrimp.config.schema import PipelineScheduleName
from scrimp.planner.layout.in_flight import held_in, passes_in_flight
from scrimp.runtime.pipeline import held_by, orders_of


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (3, 7), (4, 8), (4, 40), (8, 16), (8, 31)])
def test_a_v_holds_what_its_ranks_hold(
    schedule: PipelineScheduleName, ranks: int, micro_batches: int
) -> None:
    """For any bytes of a stage's micro-batch, in flight and waiting."""
    pipeline = Pipeline(ranks, schedule, tuple(range(n, n + 1) for n in range(2 * ranks)))
    for rank, order in enumerate(orders_of(pipeline, micro_batches)):
        theirs = held_by(order, pipeline, rank)
        stages = pipeline.stages_of(rank)
        for weights in itertools.product((0.0, 0.3, 1.0), repeat=4):
            ours = max(
                sum(size * count for size, count in zip(weights, (*one.flying, *one.waiting), strict=True))
                for one in held_in(rank, ranks, micro_batches, schedule)
            )
            expected = max(
                sum(weights[at] * one.in_flight[stage] for at, stage in enumerate(stages))
                + sum(weights[2 + at] * one.waiting[stage] for at, stage in enumerate(stages))
                for one in theirs
            )
            assert ours == pytest.approx(expected)


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
def test_later_micro_batches_take_the_same(schedule: str) -> None:
    for ranks, rank in ((2, 0), (4, 1), (8, 7)):
        assert held_in(rank, ranks, 4 * ranks, schedule) == held_in(rank, ranks, 9 * ranks, schedule)


def test_one_loss_at_a_time_is_in_flight() -> None:
    """Gradients of a head that wait would take as much as the head."""
    for schedule, ranks in itertools.product(("zbv", "dualpipev"), (2, 4, 8)):
        assert max(one.flying[1] for one in held_in(0, ranks, 4 * ranks, schedule)) == 1


def test_as_many_passes_as_formulas_say() -> None:
    four = setting(fsdp=2, pp=4, schedule="1f1b", global_batch=64, zero=1)
    assert [passes_in_flight(four, rank) for rank in range(4)] == [4, 3, 2, 1]
    there_and_back = setting(fsdp=2, pp=4, virtual=2, schedule="zbv", global_batch=64, zero=1)
    assert [passes_in_flight(there_and_back, rank) for rank in range(4)] == [4, 4, 4, 4]
    other = setting(fsdp=2, pp=4, virtual=2, schedule="dualpipev", global_batch=64, zero=1)
    assert all(4 < passes_in_flight(other, rank) <= 4.5 for rank in range(4))
