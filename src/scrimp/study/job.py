"""One run of a study as data: its settings as a file, where it runs to, and how the row about it is read.

Everything here can be sent to another machine, and names no torch.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import numpy as np

from scrimp.config.write_toml import toml_value
from scrimp.errors import CheckpointError, ConfigError, ScrimpError
from scrimp.files import storage
from scrimp.json_files import decode_loosely
from scrimp.report.curves import Array
from scrimp.report.read_run import RunRecord, mapping, read_run
from scrimp.report.units import is_number
from scrimp.study.definition import RecordedFigure
from scrimp.study.rows import LARGEST, MOST_POINTS, Curve, Key, Row
from scrimp.study.variants import Combined

RUNS: Final = "runs"
"""Within a study's folder, where its runs lie."""
SOURCE: Final = "held_out_loss/"
"""Before the label of a mixture's source: the figure that is its held-out loss."""
_WRITTEN: Final = ", written by scrimp study in "
"""In the first line of a run's settings, before the folder of the study's runs."""
_DONE: Final = "all steps done"
"""The reason of the finish of a run that did not fail."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """A run, or its next part."""

    variant: str
    seed: int
    digest: str
    settings: Mapping[str, Any]
    """All that the run is told, but for its folder."""
    steps: int
    """The step that it runs to."""
    stops_there: bool = False
    """It has more steps than that, which a later job goes on with."""
    folder: Path
    """Where all runs of the study lie, each in a folder of its own."""
    figure: RecordedFigure
    """What its row has to have."""
    threads: int = 1
    needs: tuple[Key, ...] = ()
    """Runs that have to be there first: its trunk, and those that its settings name or that it combines."""
    combined: Combined | None = None
    """How the runs that it needs are evaluated together, in place of a run; None: it is a run."""
    trusts: bool = False
    """Code that settings name may run."""
    at_once: int = 1
    environment: Mapping[str, str] = field(default_factory=dict)
    """Further variables of its process."""

    @property
    def key(self) -> Key:
        """What its row is about."""
        return self.variant, self.seed, self.steps

    @property
    def name(self) -> str:
        """The run's name in messages and of its files."""
        return run_name(self.variant, self.seed)

    @property
    def run_folder(self) -> Path:
        """What `scrimp train` writes into."""
        return self.folder / self.name

    @property
    def settings_file(self) -> Path:
        """Beside the run's folder: what it was begun with."""
        return self.folder / f"{self.name}.toml"

    @property
    def toml(self) -> str:
        """The file that `scrimp train` reads."""
        rows = [
            f"{key} = {toml_value(value)}"
            for key, value in sorted(self.settings.items())
            if value is not None
        ]
        return "\n".join([f"# {self.name}{_WRITTEN}{toml_value(str(self.folder))}", *rows]) + "\n"


def run_name(variant: str, seed: int) -> str:
    """What a run is called."""
    return f"{variant}-seed{seed}"


def has_reached(job: Job, run: RunRecord) -> bool:
    """Whether the run has taken all steps of the job, with what follows the last one where the run ends there."""
    steps = run.columns["step"]
    if not len(steps) or steps[-1] < job.steps:
        return False
    return job.stops_there or any(event.get("reason") == _DONE for event in run.events_of("finish"))


def read_run_of(job: Job) -> RunRecord | None:
    """What the run has written so far; None where it has not begun."""
    try:
        return read_run(job.run_folder)
    except CheckpointError:
        return None


def refuse_other_settings(job: Job) -> None:
    """Refuse to take a run's folder for this job's where it was begun with other settings, or nothing says with which.

    Raises:
        ConfigError: they differ, or the file that would say so is gone.
    """
    with storage(job.settings_file, "read"):
        text = job.settings_file.read_text(encoding="utf-8") if job.settings_file.exists() else None
    if not job.run_folder.exists() or (text is not None and _decides(text, job) == _decides(job.toml, job)):
        return
    if text is None and not (job.run_folder / "config.toml").exists():
        return  # killed before it had anything to go on with
    raise ConfigError(
        f"{job.run_folder} was begun with other settings",
        got=f"no {job.settings_file.name} beside it" if text is None else _changed(text, job.toml),
        expected="the settings that the study has now",
        do="give another folder with --out, or remove that one",
    )


def _decides(text: str, job: Job) -> list[str]:
    """The lines of a run's settings that decide its numbers: where the study's own runs lie does not, since they may
    have moved with it. Files of earlier versions do not say where that was, and are taken to lie there still."""
    folder = text.partition("\n")[0].partition(_WRITTEN)[2] or toml_value(str(job.folder))
    own, lines = folder.strip('"'), [line for line in text.splitlines() if not line.startswith("#")]
    return [line.replace(f"{own}/", "") for line in lines]


def _changed(before: str, after: str) -> str:
    lines: Iterable[str] = sorted(set(before.splitlines()) - set(after.splitlines()))
    return "; ".join(line for line in lines if not line.startswith("#"))[:400] or "fewer settings"


def finished_row(job: Job) -> Row | None:
    """The row of a run that has reached its end already, as one whose study was killed before it was written.

    Raises:
        ConfigError: its folder was begun with other settings.
    """
    refuse_other_settings(job)
    run = read_run_of(job)
    return row_of(job, seconds=0.0) if run is not None and has_reached(job, run) else None


def row_of(job: Job, *, seconds: float, error: str | None = None) -> Row:
    """The row about a run that ended."""
    common: dict[str, Any] = {
        "variant": job.variant,
        "seed": job.seed,
        "steps": job.steps,
        "digest": job.digest,
        "seconds": round(seconds, 3),
        "at_once": job.at_once,
        "machine": platform.node(),
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    run = read_run_of(job)
    if error is None and run is None:
        error = "the run left no folder"
    if run is None:
        return Row(**common, error=error)
    figures = _figures(run, job.steps)
    if error is None and figures.get(job.figure) is None:
        error = f"the run has no {job.figure.replace('_', ' ')} at step {job.steps:,}"
    environment = dict(run.start_field("environment") or {})
    environment["device"] = str(run.start_field("device") or "")
    return Row(
        **common,
        error=error,
        figures={} if error else figures,
        training=_means_of(run, "loss", job.steps),
        held_out=_held_out_curve(run, job),
        gradient_norm=_means_of(run, "grad_norm", job.steps),
        data=data_digest(job.run_folder, job.figure),
        environment=environment,
    )


def _figures(run: RunRecord, steps: int) -> dict[str, float | None]:
    found = {
        "held_out_loss": _held_out_loss(run, steps),
        "training_loss": _training_loss(run, steps),
        "tokens_per_second": _tokens_per_second(run, steps),
        **source_figures(_losses_of_sources(run).get(steps, {})),
    }
    return {name: None if value is None or abs(value) > LARGEST else value for name, value in found.items()}


def _held_out_loss(run: RunRecord, steps: int) -> float | None:
    at, losses = run.evaluations("eval_loss", "loss")
    return next((float(loss) for step, loss in zip(at, losses, strict=True) if step == steps), None)


def _losses_of_sources(run: RunRecord) -> dict[float, Mapping[str, float]]:
    """By step, the held-out loss of each source of a mixture by its label, where all have one."""
    found: dict[float, Mapping[str, float]] = {}
    for event in run.events_of("evaluation"):
        step, losses = event.get("step"), mapping(event.get("sources"))
        if is_number(step) and losses and all(map(is_number, losses.values())):
            found[step] = losses
    return found


def source_figures(losses: Mapping[str, float]) -> dict[str, float]:
    """Figures of a mixture's sources, each counted alike whatever its weight; none of a run on one source."""
    mean = {"mean_source_loss": statistics.fmean(losses.values())} if losses else {}
    return mean | {f"{SOURCE}{label}": loss for label, loss in losses.items()}


def _training_loss(run: RunRecord, steps: int) -> float | None:
    """Mean of the last quarter of the steps: of the same batches for all runs of a seed."""
    at, losses = run.recorded("loss")
    last = losses[(at > steps - max(1, steps // 4)) & (at <= steps)]
    return float(last.mean()) if len(last) else None


def _tokens_per_second(run: RunRecord, steps: int) -> float | None:
    """Median over the steps but the first ones, in which kernels, caches and the allocator warm up."""
    at, rates = run.recorded("tokens_per_s")
    later = rates[(at > min(max(2, steps // 10), 50, steps - 1)) & (at <= steps)]
    return float(statistics.median(later.tolist())) if len(later) else None


def _means_of(run: RunRecord, column: str, steps: int) -> Curve:
    at, values = run.columns["step"], run.columns[column]
    return _means(at[at <= steps], values[at <= steps], steps)


def _means(at: Array, values: Array, steps: int) -> Curve:
    """Means of `MOST_POINTS` equal parts, each at its last step: the same parts for all runs of so many steps."""
    width = max(1, -(-steps // MOST_POINTS))
    found = Curve(steps=[], values=[])
    for end in range(width, steps + width, width):
        part = values[(at > end - width) & (at <= end)]
        part = part[np.isfinite(part)]
        found.steps.append(min(end, steps))
        found.values.append(float(f"{part.mean():.7g}") if len(part) else None)
    return found


def _held_out_curve(run: RunRecord, job: Job) -> Curve:
    at, losses = run.evaluations("eval_loss", "loss")
    if job.figure == "mean_source_loss":
        found = sorted(_losses_of_sources(run).items())
        at = np.array([step for step, _ in found], dtype=np.float64)
        losses = np.array([statistics.fmean(one.values()) for _, one in found], dtype=np.float64)
    kept = np.flatnonzero(at <= job.steps)
    kept = kept[np.unique(np.linspace(0, len(kept) - 1, min(MOST_POINTS, len(kept))).astype(int))]
    return Curve(steps=at[kept].tolist(), values=losses[kept].tolist())


def data_digest(folder: Path, figure: RecordedFigure) -> str:
    """The digest of tokenizer and corpus, as a run's folder has it; of runs that weigh their sources otherwise, that of
    the sources. Empty where there is none."""
    try:
        if figure == "mean_source_loss":
            mixtures = read_run(folder).events_of("mixture")
            return str(mixtures[-1].get("digest_of_sources") or "") if mixtures else ""
        found = decode_loosely((folder / "run.json").read_bytes())
    except (OSError, ValueError, ScrimpError):
        return ""
    return str(found.get("data", "")) if isinstance(found, dict) else ""
