"""Products that add to the sums of weights' gradients: who does, hooks, regions that run again, compiled layers."""

from __future__ import annotations

import copy
import io

import pytest
import torch
from planned_cases import start
from test_weight_gradients import Products
from torch import Tensor, nn

from scrimp.gemm import SummedLinear, run_again
from scrimp.gemm.convert import split_products
from scrimp.gemm.weight_sums import PlainProduct, Product, WeightSum, add_product, adding, adds_plain, set_sum
from scrimp.precision import MOST_TO_NEAREST

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
BATCHES = [torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(n)) for n in range(4)]
SIZES = {"first.weight": (10, 6), "second.weight": (4, 10)}


class Sum(WeightSum):
    """A sum in float32 that remembers how it was made."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(torch.empty(0, device=parameter.device))
        self.total: Tensor | None = None
        self.added, self.made = 0, 0

    def add(self, product: Product, made: Tensor | None = None) -> None:
        if self.total is None or not product.adds(self.dtype):
            self.add_made(product.made() if made is None else made)
        else:
            product.add(self.total, None)
            self.added += 1

    def add_made(self, gradient: Tensor) -> None:
        self.total = gradient.float() + (0 if self.total is None else self.total)
        self.made += 1


class Net(nn.Module):
    """Two layers, which backward may make again up to the last product."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = SummedLinear(6, 10), SummedLinear(10, 4, bias=False)
        self.again = again
        self.to(DEVICE)

    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.silu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return run_again(self.body, x, last=self.second) if self.again else self.body(x)


def sums_of(model: nn.Module) -> dict[str, Sum]:
    """A sum for each matrix."""
    found = {name: Sum(one) for name, one in model.named_parameters() if one.dim() == 2}
    for name, total in found.items():
        set_sum(model.get_parameter(name), total)
    return found


def step(model: nn.Module, *, adds: bool = True, of_inputs: bool = True) -> list[Tensor | None]:
    """Gradients of the inputs."""
    found = []
    with adding(adds):
        for batch in BATCHES:
            x = batch.to(DEVICE).requires_grad_(of_inputs)
            model(x).square().sum().backward()
            found.append(x.grad)
    return found


@pytest.mark.parametrize("again", [False, True], ids=["kept", "again"])
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [None, "fp8"])
@pytest.mark.every(3)
def test_sums_are_those_of_autograd(again: bool, compiled: bool, recipe: str | None) -> None:
    """Torch's products add, planned ones of the reference cannot."""
    plain, summed = Net(again), Net(again)
    for model in (plain, summed):
        if recipe is not None:
            start(model, recipe)
    totals = sums_of(summed)
    if compiled:
        summed.compile(backend="aot_eager", fullgraph=True)
    for one, other in zip(step(plain, adds=False), step(summed), strict=True):
        torch.testing.assert_close(one, other)
    for name, total in totals.items():
        assert (total.made, total.added) == ((1, 3) if recipe is None else (4, 0))
        assert summed.get_parameter(name).grad is None
        torch.testing.assert_close(total.total, plain.get_parameter(name).grad)
    torch.testing.assert_close(summed.first.bias.grad, plain.first.bias.grad)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("recipe", [None, "fp8"])
def test_layers_whose_inputs_need_no_gradient(compiled: bool, recipe: str | None) -> None:
    plain, summed = Net(), Net()
    for model in (plain, summed):
        if recipe is not None:
            start(model, recipe)
    totals = sums_of(summed)
    if compiled:
        summed.compile(backend="aot_eager", fullgraph=True)
    step(plain, adds=False, of_inputs=False)
    step(summed, of_inputs=False)
    # What a compiled layer without a gradient of its input makes goes through autograd.
    found = summed.first.weight.grad if compiled else totals["first.weight"].total
    torch.testing.assert_close(found, plain.first.weight.grad)


def test_each_product_runs_once_and_the_last_of_a_region_not_again() -> None:
    """Seven where one layer is made again: two forward, the first again, dX and dW of both."""
    counts = []
    for again in (False, True):
        model = Net(again)
        sums_of(model)
        with Products() as products, adding():
            model(BATCHES[0].to(DEVICE).requires_grad_()).sum().backward()
        counts.append(sum(products.shapes.values()))
    assert counts == [6, 7]


def test_hooks_run_once_a_micro_batch_and_find_the_gradient_in_the_sum() -> None:
    model = Net()
    totals = sums_of(model)
    seen = []
    for name, total in totals.items():
        model.get_parameter(name).register_post_accumulate_grad_hook(
            lambda p, total=total: seen.append((p.grad is None, total.made + total.added))
        )
    step(model)
    assert seen == [(True, number) for number in (1, 2, 3, 4) for _ in totals]


def test_a_weight_that_is_used_twice_is_added_twice() -> None:
    model, twin = Net(), Net()
    totals = sums_of(model)
    for one, adds in ((model, True), (twin, False)):
        with adding(adds):
            x = BATCHES[0].to(DEVICE).requires_grad_()
            (one(x).sum() + one(2 * x).square().sum()).backward()
    assert totals["first.weight"].made + totals["first.weight"].added == 2
    torch.testing.assert_close(totals["first.weight"].total, twin.first.weight.grad)


@pytest.mark.parametrize("case", ["not a step", "no gradients", "waiting", "no sum"])
def test_where_nothing_is_added_gradients_are_autograds(case: str) -> None:
    model = Net()
    totals = {} if case == "no sum" else sums_of(model)
    if case == "waiting":
        split_products(model)
    if case == "no gradients":
        with torch.no_grad(), adding():
            assert not model(BATCHES[0].to(DEVICE)).requires_grad
    step(model, adds=case in ("waiting", "no sum"))
    assert all(total.total is None for total in totals.values())
    assert all(model.get_parameter(name).grad.shape == size for name, size in SIZES.items())


def test_copies_of_parameters_and_files_have_no_sums() -> None:
    model, file = Net(), io.BytesIO()
    totals = sums_of(model)
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        step(twin)
        assert twin.first.weight.grad is not None
    assert all(total.total is None for total in totals.values())


def test_under_autocast_a_cpu_leaves_bf16_to_autograd_and_a_gpu_adds_it() -> None:
    plain, summed = Net(), Net()
    totals = sums_of(summed)
    with torch.autocast(DEVICE.type, torch.bfloat16):
        step(plain, adds=False)
        step(summed)
    for name, total in totals.items():
        assert total.added == (3 if DEVICE.type == "cuda" else 0)
        found = total.total if DEVICE.type == "cuda" else summed.get_parameter(name).grad
        torch.testing.assert_close(found, plain.get_parameter(name).grad, rtol=2e-2, atol=2e-2)


def test_a_product_adds_to_a_float32_sum_what_float64_gives() -> None:
    generator = torch.Generator().manual_seed(2)
    for dtype in (torch.float32, torch.bfloat16):
        if not adds_plain(DEVICE, dtype, torch.float32):
            assert (DEVICE.type, dtype) == ("cpu", torch.bfloat16)
            continue
        g, x, total = (torch.randn(size, generator=generator) for size in ((300, 70), (300, 50), (70, 50)))
        g, x = g.to(DEVICE, dtype), x.to(DEVICE, dtype)
        found = total.to(DEVICE, copy=True)
        add_product(found, g.t(), x)
        exact = total.double() + g.double().cpu().t() @ x.double().cpu()
        bound = 302 * 2.0**-23 * (total.double().abs() + g.double().cpu().abs().t() @ x.double().cpu().abs())
        assert bool(((found.double().cpu() - exact).abs() <= bound).all())


def test_a_product_adds_to_a_sum_in_bf16_with_one_rounding() -> None:
    if not adds_plain(DEVICE, torch.bfloat16, torch.bfloat16):
        pytest.skip(f"the product of this {DEVICE.type} rounds twice")
    generator = torch.Generator().manual_seed(2)
    sizes = ((300, 70), (300, 50), (70, 50))
    g, x, total = (torch.randn(size, generator=generator).to(DEVICE, torch.bfloat16) for size in sizes)
    product = PlainProduct(g, x, torch.bfloat16)
    exact = total.double() + g.double().t() @ x.double()
    product.add(total, None)
    # Half a step of bf16, and what a sum of 300 products in float32 may be off.
    bound = 2.0**-8 * exact.abs() + 302 * 2.0**-23 * (g.double().abs().t() @ x.double().abs() + 10)
    assert bool(((total.double() - exact).abs() <= bound).all())
    assert product.adds(torch.bfloat16, MOST_TO_NEAREST - 1)
    assert not product.adds(torch.bfloat16, MOST_TO_NEAREST)
