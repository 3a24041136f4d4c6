"""The host's budget is a limit: of a run's arena and of what its checkpoints take beside it."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import flags, losses, records, write_corpus
from torch import Tensor

from scrimp.cli import main
from scrimp.config import BudgetConfig, Config, ModelConfig, TrainConfig
from scrimp.planner import Plan, build_plan
from scrimp.runtime.memory import HostRoom, arena_bytes, take_room
from scrimp.training.memory import host_room
from scrimp.training.memory.host_room import checkpoint_bytes, left_of_budget
from scrimp.training.setup import decide
from scrimp.training.snapshot import HostCopies

ROOMY = 30_000_000
GIVEN = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=2),
    train=TrainConfig(steps=4, sequence=64, batch_tokens=256, micro_batch=4),
    budget=BudgetConfig(device_memory="1GB", host_memory="1GB"),
)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


class Seen:
    """What runs really took: every arena and snapshot, as they were made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.arena, self.state, self.copies = 0, 0, list[bool]()
        take = HostCopies.take

        def room(*words: Any, **named: Any) -> HostRoom | None:
            found = take_room(*words, **named)
            assert found is not None
            self.arena = found.arena.capacity
            return found

        def copied(copies: HostCopies, tensors: Mapping[str, Tensor]) -> dict[str, Tensor] | None:
            found = take(copies, tensors)
            self.state = sum(tensor.nbytes for tensor in tensors.values())
            self.copies.append(found is not None)
            return found

        monkeypatch.setattr(host_room, "take_room", room)
        monkeypatch.setattr(HostCopies, "take", copied)


@pytest.mark.slow
def test_a_budget_of_the_host_holds_the_arena_and_what_a_checkpoint_takes(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # no cell of a table is wrapped
    seen, found = Seen(monkeypatch), {}

    def run(name: str, budget: int) -> int:
        words = ["--train.steps=2", "--checkpoint.every=1", "--memory.activations=keep+offload"]
        budgets = ["--budget.device-memory=1GB", f"--budget.host-memory={budget}B"]
        assert main(flags(corpus, tmp_path / name, *words, *budgets)) == 0
        found[name] = losses(tmp_path / name)
        return Plan.read(tmp_path / name / "plan.json").predicted.peak_host_bytes or 0

    roomy = run("roomy", ROOMY)
    assert seen.copies == [True]  # of the last step none is asked for
    shown = capsys.readouterr().out
    assert "copy for a checkpoint" in shown
    budget = seen.arena + int(0.9 * seen.state)
    tight = run("tight", budget)
    assert seen.copies == [True, False]
    assert seen.arena <= budget < seen.arena + seen.state
    assert roomy - tight == pytest.approx(seen.state, rel=0.1)
    shown = capsys.readouterr().out
    assert "training waits" in shown.partition("step 1/2")[0]
    assert found["roomy"] == found["tight"]
    steps = {
        event["step"]
        for event in records(tmp_path / "tight", "events.jsonl")
        if event["kind"] == "checkpoint"
    }
    assert steps == {1, 2}


WRITES = """
import sys, pathlib, torch
from scrimp.training.checkpoint import CheckpointStore
from scrimp.training.snapshot import HostCopies

store = CheckpointStore(pathlib.Path(sys.argv[1]), keep_last=2, keep_every=0)
store.save(1, {"model.x": torch.ones(1000)}, {}, {})  # what is imported and started once is
store.wait()
tensors = {f"model.{i}": torch.ones(4, 1 << 20) for i in range(8)}
tensors["model.turned"] = torch.ones(2048, 4096).t()


def peak():
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024


def taken(step, wait):
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    before = peak()
    store.save(step, tensors, {}, {}, wait=wait)
    store.wait()
    return peak() - before


print(sum(tensor.nbytes for tensor in tensors.values()), taken(2, True), taken(3, False))
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the peak of a process is read as Linux tells it")
def test_writing_takes_a_copy_of_the_state_or_where_training_waits_nothing(tmp_path: Path) -> None:
    """Measured in a process: no file is assembled, and what lies turned is not copied whole."""
    words = [sys.executable, "-c", WRITES, str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    state, waiting, going_on = map(int, done.stdout.split())
    assert state == 160 << 20
    assert waiting <= 24 << 20
    assert state - (8 << 20) <= going_on <= state + (24 << 20)


def test_what_a_checkpoint_takes_is_predicted_within_the_budget() -> None:
    decisions = decide(GIVEN)
    costs, device = decisions.memory.costs, decisions.device
    copy, host, arena = costs.checkpoint_copy, 10**6, arena_bytes(10**6)
    for budget, expected in ((arena + copy, copy), (arena + copy - 1, 0), (1, 0)):
        config = dataclasses.replace(
            decisions.config, budget=BudgetConfig(device_memory="1GB", host_memory=f"{budget}B")
        )
        assert checkpoint_bytes(config, device, costs, host) == expected
    assert decisions.copy_bytes == copy
    one_memory = dataclasses.replace(decisions.config, budget=BudgetConfig(host_memory="1B"))
    assert (
        left_of_budget(one_memory, device, 0) is None
    )  # there the copy is in the peak, which the budget limits


def test_a_host_without_room_for_a_copy_refuses_no_run_beside_a_gpu() -> None:
    """As where a plan uses the host: training waits."""
    budget = BudgetConfig(host_memory="1MB")
    decisions = decide(dataclasses.replace(GIVEN, budget=BudgetConfig()))
    config = dataclasses.replace(decisions.config, budget=budget)
    gpu = dataclasses.replace(decisions.device, torch_device=torch.device("cuda"))
    copy = checkpoint_bytes(config, gpu, decisions.memory.costs, 0)
    assert copy == 0
    assert decisions.memory.costs.checkpoint_copy > 1_000_000
    plan = build_plan(
        config,
        decisions.architecture,
        device_name="a GPU",
        device_is_host=False,
        torch_version="2.13",
        reasons={},
        placement=decisions.memory.placement,
        why=decisions.memory.reason,
        predicted=decisions.memory.predicted(copy),
    )
    assert plan.predicted.peak_host_bytes == copy
    dataclasses.replace(decisions, config=config, device=gpu, plan=plan, copy_bytes=copy).refuse_misfit()


@pytest.mark.slow
def test_a_host_that_does_not_give_the_memory_leaves_no_folder_and_no_change(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_much(*words: Any, **named: Any) -> HostRoom | None:
        return take_room(*words, **named | {"host_bytes": 1 << 50})

    monkeypatch.setattr(host_room, "take_room", too_much)
    run_dir, more = tmp_path / "run", ["--memory.optimizer=host"]
    assert main(flags(corpus, run_dir, "--train.steps=1", *more)) == 2
    assert "memory.optimizer" in capsys.readouterr().err
    assert not run_dir.exists()
    assert main(flags(corpus, run_dir, "--train.steps=1")) == 0  # the same folder, by the corrected command
    before = {name: (run_dir / name).read_text(encoding="utf-8") for name in ("config.toml", "plan.json")}
    assert main(["train", f"--run.dir={run_dir}", "--resume", *more]) == 2
    for name, text in before.items():
        assert (run_dir / name).read_text(encoding="utf-8") == text
