"""The account of memory that a run shows before its first step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.config import BudgetConfig, Config, MemoryConfig, ModelConfig, TrainConfig
from scrimp.planner.memory.frontier import Alternative, Searches, frontier
from scrimp.report import memory_text
from scrimp.training.memory.account_table import account_tables, account_text, attention_text
from scrimp.training.setup import decide

GIVEN = Config(
    device="cpu",
    model=ModelConfig(preset="llama-3m", vocab_size=512, num_layers=2),
    train=TrainConfig(steps=4, sequence=64, batch_tokens=256, micro_batch=4),
)


@pytest.mark.slow
def test_a_run_that_keeps_everything_and_has_no_budget_says_it_in_a_line() -> None:
    text = account_text(decide(GIVEN))
    assert "\n" not in text
    assert "everything resident, predicted peak" in text


@pytest.mark.parametrize(
    ("changes", "rows"),
    [
        ({"budget": BudgetConfig(device_memory="1GB")}, ["copy for a checkpoint"]),
        ({"memory": MemoryConfig(activations="block")}, ["how it fits", "blocks 0-1 block"]),
        (
            {
                "budget": BudgetConfig(device_memory="1GB", host_memory="20MB"),
                "memory": MemoryConfig(activations="keep+offload"),
            },
            ["predicted bytes on the host", "activations", "training waits"],
        ),
    ],
    ids=["budget", "recomputes", "too small for a copy"],
)
@pytest.mark.every(3)
def test_where_something_was_decided_or_limited_the_tables_are_those_of_a_plan(
    monkeypatch: pytest.MonkeyPatch, changes: dict[str, object], rows: list[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # no cell is wrapped
    text = account_text(decide(replace(GIVEN, **changes)))
    for row in ("bytes", *rows):
        assert row in text
    assert "\n\n" not in text


@pytest.mark.parametrize(
    ("precision", "capability", "reason"),
    [
        ("fp32", (9, 0), "fp32 on CUDA; with --precision bf16"),
        ("bf16", (9, 0), None),
        ("bf16", (8, 0), None),
        ("fp8", (8, 9), None),
        ("bf16", (7, 5), "compute capability 7.5"),
        ("fp32", (7, 5), "compute capability 7.5"),
    ],
)
@pytest.mark.every(6)
def test_attention_without_a_fused_kernel_on_cuda_is_said(
    precision: str, capability: tuple[int, int], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions = decide(replace(GIVEN, precision=precision))
    assert attention_text(decisions) is None, "a CPU has one for every format"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    gpu = replace(decisions.device, torch_device=torch.device("cuda", 0))
    text = attention_text(replace(decisions, device=gpu))
    assert text is None if reason is None else f"Scrimp uses no fused kernel for {reason}" in str(text)


@pytest.mark.slow
def test_a_run_does_not_wait_for_a_search_of_what_more_memory_would_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    searches: list[int] = []

    def counted(asked: Searches) -> list[Alternative]:
        searches.append(len(asked.plan.costs.blocks))
        return frontier(asked)

    monkeypatch.setattr(memory_text, "frontier", counted)
    tight = decide(replace(GIVEN, budget=BudgetConfig(device_memory="30MB", host_memory="1GB")))
    text = account_text(tight)
    assert "predicted" in text
    assert "faster" not in text
    assert not searches
    assert list(account_tables(tight))
    assert searches == [2]


@pytest.mark.slow
def test_it_stands_before_the_first_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(flags(write_corpus(tmp_path), tmp_path / "run", "--train.steps=1")) == 0
    before, found, _ = capsys.readouterr().out.partition("step 1/1")
    assert found
    assert "memory: everything resident" in before
