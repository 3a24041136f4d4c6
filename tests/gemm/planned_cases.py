"""Layers, batches and watchers shared by the tests of planned layers; one CPU thread, the reference back end."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from scrimp.gemm.convert import PlannedModel, swap_in
from scrimp.gemm.layer import reference_only
from scrimp.gemm.observe import Execution, observing
from scrimp.precision import RECIPES, LinearPrecision

QUANTIZED = tuple(name for name, entry in RECIPES.items() if entry.fprop is not None)
"""Recipes that quantize."""


def same(recipe: str, saved: str | None = None) -> LinearPrecision:
    """One recipe for all three GEMMs."""
    return LinearPrecision(recipe, recipe, recipe, saved or recipe)


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(
    inputs: int = 100, outputs: int = 37, *, bias: bool = True, dtype: torch.dtype = torch.float32
) -> nn.Linear:
    """An ordinary layer, always the same one."""
    layer = nn.Linear(inputs, outputs, bias=bias)
    layer.weight.data = random(outputs, inputs, seed=1) / inputs**0.5
    if bias:
        layer.bias.data = random(outputs, seed=2)
    return layer.to(dtype)


def planned(
    precision: LinearPrecision | str,
    inputs: int = 100,
    outputs: int = 37,
    *,
    bias: bool = True,
    dtype: torch.dtype = torch.float32,
) -> nn.Linear:
    """The same layer under a plan, at step 1."""
    layer = linear(inputs, outputs, bias=bias, dtype=dtype)
    start(layer, precision)
    return layer


def start(model: nn.Module, precision: LinearPrecision | str) -> PlannedModel:
    """Swap in the reference back end and set the clock to step 1."""
    model_plan = swap_in(model, precision, seed=5, choose=reference_only)
    model_plan.clock.begin(1)
    return model_plan


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = nn.functional.silu(self.up(self.norm(x)))
        return x + self.down(hidden)


def blocks(count: int = 4, width: int = 64) -> nn.Sequential:
    """Equal blocks, always the same ones."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(*[Block(width) for _ in range(count)])


@dataclass
class Passed:
    """What one forward and backward pass gave."""

    y: Tensor
    x_grad: Tensor
    weight_grad: Tensor
    bias_grad: Tensor | None

    def equals(self, other: Passed) -> bool:
        """Bit for bit."""
        mine, theirs = vars(self).values(), vars(other).values()
        return all(
            (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
            for a, b in zip(mine, theirs, strict=True)
        )


def run(layer: nn.Module, x: Tensor, seed: int = 9, *, weight: nn.Linear | None = None) -> Passed:
    """Forward, and backward from a random gradient of the result; gradients start from nothing."""
    owner = weight if weight is not None else layer
    assert isinstance(owner, nn.Linear)
    x = x.detach().requires_grad_()
    owner.zero_grad()
    y = layer(x)
    y.backward(random(*y.shape, seed=seed, dtype=y.dtype))
    assert x.grad is not None
    assert owner.weight.grad is not None
    bias_grad = None if owner.bias is None else owner.bias.grad
    return Passed(y.detach(), x.grad, owner.weight.grad, bias_grad)


def run_model(model: nn.Module, x: Tensor, seed: int = 9) -> list[Tensor]:
    """Result, gradient of the input, and gradients of the parameters in order."""
    x = x.detach().requires_grad_()
    model.zero_grad()
    y = model(x)
    y.backward(random(*y.shape, seed=seed, dtype=y.dtype))
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_all_equal(first: list[Tensor], second: list[Tensor]) -> None:
    """Bit for bit."""
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


@dataclass
class Kept:
    """Tensors that autograd kept for the backward pass, without parameters."""

    tensors: list[Tensor] = field(default_factory=list)

    def nbytes(self) -> dict[torch.dtype, int]:
        """Bytes by type."""
        found: dict[torch.dtype, int] = {}
        for tensor in self.tensors:
            found[tensor.dtype] = found.get(tensor.dtype, 0) + tensor.nbytes
        return found


@contextlib.contextmanager
def watching_saved() -> Iterator[Kept]:
    """Collects what is saved inside."""
    kept = Kept()

    def pack(tensor: Tensor) -> Tensor:
        # Empty ones take nothing: torch 2.11's checkpoints keep one.
        if not isinstance(tensor, nn.Parameter) and tensor.numel():
            kept.tensors.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield kept


@contextlib.contextmanager
def watching_gemms() -> Iterator[list[Execution]]:
    """Collects the GEMMs that run inside."""
    executions: list[Execution] = []
    with observing(executions.append):
        yield executions
