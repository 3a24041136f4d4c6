"""First-order changes of the loss by real errors, against derivatives of a loss to which the errors are added."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import scrimp
from scrimp.formats.hadamard import rotate
from scrimp.gemm import PlannedLayer, PlannedModel, observing, swap_in
from scrimp.gemm.layer import reference_only
from scrimp.gemm.problem import Use
from scrimp.planner.precision.profile import LOSS_PARTS
from scrimp.precision import LinearPrecision
from scrimp.statistics.loss_changes import LossChanges
from scrimp.statistics.ranks import Ranks

INPUTS, WIDTH, CLASSES = 32, 48, 10
RECIPES = ["bf16", "fp8", "nvfp4", "int8_hadamard"]


class Chain(nn.Module):
    """Three layers: the first reads what needs no gradient."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [INPUTS, WIDTH, WIDTH, CLASSES]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in itertools.pairwise(sizes))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[:-1]:
            x = F.silu(layer(x))
        result: Tensor = self.layers[-1](x)
        return result


def micro_batches(tokens: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for count in tokens:
        x = torch.randn(count, INPUTS, generator=generator) * torch.randn(INPUTS, generator=generator).exp()
        yield x, torch.randint(CLASSES, (count,), generator=generator)


def measured(planned: PlannedModel, model: nn.Module, tokens: list[int]) -> np.ndarray:
    """[L, P, 16], by the observer."""
    changes = LossChanges(planned.layers, RECIPES)
    with observing(changes, plain=True):
        for x, y in micro_batches(tokens):
            F.cross_entropy(model(x), y).backward()
    return changes.join(list(planned.layers))


def differentiated(
    layers: Mapping[str, PlannedLayer], model: Chain, tokens: list[int], recipe: str
) -> np.ndarray:
    """[L, 16], derivatives of the loss in float64 by shares of the errors that are added to each layer's results."""
    found = np.zeros((len(model.layers), LOSS_PARTS))
    model = model.double()
    for number, (x, y) in enumerate(micro_batches(tokens)):
        shares = torch.zeros(len(model.layers), LOSS_PARTS, dtype=torch.float64, requires_grad=True)
        pieces = torch.arange(len(x)) * LOSS_PARTS // len(x)
        of_tokens = shares[:, (LOSS_PARTS * number + pieces) // len(tokens)]
        with ExitStack() as hooks:
            for layer, planned, share in zip(model.layers, layers.values(), of_tokens, strict=True):
                hook = functools.partial(disturbed, planned, recipe, share)
                hooks.callback(layer.register_forward_hook(hook).remove)
            F.cross_entropy(model(x.double()), y).backward()
        assert shares.grad is not None
        found += shares.grad.numpy()
    return found


def disturbed(
    planned: PlannedLayer,
    recipe: str,
    shares: Tensor,
    module: nn.Module,
    inputs: tuple[Tensor],
    result: Tensor,
) -> Tensor:
    """A layer's result, and of each token its share of the error."""
    x, w = inputs[0].detach(), module.weight.detach()
    of_x, of_w = planned.uses("fprop", planned.clock.now, recipe)
    return result + shares.unsqueeze(1) * (codes(x, of_x) @ codes(w, of_w).T - x @ w.T)


def codes(value: Tensor, use: Use) -> Tensor:
    """What the operand stands for, in float64."""
    assert use.operand is not None
    found = use.codes(value.float()).dequantize()
    if use.operand.hadamard:
        found = rotate(found, use.axis, inverse=True)[: value.shape[0], : value.shape[1]]
    return found.double()


@pytest.mark.parametrize("tokens", [[64], [64, 64], [7, 40]], ids=str)
def test_changes_are_derivatives_of_the_loss(tokens: list[int]) -> None:
    torch.manual_seed(0)
    model = Chain()
    planned = swap_in(model, "fp32", seed=5, choose=reference_only)
    found = measured(planned, model, tokens)
    layers = dict(planned.layers)
    planned.swap_out()
    assert not found[:, 0].any()
    for number, recipe in enumerate(RECIPES[1:], start=1):
        expected = differentiated(layers, model, tokens, recipe)
        size = np.abs(expected).max()
        assert size > 0
        # A number between two codes may fall to either side, in one precision and the other.
        np.testing.assert_allclose(found[:, number], expected, rtol=1e-3, atol=0.02 * size)


def test_the_sum_foretells_what_the_format_does_to_the_loss() -> None:
    torch.manual_seed(1)
    model = Chain()
    planned = swap_in(model, "fp32", choose=reference_only)
    x, y = next(micro_batches([256]))
    foretold = measured(planned, model, [256])[:, RECIPES.index("fp8")].sum(1)

    def loss() -> float:
        with torch.no_grad():
            return float(F.cross_entropy(model(x).double(), y))

    clean = loss()
    for name, expected in zip(planned.layers, foretold, strict=True):
        planned.replan({name: LinearPrecision("fp8", "fp32", "fp32", "fp32")})
        assert loss() - clean == pytest.approx(expected, rel=0.1, abs=1e-5)
        planned.replan({name: LinearPrecision.of("fp32")})


def test_measuring_gives_the_changes_of_each_batch() -> None:
    torch.manual_seed(2)
    model = Chain()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    formats = ("nvfp4", "bf16", "fp8")
    batches = list(micro_batches([64, 80]))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1])

    found = scrimp.measure(model, optimizer, batches, loss, formats=formats)
    planned = swap_in(model, "fp32", choose=reference_only)
    for batch, (x, y) in zip(found.batches, batches, strict=True):
        changes = LossChanges(planned.layers, formats)
        with observing(changes, plain=True):
            loss(model, (x, y)).backward()
        np.testing.assert_allclose(batch.losses, changes.join(found.layers), rtol=1e-4, atol=1e-7)
        assert batch.losses[:, 0].all()
        assert not batch.losses[:, 1].any()


def test_micro_batches_of_ranks_lie_in_parts_one_behind_the_other() -> None:
    ranks = [Ranks(data_size=2, data_rank=rank) for rank in range(2)]
    found = [
        list(ranks[draw % 2].parts(draw // 2, 3, 4)) for draw in range(6)
    ]  # six micro-batches of four pieces
    assert found == [[0, 0, 0, 0], [0, 0, 1, 1], [1, 1, 1, 1], [2, 2, 2, 2], [2, 2, 3, 3], [3, 3, 3, 3]]
    assert list(Ranks().parts(0, 1, 4)) == [0, 1, 2, 3]
