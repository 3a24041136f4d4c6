"""Models with adapters against the float64 decoder whose matrices are W + alpha / r B A."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from adapters import adapted_model
from decoder_reference import FAMILIES, LLAMA, filled, packed_logits, summed_loss, weights_of
from losses import next_token_loss
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from scrimp.config import Adapter, Architecture, preset
from scrimp.config.activations import LEVELS, Activations
from scrimp.errors import ConfigError
from scrimp.models import HEAD, spec_of
from scrimp.models.adapter_checks import check_adapter
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.planner import count_flops

ADAPTER = Adapter(3, 7.0)
TOKENS = torch.arange(48).view(2, 24) * 7 % 61
TARGETS = TOKENS.roll(-1, 1)


def with_adapters(architecture: Architecture, targets: str = "all") -> Architecture:
    return dataclasses.replace(architecture, adapter=dataclasses.replace(ADAPTER, targets=targets))


def merged_weights(model: Model, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Every weight as its base has it, and what adapters add, by hand."""
    a = model.architecture
    stacks = {
        "attention.qkv": (a.attention_width, a.kv_width, a.kv_width),
        "attention.out": (a.width,),
        "mlp.gate_up": (a.ffn_width, a.ffn_width),
        "mlp.down": (a.width,),
    }
    found = {name: one for name, one in weights.items() if "lora" not in name}
    for i in range(a.num_layers):
        for layer, rows in stacks.items():
            own = f"blocks.{i}.{layer}"
            if f"{own}.lora_a" not in weights:
                continue
            low, high = weights[f"{own}.lora_a"].split(3), weights[f"{own}.lora_b"].split(rows)
            added = torch.cat([b @ a for a, b in zip(low, high, strict=True)])
            found[f"{own}.weight"] = found[f"{own}.weight"] + 7.0 / 3 * added
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_loss_and_every_gradient_equal_the_reference(family: str) -> None:
    model = filled(with_adapters(FAMILIES[family]))
    sums = next_token_loss(model, TOKENS, TARGETS, chunk=7, z_loss=1e-2)
    sums.total.backward()
    weights = weights_of(model)
    logits = packed_logits(model.architecture, merged_weights(model, weights), TOKENS, [0, 24, 48])
    ce, z = summed_loss(logits, TARGETS.flatten(), 1e-2)
    (ce + z).backward()
    assert float(sums.total.detach()) == pytest.approx(float((ce + z).detach()), rel=1e-6)
    assert len(model.trained()) == 2 * 4 * 2
    for name, parameter in model.named_parameters():
        if "lora" in name:
            expected = weights[name].grad
            assert parameter.grad is not None
            assert expected is not None
            assert (parameter.grad - expected).abs().max() <= 1e-5 * expected.abs().max(), name
        else:
            assert parameter.grad is None, name


@pytest.mark.parametrize("level", LEVELS[1:])
def test_levels_of_recomputation_change_no_gradient(level: str) -> None:
    found = []
    for choice in ("keep", level):
        model = filled(with_adapters(LLAMA))
        for block in model.each_block():
            block.activations = Activations(choice)
        next_token_loss(model, TOKENS, TARGETS).total.backward()
        found.append({name: one.grad for name, one in model.trained().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_training_begins_where_the_base_stands() -> None:
    model = adapted_model(with_adapters(LLAMA), b=0.0)
    base = build_model(LLAMA)
    initialise(base, 0)
    with torch.no_grad():
        assert torch.equal(model(TOKENS), base(TOKENS))
    a = model.trained()["blocks.0.mlp.down.lora_a"]
    assert a.abs().max() <= LLAMA.ffn_width**-0.5
    assert float(a.detach().std()) == pytest.approx((3 * LLAMA.ffn_width) ** -0.5, rel=0.2)


def test_parameters_are_counted_as_they_are_there() -> None:
    for targets in ("all", "attention.qkv,mlp.down"):
        architecture = with_adapters(LLAMA, targets)
        spec, model = spec_of(architecture), build_model(architecture, device="meta", dtype=torch.bfloat16)
        trained = model.trained()
        assert spec.parameters == sum(one.numel() for one in model.parameters())
        assert spec.trained_parameters == sum(one.numel() for one in trained.values())
        assert {one.dtype for one in trained.values()} == {torch.float32}
        assert {one.dtype for one in model.of_base().values()} == {torch.bfloat16}
        assert len(trained) == 2 * 2 * len([one for one in spec.blocks[0].linears if one.rank])


@pytest.mark.parametrize("targets", ["all", "mlp.gate_up", "attention.out,mlp.down"])
def test_flops_are_those_that_torch_counts(targets: str) -> None:
    """All but attention's, whose masked half torch counts too."""
    architecture = dataclasses.replace(with_adapters(LLAMA, targets), context=64)
    model = filled(architecture)
    counter = FlopCounterMode(display=False)
    with counter:
        next_token_loss(model, TOKENS, TARGETS).total.backward()
    operators = counter.get_flop_counts()["Global"]
    counted = sum(count for one, count in operators.items() if "mm" in str(one) and "bmm" not in str(one))
    flops, spec = count_flops(spec_of(architecture), 24), spec_of(architecture)
    first = next(one for one in spec.blocks[0].linears if one.rank)
    unneeded = 2 * 3 * len(first.stacked) * first.inputs  # dX of the first A, which counts all the same
    assert counted / TOKENS.numel() == pytest.approx(flops.blocks + flops.head - unneeded, rel=1e-6)


def test_which_products_run() -> None:
    gemms = spec_of(with_adapters(LLAMA, "mlp.gate_up")).gemms
    assert [len(gemms[f"blocks.0.{name}"]) for name in ("attention.qkv", "attention.out", "mlp.gate_up")] == [
        1,
        1,
        1,
    ]
    assert gemms["blocks.0.mlp.down"] == gemms["blocks.1.attention.qkv"] == gemms[HEAD] == ("fprop", "dgrad")
    assert set(spec_of(LLAMA).gemms.values()) == {("fprop", "dgrad", "wgrad")}


@pytest.mark.parametrize(
    ("name", "targets", "message"),
    [
        ("llama-3m", "attention.qkv,q_proj", "q_proj"),
        ("llama-3m", "head", "head"),
        ("mixtral-8m", "all", "of experts"),
        ("mixtral-8m", "mlp.experts.down", "experts"),
    ],
)
def test_layers_that_cannot_have_adapters_are_refused(name: str, targets: str, message: str) -> None:
    with pytest.raises(ConfigError, match=r"adapter.targets") as refused:
        check_adapter(spec_of(with_adapters(preset(name), targets)))
    assert message in str(refused.value)


def test_attention_beside_experts_may_have_adapters() -> None:
    architecture = with_adapters(preset("mixtral-8m"), "attention.qkv,attention.out")
    check_adapter(spec_of(architecture))
    model = adapted_model(dataclasses.replace(architecture, num_layers=2, vocab_size=64))
    next_token_loss(model, TOKENS, TARGETS).total.backward()
    assert all(one.grad is not None for one in model.trained().values())


def test_adapters_beside_layers_of_low_rank_are_refused() -> None:
    architecture = dataclasses.replace(with_adapters(LLAMA), rank=4)
    with pytest.raises(ConfigError, match="beside layers of low rank"):
        check_adapter(spec_of(architecture))


def test_a_rank_above_a_side_of_a_layer_is_refused() -> None:
    adapter = dataclasses.replace(ADAPTER, rank=LLAMA.width + 1)
    with pytest.raises(ConfigError, match="larger than a layer"):
        check_adapter(spec_of(dataclasses.replace(LLAMA, adapter=adapter)))


def test_adapters_of_a_kind_of_ones_own_are_refused() -> None:
    own = type("Own", (type(spec_of(LLAMA)),), {})
    architecture = dataclasses.replace(with_adapters(LLAMA), family="own.py:Own")
    with pytest.raises(ConfigError, match="of your own"):
        check_adapter(own(architecture))
