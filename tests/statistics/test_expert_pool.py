"""Statistics of routed experts: one pool for all experts of a layer, and gains along a stream that they add to."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from parity import Case
from statistics_of_runs import FORMATS, measured
from torch import Tensor, nn

from scrimp.gemm import observing, swap_in
from scrimp.gemm.grouped import GroupedLinear
from scrimp.gemm.layer import reference_only
from scrimp.planner.precision.divergence import divergence
from scrimp.statistics.loss_changes import LossChanges
from scrimp.statistics.norms import NormWatch
from scrimp.world import World

EXPERTS, INPUTS, OUTPUTS = 3, 48, 32
COUNTS = (20, 0, 5)


class Grouped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = GroupedLinear(EXPERTS, INPUTS, OUTPUTS)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(x, torch.tensor(COUNTS).cumsum(0).int())


class Apart(nn.Module):
    """The same experts as layers of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(INPUTS, OUTPUTS, bias=False) for _ in range(EXPERTS))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([e(run) for e, run in zip(self.down, x.split(COUNTS), strict=True) if len(run)])


def watched(model: nn.Module, weight: Tensor) -> tuple[NormWatch, dict[str, np.ndarray]]:
    """What was seen of two micro-batches, and the changes of the loss by layer."""
    parameters = list(model.parameters())
    for parameter, part in zip(parameters, weight.split(len(weight) // len(parameters)), strict=True):
        parameter.data = part.clone()
    planned = swap_in(model, "fp32", seed=5, choose=reference_only)
    watch = NormWatch(planned.layers, FORMATS)
    generator = torch.Generator().manual_seed(1)
    changes = LossChanges(planned.layers, FORMATS)
    with observing(watch, plain=True, every_run=True), observing(changes, plain=True, every_run=True):
        for _ in range(2):
            x = torch.randn(sum(COUNTS), INPUTS, generator=generator).requires_grad_()
            model(x).backward(torch.randn(sum(COUNTS), OUTPUTS, generator=generator))
    rows = EXPERTS * OUTPUTS if isinstance(model, Grouped) else OUTPUTS
    watch.join(dict.fromkeys(planned.layers, (rows, INPUTS)))
    layers = list(planned.layers)
    return watch, dict(zip(layers, changes.join(layers), strict=True))


def test_experts_are_one_pool_and_those_without_tokens_count_as_the_others_do() -> None:
    weight = torch.randn(EXPERTS * OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    (pool, pooled_changes), (apart, changes) = watched(Grouped(), weight), watched(Apart(), weight)
    assert pool.tokens["down"] == 2 * sum(COUNTS)
    busy = [f"down.{expert}" for expert, count in enumerate(COUNTS) if count]
    for name in ("x", "y", "g", "gx", "w"):
        times = EXPERTS / len(busy) if name == "w" else 1.0
        wanted = times * sum(apart.squares[layer, name] for layer in busy)
        assert pool.squares["down", name] == pytest.approx(wanted, rel=1e-5), name
    of_weights = {("fprop", 1), ("dgrad", 1)}
    for _, gemm, recipe, operand in list(pool.errors):
        keys = [(layer, gemm, recipe, operand) for layer in busy]
        times = EXPERTS / len(busy) if (gemm, operand) in of_weights else 1.0
        wanted = times * sum(apart.errors[key] for key in keys)
        assert pool.errors["down", gemm, recipe, operand] == pytest.approx(wanted, rel=1e-5)
        wanted = sum(apart.results[key] for key in keys)
        assert pool.results["down", gemm, recipe, operand] == pytest.approx(wanted, rel=1e-5)
    np.testing.assert_allclose(pooled_changes["down"], sum(changes[layer] for layer in busy), rtol=1e-5)
    assert np.abs(pooled_changes["down"]).max() > 0
    shape = pool.error_shape("down")
    assert shape is not None
    assert float(shape.square().mean()) == pytest.approx(1.0)
    assert not shape[OUTPUTS : 2 * OUTPUTS].any()


# -- a whole model -----------------------------------------------------------------------------


CASE = Case(preset="mixtral-8m", routers=3.0, settings={"model.num_layers": 2, "precision": "fp32"})


@pytest.mark.slow
def test_few_passes_find_what_a_pass_for_each_layer_finds() -> None:
    ratios, exact = measured(CASE, World(), 1), measured(CASE, World(), 1, "exact")
    assert (ratios.gains, exact.gains) == ("ratios", "exact")
    assert ratios.experts == (1, 1, 8, 8) * 2
    assert ratios.met == (1, 1, 2, 2) * 2
    found, wanted = (divergence(one, one.batches[0]).update[..., -1] for one in (ratios, exact))
    ranks = [np.argsort(np.argsort(one.flatten())) for one in (found, wanted)]
    assert np.corrcoef(*ranks)[0, 1] > 0.85
    # Of dgrad of attention's out; what fprop does is held against real errors either way.
    assert np.abs(found - wanted).max() < 0.3 * wanted.max()
