"""Budgets in seconds: what a step's time is made of, and what planned GEMMs may take of it."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_run import flags, records, write_corpus

from scrimp.cli import main
from scrimp.config import BudgetConfig, Config, ModelConfig, SnipConfig, TrainConfig
from scrimp.cycle.state import TIMED_STEPS
from scrimp.cycle.step_times import StepTimes
from scrimp.errors import PlanError
from scrimp.gemm.doctor_report import surroundings_of
from scrimp.planner import Plan
from scrimp.profiler.gemm_times import GemmTimes
from scrimp.training.precision import gemm_seconds as precision_times
from scrimp.training.precision.gemm_seconds import (
    keep_times,
    measured_times,
    wants_times,
)
from scrimp.training.precision.reachable import refuse_unreachable_speed
from scrimp.training.setup import Decisions, decide

SHAPES = {"a": (64, 32), "b": (32, 64)}
PER_GEMM = {"bf16": 4.0, "fp8": 2.0, "nvfp4": 1.0}
"""Milliseconds."""


def times(emulated: frozenset[str] = frozenset(), **changes: float) -> StepTimes:
    """Every GEMM of every shape takes what its format takes; two micro-batches a step."""
    rows = {
        gemm: {name: ms / 1000 for name, ms in (PER_GEMM | changes).items()}
        for gemm in ("fprop", "dgrad", "wgrad")
    }
    table = GemmTimes("device", 128, dict.fromkeys(SHAPES.values(), rows), emulated=emulated)
    return StepTimes(table, micro_batches=2, other=0.01)


def config(formats: str = "fp8,nvfp4", **budget: float) -> Config:
    return Config(
        precision="snip", budget=BudgetConfig(**budget), snip=SnipConfig(formats=formats, start="fp8")
    )


@pytest.mark.parametrize(
    ("budget", "says"),
    [({"step_seconds": 0.011}, "at least 0.012 s"), ({"speedup": 4.5}, "at most 4.000")],
)
def test_what_the_fastest_formats_miss_is_refused(budget: dict[str, float], says: str) -> None:
    with pytest.raises(PlanError, match="cannot be reached") as error:
        refuse_unreachable_speed(config(**budget), times(), SHAPES)
    assert says in str(error.value.expected)


@pytest.mark.parametrize("budget", [{"step_seconds": 0.013}, {"speedup": 3.9}, {"speedup": 1.0}])
def test_what_they_reach_is_not(budget: dict[str, float]) -> None:
    assert refuse_unreachable_speed(config(**budget), times(), SHAPES) is None


SLOW = {"emulated": frozenset({"fp8", "nvfp4"}), "fp8": 40.0, "nvfp4": 80.0}


def test_formats_that_are_emulated_and_slow_make_nothing_faster() -> None:
    slow = times(**SLOW)
    with pytest.raises(PlanError) as error:
        refuse_unreachable_speed(config("bf16,fp8,nvfp4", speedup=1.1), slow, SHAPES)
    assert str(error.value.expected).endswith(
        "at most 1.000, if a step were GEMMs alone: fp8, nvfp4 are emulated here"
    )
    assert refuse_unreachable_speed(config("bf16,fp8,nvfp4", speedup=1.0), slow, SHAPES) is None
    np.testing.assert_array_equal(slow.candidates(list(SHAPES.values()), ("bf16", "fp8"))[..., 1], False)


@pytest.mark.parametrize("budget", [{"speedup": 1.0}, {"step_seconds": 0.1}])
def test_what_only_bf16_could_keep_is_refused_where_bf16_is_no_candidate(budget: dict[str, float]) -> None:
    with pytest.raises(
        PlanError, match=r"bf16 is no candidate of snip.formats fp8,nvfp4 - add bf16"
    ) as error:
        refuse_unreachable_speed(config(**budget), times(**SLOW), SHAPES)
    reached = {"speedup": "at most 0.100", "step_seconds": "at least 0.48 s"}  # 12 GEMMs of 40 ms, in fp8
    assert reached[next(iter(budget))] in str(error.value.expected)
    assert refuse_unreachable_speed(config("fp8,bf16", **budget), times(**SLOW), SHAPES) is None


def test_what_a_rule_fixes_counts_at_the_start() -> None:
    fixed = dataclasses.replace(config(speedup=2.7), precision="snip,a=bf16")
    with pytest.raises(PlanError, match=r"at most 1\.600"):  # 48 ms over 24 of layer a and 6 of layer b
        refuse_unreachable_speed(fixed, times(), SHAPES)


def test_a_policy_of_whole_layers_reaches_what_one_format_per_layer_can() -> None:
    rows = {gemm: {"bf16": 4.0, "fp8": 2.0, "nvfp4": 1.0} for gemm in ("fprop", "dgrad", "wgrad")}
    rows["wgrad"] = {"bf16": 4.0, "fp8": 2.0, "nvfp4": 8.0}
    mixed = StepTimes(GemmTimes("device", 128, dict.fromkeys(SHAPES.values(), rows)), 1, other=0.0)
    per_layer = SnipConfig(formats="fp8,nvfp4", start="fp8", policy="snip-layer")
    asked = dataclasses.replace(config(speedup=2.5), snip=per_layer)
    assert refuse_unreachable_speed(config(speedup=3.0), mixed, SHAPES) is None
    with pytest.raises(PlanError, match=r"at most 2\.000"):
        refuse_unreachable_speed(asked, mixed, SHAPES)


def test_only_budgets_in_seconds_need_times() -> None:
    assert wants_times(config(speedup=1.5), "cpu")
    assert wants_times(config(step_seconds=1.0), "cpu")
    assert not wants_times(config(fp4_flops=0.5), "cuda")
    assert wants_times(config(divergence=0.5), "cuda")
    assert not wants_times(config(divergence=0.5), "cpu")


@pytest.mark.slow
def test_on_a_cpu_a_generous_step_time_is_kept_by_bf16_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For real: times are measured, emulated formats are no candidates, and bf16 costs nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run_dir = tmp_path / "run"
    words = [
        "--precision=snip",
        "--snip.formats=bf16,nvfp4",
        "--train.steps=6",
        "--snip.first=2",
        "--snip.every=0",
    ]
    words += ["--snip.delay=1", "--budget.step-seconds=1000"]
    assert main(flags(write_corpus(tmp_path), run_dir, *words)) == 0
    assert {choice.wgrad for choice in Plan.read(run_dir / "plan.json").gemms.values()} == {"bf16"}
    (replan,) = [event for event in records(run_dir, "events.jsonl") if event["kind"] == "replan"]
    assert replan["fp4_flops"] == 0.0
    kept = json.loads((run_dir / "gemm_times.json").read_text())
    assert kept["table"]["tokens"] == 4 * 64
    assert kept["other"] is not None  # 0 where the GEMMs were timed in a busier moment than the steps


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, ...]]:
    """Timing takes no time: the recipes of every call."""
    calls: list[tuple[str, ...]] = []

    def measure(shapes: list[tuple[int, int]], names: tuple[str, ...], **setting: Any) -> GemmTimes:
        calls.append(names)
        ones = {gemm: dict.fromkeys(names, 1.0) for gemm in ("fprop", "dgrad", "wgrad")}
        zeros = {gemm: dict.fromkeys(names, 0.0) for gemm in ones}
        backends = {gemm: dict.fromkeys(names, "reference") for gemm in ones}
        by_shape = [dict.fromkeys(shapes, rows) for rows in (ones, zeros, backends)]
        return GemmTimes(surroundings_of(setting["device"]).device, setting["tokens"], *by_shape)

    monkeypatch.setattr(precision_times, "measure_gemm_times", measure)
    return calls


@pytest.mark.slow
def test_a_run_with_a_budget_in_seconds_times_the_device_that_it_moved_to(
    timed: list[tuple[str, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    words = ["--precision=snip", "--snip.formats=bf16,nvfp4", "--snip.first=2", "--snip.delay=1"]
    words += ["--snip.every=0", "--train.steps=18", "--checkpoint.every=5", "--checkpoint.keep-every=5"]
    assert main(flags(write_corpus(tmp_path), run_dir, *words, "--budget.step-seconds=1000")) == 0
    for step in (10, 15, 18):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}")
    timed.clear()
    for module in ("profiler.device", "gemm.doctor_report"):
        monkeypatch.setattr(f"scrimp.{module}._cpu_name", lambda: "another CPU")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    told = {event["kind"]: event for event in records(run_dir, "events.jsonl")}
    measured = 5 + TIMED_STEPS
    assert str(told["device"]["reason"]).endswith(f"this is another CPU: measured anew at step {measured}")
    assert told["replan"]["step"] == measured + 2  # a step later, and numbered from 1
    assert len(timed) == 1
    kept = json.loads((run_dir / "gemm_times.json").read_text())
    assert kept["table"]["device"].startswith("another CPU")
    assert kept["other"] is not None


def decisions(micro_batch: int) -> Decisions:
    return decide(
        Config(
            precision="snip,blocks.0.*=mxfp8",
            device="cpu",
            model=ModelConfig(num_layers=2, width=32, num_heads=2, num_kv_heads=1, ffn_width=64),
            train=TrainConfig(sequence=64, batch_tokens=256, micro_batch=micro_batch),
            budget=BudgetConfig(step_seconds=1000.0),
            snip=SnipConfig(formats="bf16,nvfp4"),
        )
    )


@pytest.mark.slow
def test_what_a_rule_fixes_is_timed_too(timed: list[tuple[str, ...]], tmp_path: Path) -> None:
    measured_times(decisions(4), tmp_path, lambda *_: None)
    assert set(timed[0]) == {"bf16", "nvfp4", "mxfp8"}


@pytest.mark.slow
def test_kept_times_count_until_the_micro_batch_is_another(
    timed: list[tuple[str, ...]], tmp_path: Path
) -> None:
    first = measured_times(decisions(4), tmp_path, lambda *_: None)
    keep_times(tmp_path, dataclasses.replace(first, other=0.5))
    assert measured_times(decisions(4), tmp_path, lambda *_: None).other == 0.5
    assert len(timed) == 1
    other = measured_times(decisions(2), tmp_path, lambda *_: None)
    assert (other.table.tokens, other.micro_batches, other.other) == (128, 2, None)


@pytest.mark.parametrize("other", ["soon", -1.0, [1]])
@pytest.mark.slow
def test_damaged_seconds_are_refused(timed: list[tuple[str, ...]], tmp_path: Path, other: object) -> None:
    keep_times(tmp_path, measured_times(decisions(4), tmp_path, lambda *_: None))
    file = tmp_path / "gemm_times.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"other": other}))
    with pytest.raises(PlanError, match=r"gemm_times\.json: \$\.other .* - delete it"):
        measured_times(decisions(4), tmp_path, lambda *_: None)


@pytest.mark.slow
def test_a_speedup_that_emulation_cannot_give_is_refused_before_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    words = ["--precision=snip", "--snip.formats=bf16,nvfp4", "--train.steps=6", "--budget.speedup=3"]
    assert main(flags(write_corpus(tmp_path), tmp_path / "run", *words)) == 2
    assert "emulated here" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
