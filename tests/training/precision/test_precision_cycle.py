"""A run that plans its precision: it can be killed anywhere, and measuring alone changes nothing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tiny_run import flags, losses, records, scrimp, write_corpus

from scrimp.cli import main
from scrimp.planner import Plan
from scrimp.planner.precision import PrecisionPlan

STEPS = 11
FIRST, EVERY, DELAY = 3, 4, 2
SWITCH = FIRST + DELAY + 1
"""Number of the first step that runs by the first plan; steps are numbered from 1."""
SNIP = [
    "--precision=snip",
    f"--train.steps={STEPS}",
    f"--snip.first={FIRST}",
    f"--snip.every={EVERY}",
    f"--snip.delay={DELAY}",
    "--snip.probe-every=4",
    "--train.micro-batch=2",
    "--evaluation.every=7",
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="module")
def whole(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was never interrupted, with a checkpoint of every step."""
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    assert main(flags(corpus, run_dir, *SNIP, "--checkpoint.every=1", "--checkpoint.keep-every=1")) == 0
    return run_dir


def events(run_dir: Path, kind: str) -> list[dict[str, object]]:
    return [event for event in records(run_dir, "events.jsonl") if event["kind"] == kind]


def test_plans_are_made_at_the_steps_that_the_settings_say(whole: Path) -> None:
    assert [event["step"] for event in events(whole, "replan")] == [SWITCH, SWITCH + EVERY]


def test_the_first_plan_keeps_its_budget(whole: Path) -> None:
    plan = PrecisionPlan.read(whole / "plans" / f"step-{SWITCH:08d}.precision.json")
    assert plan.budget == {"fp4_flops": 0.75}
    low = sum(
        row.flops_share / 3
        for row in plan.layers.values()
        for gemm in row.gemms.values()
        if gemm.choice == "nvfp4"
    )
    assert 0.75 - 1e-9 <= low == pytest.approx(plan.predicted["fp4_flops"])


def test_the_plan_of_the_run_is_the_last_one_that_was_switched_to(whole: Path) -> None:
    newest = Plan.read(sorted((whole / "plans").glob("step-????????.json"))[-1])
    now = Plan.read(whole / "plan.json")
    assert now.gemms == newest.gemms
    assert {choice.fprop for choice in now.gemms.values()} >= {
        "nvfp4",
        "bf16",
    }  # the head is no layer of the plan


def test_predictions_stand_beside_what_a_probe_measured(whole: Path) -> None:
    plan = PrecisionPlan.read(whole / "plans" / f"step-{SWITCH:08d}.precision.json")
    assert plan.measured is not None
    assert 0.2 < plan.measured["weight_divergence"] / plan.predicted["weight_divergence"] < 5


@pytest.mark.slow
@pytest.mark.parametrize("step", [1, FIRST, FIRST + 1, FIRST + DELAY, FIRST + DELAY + 1, FIRST + EVERY + 1])
def test_a_run_that_was_killed_after_any_step_goes_on_the_same(
    whole: Path, corpus: Path, tmp_path: Path, step: int
) -> None:
    """As after kill -9: the folder of the whole run, with nothing newer than one checkpoint but its logs."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > step:
            shutil.rmtree(folder)
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert losses(run_dir) == losses(whole)
    assert Plan.read(run_dir / "plan.json").gemms == Plan.read(whole / "plan.json").gemms
    for name in ("replan", "probe"):
        assert [e["reason"] for e in events(run_dir, name)] == [e["reason"] for e in events(whole, name)]


def keep_checkpoints(run_dir: Path, last: int) -> None:
    """As after kill -9: nothing is newer than one checkpoint but the logs."""
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > last:
            shutil.rmtree(folder)


@pytest.mark.slow
def test_a_run_that_goes_on_upon_another_device_says_so_once(
    whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    keep_checkpoints(run_dir, SWITCH)
    before = Plan.read(whole / "plan.json").fingerprint.device
    monkeypatch.setattr("scrimp.profiler.device._cpu_name", lambda: "another CPU")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    (said,) = events(run_dir, "device")
    assert (said["step"], said["reason"]) == (
        SWITCH + 1,
        f"the plan was made on {before}; this is another CPU: measured anew at step {FIRST + EVERY}",
    )
    assert str(said["reason"]) in capsys.readouterr().out
    plans = [Plan.read(path) for path in sorted((run_dir / "plans").glob("step-????????.json"))]
    assert [plan.fingerprint.device for plan in plans] == [before, before, "another CPU"]
    assert Plan.read(run_dir / "plan.json").fingerprint.device == "another CPU"

    keep_checkpoints(run_dir, STEPS - 1)
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert events(run_dir, "device") == [said]
    assert losses(run_dir) == losses(whole)  # the device's name alone is another one: it calculates the same


@pytest.mark.slow
def test_measuring_and_keeping_the_plan_changes_no_bit(corpus: Path, tmp_path: Path) -> None:
    """One candidate leaves nothing to choose: it measures, probes, switches to what it has, and trains the same."""
    only = ["--snip.formats=nvfp4", "--budget.fp4-flops=1"]
    assert main(flags(corpus, tmp_path / "planned", *SNIP, *only)) == 0
    plain = [word for word in SNIP if not word.startswith(("--snip", "--precision"))]
    assert main(flags(corpus, tmp_path / "plain", *plain, "--precision=nvfp4")) == 0
    assert losses(tmp_path / "planned") == losses(tmp_path / "plain")


@pytest.mark.slow
def test_rules_beside_snip_are_kept(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    rules = "--precision=snip,blocks.0.*=bf16,*.wgrad=fp8"
    words = [word for word in SNIP if not word.startswith("--precision")]
    assert main(flags(corpus, run_dir, *words, rules, "--budget.fp4-flops=0.3")) == 0
    gemms = Plan.read(run_dir / "plan.json").gemms
    assert gemms["blocks.0.mlp.down"].fprop == "bf16"
    assert {choice.wgrad for layer, choice in gemms.items() if layer != "head"} == {"fp8"}
    assert "nvfp4" in {gemms["blocks.1.mlp.down"].fprop, gemms["blocks.1.mlp.down"].dgrad}


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--precision=snip,blocks.0.*=bf16", "--budget.fp4-flops=0.75"], "at most 0.5000"),
        (["--precision=snip", "--snip.formats=fp8,mxfp8"], "has 4 bits"),
        (["--precision=snip", "--snip.formats=fp8,nvfp5"], "did you mean nvfp4"),
        (["--precision=fp8", "--budget.fp4-flops=0.5"], "no effect on fixed formats"),
        (["--precision=snip", "--budget.fp4-flops=0.5", "--budget.divergence=0.1"], "one budget"),
        (["--precision=snip", "--snip.policy=best"], "snip.policy"),
        (["--precision=snip", "--snip.at=soon"], "snip.at"),
        (["--precision=snip", "--snip.first=4"], "before its first plan"),
        (["--precision=snip", "--snip.at=\u00b2"], "snip.at"),
        (["--precision=snip", "--snip.at=2", "--snip.first=1", "--snip.delay=2"], "plans of steps 1 and 2"),
        (["--precision=snip", "--snip.at=4"], "would end before a plan of snip.at"),
        (["--precision=snip", "--snip.policy=random:"], "snip.policy"),
        (["--precision=snip", "--snip.policy=first-last", "--budget.divergence=0.3"], "only a share"),
        (["--precision=snip", "--snip.every=2", "--snip.delay=3"], "at most 2"),
        (["--precision=snip", "--snip.loss-weight=0", "--snip.update-weight=0"], "no cost to choose by"),
        (["--precision=snip,*.wgrad=fp8", "--snip.policy=snip-layer"], "gives a layer one format"),
    ],
)
def test_what_cannot_be_planned_is_refused_before_a_folder_is_made(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    run_dir = tmp_path / "run"
    assert main(flags(corpus, run_dir, "--train.steps=5", *words)) == 2
    assert says in capsys.readouterr().err
    assert not run_dir.exists()


@pytest.mark.slow
def test_a_baseline_is_a_policy_of_the_same_door(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    assert main(flags(corpus, run_dir, *SNIP, "--snip.policy=first-last", "--budget.fp4-flops=0.5")) == 0
    gemms = Plan.read(run_dir / "plan.json").gemms
    assert {gemms["blocks.0.mlp.down"].wgrad, gemms["blocks.0.mlp.gate_up"].wgrad} == {"fp8"}


@pytest.mark.slow
def test_the_last_part_of_a_run_may_take_less_of_the_budget(corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    words = ["--snip.final-share=0.3", "--snip.final-weight=50", "--budget.fp4-flops=0.5"]
    assert main(flags(corpus, run_dir, *SNIP, *words)) == 0
    shares = {event["step"]: event["fp4_flops"] for event in events(run_dir, "replan")}
    final = STEPS - round(0.3 * STEPS)
    early = [share for step, share in shares.items() if step < final]
    late = [share for step, share in shares.items() if step >= final]
    assert min(early) > 0.5 > max(late)


@pytest.mark.slow
def test_plans_after_the_checkpoint_leave_the_folder_of_a_resumed_run(
    whole: Path, corpus: Path, tmp_path: Path
) -> None:
    """They were of steps that are taken again, perhaps in other formats."""
    run_dir = tmp_path / "run"
    shutil.copytree(whole, run_dir)
    for folder in (run_dir / "checkpoints").glob("step-*"):
        if int(folder.name.removeprefix("step-")) > SWITCH:
            shutil.rmtree(folder)
    stale = run_dir / "plans" / f"step-{SWITCH + 1:08d}.json"
    shutil.copy(run_dir / "plan.json", stale)
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert not stale.exists()
    assert {path.name for path in (run_dir / "plans").iterdir()} == {
        path.name for path in (whole / "plans").iterdir()
    }


@pytest.mark.slow
def test_kill_dash_nine_in_the_middle_of_a_run(whole: Path, corpus: Path, tmp_path: Path) -> None:
    """For real: a process that is killed while it trains, and resumed until it is done."""
    import os
    import signal
    import subprocess
    import sys
    import time

    run_dir = tmp_path / "run"
    words = flags(corpus, run_dir, *SNIP, "--checkpoint.every=1", "--checkpoint.keep-every=1")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for kill_at in (4, 6, 9):
        process = subprocess.Popen(
            [sys.executable, "-m", "scrimp", *words],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        while process.poll() is None and not (run_dir / "checkpoints" / f"step-{kill_at:08d}").exists():
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
        words = ["train", f"--run.dir={run_dir}", "--resume"]
    assert scrimp(*words).returncode == 0
    assert losses(run_dir) == losses(whole)
    assert (
        json.loads((run_dir / "plan.json").read_text())["gemms"]
        == json.loads((whole / "plan.json").read_text())["gemms"]
    )


@pytest.mark.slow
def test_a_budget_that_statistics_show_to_be_impossible_gives_the_nearest_plan(
    corpus: Path, tmp_path: Path
) -> None:
    """Known only in the middle of a run: the run goes on in the safest formats, and says why."""
    run_dir = tmp_path / "run"
    words = [word for word in SNIP if not word.startswith("--snip.every")]
    assert main(flags(corpus, run_dir, *words, "--snip.every=0", "--budget.divergence=0.0001")) == 0
    reason = str(events(run_dir, "replan")[0]["reason"])
    assert "the safest plan" in reason
    assert "predicted divergence" in reason
    assert {c.fprop for layer, c in Plan.read(run_dir / "plan.json").gemms.items() if layer != "head"} == {
        "fp8"
    }
