"""What a specification says of a model, against the modules themselves."""

from __future__ import annotations

import pytest
from torch import nn

from scrimp.config import PRESETS
from scrimp.config.activations import LEVELS
from scrimp.errors import ModelError
from scrimp.models import all_kinds, full_name, place, spec_of
from scrimp.models.model import build_model

NAMES = ("llama-3m", "llama-1b", "qwen2.5-0.5b", "qwen3-0.6b", "mistral-7b", "olmo2-1b", "gemma3-1b")


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_parameters_are_those_of_the_module(name: str) -> None:
    spec = spec_of(PRESETS[name])
    model = build_model(PRESETS[name], device="meta")
    linears = {
        layer: (module.out_features, module.in_features)
        for layer, module in model.named_modules()
        if isinstance(module, nn.Linear)
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


@pytest.mark.parametrize("name", NAMES)
def test_levels_are_known_and_every_layer_has_names_elsewhere(name: str) -> None:
    spec = spec_of(PRESETS[name])
    assert [level for level in LEVELS if level in spec.levels] == list(spec.levels)
    for block in spec.equal_blocks:
        assert {one.again for one in (*block.linears, *block.traffic)} <= {"", *spec.levels}
        assert {linear.name for linear in block.linears} == spec.names_elsewhere.keys()
