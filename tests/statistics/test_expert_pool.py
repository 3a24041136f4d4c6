"""Statistics of routed experts: one pool for all experts of a layer, and gains along a stream that they add to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from parity import Case, batch_of, made
from torch import Tensor, nn

from scrimp.cycle import CycleSettings
from scrimp.data import Batch
from scrimp.gemm import LinearPrecision, observing, swap_in
from scrimp.gemm.grouped import GroupedLinear
from scrimp.gemm.layer import reference_only
from scrimp.optim import Optimizer
from scrimp.planner.precision import Budget
from scrimp.planner.precision.divergence import divergence
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.runtime import Executable
from scrimp.runtime.passes import run_passes
from scrimp.statistics.norms import NormWatch
from scrimp.training.precision.meter import PrecisionMeter
from scrimp.world import World

EXPERTS, INPUTS, OUTPUTS = 3, 48, 32
COUNTS = (20, 0, 5)
FORMATS = ("fp8", "nvfp4")


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


def watched(model: nn.Module, weight: Tensor) -> NormWatch:
    for parameter, part in zip(
        model.parameters(), weight.split(len(weight) // len(list(model.parameters())))
    ):
        parameter.data = part.clone()
    planned = swap_in(model, "fp32", seed=5, choose=reference_only)
    watch = NormWatch(planned.layers, FORMATS)
    generator = torch.Generator().manual_seed(1)
    with observing(watch, plain=True, every_run=True):
        for _ in range(2):
            x = torch.randn(sum(COUNTS), INPUTS, generator=generator).requires_grad_()
            model(x).backward(torch.randn(sum(COUNTS), OUTPUTS, generator=generator))
    rows = EXPERTS * OUTPUTS if isinstance(model, Grouped) else OUTPUTS
    watch.join(dict.fromkeys(planned.layers, (rows, INPUTS)))
    return watch


def test_experts_are_one_pool_and_those_without_tokens_count_as_the_others_do() -> None:
    weight = torch.randn(EXPERTS * OUTPUTS, INPUTS, generator=torch.Generator().manual_seed(0))
    pool, apart = watched(Grouped(), weight), watched(Apart(), weight)
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
    shape = pool.error_shape("down")
    assert shape is not None
    assert float(shape.square().mean()) == pytest.approx(1.0)
    assert not shape[OUTPUTS : 2 * OUTPUTS].any()


# -- a whole model -----------------------------------------------------------------------------


CASE = Case(preset="mixtral-8m", routers=3.0, settings={"model.num_layers": 2, "precision": "fp32"})


def trained(case: Case, world: World, readers: int) -> tuple[Executable, Optimizer]:
    """After two steps, its layers planned."""
    _, executable, optimizer, lr = made(case, world, readers)
    names = [name for name in executable.model.spec.layers() if name != "head"]
    precisions = dict.fromkeys(names, LinearPrecision.of("fp32"))
    planned = swap_in(executable.model, precisions, choose=reference_only)
    executable = dataclasses.replace(executable, planned=planned)
    rank, each = executable.mesh.data_rank, case.micro_batches * (readers if world.size == 1 else 1)
    for step in range(2):
        own = [batch_of(case, step, number) for number in range(rank * each, (rank + 1) * each)]
        every = [batch_of(case, step, number) for number in range(readers * case.micro_batches)]
        run_passes(executable, own, sum(batch.num_targets for batch in every), step=step)
        executable.add_up_copies(optimizer.gradients())
        optimizer.clip(optimizer.gradient_norm(), 1.0)
        optimizer.step(lr)
        optimizer.zero_grad()
    return executable, optimizer


def measured(case: Case, world: World, readers: int, gains: str = "auto") -> PrecisionProfile:
    """Statistics of one batch, which so many readers share."""
    executable, optimizer = trained(case, world, readers)
    first, size = executable.mesh.data_rank, 1 if world.size > 1 else readers

    def batches(step: int, count: int) -> Iterator[list[Batch]]:
        # Micro-batch m of rank r is number m R + r, as one process draws noise for it.
        numbers = [m * readers + r for m in range(case.micro_batches) for r in range(first, first + size)]
        yield [batch_of(case, step, number) for number in numbers]

    settings = CycleSettings(
        budget=Budget(fp4_flops=0.75), formats=FORMATS, first=2, every=0, delay=1, batches=1, gains=gains
    )
    meter = PrecisionMeter(settings, executable, optimizer, batches, device_name="cpu")
    return meter.measure(2, FORMATS)


@pytest.mark.slow
def test_few_passes_find_what_a_pass_for_each_layer_finds() -> None:
    ratios, exact = measured(CASE, World(), 1), measured(CASE, World(), 1, "exact")
    assert (ratios.gains, exact.gains) == ("ratios", "exact")
    assert ratios.experts == (1, 1, 8, 8) * 2
    assert ratios.met == (1, 1, 2, 2) * 2
    found, wanted = (divergence(one, one.batches[0]).update[..., -1] for one in (ratios, exact))
    ranks = [np.argsort(np.argsort(one.flatten())) for one in (found, wanted)]
    assert np.corrcoef(*ranks)[0, 1] > 0.85
    assert np.abs(np.log(found / wanted)).max() < np.log(2.5)
