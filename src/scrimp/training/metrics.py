"""What a run writes down while it runs: figures per step, events with reasons, TensorBoard.

Problem  The log must survive a kill at any byte, a resumed run must not leave two lines for
         one step, and a loss that is not finite must not break the file for strict readers.
Method   ``metrics.jsonl`` and ``events.jsonl``: one JSON object per line, handed to the system
         in one write per line. A resumed run drops the lines after its step and a torn last
         line (written beside, renamed). JSON has no NaN or infinity: such a value is ``null``,
         and ``"nonfinite": {"loss": "nan"}`` in the same line says what it was.
Limits   A line survives the death of the process at once, a loss of power only after the
         system has written it out. If the disk is full, lines wait in memory and follow when
         there is space; `trouble` says so meanwhile, and `close` raises if they are lost.
         Of several ranks one writes: what the others hand over is not kept.
Checked  tests/training/test_metrics.py
"""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from scrimp.errors import StorageError
from scrimp.files import replaced_file, storage_error
from scrimp.report.records import read_jsonl, scan_jsonl
from scrimp.training.event_file import EventFile
from scrimp.world import ALONE, World

METRICS: Final = "metrics.jsonl"
EVENTS: Final = "events.jsonl"
TENSORBOARD: Final = "tensorboard"
LASTING: Final = ("lost-rank",)
"""Kinds of events that a resumed run keeps, whatever their step: they will not be written again."""

_GROUPS: Final = {
    "tokens_per_s": "speed",
    "mfu_bf16": "speed",
    "sol": "speed",
    "step_s": "speed",
    "data_wait_s": "speed",
    "tensor_peak_bytes": "memory",
    "process_peak_bytes": "memory",
    "process_growth_bytes": "memory",
    "eval_loss": "evaluation",
    "eval_bits_per_byte": "evaluation",
}
"""TensorBoard shows a figure under this heading; every other one under ``train``."""


class MetricsLog:
    """The three records of one run, appended to.

    Args:
        resume_step: step of the checkpoint that the run goes on from: later lines are dropped,
            for they will be written again. None: the run begins, at step 0.
        world: the ranks of the run; all but the writer touch no file.

    Raises:
        StorageError: a file cannot be written. CheckpointError: a file is damaged.
    """

    def __init__(self, run_dir: Path, *, resume_step: int | None, world: World = ALONE) -> None:
        self.trouble: StorageError | None = None
        """Why lines are waiting in memory, while they are."""
        self._writes = world.is_writer
        if not self._writes:
            return
        with contextlib.ExitStack() as stack:
            try:
                run_dir.mkdir(parents=True, exist_ok=True)
                self._metrics = stack.enter_context(_Lines(run_dir / METRICS, after=resume_step or 0))
                self._events = stack.enter_context(_Lines(run_dir / EVENTS, after=resume_step or 0))
                is_first = resume_step is None and not (run_dir / TENSORBOARD).exists()
                self._tensorboard: EventFile | None = EventFile(
                    run_dir / TENSORBOARD, resume_step=None if is_first else resume_step or 0
                )
            except OSError as error:
                raise _log_error(error, run_dir) from error
            self._open_files = stack.pop_all()

    def step(self, record: Mapping[str, float | int | None]) -> None:
        """Write the figures of one step; ``record["step"]`` is its number. Does not raise OSError."""
        if not self._writes:
            return
        self._append(self._metrics, record)
        if self._tensorboard is None:
            return
        figures = {
            f"{_GROUPS.get(key.partition('/')[0], 'train')}/{key}": float(value)
            for key, value in record.items()
            if value is not None and key != "step"
        }
        try:
            self._tensorboard.scalars(int(record["step"] or 0), figures)
        except OSError as error:  # a view of the metrics only, and its file may now end in half a record
            self._close_tensorboard()
            self.event("tensorboard-stopped", int(record["step"] or 0), error.strerror or str(error))

    def event(self, kind: str, step: int, reason: str, **fields: Any) -> None:
        """Write that something happened after `step` steps, and why. Does not raise OSError."""
        if not self._writes:
            return
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._append(self._events, {"kind": kind, "step": step, "time": time, "reason": reason, **fields})

    def close(self) -> None:
        """Write what waits, and close. Raises StorageError if lines are lost."""
        if not self._writes:
            return
        self._close_tensorboard()
        try:
            self._metrics.write(b"")
            self._events.write(b"")
        except OSError as error:
            raise _log_error(error, self._metrics.path.parent) from error
        finally:
            self._open_files.close()

    def _append(self, lines: _Lines, record: Mapping[str, Any]) -> None:
        try:
            lines.write(_line(record))
        except OSError as error:
            self.trouble = _log_error(error, lines.path)
        else:
            self.trouble = None

    def _close_tensorboard(self) -> None:
        writer, self._tensorboard = self._tensorboard, None
        if writer is not None:
            with contextlib.suppress(OSError):
                writer.close()


class _Lines:
    """A file of lines, each written whole; what could not be written is kept for the next time."""

    def __init__(self, path: Path, *, after: int) -> None:
        self.path = path
        self._waiting = bytearray()
        _drop_lines(path, after)
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def __enter__(self) -> _Lines:
        return self

    def __exit__(self, *exception: object) -> None:
        os.close(self._descriptor)

    def write(self, line: bytes) -> None:
        self._waiting += line
        while self._waiting:  # a write can stop in the middle of a line: the rest goes first next time
            del self._waiting[: os.write(self._descriptor, self._waiting)]


def _drop_lines(path: Path, after: int) -> None:
    """Remove lines of steps after `after` and a torn last line; all others stay as they are."""
    if not path.exists():
        return
    with replaced_file(path) as file:
        for _, record in scan_jsonl(path):
            if record is None:
                read_jsonl(path)  # raises, naming the damaged line
            elif not _is_after(record, after):
                file.write(_line(record))


def _is_after(record: Mapping[str, Any], step: int) -> bool:
    number = record.get("step")
    if record.get("kind") in LASTING:
        return False
    return isinstance(number, int | float) and number > step


def _line(record: Mapping[str, Any]) -> bytes:
    try:
        text = json.dumps(record, allow_nan=False, ensure_ascii=False)
    except ValueError:
        words = {key: repr(float(value)) for key, value in record.items() if _is_non_finite(value)}
        text = json.dumps(_finite({**record, "nonfinite": words}), allow_nan=False, ensure_ascii=False)
    # A text of a corpus can hold lone surrogates, which UTF-8 cannot.
    return text.encode("utf-8", "replace") + b"\n"


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if _is_non_finite(value) else value


def _is_non_finite(value: Any) -> bool:
    return isinstance(value, float) and not math.isfinite(value)


def _log_error(error: OSError, path: Path) -> StorageError:
    return storage_error(error, f"the log of the run cannot be written to {path}")
