"""Whole runs with Muon: resumed bit for bit in every precision, formats planned by its own update rule."""

from __future__ import annotations

from pathlib import Path

import pytest
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main

STEPS = ("--optimizer.name=muon", "--train.steps=6", "--checkpoint.every=2", "--checkpoint.keep-last=3")
SNIP = ("--snip.first=1", "--snip.every=2", "--snip.delay=1", "--snip.formats=fp8,nvfp4")


@pytest.mark.parametrize(
    "precision", ["fp32", *(pytest.param(p, marks=pytest.mark.slow) for p in ("bf16", "snip"))]
)
@pytest.mark.slow
def test_a_resumed_run_repeats_the_same_losses(precision: str, tmp_path: Path) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    more = SNIP if precision == "snip" else ()
    assert main(flags(corpus, run, *STEPS, f"--precision={precision}", *more)) == 0
    whole = losses(run)
    assert len(whole) == 6
    assert whole[6] < whole[1]
    if precision == "snip":
        assert [event["step"] for event in records(run, "events.jsonl") if event["kind"] == "replan"]
    assert main(["train", f"--run.dir={run}", "--resume", "--resume-from=2"]) == 0
    assert losses(run) == whole
    assert main(["verify", str(run)]) == 0


@pytest.mark.slow
def test_another_optimizer_is_refused_on_resume_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    assert main(flags(corpus, run, *STEPS)) == 0
    assert main(["train", f"--run.dir={run}", "--resume", "--optimizer.name=adamw"]) == 2
    assert "optimizer.name = adamw" in capsys.readouterr().err
