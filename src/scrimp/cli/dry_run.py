"""What `scrimp plan` shows: a run that is decided and not begun, or the formats that a measured one would have."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

from scrimp.cli.show import plain_console
from scrimp.config import Config, MemoryConfig, StagedRun, flatten
from scrimp.config.mixture import shares_text
from scrimp.config.pipeline import pipeline_of
from scrimp.errors import ConfigError, StorageError
from scrimp.export import ExportTarget
from scrimp.models import spec_of
from scrimp.planner import count_flops, ideal_seconds_per_token
from scrimp.planner.memory.room import NoRoomError
from scrimp.planner.precision import PrecisionPlan
from scrimp.profiler import device_peaks, recall_throughput
from scrimp.report.tables import key_value_table
from scrimp.report.units import format_bytes, format_count, format_flops, format_rate
from scrimp.training.chosen_optimizer import with_first
from scrimp.training.memory.account_table import account_tables, attention_text
from scrimp.training.memory.stages import stages_text
from scrimp.training.precision.preview import Preview, preview
from scrimp.training.precision.reachable import shares_of
from scrimp.training.rank_order import order_advice
from scrimp.training.repetition import repetition_text
from scrimp.training.setup import Decisions, decide
from scrimp.training.staged import decided_stages
from scrimp.training.start import anchored
from scrimp.world import World


def dry_run(
    config: Config,
    given: Collection[str] = frozenset(),
    out: Path | None = None,
    target: ExportTarget | None = None,
) -> None:
    """Print what a run would need and how fast it would be; prepare and start nothing.

    With precision snip and a run as model.weights: measure its newest checkpoint, and show the plan.

    Args:
        given: dotted keys that the user wrote; of a run that is measured, its own settings count for others.
        out: file for the measured plan.
        target: the trainer that the measured plan is to run in.
    """
    if out is not None and out.exists():
        raise StorageError(f"{out} exists already", do="choose another name; nothing is overwritten")
    measured = preview(config, given, target, required=out is not None or target is not None)
    if measured is not None:
        _show_measured(measured, out)
        return
    if out is not None or target is not None:
        raise ConfigError(
            "there is no measured plan" + (" to write" if out is not None else f" to make for {target}"),
            got=("--target" if out is None else f"--out {out}") + " without a run to measure",
            expected="precision snip, and a run with a checkpoint",
            do="give --precision snip --model.weights RUN",
        )
    decisions, no_room = _decided(anchored(config))
    _show(decisions)
    if no_room is not None:
        raise no_room
    decisions.refuse_misfit()


def dry_run_of_stages(stages: StagedRun) -> None:
    """Print the same of each stage; the first that cannot be is refused."""
    console = plain_console()
    for number, decisions in enumerate(decided_stages(stages, World.current(), plans_ahead=True), start=1):
        console.print(f"stage {number} of {stages.count}")
        _show(decisions)


def _show(decisions: Decisions) -> None:
    console = plain_console()
    console.print(_run_table(decisions))
    if decisions.config.is_planned:
        console.print(_starting_map(decisions))
    for table in account_tables(decisions):
        console.print(table)
    if decisions.reasons:
        values = flatten(decisions.config)
        choices = [(key, f"{values[key]}  ({reason})") for key, reason in sorted(decisions.reasons.items())]
        console.print(key_value_table(choices, title="decided by Scrimp"))


def _decided(config: Config) -> tuple[Decisions, NoRoomError | None]:
    """The decisions of a run; where nothing fits those of one that keeps everything, to be shown, and the refusal."""
    try:
        return decide(config, plans_ahead=True), None
    except NoRoomError as no_room:
        resident = MemoryConfig(activations="keep", weights="device", gradients="device", optimizer="device")
        shown = decide(with_first(replace(config, memory=resident)), plans_ahead=True)
        memory = replace(shown.memory, reason="nothing: everything resident, to show what it takes")
        return replace(shown, memory=memory), no_room


def _run_table(decisions: Decisions) -> Any:
    """What a run is, and how fast it would be."""
    config, architecture, plan = decisions.config, decisions.architecture, decisions.plan
    sequence, count = config.train.sequence, spec_of(architecture).parameters
    trained = spec_of(architecture).trained_parameters
    flops = count_flops(spec_of(architecture), sequence)
    rate = recall_throughput(plan, config)
    peaks = device_peaks(decisions.device.torch_device, decisions.device.name)
    compute = config.precision_rules.compute
    ranks = config.layout.ranks
    ideal = ranks / ideal_seconds_per_token(spec_of(architecture), sequence, plan.gemms, peaks, compute)
    backends, attention = decisions.describe_backends(), attention_text(decisions)
    measured = (
        f"{format_rate(rate)} (measured by an earlier run)" if rate else "not measured yet on this machine"
    )
    tuning, order = decisions.tuning_bytes, order_advice(decisions)
    rows = [
        ("parameters", f"{count:,} ({format_count(count)})"),
        *([("trained", f"{trained:,} ({format_count(trained)}), in adapters")] if trained != count else []),
        ("FLOPs per token, causal form", format_flops(flops.causal)),
        ("FLOPs per token, full form", format_flops(flops.full)),
        ("tokens per step", f"{config.train.batch_tokens:,} in sequences of {sequence:,}"),
        ("tokens in the run", f"{config.train.batch_tokens * config.train.steps:,}"),
        *([("mixture of samples", shares_text(config.data.mixed))] if config.data.mixed else []),
        *([("layout", plan.layout.text)] if ranks > 1 else []),
        *([("order of ranks", order)] if order else []),
        *([("stages", _stages(decisions))] if decisions.memory.rank_peaks else []),
        ("device", f"{ranks} x " * (ranks > 1) + f"{decisions.device.name} ({decisions.device.spelling})"),
        ("speed of light", f"{format_rate(ideal)} (predicted; {peaks.description})"),
        *([("quantized GEMMs", backends)] if backends else []),
        *([("shapes of tiles", f"tried before the model is made, {format_bytes(tuning)}")] if tuning else []),
        *([("attention", attention)] if attention else []),
        ("repeats itself", repetition_text(decisions)),
        ("tokens/s", measured),
    ]
    return key_value_table(rows, title=f"{config.model.weights or config.model.preset}, {config.precision}")


def _stages(decisions: Decisions) -> str:
    pipeline = pipeline_of(decisions.config.layout, decisions.architecture.num_layers)
    return f"{stages_text(pipeline, decisions.memory.rank_peaks)} (predicted peaks)"


def _starting_map(decisions: Decisions) -> Any:
    """The formats of a run that plans them, before its first plan."""
    from scrimp.report.precision_text import precision_map_text

    layers = {layer: choice for layer, choice in decisions.plan.gemms.items() if layer != "head"}
    shares = shares_of(decisions.architecture)
    return precision_map_text(layers, shares, title="precision until the first plan")


def _show_measured(found: Preview, out: Path | None) -> None:
    """A measured plan on the terminal, and in a file if one is named."""
    from scrimp.report.precision_text import precision_map_text

    plan, console = found.plan, plain_console()
    shares = {layer: row.flops_share for layer, row in plan.layers.items()}
    title = f"precision after step {found.step:,}, chosen by {plan.policy}"
    console.print(precision_map_text(plan.precisions, shares, title=title))
    predicted = plan.predicted
    budget = ", ".join(f"{name} {value:g}" for name, value in plan.budget.items())
    rows = [
        ("budget", budget or f"none: policy {plan.policy} keeps no budget"),
        ("FLOPs in 4 bits", f"{predicted['fp4_flops'] or 0:.1%} of the blocks' linear layers"),
        *_saved_rows(predicted.get("saved_bytes")),
        (
            "loss divergence",
            f"{predicted['loss_divergence'] or 0:.2e} of the loss (predicted; {interval_text(plan, 'loss', '.2e')})",
        ),
        (
            "weight divergence",
            f"{predicted['weight_divergence'] or 0:.1%} of an update "
            f"(predicted; {interval_text(plan, 'weight', '.1%')})",
        ),
        ("certainty", "one batch says nothing of it" if plan.certainty is None else f"{plan.certainty:.0%}"),
        ("solver", f"{plan.solver.get('name', 'none')} {plan.solver.get('note', '')}".strip()),
    ]
    console.print(key_value_table(rows, title="the plan"))
    console.print(key_value_table(next_best_choices(plan), title="the next-best choices (predicted)"))
    if out is not None:
        plan.write(out)
        console.print(f"written: {out}")


def interval_text(plan: PrecisionPlan, what: str, number_format: str) -> str:
    """How far a predicted divergence, of loss or weight, may be off by the batches that were measured."""
    pair = plan.intervals.get(f"{what}_divergence")
    if pair is None:
        return "no interval: one batch was measured" if plan.batches == 1 else "no interval"
    low, high = (format(bound, number_format) for bound in pair)
    return f"95% from {low} to {high}, by {plan.batches} batches"


def _saved_rows(share: float | None) -> list[tuple[str, str]]:
    """What is kept of inputs, where it is known."""
    return [] if share is None else [("inputs kept for backward", f"{share:.1%} of their bytes in bf16")]


def next_best_choices(plan: PrecisionPlan, count: int = 4) -> list[tuple[str, str]]:
    """The promotions that would save most harm per FLOP, and the demotions that would cost least."""
    moves = [
        (layer, gemm, one.choice, name, (harm - one.harm[one.choice]) / max(row.flops_share, 1e-12))
        for layer, row in plan.layers.items()
        for gemm, one in row.gemms.items()
        for name, harm in one.harm.items()
        if name != one.choice
    ]
    saving = sorted((move for move in moves if move[4] < 0), key=lambda move: move[4])[:count]
    costing = sorted((move for move in moves if move[4] > 0), key=lambda move: move[4])[:count]
    return [
        (f"{layer}.{gemm}", f"{now} to {name}: harm {change * plan.layers[layer].flops_share:+.2g}")
        for layer, gemm, now, name, change in (*saving, *costing)
    ]
