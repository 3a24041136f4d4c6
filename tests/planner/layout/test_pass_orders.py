"""Orders of passes, beside torch's own schedule classes."""

from __future__ import annotations

import itertools

import pytest

from scrimp.config.pipeline import Pipeline, fits
from scrimp.config.schema import LayoutConfig, PipelineScheduleName
from scrimp.planner.layout.pass_orders import KINDS, order_of, rank_of, stages_of
from scrimp.runtime.pipeline.orders import passes_of

LETTERS = {"forward": "F", "backward": "B", "inputs": "I", "weights": "W"}
GRID = [
    (schedule, ranks, virtual, micro_batches)
    for schedule, virtual in (("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("interleaved", 3))
    for ranks, micro_batches in itertools.product((1, 2, 3, 4, 8), (1, 2, 3, 4, 6, 8, 12, 24))
] + [
    (schedule, ranks, 2, micro_batches)
    for schedule in ("zbv", "dualpipev")
    for ranks, micro_batches in itertools.product((2, 3, 4, 5, 8), (1, 2, 3, 4, 6, 7, 8, 9, 15, 16, 17, 40))
]


@pytest.mark.parametrize(("schedule", "ranks", "virtual", "micro_batches"), GRID)
def test_orders_are_those_that_ranks_run(
    schedule: PipelineScheduleName, ranks: int, virtual: int, micro_batches: int
) -> None:
    """The runtime has interleaved, zbv and dualpipev of torch's classes (`_of_torch`)."""
    layout = LayoutConfig(pp=ranks, virtual=virtual, schedule=schedule)
    if ranks > 1 and not fits(layout, micro_batches):
        return
    if ranks == 1 and schedule == "interleaved":
        return
    pipeline = Pipeline(ranks, schedule, tuple(range(n, n + 1) for n in range(ranks * virtual)))
    for rank, order in enumerate(passes_of(pipeline, micro_batches)):
        expected = [(LETTERS[one.kind], one.stage, one.micro_batch) for one in order]
        assert order_of(rank, ranks, virtual, micro_batches, schedule) == expected
        assert stages_of(rank, ranks, virtual, schedule) == pipeline.stages_of(rank)
        assert {rank_of(stage, ranks, schedule) for stage in pipeline.stages_of(rank)} == {rank}


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.parametrize(("ranks", "micro_batches"), [(2, 4), (4, 8), (4, 11), (6, 40)])
def test_each_half_of_a_backward_pass_runs_once(schedule: str, ranks: int, micro_batches: int) -> None:
    for rank in range(ranks):
        order = order_of(rank, ranks, 2, micro_batches, schedule)
        halves = [
            (half, stage, number) for kind, stage, number in order for half in ("IW" if kind == "B" else kind)
        ]
        own = stages_of(rank, ranks, 2, schedule)
        every = itertools.product("FIW", own, range(micro_batches))
        assert sorted(halves) == sorted(every)
        assert {kind for kind, _, _ in order} <= set(KINDS)
