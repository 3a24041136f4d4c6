"""Runs whose activations are made again: the same losses, whatever else the run does."""

from __future__ import annotations

import json
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import flags, losses, write_corpus

from scrimp.cli import main
from scrimp.optim import StreamedAdamW
from scrimp.planner import Plan
from scrimp.runtime import execute
from scrimp.runtime.memory import HostMemory, carry_out
from scrimp.runtime.memory.carry import SPARE_BYTES, SPARE_SHARE

STEPS = 6
SNIP = ["--precision=snip", "--snip.first=2", "--snip.every=3", "--snip.delay=1", "--snip.batches=1"]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(corpus: Path, run_dir: Path, *words: str) -> dict[int, float]:
    assert main(flags(corpus, run_dir, f"--train.steps={STEPS}", *words)) == 0
    return losses(run_dir)


@pytest.mark.slow
@pytest.mark.parametrize("words", [[], SNIP], ids=["fp32", "snip"])
def test_a_run_that_recomputes_has_the_losses_of_one_that_keeps(
    corpus: Path, tmp_path: Path, words: list[str]
) -> None:
    """SNIP's losses too: its statistics see every layer once, however often it runs."""
    expected = run(corpus, tmp_path / "keep", *words, "--memory.activations=keep")
    offload = () if words else ("keep+offload", "block+offload,1=mlp+offload")
    for setting in (*offload, "block", "qkv,1=norms"):
        run_dir = tmp_path / setting
        assert run(corpus, run_dir, *words, f"--memory.activations={setting}") == expected
    blocks = Plan.read(run_dir / "plan.json").blocks
    assert [blocks[number].activations for number in ("0", "1")] == ["qkv", "norms"]
    plans = [Plan.read(tmp_path / name / "plan.json").gemms for name in ("keep", "block")]
    assert plans[0] == plans[1]


@pytest.mark.slow
def test_a_run_may_go_on_with_other_activations(corpus: Path, tmp_path: Path) -> None:
    expected = run(corpus, tmp_path / "whole")
    run_dir = tmp_path / "run"
    assert main(flags(corpus, run_dir, f"--train.steps={STEPS}", "--checkpoint.every=3")) == 0
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


@pytest.mark.slow
def test_a_plan_that_was_edited_recomputes_on_every_resume(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    expected = run(corpus, run_dir, "--checkpoint.every=3")
    text = (run_dir / "plan.json").read_text(encoding="utf-8")
    plan = json.loads(text)
    plan["blocks"]["1"]["activations"] = "attention"
    (run_dir / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    for _ in range(2):  # an edit stays, however often the run is resumed
        assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
        assert losses(run_dir) == expected
        assert Plan.read(run_dir / "plan.json").blocks["1"].activations == "attention"
        shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    assert main(["train", f"--run.dir={run_dir}", "--resume", "--memory.activations=block"]) == 2
    assert "plan.json was edited" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
@pytest.mark.parametrize("words", [["--precision=bf16", "--train.parameters=bf16"], []], ids=["bf16", "fp32"])
def test_states_on_the_host_change_no_loss(corpus: Path, tmp_path: Path, words: list[str]) -> None:
    more = [*words, "--train.micro-batch=2", "--optimizer.clip=0.1"]
    expected = run(corpus, tmp_path / "device", *more)
    settings = ["--memory.optimizer=host", "--memory.gradients=1", "--memory.weights=host"]
    for number, some in enumerate((settings[:1], settings, [*settings, "--memory.activations=keep+offload"])):
        run_dir = tmp_path / str(number)
        assert run(corpus, run_dir, *more, *some) == expected
    states = Plan.read(run_dir / "plan.json").states
    assert [states[name].gradients for name in ("0", "1", "head")] == ["device", "host", "device"]


ON_CPU = ["--memory.optimizer=host", "--memory.update=cpu"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "some"),
    [
        (["--optimizer.clip=0.3"], ON_CPU),
        (["--precision=bf16", "--train.parameters=bf16", "--optimizer.clip=0.3"], ON_CPU),
        (
            [
                "--precision=bf16",
                "--train.parameters=bf16",
                "--optimizer.master-weights=false",
                "--optimizer.clip=0",
            ],
            [*ON_CPU, "--memory.weights=1", "--memory.activations=block+offload"],
        ),
    ],
    ids=["fp32", "masters", "bf16, all away"],
)
def test_updates_on_the_cpu_change_no_loss(
    corpus: Path, tmp_path: Path, words: list[str], some: list[str]
) -> None:
    """In a run as in its continuation."""
    more = [*words, "--train.micro-batch=1"]
    expected = run(corpus, tmp_path / "device", *more)
    run_dir = tmp_path / "cpu"
    assert run(corpus, run_dir, *more, *some, "--checkpoint.every=3") == expected
    shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert losses(run_dir) == expected
    states = Plan.read(run_dir / "plan.json").states
    assert [states[name].optimizer for name in ("0", "1", "head")] == ["cpu", "cpu", "device"]


@pytest.mark.slow
def test_the_arena_holds_what_the_account_says(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[HostMemory] = []

    def seen(*words: Any, **named: Any) -> HostMemory | None:
        host = carry_out(*words, **named)
        assert host is not None
        found.append(host)
        return host

    monkeypatch.setattr(execute, "carry_out", seen)
    run(corpus, tmp_path / "run", *ON_CPU, "--memory.weights=1", "--memory.activations=keep+offload")
    run(corpus, tmp_path / "resident")
    host, copy = (
        Plan.read(tmp_path / name / "plan.json").predicted.peak_host_bytes or 0
        for name in ("run", "resident")
    )
    predicted = host - copy  # the copy of a checkpoint is not in the arena
    assert predicted <= found[0].arena.peak <= predicted * (1 + SPARE_SHARE) + SPARE_BYTES
    assert found[0].arena.peak <= 1.2 * predicted  # of tensors as small as these a place is rounded up


@pytest.mark.slow
def test_a_run_goes_on_with_the_cpu_as_updater_by_a_setting_or_an_edited_plan(
    corpus: Path, tmp_path: Path
) -> None:
    run_dir = tmp_path / "run"
    expected = run(corpus, run_dir, "--checkpoint.every=3")
    shutil.copytree(run_dir, tmp_path / "edited")
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    plan["states"]["1"] |= {"optimizer": "cpu", "gradients": "host"}
    (tmp_path / "edited" / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    for folder, words, updaters in (
        (run_dir, ON_CPU, ["cpu"] * 2),
        (tmp_path / "edited", [], ["device", "cpu"]),
    ):
        shutil.rmtree(folder / "checkpoints" / f"step-{STEPS:08d}")
        assert main(["train", f"--run.dir={folder}", "--resume", *words]) == 0
        assert losses(folder) == expected
        states = Plan.read(folder / "plan.json").states
        assert [states[name].optimizer for name in ("0", "1")] == updaters


@pytest.mark.slow
def test_an_update_that_fails_on_the_cpu_ends_the_run_by_its_own_name(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(self: StreamedAdamW, *rest: object) -> None:
        raise torch.OutOfMemoryError("no room in the thread")

    monkeypatch.setattr(StreamedAdamW, "_update_on_cpu", failing)
    run_dir = tmp_path / "run"
    assert main(flags(corpus, run_dir, "--train.steps=2", *ON_CPU)) == 1
    assert not list((run_dir / "checkpoints").glob("step-*"))
    assert not [one for one in threading.enumerate() if one.name.startswith("scrimp-update")]


@pytest.mark.slow
def test_a_run_goes_on_with_its_states_elsewhere(corpus: Path, tmp_path: Path) -> None:
    expected = run(corpus, tmp_path / "whole")
    run_dir = tmp_path / "run"
    assert run(corpus, run_dir, "--checkpoint.every=3", "--memory.optimizer=host") == expected
    for words in (["--memory.optimizer=device", "--memory.weights=host"], ["--memory.weights=device"]):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
        assert main(["train", f"--run.dir={run_dir}", "--resume", *words]) == 0
        assert losses(run_dir) == expected


def with_copy(run_dir: Path) -> int:
    """Predicted bytes of a step and of a checkpoint's copy, which one budget on a CPU holds together."""
    predicted = Plan.read(run_dir / "plan.json").predicted
    return (predicted.peak_device_bytes or 0) + (predicted.peak_host_bytes or 0)


@pytest.mark.slow
def test_a_budget_that_changes_on_resume_changes_the_plan_and_its_figures(
    corpus: Path, tmp_path: Path
) -> None:
    """What is recorded is what runs."""
    run_dir = tmp_path / "run"
    expected = run(corpus, run_dir, "--checkpoint.every=3", "--memory.weights=device")
    budget = with_copy(run_dir) - 400_000
    shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    words = [f"--budget.device-memory={budget}B", "--memory.weights=auto"]
    assert main(["train", f"--run.dir={run_dir}", "--resume", *words]) == 0
    plan = Plan.read(run_dir / "plan.json")
    assert with_copy(run_dir) <= budget
    assert {block.activations for block in plan.blocks.values()} != {"keep"}
    assert losses(run_dir) == expected


@pytest.mark.slow
def test_a_plan_that_an_earlier_resume_wrote_is_no_edit(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    expected = run(corpus, run_dir, "--checkpoint.every=3")
    for setting in ("block", "norms"):  # both from the checkpoint of step 3
        shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
        assert main(["train", f"--run.dir={run_dir}", "--resume", f"--memory.activations={setting}"]) == 0
        assert losses(run_dir) == expected
        assert {block.activations for block in Plan.read(run_dir / "plan.json").blocks.values()} == {setting}


@pytest.mark.slow
def test_an_edited_plan_that_takes_more_than_there_is_is_refused_and_kept(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run(corpus, run_dir, "--checkpoint.every=3", "--memory.activations=block")
    peak = with_copy(run_dir)
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    for number in plan["blocks"]:
        plan["blocks"][number]["activations"] = "keep"
    text = json.dumps(plan)
    (run_dir / "plan.json").write_text(text, encoding="utf-8")
    shutil.rmtree(run_dir / "checkpoints" / f"step-{STEPS:08d}")
    words = [f"--budget.device-memory={peak + 20_000}B"]
    assert main(["train", f"--run.dir={run_dir}", "--resume", *words]) == 2
    shown = " ".join(capsys.readouterr().err.split())
    assert "more device memory than there is now" in shown
    assert "a checkpoint's copy takes" in shown  # of the one memory that a CPU has
    assert (run_dir / "plan.json").read_text(encoding="utf-8") == text


@pytest.mark.slow
def test_an_edited_plan_sends_nothing_to_the_host_beside_snip(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    run(corpus, run_dir, *SNIP)
    plan = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    plan["states"]["1"]["optimizer"] = "host"
    (run_dir / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 2
    assert "beside precision snip" in capsys.readouterr().err


@pytest.mark.slow
def test_an_update_that_was_broken_off_is_no_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[int] = []

    def broken(self: StreamedAdamW, block: int) -> None:
        started.append(block)
        if len(started) > 2:
            raise torch.OutOfMemoryError("no room for a block")

    monkeypatch.setattr(StreamedAdamW, "_ready", broken)
    run_dir = tmp_path / "run"
    assert main(flags(corpus, run_dir, "--train.steps=2", "--memory.optimizer=host")) == 1
    assert not list((run_dir / "checkpoints").glob("step-*"))
    shown = " ".join(capsys.readouterr().err.split())
    assert "in the update of step 2, which cannot be taken again" in shown
    assert "no plan" not in shown
