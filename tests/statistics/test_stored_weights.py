"""What storing weights does to predictions, against logits of a model that has these values."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor

from scrimp.config import preset
from scrimp.gemm import stored_values
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.statistics.stored_weights import PredictionDivergence, storable

SMALL = dataclasses.replace(
    preset("llama-3m"),
    num_layers=3,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    ffn_width=128,
    vocab_size=96,
)


@pytest.fixture(scope="module")
def model() -> Model:
    """Weights are ten times as large as first ones: predictions are far from uniform."""
    made = build_model(SMALL).eval()
    initialise(made, 0)
    with torch.no_grad():
        for parameter in made.parameters():
            if parameter.dim() == 2:
                parameter.mul_(10)
    return made


@pytest.fixture(scope="module")
def tokens() -> Tensor:
    return torch.randint(96, (3, 100), generator=torch.Generator().manual_seed(0))


def by_logits(model: Model, tokens: Tensor, stored: dict[str, str]) -> float:
    """KL in float64, of a copy of the model."""
    other = copy.deepcopy(model)
    with torch.no_grad():
        for layer, name in stored.items():
            weight = other.get_parameter(f"{layer}.weight")
            weight.copy_(stored_values(weight.clone(), name))
        p, q = (one.logits(one(tokens)).double().log_softmax(-1) for one in (model, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


@pytest.mark.parametrize(
    "stored",
    [{"blocks.1.mlp.down": "nvfp4"}, {"blocks.0.attention.qkv": "fp8", "blocks.2.mlp.gate_up": "mxfp4"}],
)
def test_the_divergence_is_that_of_the_logits(model: Model, tokens: Tensor, stored: dict[str, str]) -> None:
    before = copy.deepcopy(model.state_dict())
    found = PredictionDivergence(model, tokens).of(stored)
    assert found == pytest.approx(by_logits(model, tokens, stored), rel=1e-3)
    assert found > 0
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_divergences_of_layers_add_up_to_that_of_all(model: Model, tokens: Tensor) -> None:
    measured, passes = PredictionDivergence(model, tokens), []
    each = measured.of_each(["nvfp4", "fp8"], lambda: passes.append(1))
    assert each.keys() == storable(model).keys()
    assert len(passes) == 2 * len(each) == 24
    for name in ("nvfp4", "fp8"):
        together = measured.of(dict.fromkeys(each, name))
        assert together == pytest.approx(sum(one[name] for one in each.values()), rel=0.5)
    assert all(one["nvfp4"] > 10 * one["fp8"] for one in each.values())


def test_experts_and_routers_are_no_part_of_it() -> None:
    layers = storable(build_model(preset("mixtral-8m"), device="meta"))
    assert {layer.split(".", 2)[2] for layer in layers} == {"attention.qkv", "attention.out"}
