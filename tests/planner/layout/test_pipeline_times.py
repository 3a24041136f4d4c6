"""Played schedules: closed formulas for equal stages, torch's own orders, and long steps from short ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config.pipeline import Pipeline
from scrimp.errors import PlanError
from scrimp.planner.layout.pipeline_times import (
    StageSeconds,
    _played,
    order_of,
    pipeline_seconds,
    played_passes,
)
from scrimp.runtime.pipeline.orders import passes_of

F, B = 1.0, 2.0


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rounds", [1, 2, 3, 8, 64])
def test_equal_stages_take_what_the_formulas_say(ranks: int, rounds: int) -> None:
    number = ranks * rounds
    for schedule in ("gpipe", "1f1b"):
        found = pipeline_seconds(
            [StageSeconds(F, B)] * ranks, ranks=ranks, micro_batches=number, schedule=schedule
        )
        assert found.total == pytest.approx((number + ranks - 1) * (F + B))
        assert found.bubble / max(found.busy) == pytest.approx((ranks - 1) / number)
    for virtual in (2, 3, 5):
        stages = [StageSeconds(F, B)] * (ranks * virtual)
        found = pipeline_seconds(stages, ranks=ranks, micro_batches=number, schedule="interleaved")
        assert found.total == pytest.approx((number * virtual + ranks - 1) * (F + B))


@pytest.mark.parametrize(("ranks", "virtual"), [(2, 1), (4, 1), (2, 2), (4, 2), (4, 3), (3, 4)])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_orders_are_those_that_ranks_run(ranks: int, virtual: int, rounds: int) -> None:
    schedule = "1f1b" if virtual == 1 else "interleaved"
    pipeline = Pipeline(ranks, schedule, tuple(range(n, n + 1) for n in range(ranks * virtual)))
    for rank, order in enumerate(passes_of(pipeline, ranks * rounds)):
        ours = order_of(rank, ranks, virtual, ranks * rounds, schedule)
        assert [(one.kind == "forward", one.stage // ranks, one.micro_batch) for one in order] == list(ours)


@given(
    ranks=st.integers(2, 6),
    virtual=st.integers(1, 3),
    rounds=st.integers(7, 12),
    seconds=st.lists(st.floats(0.1, 10), min_size=36, max_size=36),
    transfer=st.floats(0, 5),
)
def test_a_long_step_is_what_all_its_passes_take(
    ranks: int, virtual: int, rounds: int, seconds: list[float], transfer: float
) -> None:
    stages = [StageSeconds(*seconds[2 * n : 2 * n + 2]) for n in range(ranks * virtual)]
    schedule = "1f1b" if virtual == 1 else "interleaved"
    found = pipeline_seconds(
        stages, ranks=ranks, micro_batches=ranks * rounds, schedule=schedule, transfer=transfer
    )
    assert found.total == pytest.approx(_played(stages, ranks, ranks * rounds, schedule, transfer), rel=0.03)
    assert found.bubble >= -1e-9 * found.total


@pytest.mark.parametrize(("ranks", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 3)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_each_pass_begins_when_its_rank_and_what_it_reads_are_there(
    ranks: int, virtual: int, schedule: str
) -> None:
    if (virtual > 1) != (schedule == "interleaved"):
        return
    count, number, transfer = ranks * virtual, 3 * ranks, 0.25
    stages = [StageSeconds(1.0 + 0.1 * n, 2.0 + 0.3 * n) for n in range(count)]
    passes = played_passes(stages, ranks=ranks, micro_batches=number, schedule=schedule, transfer=transfer)
    found = {(one.is_forward, one.stage, one.micro_batch): one for one in passes}
    assert len(found) == len(passes) == 2 * count * number
    for rank in range(ranks):
        own = [one for one in passes if one.rank == rank]
        order = order_of(rank, ranks, virtual, number, schedule)
        assert [(one.is_forward, one.stage // ranks, one.micro_batch) for one in own] == list(order)
        before = 0.0
        for one in own:
            seconds = stages[one.stage].forward if one.is_forward else stages[one.stage].backward
            assert one.end - one.begin == pytest.approx(seconds)
            last = one.stage == count - 1
            needs = one.stage - 1 if one.is_forward else one.stage + (not last)
            come = 0.0
            if needs >= 0:
                giver = found[one.is_forward or last, needs, one.micro_batch]
                come = giver.end + transfer * (giver.rank != rank)
            assert one.begin == pytest.approx(max(before, come))
            before = one.end
    total = pipeline_seconds(
        stages, ranks=ranks, micro_batches=number, schedule=schedule, transfer=transfer
    ).total
    assert max(one.end for one in passes) == pytest.approx(total)


def test_what_no_order_is_known_for_is_refused() -> None:
    stages = [StageSeconds(F, B)] * 4
    with pytest.raises(PlanError, match="no order of passes is known for schedule waves"):
        pipeline_seconds(stages, ranks=4, micro_batches=4, schedule="waves")
    with pytest.raises(PlanError, match="in rounds of as many as there are ranks"):
        pipeline_seconds(stages, ranks=2, micro_batches=3, schedule="interleaved")
