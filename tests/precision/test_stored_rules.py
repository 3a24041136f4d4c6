"""Rules for the formats that frozen weights lie in."""

from __future__ import annotations

import dataclasses

import pytest

from scrimp.config import Adapter, preset
from scrimp.errors import ConfigError
from scrimp.models import spec_of
from scrimp.models.adapter_checks import check_adapter
from scrimp.precision import RECIPES, parse_stored, stored_in
from scrimp.precision.stored import STORABLE


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("nvfp4", {"blocks.0.mlp.down": "nvfp4", "blocks.3.attention.qkv": "nvfp4"}),
        ("bf16,*.mlp.down=fp8", {"blocks.0.mlp.down": "fp8", "blocks.3.attention.qkv": ""}),
        (
            " nvfp4 , *.down=fp8, blocks.0.*=bf16",
            {"blocks.0.mlp.down": "", "blocks.3.mlp.down": "fp8", "blocks.3.attention.qkv": "nvfp4"},
        ),
        ("nvfp4", {"blocks.0.mlp.router": ""}),
    ],
)
def test_the_last_pattern_that_matches_wins(text: str, expected: dict[str, str]) -> None:
    assert {layer: stored_in(text, layer) for layer in expected} == expected


@pytest.mark.parametrize(
    "text", ["", "nf4", "fp32", "nvfp4/fp8/bf16", "nvfp4,fp8", "nvfp4,*.down=", "nvfp4,=fp8"]
)
def test_what_is_no_rule_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(ConfigError, match=r"adapter\.base cannot be read") as refused:
        parse_stored(text)
    assert "nvfp4,*.down=fp8" in str(refused.value)


def test_every_recipe_that_quantizes_weights_stores_them() -> None:
    assert set(STORABLE) == set(RECIPES) - {"bf16", "fp32", "int8_fallback", "int8_hadamard"}
    for name in STORABLE:
        assert stored_in(name, "blocks.0.mlp.down") == name


def test_layers_know_how_they_are_stored_and_experts_stay_as_they_are() -> None:
    adapter = Adapter(4, 8.0, "attention.qkv", "nvfp4,blocks.0.*=bf16")
    for name in ("llama-3m", "mixtral-8m"):
        layers = spec_of(dataclasses.replace(preset(name), adapter=adapter)).layers()
        stored = {layer for layer, one in layers.items() if one.stored}
        expected = {
            layer
            for layer, one in layers.items()
            if layer != "head"
            and one.experts == 1
            and not layer.startswith("blocks.0.")
            and "router" not in layer
        }
        assert stored == expected


def test_patterns_that_name_nothing_or_experts_are_refused() -> None:
    for name, pattern in (("llama-3m", "*.q_proj"), ("mixtral-8m", "*.experts.*"), ("llama-3m", "head")):
        adapter = Adapter(4, 8.0, "attention.qkv", f"nvfp4,{pattern}=fp8")
        spec = spec_of(dataclasses.replace(preset(name), adapter=adapter))
        with pytest.raises(ConfigError, match="matches no layer"):
            check_adapter(spec)
