"""Layers of the decoder under other names: exactly the linear layers of the other model."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from scrimp.errors import PlanError
from scrimp.export import huggingface_names, megatron_names, of_stage, rename

LAYERS = [
    f"blocks.{i}.{name}"
    for i in range(3)
    for name in ("attention.qkv", "attention.out", "mlp.gate_up", "mlp.down")
]


def test_hugging_face_names_are_the_linear_layers_of_transformers_llama() -> None:
    config = LlamaConfig(
        num_hidden_layers=3, hidden_size=16, intermediate_size=32, num_attention_heads=2, vocab_size=32
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config)
    linears = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    names = [name for layer in [*LAYERS, "head"] for name in huggingface_names(layer)]
    assert sorted(names) == sorted(linears)


def test_megatron_names_are_those_of_its_own_tests() -> None:
    # The expected types of tests/unit_tests/models/test_gpt_model_quantization.py in Megatron-LM.
    assert [megatron_names(layer) for layer in LAYERS[4:8]] == [
        ("decoder.layers.1.self_attention.linear_qkv",),
        ("decoder.layers.1.self_attention.linear_proj",),
        ("decoder.layers.1.mlp.linear_fc1",),
        ("decoder.layers.1.mlp.linear_fc2",),
    ]


def test_fused_layers_pass_their_choice_on_to_each_part() -> None:
    choices = {layer: index for index, layer in enumerate(LAYERS)}
    renamed = rename(choices, "huggingface")
    assert len(renamed) == 3 * 7
    for layer, choice in choices.items():
        assert all(renamed[name] == choice for name in huggingface_names(layer))
    assert rename({"any.name": 1}, "scrimp") == {"any.name": 1}


def test_a_pipeline_stage_counts_its_blocks_from_zero() -> None:
    choices = {layer: layer for layer in [*LAYERS, "head"]}
    stage = of_stage(choices, 1, 2)
    assert len(stage) == 2 * 4 + 1
    assert stage["blocks.0.mlp.down"] == "blocks.1.mlp.down"
    assert stage["blocks.1.attention.qkv"] == "blocks.2.attention.qkv"
    assert of_stage(choices, 0, 2) == choices


@pytest.mark.parametrize(
    "layer", ["blocks.0.mlp.up", "model.layers.0.mlp.down_proj", "heads", "blocks.x.mlp.down", ""]
)
def test_a_layer_that_the_decoder_does_not_have_is_refused(layer: str) -> None:
    with pytest.raises(PlanError, match="no linear layer of a Scrimp model"):
        rename({layer: 1}, "megatron")


@pytest.mark.parametrize(("first", "last"), [(2, 1), (0, 3), (-1, 1)])
def test_a_stage_that_is_not_in_the_plan_is_refused(first: int, last: int) -> None:
    with pytest.raises(PlanError, match="does not have the blocks"):
        of_stage(dict.fromkeys(LAYERS), first, last)


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(PlanError, match="no such names"):
        rename({}, "nemo")  # type: ignore[arg-type]
