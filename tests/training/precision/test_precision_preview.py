"""`scrimp plan --precision snip` on a run, and the plan's export."""

from __future__ import annotations

import math
import re
import runpy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.planner import Plan
from scrimp.planner.precision import PrecisionPlan, PrecisionProfile
from scrimp.training.precision import meter as precision_meter

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run in fixed formats."""
    folder = tmp_path_factory.mktemp("preview")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "user-cache"))
        words = flags(write_corpus(folder), folder / "run", "--precision=bf16", "--train.steps=8")
        assert main(words) == 0
        yield folder / "run"


def preview(run_dir: Path, *more: str) -> int:
    return main(["plan", "--precision=snip", f"--model.weights={run_dir}", *more])


@pytest.mark.slow
def test_a_run_in_other_formats_is_measured_and_its_plan_shown(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()}
    assert preview(run_dir, f"--out={tmp_path / 'plan.json'}") == 0
    shown = capsys.readouterr().out
    for words in ("precision after step 8", "mlp.down", "FLOPs in 4 bits", "next-best", "certainty"):
        assert words in shown
    plan = PrecisionPlan.read(tmp_path / "plan.json")
    assert plan.predicted["fp4_flops"] == pytest.approx(0.75, abs=0.1)
    assert len(plan.layers) == 8
    assert {path: path.read_bytes() for path in sorted(run_dir.rglob("*")) if path.is_file()} == before


@pytest.mark.slow
def test_how_far_the_prediction_may_be_off_is_shown(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preview(run_dir, f"--out={tmp_path / 'two.json'}") == 0
    plan, shown = PrecisionPlan.read(tmp_path / "two.json"), " ".join(capsys.readouterr().out.split())
    low, high = plan.intervals["weight_divergence"]
    assert low < plan.predicted["weight_divergence"] < high
    assert f"95% from {low:.1%} to {high:.1%}, by 2 batches" in shown
    assert preview(run_dir, "--snip.batches=1", f"--out={tmp_path / 'one.json'}") == 0
    assert PrecisionPlan.read(tmp_path / "one.json").intervals == {}
    assert "no interval: one batch was measured" in " ".join(capsys.readouterr().out.split())


@pytest.mark.slow
def test_the_users_budget_and_formats_count(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.json"
    words = ("--budget.fp4-flops=0.25", "--snip.formats=bf16,fp8,mxfp4", f"--out={out}")
    assert preview(run_dir, *words) == 0
    plan = PrecisionPlan.read(out)
    assert plan.formats[:3] == ("bf16", "fp8", "mxfp4")
    assert plan.budget == {"fp4_flops": 0.25}
    # Nothing is gained by fp8 where only four bits count.
    assert {gemm.choice for row in plan.layers.values() for gemm in row.gemms.values()} == {"bf16", "mxfp4"}


@pytest.mark.slow
def test_a_budget_of_harm_takes_as_many_four_bits_as_it_allows(run_dir: Path, tmp_path: Path) -> None:
    shares = []
    for harm in (0.2, 0.4, 0.9):
        out = tmp_path / f"{harm}.json"
        assert preview(run_dir, f"--budget.divergence={harm}", f"--out={out}") == 0
        plan = PrecisionPlan.read(out)
        spent = sum(gemm.harm[gemm.choice] for row in plan.layers.values() for gemm in row.gemms.values())
        assert spent <= harm * 2 * (1 + 1e-6)
        assert plan.budget == {"divergence": harm}
        shares.append(plan.predicted["fp4_flops"])
    assert shares[0] < shares[1] < shares[2]


@pytest.mark.slow
def test_a_budget_of_harm_is_shown_and_refused_in_the_users_number(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preview(run_dir, "--budget.divergence=0.1") == 0
    shown = capsys.readouterr().out
    assert "divergence 0.1" in shown
    assert "quality" not in shown
    assert preview(run_dir, "--budget.divergence=1e-7") == 2
    refused = capsys.readouterr().err
    assert "the predicted divergence" in refused
    assert "at most 1e-07" in refused
    assert re.search(r"at least 0\.0\d+ can be reached", refused)


def test_a_policy_that_keeps_no_budget_says_so(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert preview(run_dir, "--snip.policy=fp8") == 0
    shown = capsys.readouterr().out
    assert "none: policy fp8 keeps no budget" in shown
    assert "fp4_flops" not in shown


@pytest.mark.slow
def test_statistics_that_are_not_finite_are_named(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    collect = precision_meter.collect

    def spoiled(*args: Any, **setting: Any) -> PrecisionProfile:
        profile = collect(*args, **setting)
        profile.batches[0].gw[0] = math.nan
        return profile

    monkeypatch.setattr(precision_meter, "collect", spoiled)
    words = "statistics of 1 layer are not finite, it stays in fp8: blocks.0.attention.qkv"
    assert preview(run_dir, "--budget.fp4-flops=0.5") == 0
    assert words in " ".join(capsys.readouterr().out.split())
    assert preview(run_dir, "--budget.fp4-flops=1.0") == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_a_budget_takes_the_place_of_the_one_that_the_run_had(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = [
        "--precision=snip",
        "--train.steps=4",
        "--snip.first=1",
        "--snip.delay=1",
        "--budget.fp4-flops=0.5",
    ]
    assert main(flags(write_corpus(tmp_path), run_dir, *words)) == 0
    assert preview(run_dir, "--budget.divergence=0.3", f"--out={tmp_path / 'plan.json'}") == 0
    assert set(PrecisionPlan.read(tmp_path / "plan.json").budget) == {"divergence"}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--budget.speedup=2"], "timed steps"),
        (["--data.source=stdlib"], "not those that the run was trained on"),
        (["--precision=snip,blocks.*=fp8"], "at most 0.0000"),
    ],
)
def test_what_cannot_be_measured_is_refused(
    run_dir: Path, words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preview(run_dir, *words) == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--objective.name=sft", "--data.source=stdlib-signatures"], ""),
        (["--adapter.rank=4"], "precision snip is not carried out beside adapters"),
    ],
)
def test_another_run_from_the_weights_is_planned_as_it_would_be_trained(
    run_dir: Path, words: list[str], refused: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has no checkpoint to measure, and is refused in training's own words."""
    words = [f"--model.weights={run_dir}", "--precision=snip", "--data.tokenizer=auto", *words]
    words += ["--data.held-out=0.1", "--train.steps=2", "--train.sequence=64", "--train.batch-tokens=512"]
    code = 2 if refused else 0
    assert main(["train", *words, f"--run.dir={tmp_path / 'run'}"]) == code
    told = capsys.readouterr().err
    assert refused in told
    assert main(["plan", *words]) == code
    planned = capsys.readouterr()
    assert "precision after step" not in planned.out
    if refused:
        assert planned.err == told
    assert main(["plan", *words, f"--out={tmp_path / 'plan.json'}"]) == 2
    assert "has no checkpoint yet to measure" in capsys.readouterr().err


def test_the_tokenizer_that_the_run_has_decided_is_no_other_one(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert preview(run_dir, "--data.tokenizer=auto") == 0
    assert "precision after step 8" in capsys.readouterr().out


def test_a_plan_can_be_written_only_where_one_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"--out={tmp_path / 'plan.json'}"]) == 2
    assert "no measured plan to write" in capsys.readouterr().err
    assert main(["plan", "--target=torchao"]) == 2
    assert "no measured plan to make for torchao" in capsys.readouterr().err


@pytest.mark.slow
def test_a_dry_run_of_a_new_run_shows_what_it_starts_with(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--precision=snip"]) == 0
    shown = capsys.readouterr().out
    assert "precision until the first plan" in shown
    assert "budget.fp4_flops" in shown


@pytest.mark.slow
def test_a_plan_is_exported_as_code_that_runs(
    run_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "plan.json", tmp_path / "precision.py"
    assert preview(run_dir, "--snip.formats=fp8,mxfp4", f"--out={source}") == 0
    words = ["export-precision", str(source), str(out), "--target=torchao", "--names=scrimp"]
    assert main(words) == 0
    told = capsys.readouterr().out
    assert "not as planned" in told  # torchao trains in no mxfp4
    assert re.search(r"\d of 8 layers do not run as planned", told)
    assert "--target torchao --out torchao-plan.json`" in told
    assert "--snip.policy snip-layer" in told
    assert callable(runpy.run_path(str(out))["convert"])
    assert main(words) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize("target", ["torchao", "transformer-engine"])
@pytest.mark.every(2)
def test_a_plan_for_a_target_is_exported_whole(
    run_dir: Path, tmp_path: Path, target: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "plan.json", tmp_path / "out"
    assert preview(run_dir, f"--target={target}", "--budget.fp4-flops=0.5", f"--out={source}") == 0
    plan = PrecisionPlan.read(source)
    assert plan.predicted["fp4_flops"] >= 0.5
    assert f"only what {target} runs" in plan.reason
    assert main(["export-precision", str(source), str(out), f"--target={target}"]) == 0
    assert "not as planned" not in capsys.readouterr().out + out.read_text()


def test_the_plan_of_a_run_is_exported_from_its_folder(run_dir: Path, tmp_path: Path) -> None:
    out = tmp_path / "te.yaml"
    words = ["export-precision", str(run_dir), str(out), "--target=transformer-engine", "--names=megatron"]
    assert main(words) == 0
    assert "bf16" in out.read_text()
    assert set(Plan.read(run_dir / "plan.json").gemms) >= {"head"}
