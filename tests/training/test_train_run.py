"""A whole run: what it leaves behind, how it resumes, how it stops, and what decides it."""

import json
import math
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import flags, losses, records, scrimp, write_corpus

from scrimp.cli import main
from scrimp.planner import Plan
from scrimp.runtime import deterministic


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(autouse=True)
def private_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "user-cache"))


@pytest.fixture(scope="module")
def finished(corpus: Path) -> Path:
    """A run of 30 steps with checkpoints every 10, never interrupted."""
    run_dir = corpus.parent / "finished"
    assert (
        main(flags(corpus, run_dir, "--train.steps=30", "--checkpoint.every=10", "--checkpoint.keep-last=3"))
        == 0
    )
    return run_dir


def test_a_run_leaves_what_the_design_says(finished: Path) -> None:
    for name in ("config.toml", "plan.json", "metrics.jsonl", "events.jsonl", "report.html"):
        assert (finished / name).stat().st_size > 0, name
    for name in ("tensorboard", "tokenizer"):
        assert any((finished / name).iterdir()), name
    steps = sorted(folder.name for folder in (finished / "checkpoints").iterdir())
    assert steps == ["step-00000010", "step-00000020", "step-00000030"]


def test_the_loss_falls_and_every_step_is_recorded(finished: Path) -> None:
    by_step = losses(finished)
    assert sorted(by_step) == list(range(1, 31))
    assert by_step[1] == pytest.approx(math.log(320), rel=0.02)
    assert by_step[30] < by_step[1] - 0.5
    last = records(finished)[-1]
    assert last["tokens"] == 30 * 256
    assert last["mfu_bf16"] > 0  # of a peak that was measured while others may have used the machine
    assert last["sol"] > 0
    assert last["eval_loss"] < by_step[1]


def test_the_plan_has_predictions_and_measurements_side_by_side(finished: Path) -> None:
    plan = Plan.read(finished / "plan.json")
    assert plan.predicted.peak_device_bytes
    assert plan.measured is not None
    assert plan.measured.step_seconds
    assert {choice.fprop for choice in plan.gemms.values()} == {"fp32"}


@pytest.mark.slow
def test_the_saved_configuration_reproduces_the_run(finished: Path, tmp_path: Path) -> None:
    again = tmp_path / "again"
    assert main(["train", str(finished / "config.toml"), f"--run.dir={again}"]) == 0
    assert losses(again) == losses(finished)


@pytest.mark.slow
def test_another_seed_gives_another_run(finished: Path, corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "seed"
    assert main(flags(corpus, run_dir, "--train.steps=2", "--run.seed=1")) == 0
    assert losses(run_dir)[1] != losses(finished)[1]


@pytest.mark.slow
def test_another_rounding_seed_moves_nothing_but_stochastic_rounding(corpus: Path, tmp_path: Path) -> None:
    """nvfp4 rounds forward products to nearest and gradients stochastically: the first loss is the same."""
    found = []
    for seed in ("0", "1"):
        run_dir = tmp_path / seed
        drawn = f"--run.rounding-seed={seed}"
        assert main(flags(corpus, run_dir, "--train.steps=3", "--precision=nvfp4", drawn)) == 0
        found.append(losses(run_dir))
    assert found[0][1] == found[1][1]
    assert found[0][3] != found[1][3]


def test_a_run_resumed_from_any_checkpoint_repeats_the_same_losses(finished: Path, tmp_path: Path) -> None:
    import shutil

    run_dir = tmp_path / "resumed"
    shutil.copytree(finished, run_dir)
    for step in (20, 30):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert losses(run_dir) == losses(finished)
    assert [event["kind"] for event in records(run_dir, "events.jsonl")].count("resume") == 1


def test_resuming_a_finished_run_changes_nothing_but_the_last_evaluation(
    finished: Path, tmp_path: Path
) -> None:
    import shutil

    run_dir = tmp_path / "done"
    shutil.copytree(finished, run_dir)
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert losses(run_dir) == losses(finished)


def test_a_run_goes_on_by_other_kernels(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They do not change what is trained; on a CPU they are the same ones."""
    import shutil

    asked = []

    def noted(device: torch.device, wanted: bool) -> AbstractContextManager[None]:
        asked.append(wanted)
        return deterministic(device, wanted)

    monkeypatch.setattr("scrimp.training.session.deterministic", noted)
    run_dir = tmp_path / "resumed"
    shutil.copytree(finished, run_dir)
    for step in (20, 30):
        shutil.rmtree(run_dir / "checkpoints" / f"step-{step:08d}")
    assert main(["train", f"--run.dir={run_dir}", "--resume", "--train.no-deterministic"]) == 0
    assert losses(run_dir) == losses(finished)
    assert "deterministic = false" in (run_dir / "config.toml").read_text(encoding="utf-8")
    assert main(["train", f"--run.dir={run_dir}", "--resume", "--train.deterministic"]) == 0
    assert asked == [False, True]


def test_a_used_folder_is_refused_without_resume(
    finished: Path, corpus: Path, capsys: pytest.CaptureFixture
) -> None:
    before = sorted(path.name for path in finished.rglob("*"))
    assert main(flags(corpus, finished, "--train.steps=30")) == 2
    assert "--resume" in capsys.readouterr().err
    assert sorted(path.name for path in finished.rglob("*")) == before


def test_a_changed_setting_is_refused_on_resume_by_its_name(
    finished: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["train", f"--run.dir={finished}", "--resume", "--optimizer.lr=0.5"]) == 2
    assert "optimizer.lr = 0.5" in capsys.readouterr().err


@pytest.mark.slow
def test_a_damaged_checkpoint_is_named_and_the_older_one_used(
    finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    import shutil

    run_dir = tmp_path / "damaged"
    shutil.copytree(finished, run_dir)
    newest = run_dir / "checkpoints" / "step-00000030"
    victim = next(iter(newest.glob("*.safetensors")))
    victim.write_bytes(victim.read_bytes()[:-7])
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    out = capsys.readouterr()
    assert victim.name in out.out + out.err
    assert losses(run_dir) == losses(finished)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_cutting_the_batch_otherwise_changes_the_loss_only_by_rounding(
    corpus: Path, tmp_path: Path, precision: str
) -> None:
    runs = []
    for micro_batch in (1, 2, 4):
        run_dir = tmp_path / f"cut-{micro_batch}"
        more = (f"--train.micro-batch={micro_batch}", "--train.steps=6", f"--precision={precision}")
        assert main(flags(corpus, run_dir, *more)) == 0
        runs.append(torch.tensor(list(losses(run_dir).values())))
    tolerance = 1e-5 if precision == "fp32" else 2e-2
    torch.testing.assert_close(runs[1], runs[0], rtol=tolerance, atol=0)
    torch.testing.assert_close(runs[2], runs[0], rtol=tolerance, atol=0)


@pytest.mark.parametrize("parameters", ["fp32", "bf16"])
@pytest.mark.slow
def test_bf16_runs_resume_bit_for_bit(corpus: Path, tmp_path: Path, parameters: str) -> None:
    import shutil

    more = (
        "--precision=bf16",
        f"--train.parameters={parameters}",
        "--train.steps=12",
        "--checkpoint.every=4",
    )
    run_dir, resumed = tmp_path / "whole", tmp_path / "resumed"
    assert main(flags(corpus, run_dir, *more, "--checkpoint.keep-last=3")) == 0
    shutil.copytree(run_dir, resumed)
    for step in (8, 12):
        shutil.rmtree(resumed / "checkpoints" / f"step-{step:08d}")
    assert main(["train", f"--run.dir={resumed}", "--resume"]) == 0
    assert losses(resumed) == losses(run_dir)


def test_non_finite_steps_are_skipped_recorded_and_stop_the_run(
    finished: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    broken, run_dir = tmp_path / "broken", tmp_path / "diverged"
    assert main(["export", str(finished), str(broken)]) == 0
    weights = load_file(broken / "model.safetensors")
    weights["model.embed_tokens.weight"] *= 1e38  # finite, but the first product overflows
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    words = [
        "train",
        "--device=cpu",
        f"--model.weights={broken}",
        f"--data.source={corpus}",
        f"--data.cache={tmp_path}/c",
        f"--run.dir={run_dir}",
        "--train.steps=20",
        "--train.sequence=64",
        "--train.batch-tokens=256",
        "--train.nonfinite-patience=3",
    ]
    assert main(words) == 1
    assert "3 steps in a row" in capsys.readouterr().err
    skipped = [event for event in records(run_dir, "events.jsonl") if event["kind"] == "skipped"]
    assert [event["step"] for event in skipped] == [1, 2, 3]
    assert records(run_dir, "events.jsonl")[-1]["kind"] == "finish"
    assert (run_dir / "report.html").exists()


@pytest.mark.slow
def test_weights_of_a_run_start_another_one(finished: Path, corpus: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "second"
    words = [
        "train",
        "--device=cpu",
        f"--model.weights={finished}",
        f"--data.source={corpus}",
        f"--data.cache={tmp_path}/c",
        f"--run.dir={run_dir}",
        "--train.steps=2",
        "--train.sequence=64",
        "--train.batch-tokens=256",
    ]
    assert main(words) == 0
    assert losses(run_dir)[1] < losses(finished)[1] - 0.5
    assert json.loads((run_dir / "plan.json").read_text())["fingerprint"]["world_size"] == 1


def test_python_dash_m_scrimp_is_the_command(finished: Path) -> None:
    done = scrimp("report", str(finished))
    assert done.returncode == 0, done.stderr
    assert "report.html" in done.stdout
