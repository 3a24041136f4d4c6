"""The best of each family, beside all settings that there are."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import LLAMA_8B, ROUTED, setting

from scrimp.config.resolved import ResolvedLayout
from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.block_choices import Blocks, leanest
from scrimp.planner.layout.contenders import DEGREES, Contenders, Misfit, families_of
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.questions import Question, layouts, micro_batches, setting_of
from scrimp.planner.layout.search import Candidate, fits, search
from scrimp.planner.layout.stage_memory import peak_bytes

SMALL = dataclasses.replace(LLAMA_8B, layers=4)
FEW_EXPERTS = dataclasses.replace(ROUTED, layers=2)


def question(shape: ModelShape, hardware: str) -> Question:
    like = setting(shape, hardware, global_batch=16)
    return Question(
        model=like.model,
        cluster=like.cluster,
        sequence=like.sequence,
        global_batch=like.global_batch,
        software=like.software,
    )


@pytest.mark.parametrize(
    ("shape", "hardware"), [(SMALL, "4xh100"), (LLAMA_8B, "4xl40s"), (FEW_EXPERTS, "4xh100")]
)
@pytest.mark.every(3)
def test_each_family_has_its_fastest_that_fits(shape: ModelShape, hardware: str) -> None:
    asked = question(shape, hardware)
    found = search(asked)
    seconds: dict[tuple[str, int], float] = {}
    needs: dict[tuple[str, int], float] = {}
    for layout in layouts(asked):
        for size in micro_batches(asked, layout):
            for offload in asked.on_host(layout):
                one = dataclasses.replace(setting_of(asked, layout, size), offload=offload)
                peak = max(rank.total for rank in peak_bytes(leanest(one)))
                solved = Blocks(one, None).solve()
                for family in families_of(layout):
                    needs[family] = min(needs.get(family, peak), peak)
                    if solved is not None:
                        step = predict(solved).step_seconds
                        seconds[family] = min(seconds.get(family, step), step)
    assert found.families.keys() == needs.keys()
    for family, best in found.families.items():
        if isinstance(best, Misfit):
            assert family not in seconds
            assert best.bytes == pytest.approx(needs[family])
        else:
            # Stages of the best plans may have got better sizes.
            moved = best.setting.layout.stages is not None
            assert best.seconds == pytest.approx(seconds[family]) or (
                moved and best.seconds < seconds[family]
            )
    assert {best.setting.layout for best in found.best[:1]} <= {
        best.setting.layout for best in found.families.values() if isinstance(best, Candidate)
    }
    assert fits(asked) == bool(found.best)


def test_what_fits_nowhere_has_families_too() -> None:
    asked = question(dataclasses.replace(LLAMA_8B, width=32768, heads=256), "2xrtx4060ti")
    found = search(asked)
    assert not fits(asked)
    assert all(isinstance(best, Misfit) for best in found.families.values())
    assert min(best.bytes for best in found.families.values()) == found.nearest_bytes
    assert {degree for degree, _ in found.families} == set(DEGREES)


def test_only_what_is_slower_than_all_of_its_families_changes_nothing() -> None:
    found = search(question(SMALL, "4xh100"), keep=1)
    (best,) = found.best
    lead = Contenders(1)
    assert lead.may_take(best.setting.layout, 1e9)
    lead.fits(best)
    assert not lead.may_take(best.setting.layout, 2 * best.seconds)
    assert lead.may_take(best.setting.layout, best.seconds / 2)
    other = ResolvedLayout(dp=1, fsdp=1, tp=4, pp=1, cp=1, zero=1, virtual=1)
    assert lead.may_take(other, 2 * best.seconds)


def test_without_families_the_best_are_the_same() -> None:
    asked = question(SMALL, "4xh100")
    alone = search(asked, has_families=False)
    assert alone.best == search(asked).best
    assert not alone.families
