"""`scrimp plan FILE --tune N`: N short runs on this machine find what a prediction cannot be trusted with.

Problem  Which micro-batch, which recomputation and, on several ranks, which layout is fastest depends on the machine.
Method   What the configuration leaves open of train.micro_batch, memory.activations and, with --ranks, layout.dp, fsdp,
         tp, pp and zero is varied. All settings that `resolve` does not refuse are predicted, by the seconds of a block
         of the run that this process measures (`scrimp.training.measured_ranks`), and usual links; the tuner
         (`planner/layout/tuning.py`) corrects that by what it measures.
Limits   Formats are as given. A micro-batch or a layout is another order of sums.
Checked  tests/cli/test_plan_tune.py
"""

from __future__ import annotations

import itertools
import shlex
import signal
import tempfile
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table

from scrimp.cli.handlers import handled
from scrimp.cli.parse import option
from scrimp.cli.short_run import short_run
from scrimp.cli.show import plain_console, say
from scrimp.config import (
    Architecture,
    Config,
    LayoutConfig,
    base_architecture,
    replace_values,
    resolve,
)
from scrimp.config.layout import ranks_of
from scrimp.config.optimizers import AUTO
from scrimp.config.write_toml import to_toml
from scrimp.errors import ConfigError, PlanError
from scrimp.models import spec_of
from scrimp.models.shapes import sizes_of
from scrimp.planner.hardware import Cluster
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Setting
from scrimp.planner.layout.stage_memory import peak_bytes
from scrimp.planner.layout.state_formats import run_states
from scrimp.planner.layout.tuning import Failure, Option, Outcome, Tuned, tune
from scrimp.profiler import Device, resolve_device
from scrimp.profiler.measured_cluster import cluster_of, software_here
from scrimp.report.units import format_duration
from scrimp.training.measured_ranks import rates_of_run, scaled
from scrimp.training.memory.limits import device_limit
from scrimp.training.start import anchored
from scrimp.training.trained_weights import architecture_of_weights

STEPS: Final = 12
"""Steps of a trial at full fidelity."""
_AGAIN: Final = {"keep": NONE, "norms": SELECTIVE, "block": FULL}
_AXES: Final = ("pp", "dp", "fsdp", "tp")
_ROOM: Final = 1.25
"""Limit as a share of the device's memory: settings that are predicted to need more are not tried."""
_LINK: Final = {"cpu": (1.5e9, 1e-3), "cuda": (2e10, 3e-5)}
"""Bytes per second and seconds of a message between ranks, which one process cannot measure: as gloo and NCCL over PCIe
have them."""
Values = dict[str, int | str]


@dataclass(frozen=True)
class _Candidate:
    values: Values
    """Settings that the configuration leaves open."""
    option: Option


def plan_tune(config: Config, given: Collection[str], trials: int, ranks: int | None, *, trusts: bool) -> int:
    """Try, and print what is fastest; 1 where no trial succeeded.

    Raises:
        ConfigError: nothing is open, or seconds of a few steps say nothing of the run.
    """
    config = anchored(config)
    ranks = ranks or ranks_of(config.layout)
    _refuse(config)
    device = resolve_device(config.device)
    weights = architecture_of_weights(config.model.weights) if config.model.weights else None
    architecture = base_architecture(config, weights)
    candidates = _candidates(config, given, architecture, device, ranks)
    say(f"{len(candidates)} settings, of which at most {trials} runs are tried, of up to {STEPS} steps")
    outcomes: dict[tuple[int, float], str] = {}
    with tempfile.TemporaryDirectory(prefix="scrimp-tune-") as name:
        folders = (Path(name) / str(number) for number in itertools.count())

        def evaluate(number: int, fidelity: float) -> Outcome:
            candidate, folder, steps = candidates[number], next(folders), round(STEPS * fidelity)
            folder.mkdir()
            outcome, why = short_run(
                _words(config, candidate.values, folder, trusts=trusts), ranks, steps, folder
            )
            outcomes[number, fidelity] = why if isinstance(outcome, Failure) else ""
            shown = f"{outcome.value}: {why}" if isinstance(outcome, Failure) else format_duration(outcome)
            say(f"run {len(outcomes)} of {trials}, {steps} steps: {_text(candidate.values)}: {shown}")
            return outcome

        with handled((signal.SIGTERM, signal.SIGHUP), _interrupted):  # ranks and folders go
            found = tune([one.option for one in candidates], trials, evaluate)
    return _show(found, candidates)


def _interrupted(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _refuse(config: Config) -> None:
    reasons = {
        "precision snip": ("formats change while it trains", config.is_planned),
        "outer.every": ("most steps exchange nothing, and some do", config.outer.every > 0),
        "optimizer.name auto": (
            "each setting would choose its own",
            config.optimizer.name == AUTO,
        ),
        "memory.split fastest": ("it chooses the micro-batch itself", config.memory.split == "fastest"),
    }
    for name, (why, is_so) in reasons.items():
        if is_so:
            raise ConfigError(f"--tune does not go with {name}", expected=why, do="leave one of the two out")


def _candidates(
    config: Config, given: Collection[str], architecture: Architecture, device: Device, ranks: int
) -> list[_Candidate]:
    cluster, kind = _here(config, architecture, device, ranks), device.torch_device.type
    found = [
        one
        for values in _open_values(config, given, ranks)
        for one in _predicted(config, values, architecture, cluster, kind)
    ]
    if len(found) < 2:
        raise ConfigError(
            "there is nothing to try",
            got=f"{len(found)} settings of {ranks} ranks",
            expected="a configuration that leaves train.micro_batch, memory.activations or degrees of its layout open",
            do="leave them out, or name more --ranks",
        )
    names = sorted({name for one in found for name in one.values})
    varies = [name for name in names if len({one.values.get(name) for one in found}) > 1]
    return [_with_factors(one, varies) for one in found]


def _with_factors(one: _Candidate, names: Sequence[str]) -> _Candidate:
    factors = {name: one.values.get(name, 1) for name in names}
    degrees = tuple(value for name, value in factors.items() if name.startswith("layout."))
    return replace(one, option=replace(one.option, factors=factors, alike=degrees or None))


def _open_values(config: Config, given: Collection[str], ranks: int) -> Iterator[Values]:
    """Layouts and recomputation; micro-batches follow from them."""
    for layout in _open_layouts(config, given, ranks):
        if config.memory.activations != "auto":
            yield layout
            continue
        for again in _AGAIN:
            yield {**layout, "memory.activations": again}


def _open_layouts(config: Config, given: Collection[str], ranks: int) -> Iterator[Values]:
    if ranks == 1:
        yield {}
        return
    divisors = [one for one in range(1, ranks + 1) if ranks % one == 0]
    fixed = {axis: getattr(config.layout, axis) for axis in _AXES if f"layout.{axis}" in given}
    choices = [[fixed[axis]] if axis in fixed else divisors for axis in _AXES]
    for degrees in itertools.product(*choices):
        values = {f"layout.{axis}": degree for axis, degree in zip(_AXES, degrees, strict=True)}
        is_open = values["layout.fsdp"] * config.layout.cp > 1 and "layout.zero" not in given
        for zero in [3, 1] if is_open else [config.layout.zero]:
            yield {**values, "layout.zero": zero}


def _predicted(
    config: Config, values: Mapping[str, int | str], architecture: Architecture, cluster: Cluster, kind: str
) -> Iterator[_Candidate]:
    """The settings of all micro-batches, that Scrimp carries out."""
    asked = replace_values(config, values)
    try:
        first = resolve(asked, architecture, device_type=kind, ranks=cluster.devices).config
    except (ConfigError, PlanError):
        return
    share = first.rank_sequences
    sizes = [size for size in range(1, share + 1) if share % size == 0]
    for size in sizes if config.train.micro_batch is None else [config.train.micro_batch]:
        try:
            one = resolve(
                replace_values(asked, {"train.micro_batch": size}),
                architecture,
                device_type=kind,
                ranks=cluster.devices,
            ).config
            setting = Setting(
                model=sizes_of(spec_of(architecture)),
                cluster=cluster,
                sequence=one.train.sequence,
                global_batch=one.train.sequences_per_step,
                micro_batch=size,
                layout=one.layout,
                software=software_here(
                    cluster,
                    kind,
                    compute=one.precision_rules.compute,
                    compiled=one.train.compile == "on",
                    states=run_states(one.optimizer),
                    deterministic=one.train.deterministic,
                    documents=one.data.mask_documents,
                ),
                recompute=_AGAIN.get(one.memory.activations, NONE),
            )
        except (ConfigError, PlanError):
            continue
        needs = max(rank.total for rank in peak_bytes(setting))
        if needs > _ROOM * setting.device.memory_bytes:
            continue
        step = predict(setting)
        varied = dict(values) if config.train.micro_batch else {**values, "train.micro_batch": size}
        yield _Candidate(
            varied, Option(factors={}, seconds=step.step_seconds, bytes=needs, causes=step.seconds)
        )


def _here(config: Config, architecture: Architecture, device: Device, ranks: int) -> Cluster:
    """So many ranks here. This process measures a block of the run; on a host the ranks share what it reaches."""
    alone = replace(config, layout=LayoutConfig())
    resolved = resolve(alone, architecture, device_type=device.torch_device.type).config
    sharing = ranks if device.is_host else 1
    link, latency = _LINK[device.torch_device.type]
    rates = scaled(rates_of_run(resolved, architecture, device), 1.0 / sharing)
    rates = replace(rates, link=link, latency_seconds=latency)
    memory = int(device_limit(resolved, device, 0)) // sharing
    return cluster_of(rates, ranks=ranks, name="this machine", memory_bytes=memory)


def _words(config: Config, values: Values, folder: Path, *, trusts: bool) -> list[str]:
    """What starts one trial: all settings in a file, and the command that reads it."""
    never = {"checkpoint.every": 0, "evaluation.every": 0, "run.dir": None}
    file = folder / "trial.toml"
    file.write_text(to_toml(replace_values(config, {**values, **never})), encoding="utf-8")
    return ["train", str(file), *(["--trust-code"] if trusts else [])]


def _show(found: Tuned, candidates: Sequence[_Candidate]) -> int:
    console = plain_console()
    table = Table(title="settings that were tried", title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for name in ("setting", "steps", "predicted", "measured"):
        table.add_column(name, justify="left" if name == "setting" else "right")
    last = {one.number: one for one in found.trials}
    for one in sorted(last.values(), key=lambda one: (-one.fidelity, found.seconds[one.number])):
        candidate, outcome = candidates[one.number], one.outcome
        measured = outcome.value if isinstance(outcome, Failure) else format_duration(outcome)
        steps = str(round(STEPS * one.fidelity))
        table.add_row(_text(candidate.values), steps, format_duration(candidate.option.seconds), measured)
    console.print(table)
    if found.best is None:
        console.print("no setting ran: what each one said stands above")
        return 1
    shares = ", ".join(f"{name} {share:.0%}" for name, share in found.importance.items())
    console.print(f"share of the differences in time: {shares}", soft_wrap=True)
    words = [f"{option(key)}={value}" for key, value in candidates[found.best].values.items()]
    console.print(f"fastest: {shlex.join(words)}", soft_wrap=True)
    return 0


def _text(values: Values) -> str:
    """Settings without their sections; degrees of 1 are left out, and the ZeRO stage of whole copies."""
    left_out = {key for key, value in values.items() if key.startswith("layout.") and value == 1}
    left_out -= {"layout.zero"}
    if values.get("layout.fsdp") == 1:
        left_out |= {"layout.zero"}
    return " ".join(
        f"{key.partition('.')[2]} {value}" for key, value in values.items() if key not in left_out
    )
