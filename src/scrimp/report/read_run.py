"""Everything that a run folder tells, read as far as it can be read.

Problem  The page is wanted most when a run went wrong: it died at step 3, a file is torn,
         a key is missing, a value has the wrong type.
Method   Each file is read on its own. What is missing is left empty, what is damaged is left
         out and noted, and the page shows the notes. Metrics become one column of floats per
         name (8 bytes a step); what is not a finite number is NaN, and later a gap. Steps
         that were run again after a resume replace their first version.
Limits   Only names in `COLUMNS` are charted.
Checked  tests/report/test_read_run.py
"""

from __future__ import annotations

import math
import tomllib
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from scrimp.errors import CheckpointError, StorageError
from scrimp.files import read_bounded
from scrimp.json_files import decode_loosely
from scrimp.report.curves import Array
from scrimp.report.precision_record import PlanAt, read_plans
from scrimp.report.records import scan_jsonl
from scrimp.report.units import is_number

COLUMNS: Final = (
    "step",
    "tokens",
    "loss",
    "grad_norm",
    "lr",
    "tokens_per_s",
    "mfu_bf16",
    "mfu_bf16_full",
    "sol",
    "tensor_peak_bytes",
    "process_peak_bytes",
    "process_growth_bytes",
    "data_wait_s",
    "step_s",
    "skipped",
    "eval_loss",
    "eval_bits_per_byte",
)
OLD_TENSOR_PEAK: Final = "peak_device_bytes"
"""The allocator's peak in records of earlier versions. On a CPU it was the process's growth: read on CUDA alone."""
MAX_FILE_BYTES: Final = 2**26
FILES: Final = ("config.toml", "plan.json", "metrics.jsonl", "events.jsonl")


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """What a run left behind."""

    folder: Path
    name: str
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    plan: Mapping[str, Any] = field(default_factory=dict)
    plans: tuple[PlanAt, ...] = ()
    """Those of re-plans, oldest first."""
    columns: Mapping[str, Array]
    events: list[dict[str, Any]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What could not be read, in sentences."""

    @property
    def num_steps(self) -> int:
        """Steps that were recorded."""
        return len(self.columns["step"])

    def recorded(self, name: str) -> tuple[Array, Array]:
        """(steps, values) of the rows in which `name` is a finite number."""
        values = self.columns[name]
        finite = np.isfinite(values)
        return self.columns["step"][finite], values[finite]

    def evaluations(self, column: str, event_field: str) -> tuple[Array, Array]:
        """Held-out (steps, values): of the step records, and of evaluation events between them."""
        found = dict(zip(*(part.tolist() for part in self.recorded(column)), strict=True))
        for event in self.events_of("evaluation"):
            step, value = event.get("step"), event.get(event_field)
            if is_number(step) and is_number(value):
                found[float(step)] = float(value)
        steps = sorted(found)
        return np.array(steps, dtype=np.float64), np.array([found[step] for step in steps], dtype=np.float64)

    def last(self, name: str) -> float | None:
        """The last finite value of a column."""
        values = self.recorded(name)[1]
        return float(values[-1]) if values.size else None

    def setting(self, key: str) -> Any:
        """A value of config.toml by its dotted key, or None."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def events_of(self, *kinds: str) -> list[dict[str, Any]]:
        """Events of these kinds, oldest first."""
        return [event for event in self.events if event.get("kind") in kinds]

    def start_field(self, key: str) -> Any:
        """A field of the newest start or resume event that has it, or None."""
        for event in reversed(self.events_of("start", "resume")):
            if event.get(key) is not None:
                return event[key]
        return None


def read_run(run_dir: Path) -> RunRecord:
    """Read a run folder.

    Raises:
        CheckpointError: there is no such folder, or it is not a run's.
        StorageError: a file is there and cannot be read.
    """
    if not run_dir.is_dir():
        raise CheckpointError(
            "run folder is not there",
            got=run_dir,
            expected="a folder written by `scrimp train`",
            do="check the path",
        )
    if not any((run_dir / name).is_file() for name in FILES):
        raise CheckpointError(
            "folder is not a run",
            got=f"{run_dir} without any of {', '.join(FILES)}",
            expected="a folder written by `scrimp train`",
            do="give the run folder itself, not the folder above it or a checkpoint inside it",
        )
    notes: list[str] = []
    config_text = _text(run_dir / "config.toml", notes)
    config = _toml(config_text, notes)
    is_cuda = str(config.get("device", "")).startswith("cuda")
    columns = _columns(run_dir / "metrics.jsonl", notes, is_cuda=is_cuda)
    events = _events(run_dir / "events.jsonl", notes)
    return RunRecord(
        folder=run_dir,
        name=run_dir.resolve().name or str(run_dir),
        config_text=config_text,
        config=config,
        plan=_plan(run_dir / "plan.json", notes),
        plans=read_plans(run_dir, notes),
        columns=columns,
        events=events,
        notes=notes,
    )


def mapping(value: object) -> Mapping[str, Any]:
    """`value` if it is an object of a JSON or TOML file, else an empty one."""
    return value if isinstance(value, Mapping) else {}


def _text(path: Path, notes: list[str]) -> str:
    if not path.exists():
        notes.append(f"{path.name} is not there.")
        return ""
    content = read_bounded(path, error=StorageError, do="move it out of the folder", at_most=MAX_FILE_BYTES)
    return content.decode("utf-8", "replace")


def _toml(text: str, notes: list[str]) -> Mapping[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:  # ValueError: also an integer of 5,000 digits
        notes.append(f"config.toml is not valid TOML ({error}); its lines are shown as they are.")
        return {}


def _plan(path: Path, notes: list[str]) -> Mapping[str, Any]:
    text = _text(path, notes)
    if not text:
        return {}
    try:
        plan = decode_loosely(text)
    except ValueError as error:
        notes.append(f"plan.json is damaged ({error}) and not shown.")
        return {}
    if not isinstance(plan, dict):
        notes.append("plan.json is not a JSON object and not shown.")
    return mapping(plan)


def _columns(path: Path, notes: list[str], *, is_cuda: bool) -> dict[str, Array]:
    columns = {name: array("d") for name in COLUMNS}
    steps, damaged = columns["step"], []
    if not path.is_file():
        notes.append(f"{path.name} is not there: no step was recorded.")
    for number, record in scan_jsonl(path):
        step = record.get("step") if record is not None else None
        if record is None or not is_number(step):
            damaged.append(number)
            continue
        while steps and steps[-1] >= step:  # run again after a resume
            for column in columns.values():
                column.pop()
        if is_cuda and "tensor_peak_bytes" not in record:
            record["tensor_peak_bytes"] = record.get(OLD_TENSOR_PEAK)
        for name, column in columns.items():
            column.append(_float(record.get(name)))
    _note_damage(path, damaged, notes)
    return {name: np.array(column, dtype=np.float64) for name, column in columns.items()}


def _float(value: object) -> float:
    if value is True:
        return 1.0
    return float(value) if is_number(value) else math.nan


def _events(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    events, damaged = [], []
    for number, record in scan_jsonl(path):
        if record is None:
            damaged.append(number)
        else:
            events.append(record)
    _note_damage(path, damaged, notes)
    return events


def _note_damage(path: Path, damaged: list[int], notes: list[str]) -> None:
    if damaged:
        lines = ", ".join(str(number) for number in damaged[:5]) + (" …" if len(damaged) > 5 else "")
        notes.append(f"{path.name}: {len(damaged):,} damaged line(s) left out (line {lines}).")
