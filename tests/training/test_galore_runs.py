"""Whole runs with GaLore and Fira: the loss falls, resumed bit for bit, formats planned by their own update rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main

STEPS = ("--optimizer.rank=8", "--optimizer.refresh-every=3", "--optimizer.lr=0.02")
CHECKPOINTS = ("--checkpoint.every=2", "--checkpoint.keep-last=4")
SNIP = ("--snip.first=1", "--snip.every=3", "--snip.delay=1", "--snip.formats=fp8,nvfp4")


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        ("fira", "fp32"),
        *(pytest.param("galore", p, marks=pytest.mark.slow) for p in ("fp32", "bf16", "snip")),
        pytest.param("fira", "snip", marks=pytest.mark.slow),
    ],
)
def test_the_loss_falls_and_a_resumed_run_repeats_it(name: str, precision: str, tmp_path: Path) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    more = SNIP if precision == "snip" else ()
    words = (
        *STEPS,
        *CHECKPOINTS,
        "--train.steps=8",
        f"--optimizer.name={name}",
        f"--precision={precision}",
        *more,
    )
    assert main(flags(corpus, run, *words)) == 0
    whole = losses(run)
    assert len(whole) == 8
    assert whole[8] < 0.95 * whole[1]
    if precision == "snip":
        assert [event["step"] for event in records(run, "events.jsonl") if event["kind"] == "replan"]
    for step in (4, 6):  # between two projectors, and where one is due
        assert main(["train", f"--run.dir={run}", "--resume", f"--resume-from={step}"]) == 0
        assert losses(run) == whole
    assert main(["verify", str(run)]) == 0


@pytest.mark.slow
def test_another_rank_is_refused_by_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    assert main(flags(corpus, run, *STEPS, "--optimizer.name=galore", "--train.steps=2")) == 0
    assert main(["train", f"--run.dir={run}", "--resume", "--optimizer.rank=4"]) == 2
    assert "optimizer.rank = 4" in capsys.readouterr().err
    states = [f"--model.weights={run}", "--optimizer.from-weights", "--optimizer.name=galore"]
    assert main(flags(corpus, tmp_path / "next", *states, "--optimizer.rank=4", "--train.steps=2")) == 2
    assert "optimizer.rank = 4 (the run has 8)" in " ".join(capsys.readouterr().err.split())
    assert main(flags(corpus, tmp_path / "next", *states, *STEPS, "--train.steps=2")) == 0
