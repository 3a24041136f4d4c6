"""Steps of several micro-batches whose products add to the sums of gradients themselves: sums and updates, bit for bit
what a product in float32, an addition and a rounding give."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("triton", reason="triton is not installed")

from scrimp.config import OptimizerConfig
from scrimp.formats import QuantizedTensor
from scrimp.gemm import Execution, SummedLinear, observing, swap_in
from scrimp.gemm.backends import BACKENDS, Backend
from scrimp.gemm.summed_linear import summed_linear
from scrimp.gemm.weight_sums import adding, adds_plain
from scrimp.optim import AdamW
from scrimp.optim.targets import add_by_operators
from scrimp.precision import MOST_TO_NEAREST

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TRITON = BACKENDS["triton"]
NAMES = ("0", "2")
BATCHES = [torch.randn(150, 40, generator=torch.Generator().manual_seed(n)) for n in range(3)]


def by_triton(recipe: str, *site: object) -> Backend:
    return BACKENDS["triton" if recipe == "fp8" else "torch"]


def started(masters: bool, dtype: torch.dtype = torch.bfloat16) -> tuple[nn.Module, AdamW]:
    """A model of two layers, and its optimizer."""
    torch.manual_seed(5)
    model = nn.Sequential(SummedLinear(40, 70), nn.SiLU(), SummedLinear(70, 30, bias=False))
    model.to(DEVICE, dtype)
    settings = dataclasses.replace(OptimizerConfig(), master_weights=masters)
    return model, AdamW(dict(model.named_parameters()), settings, seed=3)


def passes(model: nn.Module, *, adds: bool) -> None:
    """Forward and backward of every micro-batch."""
    with adding(adds):
        for batch in BATCHES:
            x = batch.to(DEVICE, model[0].weight.dtype).requires_grad_()
            model(x).square().sum().backward()


def product(one: Execution) -> Tensor:
    """A wgrad that ran, in float32."""
    a, b = TRITON.prepare(one.a, one.uses[0]), one.b
    right = TRITON.load(b) if isinstance(b, QuantizedTensor) else TRITON.prepare(b, one.uses[1])
    return TRITON.multiply("wgrad", a, right, torch.float32)


def expected_sums(model: nn.Module, optimizer: AdamW, masters: bool) -> dict[str, Tensor]:
    """What sums should be, of the products of passes that leave them to autograd."""
    products: dict[str, list[Tensor]] = {name: [] for name in NAMES}

    def watch(one: Execution) -> None:
        if one.gemm == "wgrad":
            products[one.layer].append(product(one))

    with observing(watch):
        passes(model, adds=False)
    sums = {}
    for name, (first, *others) in products.items():
        total = first.to(torch.float32 if masters else torch.bfloat16)
        for number, other in enumerate(others, 2):
            if masters:
                total += other
            else:
                add_by_operators(total, other, optimizer._noise("sum", f"{name}.weight", number))
        sums[f"{name}.weight"] = total
    return sums


@pytest.mark.parametrize("masters", [False, True])
@pytest.mark.parametrize("watched", [False, True])
@pytest.mark.every(4)
def test_sums_of_products_of_tiles(masters: bool, watched: bool) -> None:
    model, optimizer = started(masters)
    other, with_autograd = started(masters)
    for one in (model, other):
        swap_in(one, "fp8", choose=by_triton)
    expected = expected_sums(other, with_autograd, masters)
    seen: list[Tensor] = []
    if watched:
        with observing(lambda one: seen.append(one.result)):
            passes(model, adds=True)
        assert len(seen) == len(BATCHES) * 2 * 3
    else:
        passes(model, adds=True)
    found = optimizer.gradients()
    for name, total in expected.items():
        assert torch.equal(found[name], total)
        # Nobody rounded the products that were added: autograd's sums are others.
        assert not torch.equal(with_autograd.gradients()[name], total)
    assert torch.equal(found["0.bias"], with_autograd.gradients()["0.bias"])
    for name, slot in ((name, with_autograd.slot(name)) for name in expected):
        slot.sum = expected[name]
    for one in (optimizer, with_autograd):
        one.clip(one.gradient_norm(), 1.0)
        one.step(0.01)
    for one, twin in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, twin)


def test_float32_weights_and_the_next_step() -> None:
    """torch's own products, against float64; after `zero_grad` sums begin anew."""
    model, optimizer = started(masters=False, dtype=torch.float32)
    exact = copy.deepcopy(model).double()
    for _ in range(2):
        passes(model, adds=True)
        found = optimizer.gradients()
        passes(exact, adds=True)  # of no optimizer: autograd sums
        for name, parameter in exact.named_parameters():
            torch.testing.assert_close(found[name].double(), parameter.grad, rtol=1e-4, atol=1e-4)
        optimizer.zero_grad()
        exact.zero_grad()
        assert not optimizer.gradients()


def test_sums_in_bf16_of_plain_products_are_rounded_to_nearest() -> None:
    """Once for each product; what is left is the order of additions in float32."""
    if not adds_plain(DEVICE, torch.bfloat16, torch.bfloat16):
        pytest.skip(f"the product of this {DEVICE.type} rounds twice")
    weight = nn.Parameter(torch.zeros(70, 40, dtype=torch.bfloat16, device=DEVICE))
    optimizer = AdamW({"weight": weight}, dataclasses.replace(OptimizerConfig(), master_weights=False))
    expected = torch.zeros(70, 40, device=DEVICE)
    with adding():
        for batch in BATCHES:
            x = batch.to(DEVICE, torch.bfloat16)
            g = x[:, :1] * x.new_tensor(range(-35, 35))
            summed_linear(x.requires_grad_(), weight, None, None).backward(g)
            expected = (expected + g.float().t() @ x.detach().float()).bfloat16().float()
    found = optimizer.gradients()["weight"]
    assert found.dtype == torch.bfloat16
    assert (found.float() == expected).float().mean() > 0.99
    torch.testing.assert_close(found.float(), expected, rtol=2.0**-7, atol=1e-3)


def test_gradients_of_many_micro_batches_are_not_lost_beside_their_sum_in_bf16() -> None:
    """1 and many quarters of bf16's step above it: to nearest the sum stays 1."""
    if not adds_plain(DEVICE, torch.bfloat16, torch.bfloat16):
        pytest.skip(f"the product of this {DEVICE.type} rounds twice")
    weight = nn.Parameter(torch.zeros(64, 64, dtype=torch.bfloat16, device=DEVICE))
    optimizer = AdamW({"weight": weight}, dataclasses.replace(OptimizerConfig(), master_weights=False))
    x = torch.ones(1, 64, dtype=torch.bfloat16, device=DEVICE)

    def add(value: float, times: int) -> float:
        with adding():
            for _ in range(times):
                summed_linear(x.clone().requires_grad_(), weight, None, None).backward(x * value)
        return float(optimizer.gradients()["weight"].double().mean())

    assert add(1.0, 1) == 1.0
    assert add(2.0**-9, MOST_TO_NEAREST - 1) == 1.0
    # The sum of 64 x 64 roundings: each is off by sqrt(3) / 4 of a step of 2^-7.
    assert add(2.0**-9, 64) == pytest.approx(1.125, abs=5 * 2.0**-7 * 8 * 0.44 / 64)
