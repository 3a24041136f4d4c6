"""Runs whose activations are made again: the same losses, whatever else the run does."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import flags, losses, write_corpus

from scrimp.cli import main
from scrimp.planner import Plan

STEPS = 6
SNIP = ["--precision=snip", "--snip.first=2", "--snip.every=3", "--snip.delay=1", "--snip.batches=1"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(corpus: Path, run_dir: Path, *words: str) -> dict[int, float]:
    assert main(flags(corpus, run_dir, f"--train.steps={STEPS}", *words)) == 0
    return losses(run_dir)


@pytest.mark.parametrize("words", [[], SNIP], ids=["fp32", "snip"])
def test_a_run_that_recomputes_has_the_losses_of_one_that_keeps(
    corpus: Path, tmp_path: Path, words: list[str]
) -> None:
    """Of SNIP too: its statistics see every layer once, however often it runs."""
    expected = run(corpus, tmp_path / "keep", *words, "--memory.activations=keep")
    offload = () if words else ("keep+offload", "block+offload,1=mlp+offload")
    for setting in (*offload, "block", "qkv,1=norms"):
        run_dir = tmp_path / setting
        assert run(corpus, run_dir, *words, f"--memory.activations={setting}") == expected
    blocks = Plan.read(run_dir / "plan.json").blocks
    assert [blocks[number].activations for number in ("0", "1")] == ["qkv", "norms"]
    plans = [Plan.read(tmp_path / name / "plan.json").gemms for name in ("keep", "block")]
    assert plans[0] == plans[1]


def test_a_run_may_go_on_with_other_activations(corpus: Path, tmp_path: Path) -> None:
    expected = run(corpus, tmp_path / "whole")
    run_dir = tmp_path / "run"
    assert main(flags(corpus, run_dir, f"--train.steps={STEPS}", "--train.checkpoint-every=3")) == 0
    shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    words = [f"--run.dir={run_dir}", "--resume"]
    assert main(["train", *words, "--memory.activations=block"]) == 0
    assert losses(run_dir) == expected
    assert {block.activations for block in Plan.read(run_dir / "plan.json").blocks.values()} == {"block"}


@pytest.mark.parametrize(
    ("setting", "says"),
    [
        ("blocks", "keep, swiglu"),
        ("keep,0-2=block", "0 to 1"),
        ("keep,first=block", "0-11=block"),
        ("keep,1-0=block", "0 to 1"),
    ],
)
def test_a_setting_that_cannot_be_is_refused_before_a_folder_is_made(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], setting: str, says: str
) -> None:
    assert main(flags(corpus, tmp_path / "run", f"--memory.activations={setting}")) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "memory.activations" in shown
    assert says in shown
    assert not (tmp_path / "run").exists()


def test_a_plan_that_was_edited_recomputes_on_resume(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    expected = run(corpus, run_dir, "--train.checkpoint-every=3")
    text = (run_dir / "plan.json").read_text(encoding="utf-8")
    plan = json.loads(text)
    plan["blocks"]["1"]["activations"] = "attention"
    (run_dir / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert losses(run_dir) == expected
    assert Plan.read(run_dir / "plan.json").blocks["1"].activations == "attention"


@pytest.mark.parametrize("words", [["--precision=bf16", "--train.parameters=bf16"], []], ids=["bf16", "fp32"])
def test_states_on_the_host_change_no_loss(corpus: Path, tmp_path: Path, words: list[str]) -> None:
    more = [*words, "--train.micro-batch=2", "--train.clip=0.1"]
    expected = run(corpus, tmp_path / "device", *more)
    settings = ["--memory.optimizer=host", "--memory.gradients=1", "--memory.weights=host"]
    for number, some in enumerate((settings[:1], settings, [*settings, "--memory.activations=keep+offload"])):
        run_dir = tmp_path / str(number)
        assert run(corpus, run_dir, *more, *some) == expected
    states = Plan.read(run_dir / "plan.json").states
    assert [states[name].gradients for name in ("0", "1", "head")] == ["device", "host", "device"]


def test_a_run_goes_on_with_its_states_elsewhere(corpus: Path, tmp_path: Path) -> None:
    expected = run(corpus, tmp_path / "whole")
    run_dir = tmp_path / "run"
    assert run(corpus, run_dir, "--train.checkpoint-every=3", "--memory.optimizer=host") == expected
    for words in (["--memory.optimizer=device", "--memory.weights=host"], ["--memory.weights=device"]):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
        assert main(["train", f"--run.dir={run_dir}", "--resume", *words]) == 0
        assert losses(run_dir) == expected
