"""Stages of a pipeline: which blocks and ranks, and what is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config import Config, for_ranks, preset, replace_values, resolve
from scrimp.config.pipeline import Pipeline, fits, pipeline_of
from scrimp.config.resolved import ResolvedConfig, ResolvedLayout
from scrimp.config.schema import LayoutConfig
from scrimp.errors import ConfigError

BLOCKS = preset("llama-3m").num_layers
SCHEDULES = ["gpipe", "1f1b", "interleaved", "zbv", "dualpipev"]


def resolved(ranks: int, **settings: Any) -> ResolvedConfig:
    keys = {key.replace("__", "."): value for key, value in settings.items()}
    config = replace_values(Config(), {"model.num_layers": BLOCKS, **keys})
    return resolve(config, preset("llama-3m"), device_type="cpu", ranks=ranks).config


@pytest.mark.parametrize(
    ("settings", "schedule", "virtual", "stages"),
    [
        ({}, "1f1b", 1, 2),
        ({"layout__virtual": 2}, "interleaved", 2, 4),
        ({"layout__schedule": "interleaved"}, "interleaved", 2, 4),
        ({"layout__schedule": "zbv"}, "zbv", 2, 4),
        ({"layout__schedule": "gpipe"}, "gpipe", 1, 2),
    ],
)
def test_what_is_left_out_follows(settings: Any, schedule: str, virtual: int, stages: int) -> None:
    layout = resolved(2, layout__pp=2, **settings).layout
    assert (layout.schedule, layout.virtual) == (schedule, virtual)
    assert (layout.ranks, layout.data_ranks, layout.dp, layout.fsdp) == (2, 1, 1, 1)
    assert pipeline_of(layout, BLOCKS).num_stages == stages


def test_other_axes_take_what_the_pipeline_leaves() -> None:
    layout = resolved(8, layout__pp=2, layout__tp=2).layout
    assert (layout.pp, layout.dp, layout.fsdp, layout.tp, layout.data_ranks) == (2, 1, 2, 2, 2)


@given(ranks=st.integers(2, 8), blocks=st.integers(1, 40), schedule=st.sampled_from(SCHEDULES))
def test_every_block_is_in_one_stage_and_every_stage_on_one_rank(
    ranks: int, blocks: int, schedule: str
) -> None:
    virtual = {"gpipe": 1, "1f1b": 1, "interleaved": 3}.get(schedule, 2)
    blocks += ranks * virtual
    layout = ResolvedLayout(dp=1, fsdp=1, pp=ranks, virtual=virtual, schedule=schedule)  # type: ignore[arg-type]
    pipe = pipeline_of(layout, blocks)
    assert sorted(number for rank in range(ranks) for number in pipe.blocks_of(rank)) == list(range(blocks))
    assert {len(pipe.stages_of(rank)) for rank in range(ranks)} == {virtual}
    sizes = [len(stage) for stage in pipe.stages]
    assert max(sizes) - min(sizes) <= 1
    assert pipe.last_rank == (0 if schedule in ("zbv", "dualpipev") else ranks - 1)


def test_uneven_stages_are_those_given() -> None:
    layout = resolved(2, layout__pp=2, layout__stages=f"1, {BLOCKS - 1}").layout
    assert pipeline_of(layout, BLOCKS).stages == (range(1), range(1, BLOCKS))


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"layout__pp": 1, "layout__schedule": "zbv"}, "layout.schedule is of a pipeline"),
        ({"layout__pp": 1, "layout__stages": "3,3"}, "layout.stages is of a pipeline"),
        ({"layout__schedule": "1f1b", "layout__virtual": 2}, "1f1b has another number of stages"),
        ({"layout__schedule": "zbv", "layout__virtual": 3}, "zbv has another number of stages"),
        ({"layout__virtual": BLOCKS}, "more stages than the model has blocks"),
        ({"layout__stages": "a,b"}, "layout.stages is no list of blocks"),
        ({"layout__stages": f"0,{BLOCKS}"}, "layout.stages is no list of blocks"),
        ({"layout__stages": "1,1"}, "layout.stages does not fit"),
        (
            {"precision": "snip", "budget__speedup": 1.2},
            "budget.speedup 1.2 is not carried out in a pipeline",
        ),
        ({"precision": "snip", "snip__gains": "exact"}, "snip.gains exact is not carried out in a pipeline"),
        ({"memory__activations": "keep+offload"}, r"memory.activations keep\+offload is not carried out"),
        ({"memory__optimizer": "host"}, "memory.optimizer host is not carried out in a pipeline"),
        ({"memory__split": "fastest"}, "memory.split fastest is not carried out in a pipeline"),
        ({"layout__schedule": "dualpipev", "train__compile": "on"}, "train.compile on is not carried out"),
        ({"train__sequence": 64, "train__batch_tokens": 64}, "cannot run this number of micro-batches"),
    ],
)
def test_what_a_pipeline_cannot_have_is_refused_by_name(settings: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        resolved(
            settings.get("layout__pp", 2) if "layout__pp" in settings else 2, **{"layout__pp": 2, **settings}
        )


@given(schedule=st.sampled_from(SCHEDULES), sequences=st.integers(1, 64))
def test_a_batch_left_to_scrimp_fits_the_schedule(schedule: Any, sequences: int) -> None:
    config = resolved(2, layout__pp=2, layout__schedule=schedule, train__sequence=64)
    assert fits(config.layout, config.micro_batches)
    tokens = 64 * 4 * sequences
    config = resolved(
        2, layout__pp=2, layout__schedule=schedule, train__sequence=64, train__batch_tokens=tokens
    )
    assert fits(config.layout, config.micro_batches)


def test_a_saved_pipeline_is_open_again_where_there_is_none() -> None:
    saved = resolved(2, layout__pp=2, layout__schedule="zbv", train__sequence=64, train__batch_tokens=64 * 8)
    assert for_ranks(saved, 2, ()) == saved
    alone = for_ranks(saved, 1, ()).layout
    assert (alone.pp, alone.schedule, alone.virtual) == (1, "auto", None)
    other = for_ranks(replace_values(saved, {"layout.schedule": "1f1b"}), 2, {"layout.schedule"}).layout
    assert (other.schedule, other.virtual) == ("1f1b", None)


def test_a_saved_micro_batch_is_open_again_where_a_pipeline_needs_smaller_ones() -> None:
    saved = resolved(1, train__sequence=64, train__batch_tokens=64 * 8)
    assert saved.micro_batches == 1
    found = for_ranks(replace_values(saved, {"layout.pp": 2}), 2, {"layout.pp"})
    assert found.train.micro_batch is None


def test_ranks_of_stages() -> None:
    there = Pipeline(2, "interleaved", tuple(range(i, i + 1) for i in range(4)))
    assert [there.rank_of(stage) for stage in range(4)] == [0, 1, 0, 1]
    back = Pipeline(2, "zbv", there.stages)
    assert [back.rank_of(stage) for stage in range(4)] == [0, 1, 1, 0]
    assert not fits(LayoutConfig(pp=4, schedule="interleaved"), 6)
