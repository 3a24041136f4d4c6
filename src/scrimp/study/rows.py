"""rows.jsonl: what a study has found so far, a line for each run that ended. Everything else is made from it.

Problem  A study takes hours, and may be killed at any byte. Its rows outlive its runs' folders, and are read by later
         reports, beside a file that may have been edited since.
Method   The file only grows. A row is written in one piece and flushed to the disk; a torn last line is cut off before
         the next row is written, and its run is read again. A row carries the digest of its run's settings: rows of
         other settings are refused by name. A run that failed leaves a row with its error, which the next one of that
         run replaces.
Limits   One process writes (`conduct` holds a lock on the folder).
Checked  tests/study/test_rows.py
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from scrimp.errors import CheckpointError, ConfigError
from scrimp.files import read_bounded, storage, sync_folder
from scrimp.json_files import decode_json, finite

ROWS: Final = "rows.jsonl"
_VERSION: Final = ("scrimp_study_row", 1)
_MOST_BYTES: Final = 2**30
LARGEST: Final = 1e100
"""Beyond it no figure says anything, and squares overflow."""
MOST_POINTS: Final = 200
"""Most points of a curve in a row."""
Key = tuple[str, int, int]
"""Variant, seed, and the step at which its figures were taken."""


@dataclass(frozen=True, kw_only=True)
class Curve:
    """A quantity over steps."""

    steps: list[float]
    values: list[float | None]

    def first_at_most(self, target: float) -> float:
        """The first step at which the quantity is no more than `target`; infinity: it never is."""
        found = (
            step
            for step, value in zip(self.steps, self.values, strict=True)
            if value is not None and value <= target
        )
        return next(found, math.inf)


@dataclass(frozen=True, kw_only=True)
class Row:
    """One run that ended, or reached the end of a round."""

    variant: str
    seed: int
    steps: int
    """The step at which its figures were taken."""
    digest: str
    """Digest of its settings."""
    error: str | None = None
    """Why the run has no figures."""
    figures: dict[str, float | None] = field(default_factory=dict)
    training: Curve | None = None
    """Training loss: means of equal parts of the run."""
    held_out: Curve | None = None
    gradient_norm: Curve | None = None
    """Norm of the gradient before clipping, in the same parts; None in rows of earlier versions."""
    data: str = ""
    """Digest of tokenizer and corpus."""
    seconds: float = 0.0
    """Time of the process that ended the run; of a run that was resumed only its last one."""
    at_once: int = 1
    """Most runs that went on its machine at once."""
    machine: str = ""
    environment: dict[str, Any] = field(default_factory=dict)
    time: str = ""
    """UTC."""

    @property
    def key(self) -> Key:
        """What the row is about."""
        return self.variant, self.seed, self.steps


def digest_of(settings: Mapping[str, Any]) -> str:
    """A digest of all settings of a run."""
    text = json.dumps({key: str(value) for key, value in settings.items()}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def read_rows(folder: Path) -> dict[Key, Row]:
    """The newest row of every run, in the order in which they ended; none where there is no file.

    Raises:
        CheckpointError: a line but the last cannot be read.
    """
    path = folder / ROWS
    if not path.exists():
        return {}
    content = _whole_lines(read_bounded(path, error=CheckpointError, do=_advice(path), at_most=_MOST_BYTES))
    rows: dict[Key, Row] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        row = decode_json(
            line,
            Row,
            origin=f"{path}, line {number}",
            error=CheckpointError,
            do=_advice(path),
            version=_VERSION,
        )
        _check(row, f"{path}, line {number}", path)
        rows.pop(row.key, None)
        rows[row.key] = row
    return rows


def _check(row: Row, where: str, path: Path) -> None:
    """Refuse what no run writes, and what no report could reckon with."""
    for curve in (row.training, row.held_out, row.gradient_norm):
        if curve is not None and len(curve.steps) != len(curve.values):
            raise CheckpointError(
                f"{where} has a curve with other steps than values",
                got=f"{len(curve.steps):,} steps, {len(curve.values):,} values",
                expected="one value for each step",
                do=_advice(path),
            )
    for name, value in row.figures.items():
        if value is not None and abs(value) > LARGEST:
            raise CheckpointError(
                f"{where} has a figure out of range: {name}",
                got=f"{value:g}",
                expected=f"at most {LARGEST:g}",
                do=_advice(path),
            )


def append_row(folder: Path, row: Row) -> None:
    """Add a row, whole and on the disk when this returns; a torn line before it is cut off."""
    path = folder / ROWS
    line = json.dumps({_VERSION[0]: _VERSION[1]} | finite(asdict(row)), separators=(",", ":")) + "\n"
    with storage(path, "write"):
        is_new = not path.exists()
        with open(path, "ab") as file:
            _cut_torn_line(path, file.tell())
            file.write(line.encode())
            file.flush()
            os.fsync(file.fileno())
        if is_new:
            sync_folder(folder)


def rows_of_study(
    rows: Mapping[Key, Row], digest: Callable[[str, int], str | None], folder: Path
) -> dict[Key, Row]:
    """The rows of variants that the study has; those of variants that are gone are left out.

    Args:
        digest: of the settings that a run of a variant and a seed has now, of any seed; None: there is no such variant.

    Raises:
        ConfigError: a row was made with other settings.
    """
    found, others = {}, []
    for key, row in rows.items():
        now = digest(row.variant, row.seed)
        if now is None:
            continue
        found[key] = row
        if now != row.digest:
            others.append(row)
    if others:
        names = ", ".join(dict.fromkeys(f"{row.variant} seed {row.seed}" for row in others))
        raise ConfigError(
            f"{folder / ROWS} has rows of other settings",
            got=f"{len(others)}: {names}",
            expected="rows of the settings that the study has now",
            do="give another folder with --out, or the settings that the rows were made with",
        )
    return found


def _whole_lines(content: bytes) -> bytes:
    return content[: content.rfind(b"\n") + 1]


def _cut_torn_line(path: Path, size: int) -> None:
    """Cut off what stands behind the last end of a line."""
    with open(path, "r+b") as file:
        end = size
        while end > 0:
            begin = max(0, end - 2**16)
            file.seek(begin)
            place = file.read(end - begin).rfind(b"\n")
            if place >= 0:
                end = begin + place + 1
                break
            end = begin
        if end < size:
            file.truncate(end)


def _advice(path: Path) -> str:
    return f"remove that line from {path.name}: its run is read again, or repeated"
