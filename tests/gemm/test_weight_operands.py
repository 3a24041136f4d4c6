"""Weights that are quantized once for several micro-batches: equal bits, fewer quantizations, nothing stale."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from planned_cases import blocks
from torch import Tensor, nn

from scrimp.gemm import PlannedLayer, swap_in
from scrimp.gemm.backends import BACKENDS, Backend
from scrimp.gemm.problem import Use
from scrimp.gemm.weight_operands import keeping
from scrimp.precision import LinearPrecision

BATCHES = [torch.randn(24, 64, generator=torch.Generator().manual_seed(n)) for n in range(3)]
RECIPES = ["fp8", "fp8_tensor", "nvfp4", "mxfp8", "int8_fallback", "int8_hadamard"]
LAYERS = 4


def planned(recipe: str, backend: str) -> nn.Sequential:
    model = blocks(LAYERS // 2)
    swap_in(model, recipe, seed=5, choose=lambda *_: BACKENDS[backend]).clock.begin(1)
    return model


@contextmanager
def counting(model: nn.Module, backend: str) -> Iterator[Counter[bool]]:
    """How often weights, and all else, become operands."""
    kind, found = type(BACKENDS[backend]), Counter()
    weights = {p.data_ptr() for p in model.parameters()}
    prepare = kind.prepare

    def counted(self: Backend, x: Tensor, use: Use) -> object:
        found[x.data_ptr() in weights] += 1
        return prepare(self, x, use)

    with patch.object(kind, "prepare", counted):
        yield found


def passes(model: nn.Module, *, kept: bool) -> list[Tensor]:
    """Results and gradients of a step of three micro-batches."""
    found = []
    with keeping(kept) as operands:
        for batch in BATCHES:
            x = batch.clone().requires_grad_()
            y = model(x)
            y.square().sum().backward()
            found += [y.detach(), x.grad]
        assert len(operands) == (2 * LAYERS if kept else 0)
    assert not operands
    return found + [p.grad for p in model.parameters()]


@pytest.mark.parametrize("backend", ["reference", "numba"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_bits_are_those_of_weights_that_are_quantized_each_time(recipe: str, backend: str) -> None:
    if BACKENDS[backend].refusal("fprop", recipe, None, torch.device("cpu")) is not None:
        pytest.skip(f"{backend} does not run {recipe}")
    apart, kept = planned(recipe, backend), planned(recipe, backend)
    expected = passes(apart, kept=False)
    with counting(kept, backend) as counts:
        found = passes(kept, kept=True)
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert counts[True] == 2 * LAYERS
    with counting(apart, backend) as counts:
        passes(apart, kept=False)
    assert counts[True] == 2 * LAYERS * len(BATCHES)


def test_a_weight_that_changes_inside_is_quantized_again() -> None:
    model, moved = planned("fp8", "reference"), planned("fp8", "reference")
    with torch.no_grad():
        for parameter in moved.parameters():
            parameter.mul_(1.5)
    with keeping():
        model(BATCHES[0])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5)
        found = model(BATCHES[0])
    assert torch.equal(found, moved(BATCHES[0]))


def test_casts_to_high_precision_are_not_kept() -> None:
    model = planned("bf16", "reference")
    with keeping() as operands:
        model(BATCHES[0].requires_grad_()).sum().backward()
        assert not operands


def test_operands_of_experts_are_not_kept() -> None:
    layer = PlannedLayer("experts", LinearPrecision.of("fp8"))
    member = PlannedLayer("experts.0", LinearPrecision.of("fp8"), group=layer)
    assert member.product("fprop") is None
    assert layer.product("fprop") != layer.product("dgrad")
