"""Times of GEMMs for budgets in seconds and in speed-up: measured before the first step, kept in the run's folder.

The table is kept with the seconds of a step beside the GEMMs, so that a resumed run plans by the same figures
(`scrimp.cycle.step_times`).

Checked  tests/training/precision/test_precision_times.py
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from scrimp.config import ResolvedConfig
from scrimp.cycle.step_times import StepTimes
from scrimp.errors import PlanError
from scrimp.files import write_whole
from scrimp.gemm.doctor_report import surroundings_of
from scrimp.json_files import NotNegative, read_json
from scrimp.models import HEAD, spec_of
from scrimp.precision import parse_rules
from scrimp.profiler.gemm_times import GemmTimes, measure_gemm_times

if TYPE_CHECKING:
    from scrimp.training.setup import Decisions

FILE = "gemm_times.json"


@dataclass(frozen=True)
class _Kept:
    """The file."""

    table: msgspec.Raw
    other: NotNegative | None


def wants_times(config: ResolvedConfig, device_type: str) -> bool:
    """Whether a budget is in seconds, or asks for the fastest plan on a device with units for low formats."""
    budget = config.budget
    by_harm = budget.divergence is not None and device_type == "cuda"
    return budget.step_seconds is not None or budget.speedup is not None or by_harm


def measured_times(
    decisions: Decisions, run_dir: Path, progress: Callable[[str, int, int], None]
) -> StepTimes:
    """The table of this run: the one in its folder if it is of this device and micro-batch, else measured (or from
    the user's cache) and left there. The first of several ranks measures for all."""
    return _once(decisions, lambda: _measured(decisions, run_dir, progress))


def _measured(decisions: Decisions, run_dir: Path, progress: Callable[[str, int, int], None]) -> StepTimes:
    path, per_step = run_dir / FILE, decisions.config.micro_batches
    if path.exists():
        do = "delete it: times are measured again"
        kept = read_json(path, _Kept, error=PlanError, do=do, at_most=2**24)
        table = GemmTimes.from_json(bytes(kept.table), origin=f"{path}: table")
        # A resumed run may have another micro-batch, and another device.
        here = surroundings_of(decisions.device.torch_device).device
        if (table.tokens, table.device) == (decisions.micro_batch_tokens, here):
            return StepTimes(table, per_step, kept.other)
    return _fresh(decisions, progress)


def fresh_times(decisions: Decisions, progress: Callable[[str, int, int], None]) -> StepTimes:
    """The table of a run that has none yet: measured, or from the user's cache. The first of several ranks measures
    for all."""
    return _once(decisions, lambda: _fresh(decisions, progress))


def _once(decisions: Decisions, make: Callable[[], StepTimes]) -> StepTimes:
    return decisions.world.once(
        "timing GEMMs",
        make,
        write=lambda times: [times.table.to_json(), times.micro_batches, times.other],
        read=lambda told: StepTimes(GemmTimes.from_json(told[0], origin="the first rank's"), *told[1:]),
    )


def _fresh(decisions: Decisions, progress: Callable[[str, int, int], None]) -> StepTimes:
    config, train = decisions.config, decisions.config.train
    per_step = config.micro_batches
    linears = spec_of(decisions.architecture).shapes
    shapes = [(one.outputs, one.inputs) for name, one in linears.items() if name != HEAD]
    rules = config.precision_rules
    pinned = parse_rules(config.precision).pinned(list(shapes_of(decisions)))
    fixed = [name for gemms in pinned.values() for name in gemms.values()]
    table = measure_gemm_times(
        shapes,
        tuple(dict.fromkeys([*config.candidates, config.snip.start, *fixed])),
        tokens=decisions.micro_batch_tokens,
        device=decisions.device.torch_device,
        compute=rules.compute,
        parameters=train.parameters,
        choose=decisions.backends(),
        progress=progress,
    )
    return StepTimes(table, per_step)


def keep_times(run_dir: Path, times: StepTimes) -> None:
    """Leave the table and the other seconds in the run's folder."""
    record = {"table": json.loads(times.table.to_json()), "other": times.other}
    write_whole(run_dir / FILE, json.dumps(record) + "\n")


def shapes_of(decisions: Decisions) -> dict[str, tuple[int, int]]:
    """Planned layer to (outputs, inputs)."""
    spec = spec_of(decisions.architecture)
    linears = {layer: spec.linear(layer) for layer in decisions.plan.gemms if layer != HEAD}
    return {layer: (linear.outputs, linear.inputs) for layer, linear in linears.items()}
