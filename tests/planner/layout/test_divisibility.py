"""There is a reason against a degree exactly where no layout has it."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import LLAMA_8B, ROUTED, setting

from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.divisibility import has_layout, matches, objections, values_of
from scrimp.planner.layout.search import Question, layouts, micro_batches

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


@pytest.mark.parametrize(
    ("shape", "hardware", "batch"),
    [(UNEVEN, "4xh100", 6), (LLAMA_8B, "2x8xh100", 16), (dataclasses.replace(ROUTED, layers=2), "4xh100", 8)],
)
@pytest.mark.parametrize("name", ["tp", "pp", "cp", "ep", "zero", "virtual", "fsdp", "micro_batch"])
def test_a_reason_stands_where_no_layout_is(shape: ModelShape, hardware: str, batch: int, name: str) -> None:
    asked = question(shape, hardware, batch)
    pairs = [(layout, size) for layout in layouts(asked) for size in micro_batches(asked, layout)]
    for value in range(1, 18):
        there = any(matches(layout, size, {name: value}) for layout, size in pairs)
        assert has_layout(asked, {name: value}) == there
        assert bool(objections(asked, {name: value})) != there, value


def test_each_number_that_is_not_divided_is_named() -> None:
    asked = question(UNEVEN, "4xh100", 6)
    text = "; ".join(objections(asked, {"tp": 3}))
    assert "tp 3 does not divide 4 devices of a node" in text
    assert "tp 3 does not divide 4 key heads" in text
    assert "tp 3 does not divide 4,096 tokens of a sequence" in text
    assert " 12 heads" not in text
    assert objections(asked, {"pp": 8})[-1] == "pp 8 is more than the 6 blocks"
    assert "the model has none" in objections(asked, {"ep": 2})[0]
    assert "is not searched" in objections(asked, {"zero": 2})[0]
    assert values_of(asked, "tp") == [1, 2, 4]


def test_degrees_that_are_possible_alone_and_not_together() -> None:
    asked = question(LLAMA_8B, "2x8xh100", 16)
    assert objections(asked, {"tp": 8, "pp": 4}) == ["tp 8 pp 4: 32 ranks do not divide 16 devices"]
    assert "without stages alone" in objections(asked, {"zero": 3, "pp": 2})[0]
    assert "take turns" in objections(asked, {"virtual": 2, "pp": 1})[0]
    assert "more stages than the 32 blocks" in objections(asked, {"virtual": 5, "pp": 8})[0]
    few = question(LLAMA_8B, "2x8xh100", 2)
    assert "cannot be shared by 16 devices" in objections(few, {"tp": 1, "pp": 1, "cp": 2})[0]
    assert objections(asked, {}) == []


def test_what_is_not_searched_is_said() -> None:
    asked = question(LLAMA_8B, "8xh100", 16)
    assert objections(asked, {"schedule": "gpipe"}) == [
        "schedule gpipe is not searched here, only 1f1b, interleaved; a line of --batch predicts it"
    ]
    assert objections(asked, {"stages": "16,16"})[0].startswith(
        "stages 16,16 is not searched here, only unset"
    )
    assert "dp 2 is not searched here, only 1" in objections(asked, {"dp": 2})[0]
    assert objections(asked, {"schedule": "1f1b", "dp": 1}) == []
