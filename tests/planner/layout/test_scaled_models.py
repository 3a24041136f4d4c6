"""Models of one shape."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import GPT_22B, LLAMA_8B, ROUTED

from scrimp.config import PRESETS, preset
from scrimp.models import spec_of
from scrimp.models.shapes import LatentAttention, sizes_of
from scrimp.planner.layout.scaled_models import family_of


def test_the_family_of_llama_holds_about_what_was_published() -> None:
    family = family_of(LLAMA_8B)
    assert family.given == 4
    assert family.member(4).model == LLAMA_8B.sizes
    large = family.member(8)
    assert large.text == "64 layers, width 8,192, 64 heads"
    published = sizes_of(spec_of(preset("llama-3.1-70b"))).parameters
    # 80 layers instead of 64.
    assert 0.75 < large.model.parameters / published < 0.85


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_is_a_member_of_its_family_and_the_next_one_is_larger(name: str) -> None:
    family = family_of(preset(name))
    own, above = family.member(family.given).model, family.member(family.given + 1).model
    assert own == sizes_of(spec_of(preset(name)))
    assert above.parameters > own.parameters
    assert above.blocks[-1].attention.head_size == own.blocks[-1].attention.head_size


@pytest.mark.parametrize("kv_heads", [0, 1, 7, 16])
def test_key_heads_of_latent_attention_are_its_heads(kv_heads: int) -> None:
    latent = LatentAttention(kv_rank=512, nope_size=128, rope_size=64, value_size=128)
    shape = dataclasses.replace(LLAMA_8B, heads=16, kv_heads=kv_heads, latent_attention=latent)
    family = family_of(shape)
    assert family.member(family.given).model == shape.sizes
    assert family.given == 2


def test_what_grows_and_what_stays() -> None:
    twice = family_of(GPT_22B).member(16).model
    assert (twice.width, len(twice.blocks)) == (12288, 96)
    assert twice.blocks[0].attention.num_kv_heads == 128
    shape = dataclasses.replace(ROUTED, experts=dataclasses.replace(ROUTED.experts, shared=1))
    sizes = family_of(shape).member(8).model
    experts = [one for one in sizes.blocks[0].linears if one.experts > 1]
    assert {one.experts for one in experts} == {64}
    assert {one.inputs for one in experts} == {8192, 4096}
    assert sizes.blocks[0].attention.num_kv_heads == 8
