"""Statistics of a run's model after two steps, on ranks and in one process that does the work of all."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from parity import ROWS, SEQUENCE, Case, batch_of, made

from scrimp.cycle import CycleSettings
from scrimp.data import Batch
from scrimp.gemm import LinearPrecision, swap_in
from scrimp.gemm.layer import reference_only
from scrimp.optim import Optimizer
from scrimp.planner.precision import Budget
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.runtime import Executable
from scrimp.runtime.passes import run_passes
from scrimp.runtime.pieces import share_formats
from scrimp.training.precision.meter import PrecisionMeter
from scrimp.world import World

FORMATS = ("fp8", "nvfp4")


def trained(case: Case, world: World, readers: int) -> tuple[Executable, Optimizer]:
    """After two steps, its layers planned."""
    _, executable, optimizer, lr = made(case, world, readers)
    here = dict(executable.model.named_modules())
    names = [name for name in executable.model.spec.layers() if name != "head" and name in here]
    precisions = dict.fromkeys(names, LinearPrecision.of("fp32"))
    planned = swap_in(executable.model, precisions, choose=reference_only)
    share_formats(executable.model, planned, executable.mesh)
    executable = dataclasses.replace(executable, planned=planned)
    rank, each = executable.mesh.data_rank, case.micro_batches * (readers if world.size == 1 else 1)
    for step in range(2):
        own = [batch_of(case, step, number) for number in range(rank * each, (rank + 1) * each)]
        every = [batch_of(case, step, number) for number in range(readers * case.micro_batches)]
        run_passes(executable, own, sum(batch.num_targets for batch in every), step=step)
        executable.add_up_copies(optimizer.gradients)
        optimizer.clip(optimizer.gradient_norm(), 1.0)
        optimizer.step(lr)
        optimizer.zero_grad()
    return executable, optimizer


def measured(
    case: Case, world: World, readers: int, gains: str = "auto", formats: Sequence[str] = FORMATS
) -> PrecisionProfile:
    """Statistics of one batch, which so many readers share."""
    executable, optimizer = trained(case, world, readers)
    first, size = executable.mesh.data_rank, 1 if world.size > 1 else readers

    def batches(step: int, count: int) -> Iterator[list[Batch]]:
        # Micro-batch m of rank r is number m R + r, as one process draws noise for it.
        numbers = [m * readers + r for m in range(case.micro_batches) for r in range(first, first + size)]
        yield [batch_of(case, step, number) for number in numbers]

    settings = CycleSettings(
        budget=Budget(fp4_flops=0.75),
        formats=tuple(formats),
        first=2,
        every=0,
        delay=1,
        batches=1,
        gains=gains,
    )
    row = first * case.micro_batches * ROWS * SEQUENCE
    meter = PrecisionMeter(settings, executable, optimizer, batches, device_name="cpu", first_row=row)
    return meter.measure(2, formats)
