"""What a specification says of a model, against the modules themselves."""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import nn

from scrimp.config import PRESETS
from scrimp.config.activations import LEVELS
from scrimp.errors import ModelError
from scrimp.gemm.grouped import GroupedLinear
from scrimp.models import all_kinds, full_name, place, spec_of
from scrimp.models.model import ModelPart, build_model

NAMES = ("llama-3m", "llama-1b", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "olmo2-1b", "gemma3-1b")
ROUTED = ("mixtral-8m", "mixtral-8x7b", "qwen3-moe-8m", "qwen3-30b-a3b")


@pytest.mark.parametrize("name", [*NAMES, *ROUTED])
def test_layers_and_parameters_are_those_of_the_module(name: str) -> None:
    spec = spec_of(PRESETS[name])
    model = build_model(PRESETS[name], device="meta")
    linears = {
        layer: (module.out_features, module.in_features)
        for layer, module in model.named_modules()
        if isinstance(module, nn.Linear | GroupedLinear)
    }
    linears.setdefault("head", tuple(model.head_weight.shape))
    assert {layer: (one.outputs, one.inputs) for layer, one in spec.layers().items()} == linears
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    for index, block in enumerate(model.blocks):
        assert spec.block(index).parameters == sum(parameter.numel() for parameter in block.parameters())


def test_names_are_put_together_and_taken_apart() -> None:
    assert full_name(3, "mlp.down") == "blocks.3.mlp.down"
    assert place("blocks.3.mlp.down") == (3, "mlp.down")
    for other in ("head", "model.layers.3.mlp.down_proj", "blocks.x.mlp.down", "blocks.3", ""):
        assert place(other) == (None, other)
    with pytest.raises(ModelError, match=r"no such linear layer.*blocks\.0\.mlp\.up"):
        spec_of(PRESETS["llama-3m"]).linear("blocks.0.mlp.up")


@pytest.mark.parametrize("kind", all_kinds())
def test_one_name_means_the_same_in_every_kind(kind) -> None:
    for other in all_kinds():
        for name in kind.names_elsewhere.keys() & other.names_elsewhere.keys():
            assert kind.names_elsewhere[name] == other.names_elsewhere[name]


@pytest.mark.parametrize("name", [*NAMES, "mixtral-8m", "mixtral-8x7b"])
def test_levels_are_known_and_every_layer_has_names_elsewhere(name: str) -> None:
    spec = spec_of(PRESETS[name])
    assert [level for level in LEVELS if level in spec.levels] == list(spec.levels)
    for block in spec.equal_blocks:
        assert {one.again for one in (*block.linears, *block.traffic)} <= {"", *spec.levels}
        assert {linear.name for linear in block.linears} == spec.names_elsewhere.keys()


@pytest.mark.parametrize("name", ROUTED)
def test_experts_are_said_as_grouped_products(name: str) -> None:
    spec = spec_of(PRESETS[name])
    model = build_model(PRESETS[name], device="meta", part=ModelPart((0,), True, True))
    grouped = {
        place(f"blocks.0.{layer}")[1]: module
        for layer, module in model.blocks[0].named_modules()
        if isinstance(module, GroupedLinear)
    }
    assert spec.routing is not None
    layers = [one for one in spec.block(0).linears if one.experts > 1]
    assert {one.name for one in layers} == grouped.keys()
    for one in layers:
        module = grouped[one.name]
        assert (one.experts, one.outputs, one.inputs) == (
            module.experts,
            module.out_features,
            module.in_features,
        )
        assert one.parameters == module.weight.numel() == one.experts * one.outputs * one.inputs
        assert one.parameters_per_token * one.experts == one.parameters * spec.routing.chosen
        assert sum(one.stacked) == len(module.weight)


def test_blocks_without_experts_stand_between_others() -> None:
    a = PRESETS["qwen3-moe-8m"]
    spec = spec_of(replace(a, options=(*a.options, ("sparse_every", 2))))
    model = build_model(spec.architecture, device="meta")
    assert [any(one.experts > 1 for one in block.linears) for block in spec.blocks] == [0, 1, 0, 1, 0]
    for index, block in enumerate(model.blocks):
        assert spec.block(index).parameters == sum(parameter.numel() for parameter in block.parameters())
