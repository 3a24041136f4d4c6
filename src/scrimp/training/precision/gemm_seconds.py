"""Budgets in seconds and in speed-up: from the measured times of GEMMs to what planned GEMMs may take.

::

    seconds of a step  = other + GEMMs in the formats of now         other: measured before the first plan

What a budget leaves of it to the planned GEMMs: `Budget.seconds_left`. The table is kept in the run's folder with the
seconds that were left over, so that a resumed run plans by the same figures. A budget that even the fastest of
the candidates miss is refused before the first step where that can be known.

Checked  tests/training/precision/test_precision_times.py
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from numpy.typing import NDArray

from scrimp.config import ResolvedConfig
from scrimp.config.snip import WHOLE_LAYERS
from scrimp.errors import PlanError
from scrimp.files import write_whole
from scrimp.gemm.doctor_report import surroundings_of
from scrimp.json_files import NotNegative, read_json
from scrimp.models import HEAD, spec_of
from scrimp.planner.precision import allowed_by
from scrimp.precision import GEMMS, parse_rules
from scrimp.profiler.gemm_times import GemmTimes, measure_gemm_times
from scrimp.training.precision.guard import Recipes

if TYPE_CHECKING:
    from scrimp.training.setup import Decisions

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
    train, path = decisions.config.train, run_dir / FILE
    per_step = train.batch_tokens // train.micro_batch_tokens
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
    per_step = train.batch_tokens // train.micro_batch_tokens
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


def gemm_seconds(times: StepTimes, shapes: dict[str, tuple[int, int]], recipes: Recipes) -> float:
    """Seconds of a step's planned GEMMs in given formats."""
    total = 0.0
    for layer, row in recipes.items():
        names = tuple(dict.fromkeys(row))
        table = times.seconds([shapes[layer]], names)[0]
        total += sum(float(table[j, names.index(name)]) for j, name in enumerate(row))
    return total


def other_than_gemms(steps: Sequence[float], gemms: float) -> float:
    """Seconds of a step beside its planned GEMMs, by the median of measured steps."""
    return max(0.0, statistics.median(steps) - gemms)


def open_formats(
    config: ResolvedConfig,
    layers: Sequence[str],
    formats: Sequence[str],
    pinned: Mapping[str, Mapping[str, str]],
    useful: NDArray[np.bool_] | None = None,
) -> NDArray[np.bool_]:
    """[L, 3, P], what a plan may give each GEMM: what a rule fixes, else the candidates.

    Args:
        useful: [L, 3, P], by `StepTimes.candidates`; where none of a GEMM's candidates is useful, all of them stay.
    """
    candidates = np.array([name in config.candidates for name in formats])
    wanted = np.ones((len(layers), len(GEMMS), len(formats)), dtype=bool) if useful is None else useful
    wanted = wanted & candidates
    by_rule = allowed_by(layers, formats, pinned)
    is_open = by_rule.all(axis=-1, keepdims=True)
    return np.where(is_open, np.where(wanted.any(axis=-1, keepdims=True), wanted, candidates), by_rule)


def refuse_unreachable_speed(
    config: ResolvedConfig, times: StepTimes, shapes: dict[str, tuple[int, int]]
) -> None:
    """Refuse a budget that no choice among the candidates can keep, whatever else a step does.

    Raises:
        PlanError: with the best that can be reached.
    """
    fastest, in_compute = _fastest_seconds(config, times, shapes), _compute_seconds(config, times, shapes)
    compute, wanted, speedup = (
        config.precision_rules.compute,
        config.budget.step_seconds,
        config.budget.speedup,
    )
    lacks = in_compute < fastest and compute not in config.candidates
    add = f"add {compute} to snip.formats, " if lacks else ""
    why = f"{', '.join(sorted(times.table.emulated))} are emulated here" if times.table.emulated else ""
    if lacks:
        why += f"{', and ' if why else ''}{compute} is no candidate of snip.formats {config.snip.formats}"
    why = f": {why}" if why else ""
    if wanted is not None and wanted < fastest:
        raise PlanError(
            "budget.step_seconds cannot be reached on this device",
            got=f"{wanted:g} s",
            expected=f"at least {fastest:.3g} s, which the GEMMs of the blocks alone take in their fastest "
            f"formats{why}",
            do=f"{add}raise it, or lower train.batch_tokens",
        )
    if speedup is not None and speedup > in_compute / fastest * (1 + 1e-9):
        raise PlanError(
            "budget.speedup cannot be reached on this device",
            got=f"{speedup:g}",
            expected=f"at most {in_compute / fastest:.3f}, if a step were GEMMs alone{why}",
            do=f"{add}lower it, or plan by a share of FLOPs with --budget.fp4-flops",
        )


def _fastest_seconds(config: ResolvedConfig, times: StepTimes, shapes: dict[str, tuple[int, int]]) -> float:
    """Seconds of a step's planned GEMMs in the fastest formats that a plan may give them."""
    layers, sizes = list(shapes), list(shapes.values())
    pinned = parse_rules(config.precision).pinned(layers)
    fixed = [name for gemms in pinned.values() for name in gemms.values()]
    formats = tuple(dict.fromkeys([*config.candidates, *fixed]))
    allowed = open_formats(config, layers, formats, pinned, times.candidates(sizes, formats))
    seconds = times.seconds(sizes, formats)
    by_layer = np.where(allowed, seconds, np.inf).min(axis=2).sum(axis=1)
    if config.snip.policy.partition(":")[0] in WHOLE_LAYERS:
        in_one = np.where(allowed.all(axis=1), seconds.sum(axis=1), np.inf).min(axis=1)
        by_layer = np.where(
            np.isfinite(in_one), in_one, by_layer
        )  # rules that split a layer are refused elsewhere
    return float(by_layer.sum())


def _compute_seconds(config: ResolvedConfig, times: StepTimes, shapes: dict[str, tuple[int, int]]) -> float:
    """Seconds of a step's planned GEMMs, unquantized."""
    return float(times.seconds(list(shapes.values()), [config.precision_rules.compute]).sum())


def shapes_of(decisions: Decisions) -> dict[str, tuple[int, int]]:
    """Planned layer to (outputs, inputs)."""
    spec = spec_of(decisions.architecture)
    linears = {layer: spec.linear(layer) for layer in decisions.plan.gemms if layer != HEAD}
    return {layer: (linear.outputs, linear.inputs) for layer, linear in linears.items()}
