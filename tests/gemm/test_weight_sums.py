"""Products that add to the sums of weights' gradients: which do, what they add, hooks, regions that run again, compiled."""

from __future__ import annotations

import copy

import pytest
import torch
from planned_cases import watching_gemms
from test_weight_gradients import Products
from torch import Tensor, nn

from scrimp.formats import Noise
from scrimp.gemm import SummedLinear, run_again, swap_in
from scrimp.gemm.weight_sums import Product, WeightSum, adding, set_sum


class Sum(WeightSum):
    """A sum in float32 that remembers how it was made."""

    def __init__(self, parameter: Tensor) -> None:
        super().__init__(torch.empty(0, dtype=torch.float32, device=parameter.device))
        self.total: Tensor | None = None
        self.added, self.made = 0, 0

    def add(self, product: Product) -> None:
        if self.total is None or not product.adds(self.dtype):
            self.add_made(product.made())
        else:
            product.add(self.total, None)
            self.added += 1

    def add_made(self, gradient: Tensor) -> None:
        self.total = gradient.float() + (0 if self.total is None else self.total)
        self.made += 1


def sums_of(model: nn.Module) -> dict[str, Sum]:
    """A sum for each matrix."""
    found = {name: Sum(one) for name, one in model.named_parameters() if one.dim() == 2}
    for name, total in found.items():
        set_sum(model.get_parameter(name), total)
    return found


class Net(nn.Module):
    """Two layers, of which backward may make the first one again."""

    def __init__(self, again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.second = SummedLinear(6, 10), SummedLinear(10, 4, bias=False)
        self.again = again

    def body(self, x: Tensor) -> Tensor:
        return self.second(torch.nn.functional.silu(self.first(x)))

    def forward(self, x: Tensor) -> Tensor:
        return run_again(self.body, x, last=self.second) if self.again else self.body(x)


BATCHES = [torch.randn(2, 9, 6, generator=torch.Generator().manual_seed(n)) for n in range(4)]


def step(model: nn.Module, wanted: bool = True) -> list[Tensor]:
    """Gradients of the inputs."""
    with adding(wanted):
        found = []
        for batch in BATCHES:
            x = batch.clone().requires_grad_()
            model(x).square().sum().backward()
            found.append(x.grad)
    return found


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_sums_are_those_of_autograd(again: bool, compiled: bool) -> None:
    plain, summed = Net(again), Net(again)
    totals = sums_of(summed)
    if compiled:
        summed.compile(backend="aot_eager", fullgraph=True)
    for one, other in zip(step(plain, False), step(summed), strict=True):
        torch.testing.assert_close(one, other)
    for name, total in totals.items():
        assert (total.made, total.added) == (1, 3)
        assert summed.get_parameter(name).grad is None
        torch.testing.assert_close(total.total, plain.get_parameter(name).grad)
    torch.testing.assert_close(summed.first.bias.grad, plain.first.bias.grad)
