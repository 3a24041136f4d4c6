"""The records of a run: whole lines, valid JSON, one line per step after a resume, TensorBoard."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import struct
import subprocess
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.errors import CheckpointError, StorageError
from scrimp.report import read_jsonl
from scrimp.training import metrics
from scrimp.training.event_file import EventFile
from scrimp.training.metrics import MetricsLog

RECORD: dict[str, Any] = {
    "step": 1,
    "tokens": 4096,
    "loss": 0.1 + 0.2,
    "grad_norm": 1e-300,
    "lr": 3e-3,
    "tokens_per_s": 19150.123456789,
    "mfu_bf16": 0.418,
    "sol": None,
    "tensor_peak_bytes": 2**40 + 1,
    "process_growth_bytes": 2**33,
    "data_wait_s": 0.0,
    "step_s": 0.21,
    "skipped": False,
}


def write(run_dir: Path, steps: range, resume_step: int | None = None) -> None:
    with contextlib.closing(MetricsLog(run_dir, resume_step=resume_step)) as log:
        for step in steps:
            log.step({**RECORD, "step": step, "loss": step + (0.5 if resume_step else 0.0)})
            log.event("checkpoint", step, "complete")


def strict(path: Path) -> list[Any]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def curve(run_dir: Path, tag: str) -> dict[int, float]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0})
    accumulator.Reload()
    events = accumulator.Scalars(tag)
    assert len({event.step for event in events}) == len(events), "two values for one step"
    return {event.step: event.value for event in events}


def test_a_record_comes_back_exactly(tmp_path: Path) -> None:
    with contextlib.closing(MetricsLog(tmp_path, resume_step=None)) as log:
        log.step(RECORD)
        log.event("sample", 1, "end of run", prompt="a\nb", text="ü\u2028\x00 </script> \ud800")
    assert strict(tmp_path / "metrics.jsonl") == [RECORD]
    assert read_jsonl(tmp_path / "metrics.jsonl") == [RECORD]
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert event["kind"] == "sample"
    assert event["step"] == 1
    assert event["prompt"] == "a\nb"
    assert event["text"] == "ü\u2028\x00 </script> ?"
    assert datetime.fromisoformat(event["time"]).tzinfo is not None


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_floats_round_trip_exactly(value: float) -> None:
    assert json.loads(metrics._line({"loss": value}))["loss"] == value


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_valid_json_and_says_what_it_was(tmp_path: Path, value: float) -> None:
    with contextlib.closing(MetricsLog(tmp_path, resume_step=None)) as log:
        log.step({**RECORD, "loss": value, "grad_norm": value})
        log.event("skipped", 1, "not finite", loss=value, window=[1.0, value])
    (record,) = strict(tmp_path / "metrics.jsonl")
    assert record["loss"] is None
    assert record["nonfinite"] == {"loss": repr(value), "grad_norm": repr(value)}
    (event,) = strict(tmp_path / "events.jsonl")
    assert event["loss"] is None
    assert event["window"] == [1.0, None]


@pytest.mark.slow
def test_a_line_is_in_the_file_as_soon_as_it_was_written(tmp_path: Path) -> None:
    code = """
import os, signal, sys, pathlib
from scrimp.training.metrics import MetricsLog
log = MetricsLog(pathlib.Path(sys.argv[1]), resume_step=None)
for step in range(1, 6):
    log.step({"step": step, "loss": 1.0})
log.event("signal", 5, "killed")
os.kill(os.getpid(), signal.SIGKILL)
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], check=False)
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5]
    assert [record["kind"] for record in read_jsonl(tmp_path / "events.jsonl")] == ["signal"]


def test_a_resumed_run_has_one_line_per_step(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    write(tmp_path, range(7, 13), resume_step=6)
    records = read_jsonl(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"]) for record in records] == [
        *((step, float(step)) for step in range(1, 7)),
        *((step, step + 0.5) for step in range(7, 13)),
    ]
    assert [record["step"] for record in read_jsonl(tmp_path / "events.jsonl")] == list(range(1, 13))


def test_tensorboard_shows_the_same_curve_after_a_resume(tmp_path: Path) -> None:
    write(tmp_path, range(1, 11))
    write(tmp_path, range(7, 13), resume_step=6)
    write(tmp_path, range(10, 12), resume_step=9)
    records = {record["step"]: record["loss"] for record in read_jsonl(tmp_path / "metrics.jsonl")}
    assert curve(tmp_path, "train/loss") == records
    speeds = set(curve(tmp_path, "speed/tokens_per_s").values())
    assert speeds == {struct.unpack("f", struct.pack("f", RECORD["tokens_per_s"]))[0]}
    assert curve(tmp_path, "memory/process_growth_bytes")[1] == 2**33


def test_tensorboard_gets_evaluations_where_they_are(tmp_path: Path) -> None:
    with contextlib.closing(MetricsLog(tmp_path, resume_step=None)) as log:
        log.step(RECORD)
        log.step({**RECORD, "step": 2, "eval_loss": 2.5, "eval_bits_per_byte": 1.25, "loss": math.nan})
    assert curve(tmp_path, "evaluation/eval_loss") == {2: 2.5}
    assert math.isnan(curve(tmp_path, "train/loss")[2])


def test_a_run_killed_before_its_first_checkpoint_begins_again(tmp_path: Path) -> None:
    write(tmp_path, range(1, 6))
    write(tmp_path, range(1, 3))
    assert [record["step"] for record in read_jsonl(tmp_path / "metrics.jsonl")] == [1, 2]
    assert set(curve(tmp_path, "train/loss")) == {1, 2}


@pytest.mark.parametrize("cut", range(1, 40, 3))
def test_a_torn_last_line_is_dropped_on_resume(tmp_path: Path, cut: int) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    os.truncate(path, path.stat().st_size - cut)
    write(tmp_path, range(3, 5), resume_step=3 if cut == 1 else 2)
    assert {record["step"] for record in strict(path)} == {1, 2, 3, 4}


def test_kept_lines_are_not_changed_by_a_resume(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    before = (tmp_path / "metrics.jsonl").read_bytes()
    write(tmp_path, range(0), resume_step=3)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before
    assert not list(tmp_path.glob(".*"))


def test_an_altered_line_is_named_and_the_file_stays(tmp_path: Path) -> None:
    write(tmp_path, range(1, 4))
    path = tmp_path / "metrics.jsonl"
    damaged = path.read_bytes().replace(b'{"step": 2', b'{"step 2')
    path.write_bytes(damaged)
    with pytest.raises(CheckpointError, match=r"metrics\.jsonl is damaged at line 2"):
        MetricsLog(tmp_path, resume_step=2)
    assert path.read_bytes() == damaged


def test_a_file_in_the_way_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").write_text("")
    with pytest.raises(StorageError, match="File exists"):
        MetricsLog(tmp_path, resume_step=None)
    (tmp_path / "run").write_text("")
    with pytest.raises(StorageError, match="run"):
        MetricsLog(tmp_path / "run", resume_step=None)


# -- a full disk ---------------------------------------------------------------------------------


class FullDisk:
    """`os.write` on a disk with so many bytes left: writes a part, then fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, free: int) -> None:
        self.free, self._write = free, os.write
        monkeypatch.setattr(os, "write", self)

    def __call__(self, descriptor: int, data: bytes) -> int:
        if self.free == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, bytes(data[: self.free]))
        self.free -= written
        return written


def test_lines_wait_while_the_disk_is_full_and_none_is_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = MetricsLog(tmp_path, resume_step=None)
    disk = FullDisk(monkeypatch, free=500)
    for step in range(1, 6):
        log.step({**RECORD, "step": step})
    assert log.trouble is not None
    assert "No space left" in str(log.trouble)
    disk.free = 10**6
    log.step({**RECORD, "step": 6})
    assert log.trouble is None
    log.close()
    assert [record["step"] for record in strict(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4, 5, 6]


def test_lines_that_are_lost_are_an_error_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log = MetricsLog(tmp_path, resume_step=None)
    FullDisk(monkeypatch, free=0)
    log.event("start", 0, "from the beginning")
    with pytest.raises(StorageError, match="log of the run"):
        log.close()


def test_a_tensorboard_file_that_fails_is_given_up_and_the_metrics_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with contextlib.closing(MetricsLog(tmp_path, resume_step=None)) as log:
        monkeypatch.setattr(EventFile, "scalars", fail)
        log.step(RECORD)
        log.step({**RECORD, "step": 2})
    assert len(read_jsonl(tmp_path / "metrics.jsonl")) == 2
    (event,) = read_jsonl(tmp_path / "events.jsonl")
    assert event["kind"] == "tensorboard-stopped"


def test_logging_a_step_costs_less_than_a_millisecond(tmp_path: Path) -> None:
    from rich.console import Console

    from scrimp.training.progress import StepLine

    steps = 500
    with (
        open(tmp_path / "log.txt", "w") as file,
        contextlib.closing(MetricsLog(tmp_path, resume_step=None)) as log,
        StepLine(total_steps=steps, console=Console(file=file)) as line,
    ):
        log.step(RECORD)
        line.update(RECORD)
        start = time.thread_time()  # processor time: wall time would measure a busy machine
        for step in range(2, steps):
            record = {**RECORD, "step": step}
            log.step(record)
            line.update(record)
        seconds = (time.thread_time() - start) / (steps - 2)
    assert seconds < 1e-3
