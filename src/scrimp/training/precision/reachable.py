"""Budgets that no choice of formats can keep are refused before anything is measured.

Checked  tests/training/precision/test_precision_times.py, test_precision_cycle.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from scrimp.config import Architecture, ResolvedConfig
from scrimp.config.snip import WHOLE_LAYERS
from scrimp.cycle.settings import CycleSettings
from scrimp.cycle.step_times import StepTimes, open_formats
from scrimp.errors import PlanError
from scrimp.models import HEAD, LinearSpec, spec_of
from scrimp.planner.precision.choose import LOW_BITS
from scrimp.precision import BF16_BYTES, GEMMS, RECIPES, is_router, parse_rules, saved_bytes


def shares_of(architecture: Architecture) -> dict[str, float]:
    """Layer to its share of the blocks' linear FLOPs; routers, whose formats nobody plans, count as none."""
    linears = spec_of(architecture).layers()
    sizes = {
        layer: 0.0 if is_router(layer) else float(linear.parameters_per_token)
        for layer, linear in linears.items()
        if layer != HEAD
    }
    total = sum(sizes.values())
    return {layer: size / total for layer, size in sizes.items()}


def refuse_unreachable_share(
    config: ResolvedConfig, architecture: Architecture, pinned: Mapping[str, Mapping[str, str]]
) -> None:
    """Refuse a budget that the rules leave no room for, before anything is measured.

    Raises:
        PlanError: with the largest share that can be reached.
    """
    share = config.budget.fp4_flops
    if not share:
        return
    has_low = any(RECIPES[name].bits <= LOW_BITS for name in config.candidates)
    reached, whole = 0.0, config.snip.policy.partition(":")[0] in WHOLE_LAYERS
    for layer, flops in shares_of(architecture).items():
        names = [pinned.get(layer, {}).get(gemm) for gemm in GEMMS]
        low = [has_low if name is None else RECIPES[name].bits <= LOW_BITS for name in names]
        if whole and not all(low):
            low = [False] * len(GEMMS)
        reached += flops * sum(low) / len(GEMMS)
    if share > reached + 1e-9:
        raise PlanError(
            "budget.fp4_flops cannot be reached",
            got=f"{share:g}",
            expected=f"at most {reached:.4f}: the rules of precision fix the other GEMMs"
            + (f", and {config.snip.policy} gives a layer one format" if whole else ""),
            do="lower the budget, or fix fewer layers",
        )


def refuse_unreachable_bytes(config: ResolvedConfig, architecture: Architecture) -> None:
    """Refuse a budget of bytes that no choice among the candidates can keep, before anything is measured.

    Raises:
        PlanError: with the smallest share that every pipeline stage can reach.
    """
    share = config.budget.saved_bytes
    if share is None:
        return
    layers = {
        layer: linear
        for layer, linear in spec_of(architecture).layers().items()
        if layer != HEAD and not is_router(layer)
    }
    settings = CycleSettings.of_run(config, {layer: linear.origin for layer, linear in layers.items()})
    kept: dict[int, int] = {}
    whole: dict[int, int] = {}
    for layer, linear in layers.items():
        stage, rows = settings.stages.get(layer, 0), _rows(config, linear)
        whole[stage] = whole.get(stage, 0) + BF16_BYTES * rows * linear.inputs
        kept[stage] = kept.get(stage, 0) + _fewest_bytes(settings, layer, linear, rows)
    reached = max(kept[stage] / whole[stage] for stage in whole)
    if share < reached - 1e-9:
        why = "attention keeps its output in bf16 anyway" if any(map(_is_kept, layers.values())) else ""
        why += "; compiled blocks keep codes of any recipe in as many bytes" if settings.is_compiled else ""
        raise PlanError(
            "budget.saved_bytes cannot be reached",
            got=f"{share:g}",
            expected=f"at least {math.ceil(reached * 1e4) / 1e4:.4f}, what snip.formats {config.snip.formats} and the "
            f"rules of precision leave{': ' if why else ''}{why.removeprefix('; ')}",
            do="raise the budget, add a format of fewer bits to snip.formats, or fix fewer layers"
            + (", or set train.compile to off" if settings.is_compiled else ""),
        )


def _is_kept(linear: LinearSpec) -> bool:
    return linear.origin == "kept"


def _rows(config: ResolvedConfig, linear: LinearSpec) -> int:
    """Rows of a layer's input in a step."""
    return config.train.batch_tokens * (linear.chosen if linear.experts > 1 else 1)


def _fewest_bytes(settings: CycleSettings, layer: str, linear: LinearSpec, rows: int) -> int:
    """Least that is kept of a layer's input, in any format that a plan may give it."""
    pinned = settings.pinned.get(layer, {})
    whole = settings.policy.partition(":")[0] in WHOLE_LAYERS
    fixed = next(iter(pinned.values()), None) if whole else pinned.get("wgrad")
    choices = settings.formats if fixed is None else (fixed,)
    kept = [settings.saved[layer]] if layer in settings.saved else [(name,) for name in choices]
    return min(
        sum(
            saved_bytes(name, rows, linear.inputs, compiled=settings.is_compiled, grouped=linear.experts > 1)
            for name in names
        )
        for names in kept
    )


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
    allowed = open_formats(config.candidates, layers, formats, pinned, times.candidates(sizes, formats))
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
