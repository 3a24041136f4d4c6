"""Two products and the gate between them as one function: the numbers of the three, with fewer passes over memory."""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton is not installed")

from decoder_reference import LLAMA
from torch import Tensor, nn
from triton_cases import DEVICE

from scrimp.config import Architecture
from scrimp.config.activations import LEVELS, Activations
from scrimp.gemm import (
    Execution,
    FactoredLinear,
    defers,
    gate_alone,
    gated_products,
    observing,
    run_again,
    swap_in,
)
from scrimp.gemm.backends import BACKENDS, Backend
from scrimp.gemm.deferred import Gate
from scrimp.gemm.kernels import gates, tiles
from scrimp.gemm.problem import Shape
from scrimp.gemm.weight_sums import Product, WeightSum, adding, set_sum
from scrimp.models.blocks import Mlp
from scrimp.models.model import Model, build_model
from scrimp.precision import LinearPrecision

TOKENS, WIDTH, INNER = 40, 48, 32


def kernels(recipe: str, gemm: str, shape: Shape, device: torch.device) -> Backend:
    """Triton's, where it takes the product."""
    ours = BACKENDS["triton"]
    return ours if ours.refusal(gemm, recipe, shape, device) is None else BACKENDS["reference"]


class Gated(nn.Module):
    """A gated MLP, as one function or as three."""

    def __init__(self, dtype: torch.dtype, gate: Gate, joint: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, 2 * INNER, bias=False, dtype=dtype)
        self.second = nn.Linear(INNER, WIDTH, bias=False, dtype=dtype)
        self.gate, self.joint, self.keeps_gated = gate, joint, True

    def forward(self, x: Tensor) -> Tensor:
        if self.joint:
            assert defers(self.first, self.second, x)
            return gated_products(x, self.first, self.second, self.gate, keeps_gated=self.keeps_gated)
        return self.second(gate_alone(self.first(x), self.gate))


def passes(model: nn.Module, *, seed: int = 1) -> list[Tensor]:
    """Output and all gradients of one pass."""
    torch.manual_seed(seed)
    dtype = next(model.parameters()).dtype
    x = torch.randn(2, TOKENS // 2, WIDTH, dtype=dtype).requires_grad_()
    y = model(x)
    model.zero_grad()
    y.backward(torch.randn(y.shape, dtype=dtype))
    assert x.grad is not None
    return [y.detach(), x.grad, *(one.grad for one in model.parameters() if one.grad is not None)]


PRECISIONS = {
    "fp8": LinearPrecision.of("fp8"),
    "mxfp8, inputs in bf16": dataclasses.replace(LinearPrecision.of("mxfp8"), saved="bf16"),
    "fp4, nothing kept": dataclasses.replace(LinearPrecision.of("fp4"), saved="recompute"),
    "nvfp4 beside others": LinearPrecision(fprop="fp8", dgrad="bf16", wgrad="nvfp4", saved="nvfp4"),
    "codes of another recipe": LinearPrecision(fprop="mxfp8", dgrad="fp8", wgrad="fp8", saved="fp4"),
}


@pytest.fixture(params=PRECISIONS)
def precision(request: pytest.FixtureRequest) -> LinearPrecision:
    return PRECISIONS[request.param]


def pair(
    precision: LinearPrecision, gate: Gate = "silu", dtype: torch.dtype = torch.bfloat16
) -> tuple[Gated, Gated]:
    """The same layers as one function and as three."""
    found = []
    for joint in (True, False):
        model = Gated(dtype, gate, joint).to(DEVICE)
        # Where nobody makes an input again it is kept as it is, which wgrad reads the same.
        kept = precision if precision.saved != "recompute" else dataclasses.replace(precision, saved="bf16")
        first = kept if kept.saved != "bf16" else dataclasses.replace(precision, saved=precision.wgrad)
        layers = {"first": first, "second": precision if joint else kept}
        swap_in(model, layers, choose=kernels).clock.begin(3)  # every pass has the same noise
        found.append(model)
    return found[0], found[1]


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) == 4
    for number, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert torch.equal(one, other), f"result {number}"


def test_one_function_gives_the_numbers_of_three(precision: LinearPrecision) -> None:
    joint, apart = pair(precision)
    assert_same(passes(joint), passes(apart))


def test_gelu_and_float32() -> None:
    joint, apart = pair(LinearPrecision.of("fp8"), "gelu", torch.float32)
    assert_same(passes(joint), passes(apart))


@pytest.mark.parametrize("where", ["region", "compiled", "not kept"])
@pytest.mark.every(4)
def test_what_is_made_again_changes_nothing(where: str, precision: LinearPrecision) -> None:
    """Of gate and up alone, in a region that ends in the last product, and in a graph."""
    joint, _ = pair(precision)
    expected = passes(joint)
    if where == "not kept":
        joint.keeps_gated = False
        assert_same(passes(joint), expected)
    elif where == "region":
        assert_same(passes(_InRegion(joint)), expected)
    else:
        torch.compiler.reset()
        assert_same(passes(torch.compile(joint, backend="aot_eager", fullgraph=True)), expected)


class _InRegion(nn.Module):
    def __init__(self, model: Gated) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return run_again(self.model, x, last=self.model.second)


def test_frozen_weights_get_no_gradient() -> None:
    joint, apart = pair(LinearPrecision.of("fp8"))
    for layer in ("first", "second"):
        for model in (joint, apart):
            model.get_submodule(layer).requires_grad_(False)
        found, expected = passes(joint), passes(apart)
        assert len(found) == len(expected)
        assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def test_sums_of_micro_batches_are_those_of_the_layers_alone() -> None:
    sums = []
    for model in pair(LinearPrecision.of("fp8")):
        totals = {}
        for name, weight in model.named_parameters():
            totals[name] = Total(weight)
            set_sum(weight, totals[name])
        with adding():
            for seed in (1, 2):
                assert len(passes(model, seed=seed)) == 2  # the weights' gradients went to their sums
        sums.append({name: total.sum for name, total in totals.items()})
    for name, total in sums[0].items():
        assert torch.equal(total, sums[1][name]), name


class Total(WeightSum):
    """A sum in float32."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__(weight.float())
        self.sum = torch.zeros_like(weight, dtype=torch.float32)

    def add(self, product: Product, made: Tensor | None = None) -> None:
        self.add_made(product.made())

    def add_made(self, gradient: Tensor) -> None:
        self.sum += gradient


def defer_gates(model: nn.Module) -> None:
    """As on a GPU."""
    for module in model.modules():
        if isinstance(module, Mlp):
            module.defers_gate = True


def small(architecture: Architecture, precision: LinearPrecision) -> Model:
    """A model with planned layers, its gates deferred."""
    model = build_model(architecture, dtype=torch.float32).to(DEVICE)
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    names = [name for name, _ in model.named_modules() if name.endswith(("qkv", "out", "gate_up", "down"))]
    swap_in(model, dict.fromkeys(names, precision), choose=kernels).clock.begin(1)
    defer_gates(model)
    return model


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("level", LEVELS[1:])
@pytest.mark.every(14)
def test_blocks_that_make_activations_again(level: str, compiled: bool) -> None:
    """The numbers of those that keep all, and no product that is not read: gate and up are read by the gate alone."""
    found, products = [], []
    for each in ("keep", level):
        model = small(LLAMA, LinearPrecision.of("fp8"))
        torch.compiler.reset()
        for block in model.each_block():
            block.activations = Activations(each)
            if compiled:
                block.compile(backend="aot_eager", fullgraph=True)
        ran: Counter[str] = Counter()
        with observing(lambda one, ran=ran: ran.update([f"{one.layer.split('.')[-1]} {one.gemm}"])):
            model(torch.arange(32).view(2, 16)).float().square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        products.append(ran)
    again = [name for name in products[1] if products[1][name] > products[0][name]]
    both = ["gate_up fprop", "qkv fprop"]
    expected = {"swiglu": [], "norms": [], "mlp": both[:1], "block": [*both, "out fprop"]}.get(level, both)
    assert sorted(again) == sorted(expected)
    for kept, made in zip(*found, strict=True):
        assert torch.equal(kept, made)


@pytest.mark.parametrize("level", ["mlp", "attention"])
@pytest.mark.every(2)
def test_a_stream_that_is_read_in_its_own_type(level: str) -> None:
    """OLMo 2 has no norm before its MLP, which under autocast reads float32."""
    found = []
    for each in ("keep", level):
        model = small(dataclasses.replace(LLAMA, family="olmo2"), LinearPrecision.of("fp8"))
        for block in model.each_block():
            block.activations = Activations(each)
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = model(torch.arange(32).view(2, 16)).float().square().sum()
        loss.backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
    assert all(torch.equal(kept, made) for kept, made in zip(*found, strict=True))


def test_who_watches_is_shown_whole_matrices() -> None:
    """Which is what a proof quantizes by the reference's rules."""
    joint, _ = pair(LinearPrecision.of("fp8"))
    seen: dict[tuple[str, str], list[torch.Size]] = {}

    def note(execution: Execution) -> None:
        seen[execution.layer, execution.gemm] = [one.shape for one in (execution.a, execution.b)]

    with observing(note):
        passes(joint)
    assert seen["first", "dgrad"][0] == (TOKENS, 2 * INNER)
    assert seen["second", "fprop"][0] == (TOKENS, INNER)
    assert len(seen) == 6


def test_hooks_biases_and_plain_layers_run_one_by_one() -> None:
    joint, _ = pair(LinearPrecision.of("fp8"))
    x = torch.zeros(2, WIDTH, dtype=torch.bfloat16)
    assert defers(joint.first, joint.second, x)
    handle = joint.second.register_forward_pre_hook(lambda *_: None)
    assert not defers(joint.first, joint.second, x)
    handle.remove()
    assert not defers(joint.first, nn.Linear(INNER, WIDTH, bias=False), x)
    assert not defers(FactoredLinear(nn.Linear(WIDTH, 4), nn.Linear(4, 2 * INNER)), joint.second, x)
    with_bias = nn.Linear(INNER, WIDTH, dtype=torch.bfloat16)
    swap_in(with_bias, LinearPrecision.of("fp8"), choose=kernels)
    assert not defers(joint.first, with_bias, x)
    plain, _ = pair(LinearPrecision.of("bf16"))
    assert not defers(plain.first, plain.second, x)
    # A proof counts the products of a plain layer as torch's.
    assert not defers(joint.first, plain.second, x)
    assert not defers(plain.first, joint.second, x)


def test_a_gate_has_no_pass_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel each for input, gate's result, and the gradients of both results, both ways."""
    launched = []
    for module in (gates, tiles):
        run = module.run

        def noted(kernel: Any, *more: Any, run: Any = run, **constants: Any) -> None:
            launched.append(kernel.__name__)
            run(kernel, *more, **constants)

        monkeypatch.setattr(module, "run", noted)
    found = []
    for model in pair(LinearPrecision.of("fp8")):
        launched.clear()
        passes(model)
        found.append(Counter(launched))
    assert found[0] == {"quantize_tiles_kernel": 4}
    assert found[1] == {"quantize_tiles_kernel": 4, "gate_matrix_kernel": 2}
