"""Shapes of published models by their printed sizes, and our own models as shapes."""

from __future__ import annotations

import pytest

from scrimp.config import preset
from scrimp.models import spec_of
from scrimp.models.shapes import LatentAttention, ModelShape, RoutedExperts, sizes_of
from scrimp.planner.flops import count_flops

LLAMA_405B = ModelShape(
    layers=126, width=16384, heads=128, kv_heads=8, head_size=128, ffn_width=53248, vocab_size=128256
)
GPT_175B = ModelShape(
    layers=96,
    width=12288,
    heads=96,
    kv_heads=96,
    head_size=128,
    ffn_width=49152,
    vocab_size=51200,
    gated=False,
    tied=True,
    learned_positions=2048,
)
DEEPSEEK_V3 = ModelShape(
    layers=61,
    width=7168,
    heads=128,
    kv_heads=128,
    head_size=192,
    ffn_width=18432,
    vocab_size=129280,
    latent_attention=LatentAttention(kv_rank=512, q_rank=1536, nope_size=128, rope_size=64, value_size=128),
    experts=RoutedExperts(count=256, chosen=8, width=2048, shared=1, first_dense_layers=3),
)


@pytest.mark.parametrize(
    ("shape", "billions", "active"),
    [(LLAMA_405B, 405.85, 405.85), (GPT_175B, 174.6, 174.6), (DEEPSEEK_V3, 671.0, 37.0)],
)
def test_parameters_are_those_that_were_printed(shape: ModelShape, billions: float, active: float) -> None:
    sizes = shape.sizes
    assert sizes.parameters / 1e9 == pytest.approx(billions, rel=0.005)
    met = sum(block.parameters_per_token for block in sizes.blocks) + sizes.embedding_parameters
    assert (met + (0 if sizes.tied else sizes.head_parameters)) / 1e9 == pytest.approx(active, rel=0.02)


@pytest.mark.parametrize("name", ["llama-3m", "qwen2.5-0.5b", "qwen3-0.6b", "llama-3.1-8b"])
def test_a_shape_of_ours_costs_what_our_model_does(name: str) -> None:
    a = preset(name)
    shape = ModelShape(
        layers=a.num_layers,
        width=a.width,
        heads=a.num_heads,
        kv_heads=a.num_kv_heads,
        head_size=a.head_size,
        ffn_width=a.ffn_width,
        vocab_size=a.vocab_size,
        tied=a.tied_embeddings,
    )
    ours, theirs = shape.sizes, sizes_of(spec_of(a))
    assert ours.parameters == pytest.approx(theirs.parameters, rel=2e-3)
    assert ours.flops_per_token(1024) == pytest.approx(theirs.flops_per_token(1024))
    assert theirs.flops_per_token(1024) == pytest.approx(count_flops(spec_of(a), 1024).causal)
