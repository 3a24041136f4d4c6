"""A process that really runs out of memory in a step goes on with a plan that takes less, and with the same losses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from test_memory_check import assert_figures_follow
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main
from scrimp.config import BudgetConfig, Config, MemoryConfig, ModelConfig, TrainConfig
from scrimp.planner import Plan
from scrimp.planner.memory.account import StepAccount, account_step
from scrimp.runtime import Executable, realise
from scrimp.runtime.memory import ArenaTooSmallError, Place, arena_bytes, largest_step
from scrimp.training import step as training_step
from scrimp.training.memory.host_room import take_host_room
from scrimp.training.memory.oom import STEP, MemoryTrouble, is_out_of_memory
from scrimp.training.memory.replan import ROUNDED, most_on_host
from scrimp.training.setup import Decisions, decide

WIDE = [
    "--device=cpu",
    "--data.tokenizer=bytes",
    "--model.num-layers=12",
    "--model.width=64",
    "--model.num-heads=2",
    "--model.num-kv-heads=1",
    "--model.ffn-width=1024",
    "--train.sequence=128",
    "--train.batch-tokens=4096",
    "--train.micro-batch=32",
    "--train.steps=5",
    "--evaluation.tokens=512",
    "--evaluation.every=0",
    "--checkpoint.every=0",
]
SCRIPT = """
import resource, sys
from scrimp.cli import main
from scrimp.training.step import Stepper

spare, passes = int(sys.argv[1]), Stepper._passes

def limited(self, *arguments):
    if self.run.step == 3:  # the first steps have loaded all that is loaded once, and counted tensors
        with open("/proc/self/statm", encoding="ascii") as statm:
            size = int(statm.read().split()[0]) * resource.getpagesize()
        limit = resource.getrlimit(resource.RLIMIT_AS)
        if limit[0] == resource.RLIM_INFINITY:
            resource.setrlimit(resource.RLIMIT_AS, (size + spare, limit[1]))
    return passes(self, *arguments)

Stepper._passes = limited
sys.exit(main(sys.argv[2:]))
"""


def run(corpus: Path, run_dir: Path, spare: int, *more: str) -> subprocess.CompletedProcess[str]:
    """Train in a process that may take only `spare` bytes more from its second step on."""
    words = [
        "train",
        *WIDE,
        *more,
        f"--data.source={corpus}",
        f"--data.cache={corpus.parent}/cache",
        f"--run.dir={run_dir}",
    ]
    # Without arenas of its own for every thread malloc gives what is freed back, and takes it again.
    env = {"PATH": "", "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    return subprocess.run(
        [sys.executable, "-c", SCRIPT, str(spare), *words],
        capture_output=True,
        text=True,
        env=env,
        timeout=240,
    )


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_a_step_that_runs_out_of_memory_is_taken_again_with_less(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    free = run(corpus, tmp_path / "free", 1 << 40)
    assert free.returncode == 0, free.stderr
    short = run(corpus, tmp_path / "short", 280 << 20)
    assert short.returncode == 0, short.stderr
    assert losses(tmp_path / "short") == losses(tmp_path / "free")
    found = [
        event for event in records(tmp_path / "short", "events.jsonl") if event["kind"] == "memory-replan"
    ]
    assert found
    assert "out of memory in step 4" in found[0]["reason"]
    blocks = Plan.read(tmp_path / "short" / "plan.json").blocks
    assert {block.activations for block in blocks.values()} != {"keep"}


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="limits of address space are Linux's")
def test_where_nothing_takes_less_the_run_stops_by_name(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    found = run(corpus, tmp_path / "run", 48 << 20, "--memory.activations=block")
    assert found.returncode == 1
    assert "ran out of memory" in found.stderr
    assert "Traceback" not in found.stderr


def test_what_counts_as_running_out() -> None:
    with pytest.raises(RuntimeError) as caught:
        torch.empty(1 << 60)
    assert is_out_of_memory(caught.value)
    assert is_out_of_memory(ArenaTooSmallError("small"))
    with pytest.raises(RuntimeError) as other:
        torch.empty(2) @ torch.empty(3)
    assert not is_out_of_memory(other.value)


# ---- which memory ran out


OFFLOADING = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=6),
    train=TrainConfig(steps=4, sequence=64, batch_tokens=512, micro_batch=4),
    budget=BudgetConfig(device_memory="900MB", host_memory="900MB"),
    memory=MemoryConfig(activations="keep+offload", gradients="2"),
)


@pytest.fixture(scope="module")
def taken() -> tuple[Decisions, Executable]:
    decisions = decide(OFFLOADING)
    config, device = decisions.config, decisions.device
    room = take_host_room(decisions.memory, config, device)
    executable = realise(
        decisions.plan,
        decisions.architecture,
        lambda model: None,
        device=device.torch_device,
        parameters=config.train.parameters,
        compute="fp32",
        room=room,
    )
    return decisions, executable


def account_of(decisions: Decisions, plan: Plan) -> StepAccount:
    memory = decisions.memory
    # Traced for every choice: the decision knows only what its user chose.
    costs = decide(replace(OFFLOADING, memory=MemoryConfig(gradients="2"))).memory
    assert costs is not None
    return account_step(costs.costs, plan.placement, accumulates=memory.setup.accumulates)


@pytest.mark.slow
def test_where_the_arena_is_full_plans_take_less_of_it_until_nothing_leaves(
    taken: tuple[Decisions, Executable],
) -> None:
    """With the device's own limit, so that blocks may keep or make again what left."""
    decisions, executable = taken
    trouble = MemoryTrouble(decisions, executable)
    states = account_of(decisions, decisions.plan)
    floor = sum(nbytes for name, nbytes in states.host if name != "activations")
    assert 0 < floor < states.host_peak
    plan, before = decisions.plan, states
    for _ in range(50):
        found = trouble.plan_of_less(plan, 7, ArenaTooSmallError("full"))
        if found is None:
            break
        account = account_of(decisions, found)
        assert account.host_peak <= max(floor, (1 - STEP) * before.host_peak)
        assert account.peak <= 900_000_000
        assert_figures_follow(plan, before, found, account)
        assert "out of memory in step 7" in found.blocks["0"].reason
        assert f"{before.host_peak:,} bytes predicted in the arena on the host" in found.blocks["0"].reason
        plan, before = found, account
    assert found is None
    assert before.host_peak == floor


@pytest.mark.slow
def test_where_the_device_is_full_plans_take_less_of_it_and_the_arena_is_enough(
    taken: tuple[Decisions, Executable],
) -> None:
    decisions, executable = taken
    keep = {number: replace(block, activations="keep") for number, block in decisions.plan.blocks.items()}
    plan = replace(decisions.plan, blocks=keep)
    before = account_of(decisions, plan)
    found = MemoryTrouble(decisions, executable).plan_of_less(plan, 7, torch.OutOfMemoryError("full"))
    assert found is not None
    account = account_of(decisions, found)
    assert account.peak <= (1 - STEP) * before.peak
    assert executable.host is not None
    assert account.host_peak <= largest_step(executable.host.arena.capacity)
    assert f"{before.peak:,} bytes predicted on the device" in found.blocks["0"].reason


@pytest.mark.slow
def test_compiled_blocks_get_less_of_the_arena_by_their_account(taken: tuple[Decisions, Executable]) -> None:
    decisions, executable = taken
    eager = decisions.config
    compiled = replace(eager, train=replace(eager.train, compile="on"))
    assert most_on_host(executable, compiled) == int(most_on_host(executable, eager) / 1.1)


@pytest.mark.parametrize("share", [1.0, 1.1])
@pytest.mark.parametrize("host_peak", [1, 511, 512, 99_999, 10**6, 10**6 + 1, 10**9 + 7, 49_400_000_123])
def test_the_arena_of_a_plan_is_enough_for_the_same_plan(host_peak: int, share: float) -> None:
    capacity = arena_bytes(int(host_peak * share)) // 512 * 512
    assert host_peak <= int(largest_step(capacity + ROUNDED) / share) <= 1.0001 * host_peak + 2 * ROUNDED


def filled(monkeypatch: pytest.MonkeyPatch, left: int) -> list[Place]:
    """Runs find their arena full but for so many bytes more than their weights and states take."""
    kept: list[Place] = []
    make = training_step.MemoryTrouble.__init__

    def after(self: MemoryTrouble, decisions: Decisions, executable: Executable) -> None:
        make(self, decisions, executable)
        assert executable.host is not None
        arena = executable.host.arena
        kept.append(arena.take(arena.largest_gap - left))

    monkeypatch.setattr(training_step.MemoryTrouble, "__init__", after)
    return kept


@pytest.mark.slow
def test_a_step_that_fills_the_arena_is_taken_again_with_less_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, words = write_corpus(tmp_path), ["--train.steps=5", "--memory.activations=keep+offload"]
    assert main(flags(corpus, tmp_path / "free", *words)) == 0
    kept = filled(monkeypatch, 150_000)
    assert main(flags(corpus, tmp_path / "short", *words)) == 0
    assert kept
    assert losses(tmp_path / "short") == losses(tmp_path / "free")
    found = [one for one in records(tmp_path / "short", "events.jsonl") if one["kind"] == "memory-replan"]
    assert found
    assert all("in the arena on the host" in one["reason"] for one in found)
    figures = [Plan.read(tmp_path / name / "plan.json").predicted for name in ("free", "short")]
    assert (figures[1].peak_host_bytes or 0) < figures[0].peak_host_bytes


@pytest.mark.slow
def test_an_arena_that_no_activations_fit_into_ends_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device holds what this plan leaves on it, and nothing more."""
    words = ["--train.steps=1", "--model.num-layers=6", "--memory.activations=block+offload"]
    words += ["--evaluation.every=0", "--budget.host-memory=1GB", "--model.vocab-size=320"]
    corpus, run_dir = write_corpus(tmp_path), tmp_path / "run"
    assert main(flags(corpus, tmp_path / "free", *words, "--budget.device-memory=1GB")) == 0
    peak = Plan.read(tmp_path / "free" / "plan.json").predicted.peak_device_bytes
    filled(monkeypatch, 512)
    assert main(flags(corpus, run_dir, *words, f"--budget.device-memory={peak}B")) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "host memory that was taken for the run ran out in step 1, and no plan takes less" in shown
    assert "--memory.gradients" in shown
    assert records(run_dir, "events.jsonl")[-1]["kind"] == "finish"


def test_where_no_plan_was_sought_none_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*words: Any, **named: Any) -> None:
        torch.empty(1 << 60)

    monkeypatch.setattr("scrimp.training.callbacks.evaluations.evaluate_held_out", full)
    corpus = write_corpus(tmp_path)
    assert main(flags(corpus, tmp_path / "run", "--train.steps=5", "--evaluation.every=1")) == 1
    shown = " ".join(capsys.readouterr().err.split())
    assert "the device ran out of memory after step 1 got" in shown
    assert "no plan" not in shown
