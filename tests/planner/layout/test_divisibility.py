"""There is a reason against a degree exactly where no layout has it."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import LLAMA_8B, ROUTED, setting

from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.divisibility import has_layout, objections, values_of
from scrimp.planner.layout.given_memory import GivenMemory
from scrimp.planner.layout.questions import Question, layouts, micro_batches
from scrimp.planner.layout.search import search
from scrimp.planner.layout.setting import Offload

SEARCHED_IF_GIVEN = ("zero", "fsdp", "dp", "etp", "virtual")
"""Degrees of which a search tries more values where they are given."""
UNEVEN = dataclasses.replace(LLAMA_8B, layers=6, heads=12, kv_heads=4, width=1536)


def question(shape: ModelShape, hardware: str, global_batch: int, sequence: int = 4096) -> Question:
    like = setting(shape, hardware, global_batch=1024, sequence=sequence)
    return Question(
        model=like.model,
        cluster=like.cluster,
        sequence=sequence,
        global_batch=global_batch,
        software=like.software,
    )


def against(asked: Question, given: dict[str, object]) -> list[str]:
    return objections(dataclasses.replace(asked, given=given))


@pytest.mark.parametrize(
    ("shape", "hardware", "batch"),
    [(UNEVEN, "4xh100", 6), (LLAMA_8B, "2x8xh100", 16), (dataclasses.replace(ROUTED, layers=2), "4xh100", 8)],
)
@pytest.mark.parametrize(
    "name", ["tp", "pp", "cp", "ep", "zero", "virtual", "fsdp", "dp", "etp", "micro_batch"]
)
def test_a_reason_stands_where_no_layout_is(shape: ModelShape, hardware: str, batch: int, name: str) -> None:
    asked = question(shape, hardware, batch)
    pairs = [(layout, size) for layout in layouts(asked) for size in micro_batches(asked, layout)]
    for value in range(1, 18):
        one = dataclasses.replace(asked, given={name: value})
        if name not in SEARCHED_IF_GIVEN:
            there = any({**vars(layout), "micro_batch": size}[name] == value for layout, size in pairs)
            assert has_layout(one) == there
        assert bool(objections(one)) != has_layout(one), value


def test_each_number_that_is_not_divided_is_named() -> None:
    asked = question(UNEVEN, "4xh100", 6)
    text = "; ".join(against(asked, {"tp": 3}))
    assert "tp 3 does not divide 4 devices of a node" in text
    assert "tp 3 does not divide 4 key heads" in text
    assert "tp 3 does not divide 4,096 tokens of a sequence" in text
    assert " 12 heads" not in text
    assert against(asked, {"pp": 8})[-1] == "pp 8 is more than the 6 blocks"
    assert "the model has none" in against(asked, {"ep": 2})[0]
    assert "is not searched" in against(asked, {"zero": 4})[0]
    assert values_of(asked, "tp") == [1, 2, 4]


def test_degrees_that_are_possible_alone_and_not_together() -> None:
    asked = question(LLAMA_8B, "2x8xh100", 16)
    assert against(asked, {"tp": 8, "pp": 4}) == ["tp 8 pp 4: 32 ranks do not divide 16 devices"]
    assert "take turns" in against(asked, {"virtual": 2, "pp": 1})[0]
    assert "more stages than the 32 blocks" in against(asked, {"virtual": 5, "pp": 8})[0]
    assert "scrimp does not run layout.cp beside layout.tp" in against(asked, {"tp": 2, "cp": 2})[0]
    few = question(LLAMA_8B, "2x8xh100", 2)
    assert "cannot be shared by 16 devices" in against(few, {"tp": 1, "pp": 1, "cp": 2})[0]
    assert against(asked, {}) == []


def test_states_that_are_given_to_the_host_leave_no_pipeline() -> None:
    offload = Offload(optimizer=True, master=True)
    asked = dataclasses.replace(question(LLAMA_8B, "8xh100", 16), memory=GivenMemory(offload=offload))
    assert against(asked, {"pp": 2}) == [
        "states and activations live on the host without a pipeline alone: layout.pp 1"
    ]
    assert not has_layout(dataclasses.replace(asked, given={"pp": 2}))
    assert against(asked, {"pp": 1}) == []
    assert values_of(asked, "pp") == [1]
    here = dataclasses.replace(asked, memory=GivenMemory(offload=Offload()))
    assert against(here, {"pp": 2}) == []


def test_what_is_given_is_searched_where_it_can_be() -> None:
    """Values that a search does not try of itself: it predicts them all the same."""
    asked = question(LLAMA_8B, "8xh100", 16)
    for given in (
        {"schedule": "gpipe"},
        {"stages": "15,17"},
        {"dp": 2},
        {"dp": 8},
        {"fsdp": 2, "dp": 2, "zero": 1},
        {"zero": 2},
        {"zero": 3, "pp": 2},
        {"zero": 2, "pp": 2},
        {"schedule": "zbv"},
        {"schedule": "dualpipev", "pp": 2, "zero": 3},
        {"virtual": 16, "pp": 2},
        {"schedule": "interleaved", "pp": 2, "stages": "7,8,8,9"},
    ):
        one = dataclasses.replace(asked, given=given)
        assert objections(one) == [], given
        best = search(one, keep=1, has_families=False).best[0]
        assert given.items() <= vars(best.setting.layout).items()
        assert sum(best.prediction.seconds.values()) == pytest.approx(best.seconds)


def test_what_is_not_searched_is_said() -> None:
    asked = question(LLAMA_8B, "8xh100", 16)
    assert against(asked, {"schedule": "waves"}) == [
        "schedule waves is not predicted, only gpipe, 1f1b, interleaved, zbv, dualpipev"
    ]
    assert against(asked, {"schedule": "zbv"}) == []
    assert "two stages on each of several ranks" in against(asked, {"schedule": "zbv", "pp": 1})[0]
    assert against(asked, {"stages": "16,17"}) == ["stages 16,17 have 33 blocks, the model 32"]
    assert "no list of blocks" in against(asked, {"stages": "16,x"})[0]
    assert "more than one on a rank are interleaved" in against(asked, {"schedule": "gpipe", "virtual": 2})[0]
    assert against(asked, {"schedule": "1f1b", "dp": 1}) == []
