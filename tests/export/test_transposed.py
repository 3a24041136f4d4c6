"""Layers that keep their weight transposed (transformers' Conv1D): planned like the linear layers that they are.

The oracle is the same model with every Conv1D replaced by an nn.Linear of the transposed weight.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import scrimp
from scrimp.errors import ModelError
from scrimp.export import to_torchao
from scrimp.gemm import LinearPrecision, swap_in
from scrimp.planner.precision import PrecisionProfile

transformers = pytest.importorskip("transformers", minversion="5.0")
from transformers.pytorch_utils import Conv1D  # noqa: E402

WIDTH = 32
MIXED = LinearPrecision("fp8", "nvfp4", "fp4", "fp4")


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=64,
        n_positions=16,
        n_embd=WIDTH,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    model: nn.Module = transformers.GPT2LMHeadModel(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_(std=0.02)
    return model


def with_linear_layers(model: nn.Module) -> nn.Module:
    """A copy in which every Conv1D is an nn.Linear."""
    model = copy.deepcopy(model)
    for name, module in list(model.named_modules()):
        if isinstance(module, Conv1D):
            inputs, outputs = module.weight.shape
            linear = nn.Linear(inputs, outputs)
            linear.weight = nn.Parameter(module.weight.detach().t().clone())
            linear.bias = nn.Parameter(module.bias.detach().clone())
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, linear)
    return model


def batches(count: int = 2) -> list[Tensor]:
    return [
        torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(seed)) for seed in range(count)
    ]


def loss(model: nn.Module, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens, labels=tokens).loss
    return found


def profile_of(model: nn.Module) -> PrecisionProfile:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for tokens in batches():
        loss(model, tokens).backward()
        optimizer.step()
        optimizer.zero_grad()
    return scrimp.measure(model, optimizer, batches(), loss)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.grad.t()
        if isinstance(model.get_submodule(name.rpartition(".")[0]), Conv1D) and p.ndim == 2
        else p.grad
        for name, p in model.named_parameters()
        if p.grad is not None
    }


def conv1d_names(model: nn.Module) -> list[str]:
    return [name for name, module in model.named_modules() if isinstance(module, Conv1D)]


@pytest.mark.slow
def test_a_gpt2_is_measured_planned_and_run_as_it_stands() -> None:
    model = gpt2()
    profile = profile_of(model)
    assert profile.layers == tuple(conv1d_names(model))
    assert profile.gains == "ratios", "its residual stream is found"
    assert set(profile.shapes) == {(3 * WIDTH, WIDTH), (WIDTH, WIDTH), (4 * WIDTH, WIDTH), (WIDTH, 4 * WIDTH)}
    plan = scrimp.plan(profile, 0.5)
    planned = scrimp.apply(model, plan)
    loss(model, batches()[0]).backward()
    assert all(p.grad is not None and p.grad.shape == p.shape for p in model.parameters())
    planned.swap_out()
    assert all(type(model.get_submodule(name)) is Conv1D for name in conv1d_names(model))


@pytest.mark.slow
def test_statistics_are_those_of_linear_layers_with_the_transposed_weights() -> None:
    one, other = profile_of(gpt2()), profile_of(with_linear_layers(gpt2()))
    assert one.layers == other.layers
    assert one.shapes == other.shapes
    of_one, of_other = one.batches[0], other.batches[0]
    for name in ("x", "w", "y", "g", "gx", "gw", "errors", "results", "update"):
        np.testing.assert_allclose(getattr(of_one, name), getattr(of_other, name), rtol=2e-3, err_msg=name)
    # Drawn noise falls on other elements of a transposed weight, some of which move far more than others.
    np.testing.assert_allclose(of_one.sensitivity, of_other.sensitivity, rtol=0.25)


@pytest.mark.parametrize("precision", [LinearPrecision.of("fp8"), MIXED, LinearPrecision.of("mxfp8")])
def test_planned_numbers_are_those_of_linear_layers_bit_for_bit(precision: LinearPrecision) -> None:
    results: list[Any] = []
    for model in (gpt2(), with_linear_layers(gpt2())):
        names = conv1d_names(gpt2())
        swap_in(model, dict.fromkeys(names, precision), seed=3)
        found = loss(model, batches()[0])
        found.backward()
        results.append((found.detach(), gradients(model)))
    assert torch.equal(results[0][0], results[1][0])
    assert all(torch.equal(results[0][1][name], results[1][1][name]) for name in results[0][1])


def test_layers_in_the_compute_format_take_their_own_path() -> None:
    plain, planned = gpt2(), gpt2()
    swap_in(planned, dict.fromkeys(conv1d_names(planned), LinearPrecision.of("fp32")))
    for model in (plain, planned):
        loss(model, batches()[0]).backward()
    assert all(
        torch.equal(a.grad, b.grad)  # type: ignore[arg-type]
        for a, b in zip(plain.parameters(), planned.parameters(), strict=True)
    )


@pytest.mark.slow
def test_compiled_layers_give_the_eager_numbers() -> None:
    torch.manual_seed(0)
    layer = nn.Sequential(Conv1D(24, 16))
    x = torch.randn(8, 16)
    swap_in(layer, MIXED, seed=1)
    found = []
    for run in (layer, torch.compile(layer, backend="aot_eager", fullgraph=True)):
        layer[0].planned.clock.begin(0, 0)
        layer.zero_grad()
        y = run(x)
        y.square().sum().backward()
        found.append((y.detach(), layer[0].weight.grad.clone()))
    assert torch.equal(found[0][0], found[1][0])
    assert torch.equal(found[0][1], found[1][1])


def test_what_no_plan_reaches_is_named_with_advice_that_helps() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(8, 8))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own, self.lm_head = Own(), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.lm_head(self.own(x)).square().mean()  # type: ignore[no-any-return]

    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    rows = [torch.randn(4, 8)]

    def measure(**options: Any) -> PrecisionProfile:
        return scrimp.measure(model, optimizer, rows, lambda net, x: net(x), **options)

    with pytest.raises(ModelError, match=r"no plan reaches own \(Own\)") as refusal:
        measure()
    assert "layers=['lm_head']" in str(refusal.value)
    assert measure(layers=["lm_head"]).layers == ("lm_head",), "the advice works as it stands"


def test_the_file_for_torchao_refuses_what_torchao_would_pass_over() -> None:
    pytest.importorskip("torchao")
    model = gpt2()
    names = conv1d_names(model)
    export = to_torchao(dict.fromkeys(names, LinearPrecision.of("fp8_row")), emulate=True)
    scope: dict[str, Any] = {}
    exec(export.text, scope)
    with pytest.raises(ValueError, match="0 linear layers of this model where the plan has 8"):
        scope["convert"](model)
    with pytest.raises(ModelError):
        export.apply(model)
    assert all(type(model.get_submodule(name)) is Conv1D for name in names)
    scope["convert"](with_linear_layers(model))
