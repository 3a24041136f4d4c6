"""A frozen linear layer with an adapter, by itself and by a plan, against the formula in float64."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.gemm import (
    AdaptedLinear,
    Execution,
    adapt,
    merged,
    observing,
    reference_only,
    run_again_before,
    swap_in,
)

ROWS, RANK, SCALE = (16, 8, 8), 4, 1.5


def adapted(rows: tuple[int, ...] = ROWS) -> AdaptedLinear:
    """A layer of 16 inputs whose adapter adds something."""
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(16, sum(rows))
    adapt(layer, RANK, rows, SCALE)
    assert isinstance(layer, AdaptedLinear)
    for parameter in layer.parameters():
        parameter.data.normal_(0.0, 0.3, generator=generator)
    layer.weight.requires_grad_(False)
    layer.bias.requires_grad_(False)
    return layer


def by_formula(layer: AdaptedLinear, x: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """Each stacked layer by itself, in float64."""
    found, first = [], 0
    for number, rows in enumerate(layer.rows):
        own = slice(first, first + rows)
        low = x @ a[number * RANK : (number + 1) * RANK].T
        found.append(x @ layer.weight.double()[own].T + layer.bias.double()[own] + SCALE * low @ b[own].T)
        first += rows
    return torch.cat(found, dim=-1)


@pytest.mark.parametrize("rows", [ROWS, (32,)])
def test_results_and_gradients_are_those_of_the_formula(rows: tuple[int, ...]) -> None:
    layer = adapted(rows)
    x, g = torch.randn(3, 5, 16, requires_grad=True), torch.randn(3, 5, 32)
    layer(x).backward(g)
    exact = [one.detach().double().requires_grad_() for one in (x, layer.lora_a, layer.lora_b)]
    by_formula(layer, *exact).backward(g.double())
    for own, expected in zip((x, layer.lora_a, layer.lora_b), exact, strict=True):
        assert own.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(own.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)
    assert layer.weight.grad is None
    assert layer.bias.grad is None
    whole = merged(layer.weight, layer.lora_a, layer.lora_b, rows, SCALE)
    torch.testing.assert_close(nn.functional.linear(x, whole, layer.bias), layer(x), rtol=1e-4, atol=1e-5)


def test_merging_rounds_once_to_the_weights_own_format() -> None:
    layer = adapted()
    low = layer.weight.bfloat16()
    exact = (
        low.double() + SCALE * torch.block_diag(*layer.lora_b.double().split(ROWS)) @ layer.lora_a.double()
    )
    found = merged(low, layer.lora_a, layer.lora_b, ROWS, SCALE)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, exact.float().bfloat16())


@pytest.mark.parametrize("recipe", ["fp8", "nvfp4"])
def test_a_plan_runs_the_frozen_weights_products_and_no_wgrad(recipe: str) -> None:
    """The result is the planned layer's and, in the working format, what the adapter adds."""
    model = nn.Sequential(adapted())
    frozen = nn.Sequential(nn.Linear(16, 32))
    frozen[0].load_state_dict({name: getattr(model[0], name) for name in ("weight", "bias")})
    frozen[0].weight.requires_grad_(False)
    x = torch.randn(32, 16, requires_grad=True)
    added = model[0].added(x).detach()
    swap_in(model, recipe, choose=reference_only)
    swap_in(frozen, recipe, choose=reference_only)
    ran: Counter[str] = Counter()

    def count(execution: Execution) -> None:
        ran[execution.gemm] += 1

    with observing(count):
        y = model.eval()(x)
        y.sum().backward()
    assert ran == {"fprop": 1, "dgrad": 1}
    torch.testing.assert_close(y, frozen.eval()(x) + added)
    assert model[0].weight.grad is None
    low = x.detach() @ model[0].lora_a.detach()[:RANK].T
    torch.testing.assert_close(model[0].lora_b.grad[: ROWS[0]], SCALE * low.sum(0).expand(ROWS[0], -1))


class Products(TorchDispatchMode):
    """Counts matrix products by their outputs' width."""

    def __init__(self) -> None:
        super().__init__()
        self.widths: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in ("mm", "addmm", "linear"):
            self.widths.append(result.shape[-1])
        return result


def test_where_it_ends_what_runs_again_the_weights_product_is_left_out() -> None:
    layer, x = adapted((32,)), torch.randn(8, 16, requires_grad=True)
    y = run_again_before(layer, torch.tanh, x)
    with Products() as counted:
        y.sum().backward()
    # Again: those of A and B. Backward: two of each, and dX of the weight.
    assert counted.widths[:2] == [RANK, 32]
    assert len(counted.widths) == 2 + 2 + 2 + 1
    assert torch.autograd.grad(layer(torch.tanh(x)).sum(), x)[0].equal(x.grad)


@pytest.mark.parametrize("recipe", ["fp32", "fp8"])
def test_a_graph_gives_the_numbers_of_eager_mode(recipe: str) -> None:
    found = []
    for is_compiled in (False, True):
        model = nn.Sequential(adapted())
        swap_in(model, recipe, choose=reference_only)
        torch._dynamo.reset()
        run = torch.compile(model, backend="aot_eager", fullgraph=True) if is_compiled else model
        x = torch.linspace(-1, 1, 32 * 16).view(32, 16).requires_grad_()
        y = run(x)
        y.sum().backward()
        assert model[0].weight.grad is None
        found.append((y, x.grad, model[0].lora_a.grad, model[0].lora_b.grad))
    torch._dynamo.reset()
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
