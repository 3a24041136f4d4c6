"""Whole runs of schedule-free AdamW: evaluated at the average, trained as if nobody had looked, read at the average."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs_on_ranks import check_same_course, check_same_tensors, checkpoint_of, goes_on, on_ranks
from tiny_run import flags, forked, losses, records, write_corpus
from torch import Tensor

from scrimp.cli import main
from scrimp.models.huggingface.load import stream_parameters
from scrimp.planner import Plan
from scrimp.study.combined import evaluate_together
from scrimp.training.trained_weights import architecture_of_weights, finite_weights

STEPS, HALF = 8, 4
FREE = ("--optimizer.name=schedule-free", "--optimizer.lr=5e-3", "--optimizer.beta1=0.8")
SETTINGS = (
    f"--train.steps={STEPS}",
    f"--checkpoint.every={HALF}",
    "--checkpoint.keep-last=4",
    "--schedule.warmup-steps=3",
    "--train.micro-batch=1",
    "--optimizer.clip=0.5",
)
OFTEN, NEVER = "--evaluation.every=1", "--evaluation.every=0"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run that is evaluated after every step, in a process of its own."""
    folder = tmp_path_factory.mktemp("free")
    assert forked(*flags(write_corpus(folder), folder / "run", *SETTINGS, *FREE, OFTEN)) == 0
    return folder


def tensors(run: Path) -> dict[str, Tensor]:
    return dict(checkpoint_of(run, STEPS).tensors())


def check_same_bits(run: Path, other: Path) -> None:
    assert losses(run) == losses(other)
    found, expected = tensors(run), tensors(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], one) for name, one in expected.items())


def last_evaluation(run: Path) -> float:
    found = [one["loss"] for one in records(run, "events.jsonl") if one["kind"] == "evaluation"]
    return float(found[-1])


def test_a_run_that_is_evaluated_trains_as_one_that_is_not(folder: Path) -> None:
    assert main(flags(folder / "corpus.txt", folder / "quiet", *SETTINGS, *FREE, NEVER)) == 0
    check_same_bits(folder / "quiet", folder / "run")
    assert last_evaluation(folder / "quiet") == last_evaluation(folder / "run")


def test_a_run_goes_on_bit_for_bit(folder: Path) -> None:
    assert main(goes_on(folder / "run", folder / "again", HALF)) == 0
    check_same_bits(folder / "again", folder / "run")
    assert main(["verify", str(folder / "again")]) == 0


def test_all_who_read_its_weights_get_those_that_were_evaluated(folder: Path) -> None:
    """By hand from the checkpoint's tensors, where gradients are taken elsewhere."""
    run, stored = folder / "run", tensors(folder / "run")
    weights = dict(finite_weights(checkpoint_of(run, STEPS)))
    for name, x in weights.items():
        y, z = (stored[key].double() for key in (f"model.{name}", f"optimizer.{name}.z"))
        torch.testing.assert_close(x.double(), (y - 0.2 * z) / 0.8, rtol=1e-5, atol=1e-7)
    assert any((x - stored[f"model.{name}"]).abs().max() > 1e-4 for name, x in weights.items())
    assert evaluate_together([run], [1.0]).loss == pytest.approx(last_evaluation(run), rel=1e-6)
    assert main(["export", str(run), str(folder / "exported")]) == 0
    exported = dict(stream_parameters(architecture_of_weights(folder / "exported"), folder / "exported"))
    assert exported.keys() == weights.keys()
    assert all(torch.equal(exported[name], x) for name, x in weights.items())


@pytest.mark.slow
def test_adapters_are_merged_as_they_were_evaluated(folder: Path) -> None:
    run, base = folder / "adapted", f"--model.weights={folder / 'run'}"
    assert main(flags(folder / "corpus.txt", run, *SETTINGS, *FREE, base, "--adapter.rank=4", OFTEN)) == 0
    assert evaluate_together([run], [1.0]).loss == pytest.approx(last_evaluation(run), rel=1e-6)
    assert abs(last_evaluation(run) - last_evaluation(folder / "run")) > 1e-3  # not the base's loss


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "snip"])
def test_low_formats_learn_and_go_on_bit_for_bit(precision: str, folder: Path, tmp_path: Path) -> None:
    snip = ("--snip.first=1", "--snip.every=3", "--snip.delay=1", "--snip.formats=fp8,nvfp4")
    more = (f"--precision={precision}", *(snip if precision == "snip" else ()))
    run = tmp_path / "run"
    assert main(flags(folder / "corpus.txt", run, *SETTINGS, *FREE, *more, "--evaluation.every=2")) == 0
    if precision == "snip":
        assert [event["step"] for event in records(run, "events.jsonl") if event["kind"] == "replan"]
    assert tensors(run)["model.embedding.weight"].dtype == torch.bfloat16
    assert last_evaluation(run) == pytest.approx(last_evaluation(folder / "run"), rel=0.02)
    assert main(goes_on(run, tmp_path / "again", HALF)) == 0
    check_same_bits(tmp_path / "again", run)


def test_the_account_is_what_is_allocated(folder: Path) -> None:
    """Evaluations, which copy the weights, included: the fixture's run has a process of its own."""
    counted = max(record.get("tensor_peak_bytes") or 0 for record in records(folder / "run"))
    predicted = Plan.read(folder / "run" / "plan.json").predicted.peak_device_bytes
    assert predicted == pytest.approx(counted, rel=0.05)


@pytest.mark.parametrize(
    "more",
    [
        ["--schedule.name=cosine"],
        ["--optimizer.beta1=0"],
        ["--outer.every=4"],
        ["--objective.name=distill", "--objective.teachers=ema"],
    ],
)
def test_what_it_does_not_go_with_is_refused_before_a_folder_is_made(
    folder: Path, more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        main([*flags(folder / "corpus.txt", folder / "refused", "--optimizer.name=schedule-free"), *more])
        == 2
    )
    key, value = more[-1].removeprefix("--").split("=")
    said = " ".join(capsys.readouterr().err.split())
    assert f"{key} {value} is not carried out beside optimizer.name schedule-free" in said
    assert not (folder / "refused").exists()


@pytest.mark.slow
def test_ranks_train_and_evaluate_as_one_process(folder: Path) -> None:
    corpus, words = folder / "corpus.txt", [*SETTINGS, *FREE, OFTEN]
    on_ranks(
        2,
        folder / "two",
        flags(corpus, folder / "fsdp", *words, "--layout.fsdp=2"),
        flags(corpus, folder / "zero 1", *words, "--layout.fsdp=2", "--layout.zero=1"),
        flags(corpus, folder / "copies", *words, "--layout.dp=2"),
        flags(corpus, folder / "stages", *words, "--layout.pp=2"),
        goes_on(folder / "run", folder / "from one to two", HALF),
    )
    assert main(goes_on(folder / "fsdp", folder / "from two to one", HALF)) == 0
    for name in ("fsdp", "zero 1", "copies", "stages", "from one to two", "from two to one"):
        check_same_course(folder / name, folder / "run")
        check_same_tensors(folder / name, folder / "run", STEPS)
