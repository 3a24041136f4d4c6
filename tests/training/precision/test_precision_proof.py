"""Real runs with one layer that lies, at the start, at a switch and at a resume: all are stopped, by name."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_run import flags, losses, records, write_corpus
from torch import Tensor

from scrimp.cli import main
from scrimp.cycle import guard
from scrimp.gemm.backends import ReferenceBackend
from scrimp.gemm.layer import PlannedLayer
from scrimp.gemm.problem import Use

pytestmark = pytest.mark.slow

LIAR = "blocks.1.mlp.down"
FIRST, DELAY = 2, 1
SWITCH = FIRST + DELAY + 1
"""Number of the first step that runs by the plan."""
SNIP = [
    "--precision=snip",
    "--train.steps=6",
    f"--snip.first={FIRST}",
    "--snip.every=0",
    f"--snip.delay={DELAY}",
    "--snip.probe-every=0",
    "--budget.fp4-flops=1.0",
    "--evaluation.every=0",
    "--train.micro-batch=2",
]


@pytest.fixture(autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def honest(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("honest") / "run"
    assert main(flags(corpus, run_dir, *SNIP, "--checkpoint.every=1", "--checkpoint.keep-every=1")) == 0
    return run_dir


class KeepsBf16(ReferenceBackend):
    """Says that it rounds the first operand, and does not."""

    def prepare(self, x: Tensor, use: Use) -> Any:
        is_gradient_or_input = use.operand is not None and use.operand.scaling == "nvfp4"
        if is_gradient_or_input and not use.operand.hadamard:  # type: ignore[union-attr]
            use = dataclasses.replace(use, operand=None)
        return super().prepare(x, use)


def stays_bf16(monkeypatch: pytest.MonkeyPatch, gemm: str, layer: str | None = LIAR) -> None:
    """From now on one GEMM of one layer, or of all, reads its first operand as it is, where it is planned in nvfp4."""
    honest = PlannedLayer.backend

    def backend(self: PlannedLayer, recipe: str, asked: str, *site: Any) -> Any:
        is_lie = recipe == "nvfp4" and asked == gemm and layer in (None, self.name)
        return KeepsBf16() if is_lie else honest(self, recipe, asked, *site)

    monkeypatch.setattr(PlannedLayer, "backend", backend)


def runs_in(monkeypatch: pytest.MonkeyPatch, gemm: str, wrong: str) -> None:
    """From now on one GEMM of one layer runs in another recipe than the nvfp4 that it is planned and reported in."""
    honest = PlannedLayer._use

    def use(self: PlannedLayer, asked: str, operand: int, now: tuple[int, int], recipe: str | None) -> Use:
        if self.name == LIAR and asked == gemm and self.precision.gemm(gemm) == "nvfp4" and recipe is None:
            recipe = wrong
        return honest(self, asked, operand, now, recipe)

    monkeypatch.setattr(PlannedLayer, "_use", use)


def events(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in records(run_dir, "events.jsonl") if event["kind"] == kind]


@pytest.mark.slow
def test_a_true_run_says_what_was_proven(honest: Path) -> None:
    found = "24 GEMMs of 8 layers gave the numbers of their formats"
    first, second = events(honest, "proof")
    assert (first["step"], first["reason"]) == (1, found)
    answer = ", every planned one: the prediction was off" if events(honest, "doubt") else ""
    assert (second["step"], second["reason"]) == (SWITCH, found + answer)


@pytest.mark.slow
@pytest.mark.parametrize("gemm", ["dgrad", "fprop"])
@pytest.mark.every(2)
def test_one_operand_of_one_layer_that_stays_bf16_after_a_switch_stops_the_run(
    gemm: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stays_bf16(monkeypatch, gemm)
    assert main(flags(corpus, tmp_path / "run", *SNIP)) == 1
    said = capsys.readouterr().err
    assert f"{LIAR}.{gemm} did not run in nvfp4 on the reference back end" in said
    assert f"{'X' if gemm == 'fprop' else 'G'} as if it had not been quantized" in said
    assert max(losses(tmp_path / "run")) == SWITCH - 1  # no update was made of a step that lied


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["mxfp4", "bf16"])
def test_a_wgrad_in_the_wrong_recipe_after_a_switch_stops_the_run(
    wrong: str,
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    runs_in(monkeypatch, "wgrad", wrong)
    assert main(flags(corpus, tmp_path / "run", *SNIP)) == 1
    assert f"{LIAR}.wgrad did not run in nvfp4" in capsys.readouterr().err


def test_a_lie_at_the_start_is_found_before_the_first_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stays_bf16(monkeypatch, "dgrad")
    words = flags(corpus, tmp_path / "run", "--precision=nvfp4", "--train.steps=2")
    assert main(words) == 1
    assert f"{LIAR}.dgrad did not run in nvfp4" in capsys.readouterr().err
    assert not (tmp_path / "run" / "metrics.jsonl").read_text(encoding="utf-8")


def test_a_lie_at_a_resume_is_found_before_its_first_step(
    honest: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(honest, run_dir)
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > SWITCH:
            shutil.rmtree(folder)
    stays_bf16(monkeypatch, "dgrad")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 1
    assert f"{LIAR}.dgrad did not run in nvfp4" in capsys.readouterr().err
    assert max(losses(run_dir)) == SWITCH


@pytest.mark.slow
def test_formats_that_change_nothing_are_doubted_at_the_switch(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Idle(ReferenceBackend):
        def prepare(self, x: Tensor, use: Use) -> Any:
            return super().prepare(x, dataclasses.replace(use, operand=None))

    honest = PlannedLayer.backend

    def backend(self: PlannedLayer, recipe: str, *site: Any) -> Any:
        return Idle() if recipe == "nvfp4" else honest(self, recipe, *site)

    monkeypatch.setattr(PlannedLayer, "backend", backend)
    words = flags(corpus, tmp_path / "run", *SNIP, "--precision=snip,*.saved=bf16", "--train.parameters=bf16")
    assert main(words) == 1
    (event,) = events(tmp_path / "run", "doubt")
    assert event["step"] == SWITCH
    assert "the next update is the same in bf16" in event["reason"]
    assert "or formats are not in force: every planned GEMM is proven in this step" in event["reason"]
    assert "nor did 23 others as planned" in capsys.readouterr().err


@pytest.mark.slow
def test_a_doubt_that_the_proof_answers_alarms_nobody(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(guard, "doubt", lambda found, measured: "the plan changes the next update by 0.5")
    assert main(flags(corpus, tmp_path / "run", *SNIP)) == 0
    (event,) = events(tmp_path / "run", "doubt")
    assert "either the prediction is off, as it often is" in event["reason"]
    first, second = events(tmp_path / "run", "proof")
    found = "24 GEMMs of 8 layers gave the numbers of their formats"
    answer = f"{found}, every planned one: the prediction was off"
    assert (first["reason"], second["step"], second["reason"]) == (found, SWITCH, answer)
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("the plan changes the next update by 0.5") == 1
    assert f"step {SWITCH}: the plan changes the next update by 0.5; {answer}" in said
