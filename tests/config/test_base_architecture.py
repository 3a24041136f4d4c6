"""`[model]` becomes an architecture: a preset or given weights, with overridden sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from scrimp.config import Architecture, Config, base_architecture, preset, replace_values
from scrimp.errors import ConfigError

BASE = preset("llama-3m")


def built(given: dict[str, object], weights: Architecture | None = None) -> Architecture:
    prefixed = {f"model.{name}": value for name, value in given.items()}
    return base_architecture(replace_values(Config(), prefixed), weights)


def refusal(given: dict[str, object], weights: Architecture | None = None) -> str:
    with pytest.raises(ConfigError) as caught:
        built(given, weights)
    return str(caught.value)


def test_without_overrides_it_is_the_preset() -> None:
    assert built({}) == BASE
    assert built({"preset": "qwen3-0.6b"}) == preset("qwen3-0.6b")


def test_head_size_follows_width_and_heads_only_when_one_was_given() -> None:
    # Qwen 3's heads are wider than width / heads: only an override may change that.
    free = preset("qwen3-0.6b")
    assert free.head_size != free.width // free.num_heads
    assert built({"preset": "qwen3-0.6b", "num_layers": 2}).head_size == free.head_size
    assert built({"preset": "qwen3-0.6b", "width": 2048}).head_size == 2048 // free.num_heads
    assert built({"width": 384}) == replace(BASE, width=384, head_size=384 // BASE.num_heads)
    assert built({"num_heads": 12, "num_kv_heads": 4}).head_size == BASE.width // 12


@pytest.mark.parametrize(
    ("given", "part"),
    [
        ({"width": 100}, "model.num_heads does not divide model.width"),
        ({"num_heads": 7}, "model.num_heads does not divide model.width"),
        ({"num_kv_heads": 4}, "model.num_kv_heads does not divide model.num_heads"),
        ({"num_heads": 64, "num_kv_heads": 64}, "head size is odd"),
        ({"preset": "lama-3m"}, "llama-3m"),
    ],
)
def test_impossible_shapes_are_refused(given, part) -> None:
    assert part in refusal(given)


def test_weights_replace_the_preset_and_keep_their_sizes() -> None:
    weights = preset("qwen2.5-0.5b")
    assert built({}, weights) == weights
    assert built({"width": weights.width}, weights) == weights
    assert built({"context": 512}, weights) == replace(weights, context=512)


@pytest.mark.parametrize(
    "name", ["vocab_size", "num_layers", "width", "num_heads", "num_kv_heads", "ffn_width"]
)
def test_sizes_of_weights_cannot_be_overridden(name: str) -> None:
    weights = preset("qwen2.5-0.5b")
    message = refusal({name: getattr(weights, name) + 1, "weights": Path("folder")}, weights)
    assert f"model.{name} differs from that of the weights" in message
    assert "folder" in message


def test_context_of_weights_cannot_grow() -> None:
    weights = preset("qwen2.5-0.5b")
    assert "at most" in refusal({"context": weights.context + 1, "weights": Path("folder")}, weights)


@pytest.mark.parametrize(("theirs", "shown"), [(None, "none"), (16, "16")])
def test_factors_are_those_of_the_weights(theirs: int | None, shown: str) -> None:
    weights = replace(BASE, rank=theirs)
    assert built({}, weights).rank == theirs
    message = " ".join(refusal({"rank": 8, "weights": Path("folder")}, weights).split())
    assert "model.rank differs from that of the weights" in message
    assert f"expected {shown}, as in folder" in message
    assert built({"rank": 8}) == replace(BASE, rank=8)
