"""What blocks are planned to do, beside all that small models can do, where devices hardly hold them."""

from __future__ import annotations

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from published_settings import LLAMA_8B, setting
from whole_settings import (
    GAP,
    PLAYED_GAP,
    cases,
    every,
    fastest,
    fits,
    fitting,
    harm,
    most_bytes,
    planned,
    seconds_of,
    summed_of,
    with_memory,
)

from scrimp.config.resolved import ResolvedLayout
from scrimp.planner.layout.block_choices import Blocks, has_room
from scrimp.planner.layout.block_menus import Quality, flops_in_4_bits
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.questions import Question, layouts, micro_batches, setting_of
from scrimp.planner.layout.search import search
from scrimp.planner.layout.setting import FULL, BlockPlan, Offload, Setting


def check_beside_all(like: Setting, wanted: Quality | None) -> None:
    every_plan, blocks = fitting(like, wanted), Blocks(like, wanted)
    found = blocks.solve()
    if not every_plan:
        assert found is None or next(every(like, wanted), None) is None  # or there are too many to look at
        return
    assert found is not None, "nothing fits, it says"
    assert fits(found)
    assert wanted is None or harm(found, wanted) <= wanted.limit * (1 + 1e-9)
    seconds = predict(min(every_plan, key=seconds_of))
    gap = GAP
    if like.layout.pp > 1:
        assert summed_of(found) <= min(map(summed_of, every_plan)) * (1 + GAP)
        gap = PLAYED_GAP
    assert seconds_of(found) <= seconds.least * (1 + gap)
    assert wanted or has_room(like)
    if like.layout.pp == 1:
        passes = seconds.seconds["compute"] + seconds.seconds["communication_exposed"]
        assert like.micro_batches * blocks.least_seconds() <= passes * (1 + 1e-9)


@settings(max_examples=40)
@given(cases())
def test_plans_of_blocks_are_the_best_of_all(case: tuple[Setting, Quality | None]) -> None:
    check_beside_all(*case)


@pytest.mark.slow
@settings(max_examples=1500)
@given(cases())
def test_plans_of_many_blocks_are_the_best_of_all(case: tuple[Setting, Quality | None]) -> None:
    check_beside_all(*case)


@pytest.mark.parametrize("states", [False, True])
def test_where_all_blocks_must_offload_they_do(states: bool) -> None:
    """Inputs of many blocks take more than what comes back from the host of two."""
    like = setting(
        dataclasses.replace(LLAMA_8B, layers=28, width=2048, heads=16, ffn_width=4096), "h100", micro_batch=4
    )
    like = dataclasses.replace(like, offload=dataclasses.replace(like.offload, optimizer=states))
    away, again = planned(like, BlockPlan(offload=True)), planned(like, BlockPlan(recompute=FULL))
    assert most_bytes(away) < most_bytes(again)
    like = with_memory(like, most_bytes(away) + 1, 1e12)
    assert has_room(like)
    found = Blocks(like, None).solve()
    assert found is not None
    assert all(plan.offload for plan in found.blocks)
    assert not has_room(with_memory(like, most_bytes(away) - 1))


def test_activations_of_a_pipeline_stay_on_its_devices() -> None:
    """Training refuses them on the host there, so no plan has them there, though it would take less."""
    shape = dataclasses.replace(LLAMA_8B, layers=56, width=2048, heads=16, ffn_width=4096)
    like = setting(shape, "2xh100", pp=2, zero=1, sequence=16384)
    away, again = planned(like, BlockPlan(offload=True)), planned(like, BlockPlan(recompute=FULL))
    assert most_bytes(away) < most_bytes(again)
    assert not fits(with_memory(away, most_bytes(again), 1e12))
    tight = with_memory(like, most_bytes(again) - 1, 1e12)
    assert not has_room(tight)
    assert Blocks(tight, None).solve() is None
    found = Blocks(with_memory(like, most_bytes(again) + 1, 1e12), None).solve()
    assert found is not None
    assert not any(plan.offload for plan in found.blocks)


@pytest.mark.parametrize("layout", [{"zero": 3}, {"pp": 2, "zero": 1, "schedule": "1f1b"}])
def test_what_is_made_again_takes_the_bytes_of_its_format(layout: dict[str, int]) -> None:
    shape = dataclasses.replace(LLAMA_8B, layers=2, vocab_size=8192)
    like = setting(shape, "2xh100", micro_batch=4, global_batch=16, **layout)
    wanted = Quality(formats=("fp8_tensor", "bf16"), harm=flops_in_4_bits(like.model), limit=0.0)
    low = tuple(
        (f"{linear.name}.{gemm}", "fp8_tensor")
        for linear in like.model.blocks[0].linears
        for gemm in ("dgrad", "fprop", "wgrad")
    )
    lean = planned(like, BlockPlan(recompute=FULL, formats=tuple(sorted(low))))
    assert most_bytes(lean) < most_bytes(planned(like, BlockPlan(recompute=FULL)))
    like = with_memory(like, most_bytes(lean) + 1, 0.0)
    check_beside_all(like, wanted)
    found = Blocks(like, wanted).solve()
    assert found is not None
    assert predict(found).step_seconds <= predict(lean).step_seconds * (1 + GAP)


def test_gathered_weights_have_no_margin() -> None:
    """All blocks stay gathered on devices that hold just that."""
    shape = dataclasses.replace(LLAMA_8B, layers=4, vocab_size=8192)
    like = setting(shape, "4xl40s", micro_batch=1, global_batch=16, sequence=2048, zero=3)
    whole = planned(like, BlockPlan(recompute=FULL, gathered=True))
    like = with_memory(like, most_bytes(whole) + 1, 0.0)
    found = Blocks(like, None).solve()
    assert found is not None
    assert predict(found).step_seconds <= predict(whole).step_seconds
    check_beside_all(like, None)


def test_only_what_leaves_room_is_among_the_levels_that_are_tried() -> None:
    """Blocks that have room in 4 bits alone, and on the host: of all levels of backward passes, few are left."""
    shape = dataclasses.replace(LLAMA_8B, layers=2, width=2048, heads=16, ffn_width=4096, vocab_size=8192)
    like = setting(shape, "2xb200", of="torchtitan", sequence=8192, global_batch=2, zero=1)
    like = with_memory(like, 2_366_285_388)
    wanted = Quality(formats=("nvfp4", "bf16"), harm=flops_in_4_bits(like.model), limit=0.3)
    check_beside_all(like, wanted)
    found = Blocks(like, wanted).solve()
    assert found is not None
    assert all(plan.offload for plan in found.blocks)


def test_levels_of_the_end_of_a_step_leave_room_too() -> None:
    """Gradients fill a device at the end: of all bytes of one pass those that fit are tried, the most among them."""
    shape = dataclasses.replace(LLAMA_8B, layers=2, width=2048, heads=16, ffn_width=6144, vocab_size=8192)
    like = setting(shape, "2xb200", sequence=4096, micro_batch=1, global_batch=2, zero=1)
    states = Offload(optimizer=True, master=True, gradients=True)
    # Two blocks' states on a visit would fill it before.
    whole = dataclasses.replace(like.software, states_by_block=False)
    like = dataclasses.replace(like, software=whole)
    like = with_memory(dataclasses.replace(like, offload=states), 1_174_203_793 + 134_217_728)
    wanted = Quality(formats=("nvfp4", "bf16"), harm=flops_in_4_bits(like.model), limit=0.0)
    check_beside_all(like, wanted)
    (rank,) = Blocks(like, wanted).places
    menu, left = rank.menus[0], like.device.memory_bytes - rank.outside.bytes("end")
    alone = menu.waiting + menu.again
    fits_alone = alone[(1.0 + rank.outside.share) * alone <= left]
    assert max(way.alone for way in rank.ways) == fits_alone.max() < alone.max()


@pytest.mark.slow
@pytest.mark.parametrize(("share", "zero"), itertools.product([0.3, 0.6, 1.0], [1, 3]))
def test_a_search_finds_the_best_of_all_layouts(share: float, zero: int) -> None:
    like = setting(dataclasses.replace(LLAMA_8B, layers=2), "2xh100", sequence=2048, global_batch=8)
    sizes = [most_bytes(planned(like, one)) for one in (BlockPlan(), BlockPlan(recompute=FULL))]
    like = with_memory(like, 0.5 * min(sizes) + share * (max(sizes) - 0.5 * min(sizes)), 60e9)
    asked = Question(
        model=like.model,
        cluster=like.cluster,
        sequence=like.sequence,
        global_batch=like.global_batch,
        software=like.software,
        given={"zero": zero},
    )
    found, seconds = search(asked).best, []
    for layout in layouts(asked):
        seconds += [one for size in micro_batches(asked, layout) for one in _of_layout(asked, layout, size)]
    assert bool(found) == bool(seconds)
    if found:
        assert found[0].seconds <= min(seconds) * (1 + GAP)


def _of_layout(asked: Question, layout: ResolvedLayout, size: int) -> list[float]:
    """Seconds of the best of a layout, for each kind of states on the host."""
    plain = setting_of(asked, layout, size)
    best = [fastest(dataclasses.replace(plain, offload=offload), None) for offload in asked.on_host(layout)]
    return [predict(one).step_seconds for one in best if one is not None]
