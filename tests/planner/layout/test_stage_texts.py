"""What each stage has."""

from __future__ import annotations

import dataclasses

from published_settings import LLAMA_8B, setting

from scrimp.planner.layout.stage_texts import stage_texts


def test_every_block_is_in_one_stage_with_its_formats() -> None:
    one = setting(pp=2, virtual=2, zero=1, schedule="interleaved", recompute=6, precision="fp8_tensor")
    found = stage_texts(one)
    assert [stage.rank for stage in found] == [0, 1, 0, 1]
    assert [block.number for stage in found for block in stage.blocks] == list(range(LLAMA_8B.layers))
    assert {block.recipe for stage in found for block in stage.blocks} == {"fp8_tensor"}
    # Six blocks of a rank are three of each of its stages.
    assert [sum(block.is_made_again for block in stage.blocks) for stage in found] == [3, 3, 3, 3]


def test_products_of_another_format_are_counted() -> None:
    one = dataclasses.replace(setting(precision="fp8"), gemms={"mlp.down.wgrad": "bf16"})
    (stage,) = stage_texts(one)
    linears = len(LLAMA_8B.sizes.blocks[0].linears)
    assert stage.blocks[0].recipes == {"fp8": 3 * linears - 1, "bf16": 1}
