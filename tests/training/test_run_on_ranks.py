"""A run on two ranks of which one sees trouble: both do the same, and leave one run folder behind."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from distributed import spawn
from tiny_run import flags, records, write_corpus

from scrimp.cli import main
from scrimp.runtime import Executable
from scrimp.training.checkpoint import CheckpointStore
from scrimp.world import World

pytestmark = pytest.mark.slow

STEPS, STOPPED_AFTER = 15, 12
NOT_FINITE = 7
"""The step, counted from 0, in which the second rank has a NaN."""


def trouble_on(rank: int, patch: pytest.MonkeyPatch) -> None:
    """The second rank has a NaN in one step."""
    if rank == 0:
        return
    begin, loss, now = Executable.begin, Executable.loss, [0]

    def remember(self: Executable, step: int, first_row: int, **named: Any) -> None:
        now[0] = step
        begin(self, step, first_row, **named)

    def spoiled(self: Executable, *arguments: Any, **named: Any) -> Any:
        sums = loss(self, *arguments, **named)
        return dataclasses.replace(sums, loss=sums.loss * (float("nan") if now[0] == NOT_FINITE else 1.0))

    patch.setattr(Executable, "begin", remember)
    patch.setattr(Executable, "loss", spoiled)


def stop_later(log: Path) -> None:
    """Send this process a signal when a run has taken some steps."""

    def wait() -> None:
        while not log.exists() or log.read_bytes().count(b"\n") < STOPPED_AFTER:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=wait, daemon=True).start()


def trained(rank: int, corpus: Path, run_dir: Path) -> dict[str, Any]:
    """Exit codes of a run that is stopped and resumed, and the checkpoints between the two."""
    with pytest.MonkeyPatch.context() as patch:
        trouble_on(rank, patch)
        if rank == 1:
            stop_later(run_dir / "metrics.jsonl")
        words = [
            f"--train.steps={STEPS}",
            "--train.batch-tokens=128",
            "--train.micro-batch=1",
            "--evaluation.every=0",
            "--checkpoint.every=5",
        ]
        code = main(flags(corpus, run_dir, *words))
    after = [path.name for path in sorted((run_dir / "checkpoints").iterdir())]
    World.current().barrier()
    again = main(["train", f"--run.dir={run_dir}", "--resume"])
    return {"codes": (code, again), "checkpoints": after}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("ranks")
    corpus, run_dir = write_corpus(folder), folder / "run"
    meeting = tmp_path_factory.mktemp("meeting")
    return run_dir, spawn(2, trained, meeting, corpus, run_dir)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in records(run_dir, "events.jsonl") if event["kind"] == kind]


def test_a_signal_to_one_rank_ends_both_and_the_run_goes_on(run: tuple[Path, list[dict[str, Any]]]) -> None:
    run_dir, ranks = run
    assert [rank["codes"] for rank in ranks] == [(143, 0)] * 2
    assert ranks[0]["checkpoints"] == ranks[1]["checkpoints"]
    assert [event["kind"] for event in records(run_dir, "events.jsonl")].count("signal") == 1
    assert [record["step"] for record in records(run_dir)] == list(range(1, STEPS + 1))


def test_one_rank_writes_the_folder_and_it_is_whole(run: tuple[Path, list[dict[str, Any]]]) -> None:
    run_dir, _ = run
    newest, errors = CheckpointStore(run_dir, keep_last=1, keep_every=0).latest(finite=True)
    assert newest is not None
    assert (newest.step, errors) == (STEPS, [])
    assert len(events(run_dir, "start")) == len(events(run_dir, "finish")) == 1
    assert (run_dir / "report.html").exists()
    assert not list(run_dir.rglob("*.partial"))


def test_what_one_rank_cannot_use_both_skip(run: tuple[Path, list[dict[str, Any]]]) -> None:
    run_dir, _ = run
    (skipped,) = events(run_dir, "skipped")
    assert skipped["step"] == NOT_FINITE + 1
    assert "loss nan" in skipped["reason"]
