"""Odd input means the same on every back end: a defined result, or the same error."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from triton_cases import DEVICE, sums_step

from scrimp.errors import DeviceError, ModelError, PlanError
from scrimp.formats import Noise
from scrimp.gemm.backends import BACKENDS, Backend
from scrimp.gemm.convert import swap_in
from scrimp.gemm.problem import Use
from scrimp.precision import Operand

PAIRS = [
    ("reference", "fp8_tensor"),
    ("reference", "fp8_row"),
    ("reference", "fp8"),
    ("reference", "nvfp4"),
    ("torch", "fp8_tensor"),
    ("torch", "fp8_row"),
    ("triton", "fp8"),
    ("triton", "fp4"),
    ("triton", "mxfp8"),
    ("triton", "nvfp4"),
]
IN, OUT = 32, 48


@pytest.fixture(params=PAIRS, ids="-".join)
def layer(request: pytest.FixtureRequest) -> Iterator[tuple[nn.Linear, str]]:
    """A planned layer of 32 inputs and 48 outputs on one back end, and its recipe; tensors lie where it runs."""
    name, recipe = request.param
    if name == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    with torch.device(DEVICE if name == "triton" else "cpu"):
        yield made(BACKENDS[name], recipe), recipe


def made(backend: Backend, recipe: str) -> nn.Linear:
    torch.manual_seed(0)
    linear = nn.Linear(IN, OUT, bias=False)
    swap_in(linear, recipe, choose=lambda *site: backend)
    return linear


def reference(recipe: str) -> nn.Linear:
    return made(BACKENDS["reference"], recipe)


def gradients(linear: nn.Linear, x: Tensor, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    y = linear(x)
    y.backward(g)
    assert x.grad is not None
    assert linear.weight.grad is not None
    return y.detach(), x.grad, linear.weight.grad


def test_no_tokens_give_no_rows_and_a_zero_gradient(layer: tuple[nn.Linear, str]) -> None:
    linear, _ = layer
    y, x_grad, weight_grad = gradients(linear, torch.empty(0, IN), torch.empty(0, OUT))
    assert y.shape == (0, OUT)
    assert x_grad.shape == (0, IN)
    assert torch.equal(weight_grad, torch.zeros(OUT, IN))


@pytest.mark.parametrize("kind", ["transposed", "strided", "expanded"])
@pytest.mark.every(8)
def test_gaps_and_strides_change_nothing(layer: tuple[nn.Linear, str], kind: str) -> None:
    linear, recipe = layer
    x, g = torch.randn(64, IN), torch.randn(64, OUT)
    odd = {
        "transposed": (x.T.contiguous().T, g.T.contiguous().T),
        "strided": (torch.randn(128, 2 * IN)[::2, ::2], torch.randn(64, 2 * OUT)[:, ::2]),
        "expanded": (torch.randn(1, IN).expand(64, IN), torch.randn(()).expand(64, OUT)),
    }[kind]
    plain = made(linear.planned.backend(recipe, "fprop", 64, linear.weight), recipe)
    for ours, theirs in zip(
        gradients(linear, *odd), gradients(plain, *(t.contiguous() for t in odd)), strict=True
    ):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("where", ["x", "g"])
@pytest.mark.every(7)
def test_numbers_that_are_not_finite_spread_as_in_the_reference(
    layer: tuple[nn.Linear, str], bad: float, where: str
) -> None:
    linear, recipe = layer
    x, g = torch.randn(64, IN), torch.randn(64, OUT)
    (x if where == "x" else g)[5, 3] = bad
    for ours, theirs in zip(gradients(linear, x, g), gradients(reference(recipe), x, g), strict=True):
        assert torch.equal(ours.isnan(), theirs.isnan())
        tolerance = 1e-3 if ours.device.type == "cpu" else sums_step() * 4 * IN
        assert torch.allclose(ours, theirs, rtol=1e-3, atol=tolerance, equal_nan=True)
    y = linear(x) if where == "x" else None
    assert y is None or bool(y[5].isnan().all()), "an overflow is never rounded away"


def test_zeros_give_zeros(layer: tuple[nn.Linear, str]) -> None:
    linear, _ = layer
    for found in gradients(linear, torch.zeros(64, IN), torch.zeros(64, OUT)):
        assert torch.equal(found, torch.zeros_like(found))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64, torch.int32])
def test_types_that_no_layer_computes_in_are_refused(
    layer: tuple[nn.Linear, str], dtype: torch.dtype
) -> None:
    with pytest.raises(ModelError):
        layer[0](torch.ones(64, IN).to(dtype))


def test_mixed_devices_are_refused(layer: tuple[nn.Linear, str]) -> None:
    with pytest.raises(DeviceError):
        layer[0](torch.ones(64, IN, device="meta"))


def test_a_feature_too_many_is_refused(layer: tuple[nn.Linear, str]) -> None:
    with pytest.raises(ModelError):
        layer[0](torch.ones(64, IN + 1))


@pytest.mark.parametrize(("name", "scaling"), [("reference", "tile"), ("torch", "row"), ("triton", "tile")])
def test_operands_that_are_no_float_matrices_are_refused(name: str, scaling: str) -> None:
    if name == "triton":
        pytest.importorskip("triton", reason="triton is not installed")
    use = Use(Operand("e4m3", scaling), -1, Noise())
    with pytest.raises(PlanError, match="only floating tensors"):
        BACKENDS[name].prepare(torch.ones(16, 16, dtype=torch.int32), use)
    with pytest.raises(PlanError, match="matrices"):
        BACKENDS[name].prepare(torch.ones(2, 16, 16), use)
