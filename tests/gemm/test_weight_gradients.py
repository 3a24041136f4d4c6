"""Gradients of weights that wait: those of one backward pass, each product once."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from typing import Any

import pytest
import torch
from planned_cases import start, watching_gemms
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.gemm.convert import split_products
from scrimp.gemm.split_linear import SplitLinear
from scrimp.gemm.weight_gradients import WeightGradients
from scrimp.precision import GEMMS, LinearPrecision

PRODUCTS = {"mm", "addmm", "linear"}


class Products(TorchDispatchMode):
    """The shapes of all products."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: Counter[tuple[int, ...]] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func.overloadpacket.__name__ in PRODUCTS:
            self.shapes[tuple(result.shape)] += 1
        return result


def layers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 5), nn.SiLU(), nn.Linear(5, 7, bias=False), nn.LayerNorm(7))
    split = copy.deepcopy(plain)
    split_products(split)
    assert [type(one) for one in split][::2] == [SplitLinear, SplitLinear]
    return plain, split


@pytest.mark.parametrize("autocast", [False, True])
def test_gradients_are_those_of_torchs_layer(autocast: bool) -> None:
    plain, split = layers()
    x, probe = torch.randn(2, 11, 3), torch.randn(2, 11, 7)
    found = []
    for model in (plain, split):
        own = x.clone().requires_grad_()
        later = WeightGradients()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            y = model(own)
        for _ in range(2):  # gradients add up
            with later.waiting():
                (y.float() * probe).sum().backward(retain_graph=True)
            later.make()
        found.append([own.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(
            one, other, rtol=5e-2 if autocast else 1e-6, atol=1e-1 if autocast else 1e-6
        )


def test_each_product_runs_once_and_those_of_weights_when_they_are_asked_for() -> None:
    _, split = layers()
    x, later = torch.randn(11, 3, requires_grad=True), WeightGradients()
    seen = []
    split[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    with Products() as forward:
        y = split(x)
    with Products() as inputs, later.waiting():
        y.sum().backward()
    assert split[0].weight.grad is None
    assert split[0].bias.grad is not None
    assert seen == []
    with Products() as weights:
        later.make()
    assert forward.shapes == {(11, 5): 1, (11, 7): 1}
    assert inputs.shapes == {(11, 5): 1, (11, 3): 1}
    assert weights.shapes == {(5, 3): 1, (7, 5): 1}
    assert seen == [torch.Size([5, 3])]
    with Products() as again:
        later.make()
    assert not again.shapes


@pytest.mark.parametrize("plain", [False, True])
def test_planned_products_wait_too_and_their_numbers_are_those_of_one_pass(plain: bool) -> None:
    _, split = layers()
    whole, x = copy.deepcopy(split), torch.randn(11, 3)
    recipe: Any = (
        LinearPrecision.of("fp32") if plain else LinearPrecision("fp8_row", "mxfp4", "nvfp4", "nvfp4")
    )
    found = []
    for model, waits in ((split, True), (whole, False)):
        plan, later, own = start(model, recipe), WeightGradients(), x.clone().requires_grad_()
        with watching_gemms() as ran:
            y = model(own)
            with later.waiting() if waits else contextlib.nullcontext():
                y.square().sum().backward()
            assert (model[0].weight.grad is None) == waits
            assert [one.gemm for one in ran].count("wgrad") == (0 if waits or plain else 2)
            later.make()
        once = {} if plain else {(name, gemm): 1 for name in plan.layers for gemm in GEMMS}
        assert Counter((one.layer, one.gemm) for one in ran) == once
        found.append([own.grad, *(p.grad for p in model.parameters())])
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
    plan.swap_out()
    assert type(whole[0]) is SplitLinear


def test_without_waiting_all_are_made_at_once() -> None:
    _, split = layers()
    split(torch.randn(11, 3, requires_grad=True)).sum().backward()
    assert split[0].weight.grad is not None
