"""The best layouts, beside all settings that there are."""

from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path

import pytest
from published_settings import LLAMA_8B, ROUTED, setting
from whole_settings import most_bytes, with_memory

from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import PlanError
from scrimp.models.shapes import ModelShape
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.block_choices import Blocks, leanest
from scrimp.planner.layout.format_budget import FormatBudget
from scrimp.planner.layout.given_memory import GivenMemory
from scrimp.planner.layout.held_states import visiting_bytes
from scrimp.planner.layout.predict import least_of_any_batch, predict
from scrimp.planner.layout.questions import Question, layouts, micro_batches, setting_of
from scrimp.planner.layout.search import Candidate, _with_room, fits, search
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, BlockPlan, Offload, Setting
from scrimp.planner.layout.stage_memory import peak_bytes


def question(like: Setting) -> Question:
    return Question(
        model=like.model,
        cluster=like.cluster,
        sequence=like.sequence,
        global_batch=like.global_batch,
        software=like.software,
    )


SMALL = dataclasses.replace(LLAMA_8B, layers=4)


@pytest.mark.parametrize(
    ("shape", "hardware"), [(SMALL, "4xh100"), pytest.param(LLAMA_8B, "4xl40s", marks=pytest.mark.slow)]
)
def test_no_setting_that_fits_is_faster(shape: ModelShape, hardware: str) -> None:
    like = setting(shape, hardware, global_batch=16)
    found = search(question(like))
    best = found.best[0]
    assert max(one.total for one in best.memory) <= like.device.memory_bytes
    assert [one.seconds for one in found.best] == sorted(one.seconds for one in found.best)
    degrees = [1, 2, 4]
    for tp, pp, cp, fsdp, virtual, zero, size in itertools.product(
        degrees, degrees, degrees, degrees, [1, 2], [1, 3], [1, 2, 4]
    ):
        if tp * pp * cp * fsdp != 4 or (pp == 1 and virtual > 1):
            continue
        schedule = "interleaved" if virtual > 1 else "1f1b"
        layout = ResolvedLayout(
            dp=1, fsdp=fsdp, tp=tp, pp=pp, cp=cp, virtual=virtual, zero=zero, schedule=schedule
        )
        for recompute in (NONE, SELECTIVE, FULL):
            try:
                one = dataclasses.replace(like, layout=layout, micro_batch=size, recompute=recompute)
                if max(rank.total for rank in peak_bytes(one)) > like.device.memory_bytes:
                    continue
                seconds = predict(one).step_seconds
            except PlanError:
                continue
            # Bytes of choices are rounded up.
            assert seconds >= best.seconds * (1 - 2e-3), one.layout


def test_whoever_shares_weights_is_tried_with_zero_1_and_3() -> None:
    """Ranks of cp share them too, where they are all that there are."""
    asked = question(setting(LLAMA_8B, "8xh100", global_batch=8))
    found = set(layouts(asked))
    every = {one for one in layouts(dataclasses.replace(asked, shares_all=True)) if one.dp == 1}
    for one in every:
        for zero in (1, 3) if one.shards > 1 else ():
            assert dataclasses.replace(one, zero=zero) in found
    given = set(layouts(dataclasses.replace(asked, given={"fsdp": 1, "dp": 1})))
    assert given == {one for one in found if one.fsdp == one.dp == 1}
    assert {one.zero for one in given if one.cp > 1} == {1, 3}


def test_ranks_that_share_one_long_sequence_share_weights_too() -> None:
    large = dataclasses.replace(LLAMA_8B, layers=64, width=5120, heads=40, ffn_width=25600)
    like = setting(large, "8xh100", sequence=131072, global_batch=1, fsdp=1, cp=8)
    best = search(question(like), keep=1, has_families=False).best[0].setting.layout
    assert (best.cp, best.zero) == (8, 3)


def test_one_device_takes_an_odd_number_of_tokens() -> None:
    asked = question(setting(SMALL, "h100", sequence=4095, global_batch=1))
    assert search(asked, keep=1, has_families=False).best


def test_where_nothing_fits_the_least_that_is_needed_is_said() -> None:
    wide = dataclasses.replace(LLAMA_8B, width=32768, heads=256)
    found = search(question(setting(wide, "2xrtx4060ti", global_batch=16)))
    assert not found.best
    assert found.priced >= found.too_large == found.tried > 0
    assert found.nearest_bytes > 16e9


@pytest.mark.parametrize("activations", [None, "block"])
def test_all_in_one_pass_may_fit_where_less_does_not(activations: str | None) -> None:
    """Gradients of a single micro-batch are not there while it runs forward."""
    wide = dataclasses.replace(LLAMA_8B, layers=4, width=1024, heads=8, ffn_width=3072, tied=True)
    like = setting(wide, "h100", sequence=1024, global_batch=2)
    one, two = (most_bytes(leanest(dataclasses.replace(like, micro_batch=size))) for size in (1, 2))
    assert two < one
    asked = dataclasses.replace(question(like), memory=GivenMemory(activations))
    for memory, held in ((two + 1, True), (two - 1, False)):
        asked = dataclasses.replace(asked, cluster=with_memory(like, memory, 0.0).cluster)
        assert fits(asked) == bool(search(asked).best) == held


def test_states_go_to_the_host_where_a_device_has_no_room() -> None:
    like = setting(LLAMA_8B, "rtx5090", global_batch=16)
    answer = search(question(like))
    found = answer.best[0]
    assert found.setting.offload.optimizer
    assert 0 <= answer.too_large < answer.tried
    assert max(one.total for one in found.memory) <= like.device.memory_bytes
    here = search(question(setting(LLAMA_8B, "b200", global_batch=16))).best[0]
    assert here.setting.offload == Offload()


@pytest.mark.parametrize(
    ("shape", "hardware"), [(LLAMA_8B, "h100"), (SMALL, "rtx4090"), (SMALL, "2xrtx4060ti")]
)
def test_what_does_not_fit_fits_in_no_way(shape: ModelShape, hardware: str) -> None:
    """Layouts that might with more on the host, which would be slower, are not among them."""
    like = setting(shape, hardware, global_batch=8)
    asked = question(like)
    held = [
        any(
            Blocks(dataclasses.replace(one, offload=offload), None).solve() is not None
            for offload in asked.on_host(layout)
        )
        for layout in layouts(asked)
        for size in micro_batches(asked, layout)
        for one in [setting_of(asked, layout, size)]
    ]
    found = search(asked)
    assert found.tried == len(held)
    assert found.too_large <= held.count(False)


def test_a_host_without_room_is_said() -> None:
    shape = dataclasses.replace(LLAMA_8B, vocab_size=32000)
    found = search(question(setting(shape, "rtx4060ti", global_batch=16)))
    assert not found.best
    assert found.nearest_bytes < 16e9
    assert 115e9 < found.nearest_host_bytes < 200e9


@pytest.mark.parametrize("hardware", ["4xh100", "4xb200"])
@pytest.mark.every(2)
def test_what_is_not_looked_at_is_slower(hardware: str) -> None:
    """The bounds leave nothing out: all layouts, solved."""
    like = setting(dataclasses.replace(LLAMA_8B, layers=4), hardware, global_batch=16)
    limited = FormatBudget(names=("nvfp4", "bf16"), share=0.4)
    for formats in (None, limited):
        asked = dataclasses.replace(question(like), formats=formats)
        quality = formats.quality(like.model) if formats else None
        found = search(asked)
        assert found.priced < found.tried
        seconds = []
        for layout in layouts(asked):
            for size in micro_batches(asked, layout):
                one = dataclasses.replace(like, layout=layout, micro_batch=size)
                solved = Blocks(one, quality).solve()
                if solved is not None:
                    seconds.append(predict(solved).step_seconds)
        assert [one.seconds for one in found.best] == pytest.approx(sorted(seconds)[: len(found.best)])


@pytest.mark.parametrize("schedule", ["zbv", "dualpipev"])
@pytest.mark.every(2)
def test_schedules_that_go_there_and_back_are_searched_where_they_are_given(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    like = setting(dataclasses.replace(LLAMA_8B, layers=8), "4xh100", global_batch=16, of="scrimp-eager")
    assert all(one.schedule != schedule for one in layouts(question(like)))
    asked = dataclasses.replace(question(like), given={"schedule": schedule})
    uneven = search(asked).best[0].seconds
    monkeypatch.setattr("scrimp.planner.layout.search._with_better_stages", lambda *_: None)
    found = search(asked)
    assert found.priced < found.tried
    seconds = []
    for layout in layouts(asked):
        assert (layout.schedule, layout.virtual) == (schedule, 2)
        for size in micro_batches(asked, layout):
            solved = Blocks(dataclasses.replace(like, layout=layout, micro_batch=size), None).solve()
            seconds += [] if solved is None else [predict(solved).step_seconds]
    assert [one.seconds for one in found.best] == pytest.approx(sorted(seconds)[: len(found.best)])
    # The first rank has embedding, head and loss: fewer blocks make it faster.
    assert uneven < 0.95 * found.best[0].seconds


@pytest.mark.slow
def test_every_kind_of_device_has_room_for_its_rank(tmp_path: Path) -> None:
    """Nodes that compute alike and hold half as much decide what a rank over both kinds may take."""
    file = tmp_path / "two.toml"
    file.write_text('[[nodes]]\nnode = "dgx-a100-80"\n[[nodes]]\nnode = "dgx-a100-40"\n', encoding="utf-8")
    least = load_hardware("8xa100-40").groups[0].node.device.memory_bytes
    found = search(question(setting(LLAMA_8B, str(file), global_batch=64, fsdp=16)), keep=20)
    spanning = [one for one in found.best if one.setting.layout.pp == 1]
    assert spanning
    assert all(max(rank.total for rank in one.memory) <= least for one in spanning)
    assert all(one.fullest <= 1 for one in found.best)


@pytest.mark.parametrize("pp", [4, 2, 8])
@pytest.mark.every(3)
def test_the_best_pipeline_is_the_same_however_many_are_wanted(pp: int) -> None:
    """Stages are made better before plans are ranked: a head that is as much as several blocks shows it."""
    like = setting(dataclasses.replace(LLAMA_8B, layers=8), "8xh100", pp=pp, fsdp=8 // pp, global_batch=32)
    asked = dataclasses.replace(question(like), given={"pp": pp})
    best = [search(asked, keep=keep, has_families=False).best[0].seconds for keep in (1, 2, 6)]
    assert best[0] == pytest.approx(best[2], rel=1e-9)
    assert best[1] == pytest.approx(best[2], rel=1e-9)
    with_others = search(dataclasses.replace(asked, given={}), keep=1)
    family = with_others.families["pp", pp]
    assert isinstance(family, Candidate)
    assert family.seconds == pytest.approx(best[0], rel=1e-9)


@pytest.mark.slow
def test_more_memory_makes_no_pipeline_slower() -> None:
    like = setting(dataclasses.replace(LLAMA_8B, layers=16), "8xh100", pp=4, fsdp=2, global_batch=64)
    asked = dataclasses.replace(question(like), given={"pp": 4})
    seconds = [
        search(dataclasses.replace(asked, cluster=with_memory(like, size).cluster), keep=1).best[0].seconds
        for size in (30e9, 45e9, 80e9, 160e9)
    ]
    assert seconds == sorted(seconds, reverse=True)


@pytest.mark.parametrize("software_name", ["scrimp", "megatron"])
@pytest.mark.parametrize(
    ("shape", "hardware", "formats"),
    [(LLAMA_8B, "8xh100", ()), (LLAMA_8B, "2x8xh100", ("nvfp4", "bf16")), (ROUTED, "2x8xh100", ())],
)
@pytest.mark.every(6)
def test_no_micro_batch_takes_less_than_its_layout_promises(
    shape: ModelShape, hardware: str, formats: tuple[str, ...], software_name: str
) -> None:
    asked = question(setting(shape, hardware, of=software_name, global_batch=48))
    for layout in layouts(asked):
        sizes = list(micro_batches(asked, layout))
        if sizes:
            whole = setting_of(asked, layout, asked.global_batch // layout.data_ranks)
            least = least_of_any_batch(unlimited(whole), sizes[0], formats)
        for size in sizes:
            one = unlimited(setting_of(asked, layout, size))
            assert predict(one, formats).step_seconds >= least * (1 - 1e-9)


def unlimited(one: Setting) -> Setting:
    return dataclasses.replace(one, blocks=(BlockPlan(gathered=True),) * len(one.model.blocks))


ONE_WIDE = dataclasses.replace(LLAMA_8B, layers=1, width=8192, heads=64, ffn_width=28672, vocab_size=1000)


def test_states_of_the_only_block_visit_the_device_once() -> None:
    asked = question(with_memory(setting(ONE_WIDE, "h100", sequence=512, global_batch=32), 20_000_000_000))
    (layout,) = layouts(asked)
    sizes = list(micro_batches(asked, layout))
    assert 16 in _with_room(asked, None, layout, sizes)
    assert search(asked).best[0].setting.micro_batch == 16
    away = dataclasses.replace(
        setting_of(asked, layout, 1), offload=asked.on_host(layout)[-1], blocks=(BlockPlan(),)
    )
    block = ONE_WIDE.sizes.parameters - 2 * 1000 * 8192
    assert visiting_bytes(away, {(0, BlockPlan()): 1}) == pytest.approx(12 * block, rel=1e-3)


def test_what_has_no_room_has_none_with_more_sequences() -> None:
    asked = question(setting(dataclasses.replace(LLAMA_8B, layers=8), "4xrtx5090", global_batch=64))
    some = [one for one in layouts(asked) if len(list(micro_batches(asked, one))) >= 4]
    lost = 0
    for layout in some:
        sizes = list(micro_batches(asked, layout))
        kept = _with_room(asked, None, layout, sizes)
        lost += len(sizes) - len(kept)
        for size in set(sizes) - set(kept):
            for offload in asked.on_host(layout):
                one = dataclasses.replace(setting_of(asked, layout, size), offload=offload)
                assert not Blocks(one, None).has_room
    assert lost
