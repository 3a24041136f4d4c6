"""Gathers and reductions of ranks that share states, in pipelines and without."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from published_settings import setting

from scrimp.config.pipeline import Pipeline
from scrimp.config.schema import PipelineScheduleName
from scrimp.planner.layout.block_times import PassSeconds
from scrimp.planner.layout.predict import kernels_of, planned_seconds, predict
from scrimp.planner.layout.setting import BlockPlan, Setting
from scrimp.planner.layout.sharing import beside_exchanges, once_a_step, stage_waits
from scrimp.planner.layout.stage_memory import peak_bytes
from scrimp.planner.layout.stages import numbers_of_block
from scrimp.runtime.pipeline.orders import passes_of

WHOLE = BlockPlan(gathered=True)


def of(zero: int, **more: Any) -> Setting:
    return setting(**({"fsdp": 2, "pp": 4, "zero": zero, "global_batch": 64} | more))


def exchanged(one: Setting) -> float:
    """Seconds of a block's gathers and reductions in both passes, without the copies around them."""
    alone = dataclasses.replace(one, software=dataclasses.replace(one.software, unit_copies=0.0))
    passes = planned_seconds(0, BlockPlan(), alone, kernels_of(alone))
    return sum(each.communication + each.hidden for each in passes)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("interleaved", 2), ("zbv", 2), ("dualpipev", 2)]
)
def test_each_stage_of_zero_gathers_and_reduces_as_often_as_fsdp2(
    schedule: PipelineScheduleName, virtual: int
) -> None:
    """FSDP2's rule, played over the order that ranks run: a pass that finds weights whole gathers nothing, a backward
    pass leaves them cut, and so does a forward pass under zero 3."""
    ranks, micro_batches = 4, 16
    pipeline = Pipeline(ranks, schedule, tuple(range(n, n + 1) for n in range(ranks * virtual)))
    for zero, expected in ((1, 1), (2, 1), (3, 2)):
        for order in passes_of(pipeline, micro_batches):
            whole, gathers = set[int](), dict.fromkeys((one.stage for one in order), 0)
            for one in order:
                if one.kind == "weights":
                    continue
                gathers[one.stage] += one.stage not in whole
                is_cut = one.kind != "forward" or zero == 3
                whole = whole - {one.stage} if is_cut else whole | {one.stage}
            assert set(gathers.values()) == {expected * micro_batches}
        like = of(zero, schedule=schedule, virtual=virtual)
        group, block = like.groups["shards"], like.model.blocks[0]
        gathered = group.gathered(2.0 * block.parameters)
        reduced = group.reduced(4.0 * block.parameters)
        assert exchanged(like) == pytest.approx(expected * gathered + (zero > 1) * reduced)


def test_zero_3_with_all_weights_gathered_is_zero_2() -> None:
    two, three = of(2), of(3)
    three = dataclasses.replace(three, blocks=(WHOLE,) * len(three.model.blocks))
    assert predict(three).seconds == pytest.approx(predict(two).seconds)


def test_zero_1_has_the_faster_passes_and_zero_3_the_fewer_bytes() -> None:
    eight = {"fsdp": 8, "hardware": "32xh100", "global_batch": 256}
    one, two, three = (of(zero, **eight) for zero in (1, 2, 3))
    assert predict(one).passes < predict(two).passes < predict(three).passes
    sizes = [max(rank.total for rank in peak_bytes(each)) for each in (one, two, three)]
    assert sizes[0] > sizes[1] > sizes[2]


def test_a_stage_waits_for_its_first_gather_and_its_last_reduction() -> None:
    pipe, whole = of(3), setting(fsdp=8, zero=3)
    block = pipe.model.blocks[0]
    gather, reduce = stage_waits(pipe, block)
    group = pipe.groups["shards"]
    assert gather == pytest.approx(0.9 * group.gathered(2.0 * block.parameters))
    assert reduce == pytest.approx(0.9 * group.reduced(4.0 * block.parameters))
    assert stage_waits(of(1), block) == pytest.approx((gather, 0.0))
    assert stage_waits(whole, block) == (0.0, 0.0)


def test_where_gradients_of_weights_come_last_nothing_hides_their_reduction() -> None:
    """Zero 1: once a step, after the last W."""
    shaped = of(1, virtual=2, schedule="zbv")
    plain = of(1, virtual=2, schedule="interleaved")
    apart = sum(once_a_step(shaped, 0))
    hidden = predict(shaped).step_seconds - predict(shaped).passes
    assert hidden >= apart
    assert hidden > predict(plain).step_seconds - predict(plain).passes


@pytest.mark.parametrize("program", ["scrimp", "megatron"])
@pytest.mark.parametrize("axis", ["fsdp", "cp"])
def test_copies_beside_shards_add_up_what_is_reduced(program: str, axis: str) -> None:
    """Zero 1: the states are cut over the shards of one copy."""
    shaped = setting(hardware="8x8xh100", of=program, zero=1, dp=8, **({"fsdp": 1} | {axis: 8}))
    shaped = dataclasses.replace(
        shaped, software=dataclasses.replace(shaped.software, shards_over_copies=False)
    )
    assert shaped.state_shards == (8, 8)
    groups, numbers = shaped.groups, shaped.model.parameters
    gradients = shaped.software.gradient_bytes * numbers
    reduced, gathered = once_a_step(shaped, 0)
    assert reduced == pytest.approx(groups["shards"].reduced(gradients) + groups["dp"].added(gradients / 8))
    weights = 0.0 if shaped.gathers_copies else shaped.block_weight_bytes * numbers
    assert gathered == pytest.approx(groups["shards"].gathered(weights))
    once = dataclasses.replace(shaped, layout=dataclasses.replace(shaped.layout, zero=2))
    assert reduced > sum(once_a_step(once, 0))


def test_gradients_of_whole_states_are_added_up() -> None:
    """Zero 0, with ranks of tp too, which share no states of what they cut."""
    shaped = setting(of="megatron", precision="fp16", zero=0, dp=4, tp=2)
    gradients = shaped.software.gradient_bytes * shaped.model.parameters / 2
    assert once_a_step(shaped, 0) == pytest.approx((shaped.groups["data"].added(gradients), 0.0))


def test_copies_beside_shards_of_zero_3_add_up_in_every_pass() -> None:
    shaped = setting(hardware="8x8xh100", zero=3, dp=8, fsdp=8)
    once = dataclasses.replace(shaped.software, adds_copies_in_passes=False)
    other = dataclasses.replace(shaped, software=once)
    block = numbers_of_block(shaped, shaped.model.blocks[0])
    each, added = shaped.software.gradient_bytes, shaped.groups["dp"].added

    def exchanged(one: Setting) -> float:
        return beside_exchanges(one, block, PassSeconds(0.0), 0.0, each).communication

    assert exchanged(shaped) - exchanged(other) == pytest.approx(added(each * block.total / 8))
    assert once_a_step(shaped, 0) == (0.0, 0.0)
    assert once_a_step(other, 0)[0] == pytest.approx(added(each * shaped.model.parameters / 8))
    assert predict(shaped).step_seconds > predict(other).step_seconds
