"""kill -9 at random moments: the resumed run ends with the losses of one that was never killed.

Checkpoints are written after every step, so that many of the kills fall into the middle of a
write; each process is killed between the start of its interpreter and a few dozen steps.
"""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tiny_run import flags, losses, write_corpus

from scrimp.cli import main

STEPS = 60


def train(words: list[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "scrimp", *words],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )


@pytest.mark.parametrize("kills", [2, 20])
@pytest.mark.slow
def test_a_run_killed_at_random_moments_ends_with_the_same_losses(tmp_path: Path, kills: int) -> None:
    corpus = write_corpus(tmp_path)
    steps = STEPS if kills < 10 else 5 * STEPS
    more = (f"--train.steps={steps}", "--checkpoint.every=1", "--evaluation.every=0")
    whole, drilled = tmp_path / "whole", tmp_path / "drilled"
    assert main(flags(corpus, whole, *more)) == 0
    rng = random.Random(kills)
    killed = 0
    while killed < kills:
        resume = ["--resume"] if (drilled / "config.toml").exists() else []
        process = train(flags(corpus, drilled, *more, *resume))
        _wait_for_start(process, drilled, rng)
        if process.poll() is not None:
            break  # it finished before the kill
        process.send_signal(signal.SIGKILL)
        process.communicate()
        killed += 1
    assert main(flags(corpus, drilled, *more, "--resume")) == 0
    assert killed == kills, "the run ended before all kills: raise the number of steps"
    assert losses(drilled) == losses(whole)
    assert sorted(losses(drilled)) == list(range(1, steps + 1))


def _wait_for_start(process: subprocess.Popen[bytes], run_dir: Path, rng: random.Random) -> None:
    """Wait until this process has logged or saved something new, then a random moment."""
    log = run_dir / "metrics.jsonl"
    size = log.stat().st_size if log.exists() else 0
    deadline = time.monotonic() + 60
    early = rng.random() < 0.2  # some kills fall into start-up, before the first step
    while not early and process.poll() is None and time.monotonic() < deadline:
        if log.exists() and log.stat().st_size != size:
            break
        time.sleep(0.005)
    time.sleep(rng.uniform(0.0, 3.0) if early else rng.uniform(0.0, 0.15))
