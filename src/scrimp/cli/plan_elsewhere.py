"""`scrimp plan --hardware`: the fastest layouts of a model on hardware that is not here."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Collection
from pathlib import Path

from scrimp.cli.show import plain_console, say
from scrimp.config import Config, base_architecture, batches, flatten, parse_bytes, snip
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import ConfigError, PlanError
from scrimp.models import spec_of
from scrimp.models.shapes import ModelSizes, sizes_of
from scrimp.planner.hardware import Cluster, load_hardware
from scrimp.planner.layout.block_menus import Quality, flops_in_4_bits
from scrimp.planner.layout.lines import PRECISIONS, read_shape
from scrimp.planner.layout.search import Candidate, Found, Question, search
from scrimp.planner.layout.software import software
from scrimp.planner.layout.summary import blocks_text, low_share
from scrimp.report.units import format_bytes, format_rate

READ = (
    *("train.sequence", "train.batch_tokens", "train.micro_batch", "precision"),
    *("snip.formats", "budget.fp4_flops", "budget.host_memory", "budget.device_memory"),
)
LAYOUT = ("dp", "fsdp", "zero", "tp", "pp", "cp", "ep", "etp", "virtual", "schedule", "stages")
_AFTER_S = 2.0
"""Seconds after which the search says how far it is."""
COLUMNS = ("layout", "micro", "recompute", "s/step", "tok/s each", "split", "memory")


def plan_elsewhere(hardware: str, shape: Path | None, config: Config, given: Collection[str]) -> int:
    """Search, and print the best plans.

    Args:
        shape: file of the model's shape; None: that of the configuration.
        given: dotted keys that the user wrote.

    Raises:
        ConfigError: a file, a name or a setting that the search does not know.
        PlanError: no layout fits.
    """
    _refuse(given, shape)
    cluster = _with_budget(load_hardware(hardware), config)
    model, sequence, tokens = _asked(shape, config)
    quality = _quality(config, model)
    question = Question(
        model=model,
        cluster=cluster,
        sequence=sequence,
        global_batch=tokens // sequence,
        software=software("scrimp"),
        precision=quality.base if quality else _precision(config),
        quality=quality,
    )
    found = search(question, fits_given=_as_given(config, given), note=_progress())
    if not found.best:
        raise _misfit(found, question)
    _show(found, question, hardware)
    return 0


def _with_budget(cluster: Cluster, config: Config) -> Cluster:
    """The cluster with the memory that the user gives, of each device and each host."""
    device, host = config.budget.device_memory, config.budget.host_memory
    groups = []
    for group in cluster.groups:
        node = group.node
        if device is not None:
            given = dataclasses.replace(node.device, memory_bytes=parse_bytes(device))
            node = dataclasses.replace(node, device=given)
        if host is not None:
            node = dataclasses.replace(node, host_memory_bytes=parse_bytes(host))
        groups.append(dataclasses.replace(group, node=node))
    return dataclasses.replace(cluster, groups=tuple(groups))


def _precision(config: Config) -> str:
    """The format of all blocks' products."""
    precision = "bf16" if config.precision == "auto" else config.precision
    if precision not in PRECISIONS:
        raise ConfigError(
            "a search takes one format for all blocks, or chooses",
            got=f"precision {config.precision}",
            expected=f"one of {', '.join(PRECISIONS)}, snip",
        )
    return precision


def _quality(config: Config, model: ModelSizes) -> Quality | None:
    """What formats the search chooses from; None: they are given."""
    if not config.is_planned:
        return None
    given = config.snip.formats
    names = (snip.DEFAULT_FORMATS if given == "auto" else given).split(",")
    share = snip.DEFAULT_SHARE if config.budget.fp4_flops is None else config.budget.fp4_flops
    return Quality(formats=tuple(name.strip() for name in names), harm=flops_in_4_bits(model), limit=share)


def _refuse(given: Collection[str], shape: Path | None) -> None:
    known = {*READ, *(f"layout.{name}" for name in LAYOUT)}
    others = [key for key in given if key not in known and not (shape is None and key.startswith("model."))]
    if others:
        raise ConfigError(
            "a search on other hardware does not ask for this",
            got=", ".join(sorted(others)),
            expected=f"model.* (without --shape), layout.* and {', '.join(READ)}",
            do="leave it out, or leave --hardware out to plan for this machine",
        )


def _asked(shape: Path | None, config: Config) -> tuple[ModelSizes, int, int]:
    """The model, and tokens of a sequence and of a batch."""
    train = config.train
    if shape is not None:
        if train.sequence is None or train.batch_tokens is None:
            raise ConfigError(
                "a shape says nothing of sequences and batches",
                expected="--train.sequence and --train.batch-tokens",
                do="give both",
            )
        sizes, sequence, tokens = read_shape(shape).sizes, train.sequence, train.batch_tokens
    else:
        if config.model.weights is not None:
            raise ConfigError(
                "a search on other hardware reads no weights",
                got=f"model.weights {config.model.weights}",
                do="name a preset, or give --shape FILE",
            )
        architecture = base_architecture(config, None)
        sizes = sizes_of(spec_of(architecture))
        sequence = train.sequence or batches.decide_sequence(train, architecture, 1)[0]
        known = dataclasses.replace(train, sequence=sequence)
        tokens = train.batch_tokens or batches.decide_tokens(known, architecture, 1)[0]
    if tokens % sequence:
        raise ConfigError(
            "train.batch_tokens is not a multiple of train.sequence",
            got=f"{tokens:,} tokens in sequences of {sequence:,}",
            expected=f"a multiple of {sequence:,}",
        )
    return sizes, sequence, tokens


def _as_given(config: Config, given: Collection[str]) -> Callable[[ResolvedLayout, int], bool]:
    """Whether a layout has the degrees that the user wrote."""
    values = flatten(config)
    wanted = {name: values[f"layout.{name}"] for name in LAYOUT if f"layout.{name}" in given}
    size = config.train.micro_batch

    def fits(layout: ResolvedLayout, micro_batch: int) -> bool:
        return (size is None or size == micro_batch) and all(
            getattr(layout, name) == value for name, value in wanted.items()
        )

    return fits


def _progress() -> Callable[[int], None]:
    last = time.monotonic()

    def note(tried: int) -> None:
        nonlocal last
        if time.monotonic() - last > _AFTER_S:
            last = time.monotonic()
            say(f"{tried:,} settings tried ...")

    return note


def _misfit(found: Found, question: Question) -> PlanError:
    if not found.tried:
        return PlanError(
            "no layout has these degrees on this hardware",
            got=f"{question.cluster.devices:,} devices, {question.global_batch:,} sequences in a batch",
            do="change layout.* or train.batch_tokens, or leave some of layout.* out",
        )
    if found.nearest_bytes <= question.device.memory_bytes:
        group = question.cluster.groups[0]
        return PlanError(
            "no layout of the model fits: what does not fit on the devices does not fit on the host",
            got=f"{format_bytes(round(found.nearest_host_bytes * group.used))} of states for the host, "
            f"{format_bytes(group.node.host_memory_bytes)} of host memory",
            do="give --budget.host-memory where there is more, take more or larger devices, or a smaller model",
        )
    return PlanError(
        "no layout of the model fits into the memory of a device",
        got=f"at least {format_bytes(round(found.nearest_bytes))} of "
        f"{format_bytes(question.device.memory_bytes)}, with everything made again",
        do="take more or larger devices, shorter sequences, or a smaller model",
    )


def _show(found: Found, question: Question, hardware: str) -> None:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    console, count = plain_console(), question.model.parameters
    table = Table(
        title=f"{count / 1e9:,.1f}B parameters on {hardware}, {_formats_text(question)}; predicted",
        title_justify="left",
        box=SIMPLE_HEAD,
        pad_edge=False,
    )
    for name in COLUMNS:
        table.add_column(name, justify="left" if name == "layout" else "right", no_wrap=True)
    for one in found.best:
        table.add_row(*_cells(one, question))
    console.print(table)
    tokens = question.sequence * question.global_batch
    rate = format_rate(tokens / found.best[0].seconds)
    console.print(f"the first: {rate} over all devices; {tokens:,} tokens a step")
    if question.quality:
        console.print(
            f"{low_share(found.best[0].setting):.0%} of the blocks' FLOPs in 4 bits; all products are "
            "taken to suffer alike, since this model has no statistics"
        )
    console.print("split: per cent of a step that is computing, exchanges that nothing hides, and bubble")
    console.print(f"{found.tried:,} settings tried, of which {found.too_large:,} do not fit")


def _formats_text(question: Question) -> str:
    if question.quality is None:
        return question.precision
    low = [name for name in question.quality.formats if name != question.quality.base]
    return f"{question.quality.base} and at most {question.quality.limit:.0%} in {', '.join(low)}"


def _cells(one: Candidate, question: Question) -> list[str]:
    setting, found, layout = one.setting, one.prediction, one.setting.layout
    degrees = {name: getattr(layout, name) for name in ("pp", "dp", "fsdp", "cp", "tp", "ep")}
    text = [f"{name} {degree}" for name, degree in degrees.items() if degree > 1] or ["one device"]
    text += [f"zero {layout.zero}"] * (layout.fsdp > 1)
    text += [f"virtual {layout.virtual}"] * ((layout.virtual or 1) > 1)
    peak = max(rank.total for rank in one.memory) / question.device.memory_bytes
    shares = [
        found.seconds[name] / found.step_seconds for name in ("compute", "communication_exposed", "bubble")
    ]
    return [
        " ".join(text),
        str(setting.micro_batch),
        blocks_text(setting),
        f"{found.step_seconds:.3g}",
        f"{found.tokens_per_second_per_device:,.0f}",
        "/".join(f"{100 * share:.0f}" for share in shares),
        f"{peak:.0%}",
    ]
