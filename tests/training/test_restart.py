"""A run whose checkpoints are gone begins again only where its user permits it."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main

MORE = ("--train.steps=6", "--checkpoint.every=2", "--evaluation.every=0")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("restart"))


@pytest.fixture(scope="module")
def whole(corpus: Path) -> Path:
    run_dir = corpus.parent / "whole"
    assert main(flags(corpus, run_dir, *MORE)) == 0
    return run_dir


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole, tmp_path / "run"))


def logs(run_dir: Path) -> list[bytes]:
    return [(run_dir / name).read_bytes() for name in ("metrics.jsonl", "events.jsonl", "plan.json")]


@pytest.mark.parametrize("gone", ["checkpoints", "checkpoints/*", "checkpoints and events.jsonl"])
@pytest.mark.every(3)
def test_resuming_without_checkpoints_is_refused_and_nothing_is_cut(
    copy: Path, whole: Path, gone: str, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copy / "checkpoints")
    if gone == "checkpoints/*":
        (copy / "checkpoints").mkdir()
    if gone == "checkpoints and events.jsonl":
        (copy / "events.jsonl").unlink()
    assert main(["train", f"--run.dir={copy}", "--resume"]) == 2
    refusal = capsys.readouterr().err
    assert f"the checkpoints of {copy} are gone" in refusal
    assert (copy / "metrics.jsonl").read_bytes() == (whole / "metrics.jsonl").read_bytes()
    words = refusal.split("`")[1].split()[1:]
    assert words == ["train", "--run.dir", str(copy), "--resume", "--restart"]
    assert main(words) == 0
    assert "beginning at step 0" in capsys.readouterr().out
    assert losses(copy) == losses(whole)


def test_damaged_checkpoints_are_set_aside_where_the_run_may_begin_again(
    copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (copy / "checkpoints").iterdir():
        os.truncate(folder / "state.json", 10)
    before = logs(copy)
    assert main(["train", f"--run.dir={copy}", "--resume"]) == 2
    assert "--resume --restart" in capsys.readouterr().err
    assert logs(copy) == before
    assert main(["train", f"--run.dir={copy}", "--resume", "--restart"]) == 0
    assert losses(copy) == losses(whole)
    assert sorted(path.name for path in (copy / "checkpoints").iterdir()) == [
        "left-step-00000004",
        "left-step-00000006",
        "step-00000004",
        "step-00000006",
    ]


@pytest.mark.slow
def test_a_run_that_may_begin_again_goes_on_where_it_can(
    copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.rmtree(copy / "checkpoints" / "step-00000006")
    assert main(["train", f"--run.dir={copy}", "--resume", "--restart"]) == 0
    assert "continuing from step 4" in capsys.readouterr().out
    assert losses(copy) == losses(whole)


@pytest.mark.slow
def test_a_run_that_never_had_a_checkpoint_begins_at_its_beginning(
    copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As a kill before the first one leaves it: there is nothing to lose."""
    shutil.rmtree(copy / "checkpoints")
    for name, kept in (("metrics.jsonl", 1), ("events.jsonl", 1)):
        lines = (copy / name).read_text(encoding="utf-8").splitlines(keepends=True)
        (copy / name).write_text("".join(lines[:kept]), encoding="utf-8")
    assert [event["kind"] for event in records(copy, "events.jsonl")] == ["start"]
    assert main(["train", f"--run.dir={copy}", "--resume"]) == 0
    assert "beginning at step 0" in capsys.readouterr().out
    assert losses(copy) == losses(whole)


@pytest.mark.slow
def test_a_run_that_plans_its_formats_begins_again_in_those_of_its_start(
    corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    snip = (
        "--precision=snip",
        "--snip.first=2",
        "--snip.every=20",
        "--snip.delay=1",
        "--train.micro-batch=2",
    )
    assert main(flags(corpus, run_dir, "--train.steps=6", "--evaluation.every=0", *snip)) == 0
    before, plan = losses(run_dir), (run_dir / "plan.json").read_text(encoding="utf-8")
    plans = sorted(path.name for path in (run_dir / "plans").iterdir())
    shutil.rmtree(run_dir / "checkpoints")
    assert main(["train", f"--run.dir={run_dir}", "--resume", "--restart"]) == 0
    assert losses(run_dir) == before
    assert sorted(path.name for path in (run_dir / "plans").iterdir()) == plans
    gemms = [
        json.loads(text)["gemms"] for text in (plan, (run_dir / "plan.json").read_text(encoding="utf-8"))
    ]
    assert gemms[0] == gemms[1]
    assert any("nvfp4" in str(choice) for choice in gemms[0].values())


def test_a_checkpoint_is_no_run_to_go_on_with(whole: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = whole / "checkpoints" / "step-00000004"
    before = sorted(folder.iterdir())
    assert main(["train", f"--run.dir={folder}", "--resume"]) == 2
    assert f"--run.dir {whole} --resume-from 4" in capsys.readouterr().err
    assert sorted(folder.iterdir()) == before
