"""Signals to real runs: a checkpoint is written, the hint is given, and the exit code says which one it was."""

from __future__ import annotations

import contextlib
import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import flags, records, write_corpus

from scrimp.training.checkpoint import CheckpointStore

ENDLESS = ("--train.steps=100000", "--evaluation.every=0")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("signals"))


def not_ignoring() -> None:
    """A shell's background job starts with SIGINT ignored, and hands that on."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _no_run_outlives_its_test() -> Iterator[None]:
    yield
    while STARTED:
        with STARTED.pop() as process:
            process.kill()


def start(words: list[str], **how: Any) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-m", "scrimp", *words],
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        **({"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "preexec_fn": not_ignoring} | how),
    )
    STARTED.append(process)
    return process


def wait_for_steps(run_dir: Path, process: subprocess.Popen[str], more: int = 1) -> None:
    log = run_dir / "metrics.jsonl"

    def size() -> int:
        return log.stat().st_size if log.exists() else 0

    before, deadline = size(), time.monotonic() + 90
    while size() < before + more and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    assert size() >= before + more


def checkpoint_is_complete(run_dir: Path) -> bool:
    newest, errors = CheckpointStore(run_dir, keep_last=1, keep_every=0).latest()
    return newest is not None and not errors and newest.step == records(run_dir)[-1]["step"]


@pytest.mark.parametrize(
    "number",
    [
        signal.SIGINT,
        *(pytest.param(n, marks=pytest.mark.slow) for n in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)),
    ],
    ids=lambda number: number.name,
)
@pytest.mark.slow
def test_a_signal_finishes_the_step_writes_a_checkpoint_and_says_how_to_continue(
    corpus: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    process = start(flags(corpus, run_dir, *ENDLESS))
    wait_for_steps(run_dir, process)
    process.send_signal(number)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 128 + number, output
    assert f"go on with `scrimp train --run.dir {run_dir} --resume`" in output
    assert checkpoint_is_complete(run_dir)
    assert records(run_dir, "events.jsonl")[-1]["kind"] == "signal"
    assert (run_dir / "report.html").exists()


def ignoring(number: signal.Signals) -> Callable[[], object]:
    """What `nohup` does to SIGHUP, between fork and exec."""
    return lambda: signal.signal(number, signal.SIG_IGN)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1], ids=lambda number: number.name)
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(
    corpus: Path, tmp_path: Path, number: signal.Signals
) -> None:
    run_dir = tmp_path / "run"
    process = start(flags(corpus, run_dir, *ENDLESS), preexec_fn=ignoring(number))
    wait_for_steps(run_dir, process)
    process.send_signal(number)
    wait_for_steps(run_dir, process, more=2000)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 143, output
    assert checkpoint_is_complete(run_dir)


@pytest.mark.slow
def test_a_warning_that_is_followed_by_the_end_itself_still_writes_the_checkpoint(
    corpus: Path, tmp_path: Path
) -> None:
    """Slurm: SIGUSR1 some time before the limit, SIGTERM at the limit; a lost ssh: SIGHUP twice."""
    run_dir = tmp_path / "run"
    process = start(flags(corpus, run_dir, *ENDLESS))
    wait_for_steps(run_dir, process)
    for number in (signal.SIGUSR1, signal.SIGHUP, signal.SIGHUP, signal.SIGTERM):
        process.send_signal(number)
        time.sleep(0.01)
    output, _ = process.communicate(timeout=60)
    # Of signals that arrive together Python handles the lowest number first: either may be the one that is answered.
    assert process.returncode in (129, 138), output
    assert checkpoint_is_complete(run_dir)


@pytest.mark.slow
def test_a_terminal_that_goes_away_leaves_a_checkpoint(corpus: Path, tmp_path: Path) -> None:
    """The kernel sends SIGHUP to the terminal's session, and what is written to the terminal fails from then on."""
    run_dir = tmp_path / "run"
    child, terminal = pty.fork()
    if child == 0:
        os.environ["OMP_NUM_THREADS"] = "1"
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ignored where the tests run under nohup
        words = [sys.executable, "-m", "scrimp", *flags(corpus, run_dir, *ENDLESS)]
        os.execv(sys.executable, words)
    log, deadline = run_dir / "metrics.jsonl", time.monotonic() + 90
    os.set_blocking(terminal, False)
    while time.monotonic() < deadline and not (log.exists() and log.stat().st_size):
        with contextlib.suppress(BlockingIOError):
            os.read(terminal, 65536)
        time.sleep(0.01)
    os.close(terminal)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 129
    assert checkpoint_is_complete(run_dir)
    assert (run_dir / "report.html").exists()
