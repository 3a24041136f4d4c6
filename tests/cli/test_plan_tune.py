"""`scrimp plan --tune` with real runs: what is fastest, what fails, and nothing left behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_run import TINY, flags, scrimp, write_corpus

from scrimp.cli import main
from scrimp.cli.short_run import short_run
from scrimp.planner.layout.tuning import Failure


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--tune", "0"], "--tune"),
        (["--tune", "two"], "--tune"),
        (["--ranks", "2"], "--tune"),
        (["--tune", "2", "--ranks", "0"], "--ranks"),
        (["--tune", "2", "--hardware", "8xh100"], "--hardware"),
        (["--tune", "2", "--batch", "lines.jsonl"], "--batch"),
        (["--tune", "2", "--out", "plan.json"], "--out"),
        (["--tune", "2", "--precision", "snip"], "precision snip"),
        (["--tune", "2", "--memory.split", "fastest"], "memory.split"),
        (["--tune", "2", "--optimizer.name", "auto", "--budget.device-memory", "9GB"], "optimizer.name auto"),
        (["--tune", "2", "--layout.dp", "2", "--outer.every", "5"], "outer.every"),
        (["--tune", "2", "--train.micro-batch=1", "--memory.activations=keep"], "nothing to try"),
    ],
)
def test_what_cannot_be_tuned_is_refused(
    words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *TINY, *words]) == 2
    told = capsys.readouterr().err
    assert says in told
    assert told.count("error:") == 1


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_settings_that_are_found_are_trained_with(ranks: int, tmp_path: Path) -> None:
    mine, own = tmp_path / "mine", tmp_path / "own"
    own.mkdir()
    command = flags(write_corpus(tmp_path), mine, "--train.steps=1000", "--model.num-kv-heads=2")
    done = subprocess.run(
        [sys.executable, "-m", "scrimp", "plan", *command[1:], "--tune=3", f"--ranks={ranks}"],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TMPDIR": str(own)},
    )
    assert done.returncode == 0, done.stderr
    told = re.findall(r"^run (\d) of 3, (\d+) steps: .*: [\d.]+ m?s$", done.stderr, re.MULTILINE)
    assert told == [("1", "6"), ("2", "6"), ("3", "12")]
    assert not mine.exists()
    assert not any(one.name.startswith("scrimp-tune-") for one in own.iterdir())
    assert "predicted" in done.stdout
    assert re.search(r"share of the differences in time: .*memory\.activations \d+%", done.stdout)
    found = re.search(r"^fastest: (.*)$", done.stdout, re.MULTILINE)
    assert found is not None
    words = found[1].split()
    assert {word.partition("=")[0] for word in words} >= {"--train.micro-batch", "--memory.activations"}
    assert ("--layout.tp" in found[1]) == (ranks > 1)
    once = [*command, *words, "--train.steps=1", "--evaluation.every=0"]
    trained = scrimp("launch", f"--ranks={ranks}", *once, timeout=300)
    assert trained.returncode == 0, trained.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "why", "says"),
    [
        ("--budget.device-memory=1MB", Failure.MEMORY, "memory"),
        ("--model.num-heads=3", Failure.OTHER, "num_heads"),
    ],
)
def test_failures_are_results(setting: str, why: Failure, says: str, tmp_path: Path) -> None:
    words = flags(write_corpus(tmp_path), tmp_path / "mine", setting)
    words = [word for word in words if not word.startswith("--run.dir")]
    outcome, told = short_run(words, 1, 3, tmp_path)
    assert outcome is why
    assert says in told
