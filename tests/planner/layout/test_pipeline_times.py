"""Played schedules: closed formulas for equal stages, torch's own orders, and long steps from short ones."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config.pipeline import Pipeline
from scrimp.config.schema import PipelineScheduleName
from scrimp.errors import PlanError
from scrimp.planner.layout.pipeline_times import (
    StageSeconds,
    _played,
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


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 6, 8])
@pytest.mark.parametrize("rounds", [2, 3, 8, 64])
def test_a_v_of_equal_stages_waits_as_its_formula_says(schedule: str, ranks: int, rounds: int) -> None:
    def bubble(forward: float, backward: float, weights: float) -> float:
        stages = [StageSeconds(forward, backward, weights)] * (2 * ranks)
        return pipeline_seconds(stages, ranks=ranks, micro_batches=ranks * rounds, schedule=schedule).bubble

    assert bubble(1.0, 2.0, 1.0) == pytest.approx(ranks - 1)
    # Half of what 1F1B of as many stages waits, and less.
    one = [StageSeconds(2.0, 4.0)] * ranks
    other = pipeline_seconds(one, ranks=ranks, micro_batches=ranks * rounds, schedule="1f1b")
    assert bubble(1.0, 2.0, 1.0) == pytest.approx(other.bubble / 6)
    if schedule == "dualpipev":
        for forward, backward, weights in ((1.0, 2.0, 0.9), (1.0, 2.5, 0.8), (1.0, 3.0, 1.0)):
            most = (ranks - 1) * (forward + 2 * backward - 3 * weights)
            assert bubble(forward, backward, weights) <= most * (1 + 1e-9) + 1e-9


@given(
    ranks=st.integers(2, 6),
    kind=st.sampled_from([("1f1b", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2), ("dualpipev", 2)]),
    rounds=st.integers(7, 12),
    seconds=st.lists(st.floats(0.1, 10), min_size=36, max_size=36),
    transfer=st.floats(0, 5),
)
def test_a_long_step_is_what_all_its_passes_take(
    ranks: int, kind: tuple[str, int], rounds: int, seconds: list[float], transfer: float
) -> None:
    schedule, virtual = kind
    pairs = (seconds[2 * n : 2 * n + 2] for n in range(ranks * virtual))
    stages = [StageSeconds(forward, backward, 0.4 * backward) for forward, backward in pairs]
    found = pipeline_seconds(
        stages, ranks=ranks, micro_batches=ranks * rounds, schedule=schedule, transfer=transfer
    )
    assert found.total == pytest.approx(_played(stages, ranks, ranks * rounds, schedule, transfer), rel=0.03)
    assert found.bubble >= -1e-9 * found.total


@pytest.mark.parametrize(("ranks", "virtual"), [(1, 1), (2, 1), (4, 1), (2, 2), (4, 2), (5, 2), (4, 3)])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"])
def test_each_pass_begins_when_its_rank_and_what_it_reads_are_there(
    ranks: int, virtual: int, schedule: PipelineScheduleName
) -> None:
    """In the order that ranks run, whose interleaved, zbv and dualpipev are torch's."""
    is_v = schedule in ("zbv", "dualpipev")
    if (virtual > 1) != (schedule not in ("gpipe", "1f1b")) or (is_v and virtual != 2):
        return
    count, number, transfer = ranks * virtual, 3 * ranks, 0.25
    stages = [StageSeconds(1.0 + 0.1 * n, 2.0 + 0.3 * n, 0.7 + 0.1 * n) for n in range(count)]
    passes = played_passes(stages, ranks=ranks, micro_batches=number, schedule=schedule, transfer=transfer)
    made = {
        (half, one.stage, one.micro_batch): one
        for one in passes
        for half in ("IW" if one.kind == "B" else one.kind)
    }
    assert len(made) == 3 * count * number
    pipeline = Pipeline(ranks, schedule, tuple(range(n, n + 1) for n in range(count)))
    for rank, order in enumerate(passes_of(pipeline, number)):
        own, before = [one for one in passes if one.rank == rank], 0.0
        assert len(own) == len(order)
        for one, action in zip(own, order, strict=True):
            assert (one.stage, one.micro_batch) == (action.stage, action.micro_batch)
            stage, last = stages[one.stage], one.stage == count - 1
            seconds, reads = {
                "forward": (stage.forward, ("F", one.stage - 1)),
                "backward": (stage.backward, ("F" if last else "I", one.stage + (not last))),
                "inputs": (stage.backward - stage.weights, ("F" if last else "I", one.stage + (not last))),
                "weights": (stage.weights, ("I", one.stage)),
            }[action.kind]
            assert one.end - one.begin == pytest.approx(seconds)
            giver = made.get((*reads, one.micro_batch))
            come = giver.end + transfer * (giver.rank != rank) if giver else 0.0
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
    with pytest.raises(PlanError, match="dualpipev needs as many micro-batches as there are stages"):
        pipeline_seconds(stages, ranks=2, micro_batches=3, schedule="dualpipev")
    with pytest.raises(PlanError, match="no order of passes is known for schedule zbv"):
        pipeline_seconds(stages, ranks=4, micro_batches=8, schedule="zbv")
