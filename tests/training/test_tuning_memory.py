"""The memory for trying shapes of tiles: a figure of its own, held against the limit before anything is begun."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import triton
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.gemm.kernels.matmul import TIMER_BYTES
from scrimp.training import setup
from scrimp.training.setup import Decisions

pytestmark = pytest.mark.skipif(
    not triton.knobs.runtime.interpret, reason="decides on a CPU, with triton interpreted"
)
BY_TRITON = ("--precision=fp8", "--backend=triton", "--train.steps=1")


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture
def command(tmp_path: Path, run_dir: Path) -> list[str]:
    return flags(write_corpus(tmp_path), run_dir, *BY_TRITON)


@pytest.mark.slow
def test_a_plan_shows_it_beside_a_step_whose_peak_is_its_own(
    command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found: list[Decisions] = []
    decide = setup._decisions

    def watched(*arguments: object) -> Decisions:
        found.append(decide(*arguments))  # type: ignore[arg-type]
        return found[-1]

    monkeypatch.setattr(setup, "_decisions", watched)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["plan", *(word for word in command[1:] if "run.dir" not in word)]) == 0
    shown = capsys.readouterr().out
    assert "tried before the model is made, 256" in shown
    decisions = found[-1].with_recorded_backends()
    assert decisions.tuning_bytes > TIMER_BYTES > decisions.memory.account.peak
    assert decisions.plan.predicted.peak_device_bytes == decisions.memory.account.peak


@pytest.mark.slow
def test_where_there_is_no_room_for_it_a_run_is_refused_without_a_folder(
    command: list[str], run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*command, "--budget.device-memory=200MB"]) == 2
    said = capsys.readouterr().err
    assert "no memory for trying which shapes of tiles" in said
    assert "got      268,514,816 bytes" in said
    assert not run_dir.exists()
    assert main([*command, "--budget.device-memory=200MB", "--backend=reference"]) == 0
