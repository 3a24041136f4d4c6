"""Linear layers that are products of two factors: the model, its specification and its first weights."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from decoder_reference import FAMILIES, LLAMA, document_logits, filled, summed_loss, weights_of
from losses import next_token_loss
from states import states_of
from torch import Tensor, nn

from scrimp.config import PRESETS, Architecture, Config, replace_values, resolve
from scrimp.errors import ConfigError
from scrimp.models import LinearSpec, spec_of
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.optim import memory_of
from scrimp.optim.galore import GaLore
from scrimp.optim.muon import Muon

RANK = 5


def multiplied_out(weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights of layers that are one matrix."""
    whole = {name.replace(".B.bias", ".bias"): value for name, value in weights.items()}
    for name in [name for name in weights if name.endswith(".A.weight")]:
        layer = name.removesuffix(".A.weight")
        whole[f"{layer}.weight"] = whole.pop(f"{layer}.B.weight") @ whole.pop(name)
    return whole


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_are_those_of_the_products(family: str) -> None:
    """The reference is float64 and knows no factors."""
    architecture = replace(FAMILIES[family], rank=RANK)
    model = filled(architecture)
    generator = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(0, 61, (1, 24), generator=generator) for _ in range(2))
    sums = next_token_loss(model, tokens, targets, chunk=7)
    sums.total.backward()
    weights = weights_of(model)
    expected, _ = summed_loss(
        document_logits(architecture, multiplied_out(weights), tokens[0]), targets.flatten()
    )
    expected.backward()
    torch.testing.assert_close(sums.loss.double(), expected, atol=0, rtol=1e-5)
    for name, parameter in model.named_parameters():
        gradient = weights[name].grad
        assert parameter.grad is not None
        assert gradient is not None
        assert (parameter.grad.double() - gradient).norm() < 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("name", ["llama-3m", "qwen2.5-0.5b", "olmo2-1b", "gemma3-1b"])
def test_the_specification_lists_what_the_model_has(name: str) -> None:
    dense = spec_of(PRESETS[name])
    spec = spec_of(replace(PRESETS[name], rank=64))
    model = build_model(spec.architecture, device="meta")
    linears = {
        layer: (module.out_features, module.in_features)
        for layer, module in model.named_modules()
        if isinstance(module, nn.Linear)
    }
    linears.setdefault("head", tuple(model.head_weight.shape))
    assert {layer: (one.outputs, one.inputs) for layer, one in spec.layers().items()} == linears
    assert spec.parameters == sum(parameter.numel() for parameter in model.parameters())
    for block, module, whole in zip(spec.blocks, model.blocks, dense.blocks, strict=True):
        names = {one.name + ".weight" * isinstance(one, LinearSpec) for one in block.layers}
        assert block.parameters == sum(parameter.numel() for parameter in module.parameters())
        assert names == {name for name, _ in module.named_parameters()}
        sides = sum(one.outputs + one.inputs for one in whole.linears)
        assert block.parameters_per_token == 64 * sides
    assert len(spec.equal_blocks) == len(dense.equal_blocks)


def test_the_size_of_a_run_follows_from_the_factors() -> None:
    a = replace(PRESETS["llama-3m"], rank=16)
    vectors = sum(one.parameters - one.parameters_per_token for one in spec_of(a).blocks) + a.width
    assert a.matrix_parameters == spec_of(a).parameters - vectors


@pytest.mark.parametrize("rank", [2, 48])
def test_products_begin_with_the_variance_of_a_matrix(rank: int) -> None:
    model = build_model(replace(PRESETS["llama-3m"], rank=rank))
    initialise(model, 3)
    whole = multiplied_out(model.state_dict())
    layers = [name for name in whole if name.count(".") == 4]
    assert len(layers) == 4 * 5
    together = torch.cat([whole[name].flatten() for name in layers])
    assert float(together.std()) == pytest.approx(0.02, rel=0.03)
    assert float(whole["embedding.weight"].std()) == pytest.approx(0.02, rel=0.01)
    deep = build_model(replace(PRESETS["llama-3m"], rank=rank, num_layers=6))
    initialise(deep, 3)
    for (name, one), other in zip(deep.named_parameters(), deep.parameters(), strict=True):
        assert torch.equal(one, dict(model.named_parameters()).get(name, other)), name


@pytest.mark.parametrize(
    ("architecture", "rank", "what"),
    [
        (LLAMA, 33, "1 to 32, the smaller side"),
        (LLAMA, 0, "1 to 32"),
        (PRESETS["mixtral-8m"], 4, "routed experts"),
    ],
)
def test_a_rank_that_no_layer_has_is_refused(architecture: Architecture, rank: int, what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        replace(architecture, rank=rank)


def test_a_model_without_factors_is_written_as_before() -> None:
    assert "rank" not in LLAMA.to_json()
    assert replace(LLAMA, rank=4).to_json()["rank"] == 4


@pytest.mark.parametrize(("name", "kind"), [("muon", Muon), ("galore", GaLore), ("fira", GaLore)])
def test_optimizers_of_matrices_keep_of_factors_what_the_account_says(
    name: str, kind: type[Muon | GaLore]
) -> None:
    architecture = replace(LLAMA, rank=RANK)
    settings = {"optimizer.name": name} | ({} if name == "muon" else {"optimizer.rank": 3})
    config = resolve(replace_values(Config(), settings), architecture, device_type="cpu").config
    model = filled(architecture)
    named = dict(model.named_parameters())
    optimizer = kind(named, config.optimizer, model.spec)
    held = sum(state.nbytes for state in states_of(optimizer).values())
    assert memory_of(config, architecture).state_bytes(named) == held
    assert held < 8 * model.spec.parameters
