"""`scrimp plan` of a run that fits nowhere: what everything resident takes, and then the refusal."""

from __future__ import annotations

import re

import pytest

from scrimp.cli import main

SMALL = [
    "plan",
    "--device=cpu",
    "--data.tokenizer=bytes",
    "--model.num-layers=2",
    "--train.sequence=128",
    "--train.batch-tokens=512",
]


def squeezed(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.slow
def test_the_account_before_a_refusal_is_of_the_budget_that_was_given(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--budget.device-memory=20MiB"]) == 2
    said = capsys.readouterr()
    shown, error = squeezed(said.out), squeezed(said.err)
    assert "of 20.0 MiB less" in shown
    assert "for a checkpoint's copy" in shown
    assert "everything resident" in shown
    assert "memory.activations" not in shown  # which nobody set
    assert "timing" not in error
    assert "got 21.0 MB of device memory, of which a checkpoint's copy takes" in error
    assert "micro-batch" not in error  # one sequence was tried


@pytest.mark.slow
def test_states_that_were_placed_stay_in_what_more_memory_would_give(
    capsys: pytest.CaptureFixture[str],
) -> None:
    placed = ["--memory.weights=host", "--memory.gradients=host", "--memory.optimizer=host"]
    assert main([*SMALL, *placed, "--budget.device-memory=34MB", "--budget.host-memory=60MB"]) == 0
    shown = squeezed(capsys.readouterr().out)
    assert "states weights of 2, gradients of 2, optimizer of 2 blocks on the host" in shown
    assert "all states on the device" not in shown
    assert "with 0 B more" not in shown


@pytest.mark.slow
def test_an_optimizer_that_is_chosen_by_memory_is_shown_with_its_reason(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*SMALL, "--optimizer.name=auto", "--budget.device-memory=8MiB"]) == 2
    said = capsys.readouterr()
    assert "everything resident" in squeezed(said.out)
    error = squeezed(said.err)
    assert "no optimizer that auto tries fits in memory" in error
    needs = [float(size) for size in re.findall(r"(?:adamw|fira of rank \d+) needs ([\d.]+) MB", error)]
    assert len(needs) == 4
    assert main([*SMALL, "--optimizer.name=auto", f"--budget.device-memory={needs[1]}MB"]) == 0
    shown = squeezed(capsys.readouterr().out)
    assert re.search(
        rf"optimizer\.name fira \(adamw needs {needs[0]} MB; .* of optimizer states; price: ", shown
    )
    assert "optimizer.rank 48 (the width / 4, the largest of" in shown
