"""Budgets in seconds and in speed-up: from the measured times of GEMMs to what planned GEMMs may take.

::

    seconds of a step  = other + GEMMs in the formats of now         other: measured before the first plan
    step_seconds t     : planned GEMMs may take t - other
    speedup s          : planned GEMMs may take (other + GEMMs in bf16) / s - other

The table is kept in the run's folder with the seconds that were left over, so that a resumed run plans by the same
figures. A budget that even the fastest formats miss is refused before the first step where that can be known.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scrimp.config import Config, decided
from scrimp.errors import PlanError
from scrimp.files import write_whole
from scrimp.gemm.doctor_report import surroundings_of
from scrimp.planner import linear_shapes
from scrimp.precision import parse_rules
from scrimp.profiler.gemm_times import GemmTimes, measure_gemm_times
from scrimp.train.precision_guard import Recipes

if TYPE_CHECKING:
    from scrimp.train.setup import Decisions

FILE = "gemm_times.json"
Array = NDArray[np.float64]


@dataclass(frozen=True)
class StepTimes:
    """What a step's time is made of."""

    table: GemmTimes
    micro_batches: int
    other: float | None = None
    """Seconds of a step beside the planned GEMMs; None until steps have been timed."""

    def seconds(self, shapes: Sequence[tuple[int, int]], formats: Sequence[str]) -> Array:
        """[L, 3, P] of a step."""
        return self.table.table(shapes, formats, self.micro_batches)

    def candidates(self, shapes: Sequence[tuple[int, int]], formats: Sequence[str]) -> NDArray[np.bool_]:
        """[L, 3, P], what the device gains by, or has units for."""
        return self.table.candidates(shapes, formats)


def wants_times(config: Config, device_type: str) -> bool:
    """Whether a budget is in seconds, or asks for the fastest plan on a device with units for low formats."""
    budget = config.budget
    by_harm = budget.divergence is not None and device_type == "cuda"
    return budget.step_seconds is not None or budget.speedup is not None or by_harm


def measured_times(
    decisions: Decisions, run_dir: Path, progress: Callable[[str, int, int], None]
) -> StepTimes:
    """The table of this run: the one in its folder if it is of this device and micro-batch, else measured (or from
    the user's cache) and left there."""
    train, path = decisions.config.train, run_dir / FILE
    per_step = decided(train.batch_tokens) // (decided(train.micro_batch) * decided(train.sequence))
    if path.exists():
        try:
            kept = json.loads(path.read_text(encoding="utf-8"))
            other = None if kept["other"] is None else float(kept["other"])
            if other is not None and not 0 <= other < math.inf:
                raise ValueError(f"{other} seconds")
            table = GemmTimes.from_json(json.dumps(kept["table"]))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise PlanError(
                f"{path} is damaged", got=error, do="delete it: times are measured again"
            ) from None
        # A resumed run may have another micro-batch, and another device.
        here = surroundings_of(decisions.device.torch_device).device
        if (table.tokens, table.device) == (decisions.micro_batch_tokens, here):
            return StepTimes(table, per_step, other)
    return fresh_times(decisions, progress)


def fresh_times(decisions: Decisions, progress: Callable[[str, int, int], None]) -> StepTimes:
    """The table of a run that has none yet: measured, or from the user's cache."""
    config, train = decisions.config, decisions.config.train
    per_step = decided(train.batch_tokens) // (decided(train.micro_batch) * decided(train.sequence))
    shapes = [shape for name, shape in linear_shapes(decisions.architecture).items() if name != "head"]
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


def gemm_seconds(times: StepTimes, shapes: dict[str, tuple[int, int]], recipes: Recipes) -> float:
    """Of a step's planned GEMMs in given formats."""
    total = 0.0
    for layer, row in recipes.items():
        names = tuple(dict.fromkeys(row))
        table = times.seconds([shapes[layer]], names)[0]
        total += sum(float(table[j, names.index(name)]) for j, name in enumerate(row))
    return total


def other_than_gemms(steps: Sequence[float], gemms: float) -> float:
    """Seconds of a step beside its planned GEMMs, by the median of measured steps."""
    return max(0.0, statistics.median(steps) - gemms)


def allowed_seconds(config: Config, other: float, in_compute: float) -> float:
    """What the planned GEMMs of a step may take."""
    if config.budget.step_seconds is not None:
        return config.budget.step_seconds - other
    return (other + in_compute) / decided(config.budget.speedup) - other


def refuse_unreachable_speed(config: Config, times: StepTimes, shapes: dict[str, tuple[int, int]]) -> None:
    """Refuse a budget that no choice of formats can keep, whatever else a step does.

    Raises:
        PlanError: with the best that can be reached.
    """
    formats = tuple(dict.fromkeys([*config.candidates, config.precision_rules.compute]))
    sizes = list(shapes.values())
    table = np.where(times.candidates(sizes, formats), times.seconds(sizes, formats), np.inf)
    fastest = float(table.min(axis=2).sum())
    in_compute = float(table[:, :, formats.index(config.precision_rules.compute)].sum())
    wanted = config.budget.step_seconds
    if wanted is not None and wanted < fastest:
        raise PlanError(
            "budget.step_seconds cannot be reached on this device",
            got=f"{wanted:g} s",
            expected=f"at least {fastest:.3g} s, which the GEMMs of the blocks alone take in their fastest formats",
            do="raise it, or lower train.batch_tokens",
        )
    speedup = config.budget.speedup
    if speedup is not None and speedup > in_compute / fastest * (1 + 1e-9):
        slow = f"{', '.join(sorted(times.table.emulated))} are emulated here" if times.table.emulated else ""
        raise PlanError(
            "budget.speedup cannot be reached on this device",
            got=f"{speedup:g}",
            expected=f"at most {in_compute / fastest:.3f}, if a step were GEMMs alone"
            + (f": {slow}" if slow else ""),
            do="lower it, or plan by a share of FLOPs with --budget.fp4-flops",
        )


def shapes_of(decisions: Decisions) -> dict[str, tuple[int, int]]:
    """Planned layer to (outputs, inputs)."""
    sizes = linear_shapes(decisions.architecture)
    return {layer: sizes[layer.split(".", 2)[-1]] for layer in decisions.plan.gemms if layer != "head"}
