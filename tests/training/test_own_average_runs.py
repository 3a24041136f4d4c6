"""Runs that learn from the average of their own weights: what it changes, resuming, memory, ranks."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from runs_on_ranks import check_same_course, check_same_tensors, checkpoint_of, goes_on, on_ranks
from tiny_run import flags, forked, losses, records, write_corpus

from scrimp.cli import main
from scrimp.config import load_config
from scrimp.planner import Plan
from scrimp.training.setup import decide

STEPS, HALF = 8, 4
SETTINGS = (
    f"--train.steps={STEPS}",
    f"--checkpoint.every={HALF}",
    "--checkpoint.keep-last=4",
    "--evaluation.every=4",
    "--train.micro-batch=1",
    "--optimizer.clip=0.5",
)
EMA = ("--objective.name=distill", "--objective.teachers=ema", "--objective.teacher-momentum=0.75")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a plain run, and one that learns from its average."""
    folder = tmp_path_factory.mktemp("average")
    corpus = write_corpus(folder)
    for name, more in (("plain", ()), ("taught", EMA)):
        assert forked(*flags(corpus, folder / name, *SETTINGS, *more)) == 0
    return folder


def test_the_loss_that_is_shown_is_that_of_the_text(folder: Path) -> None:
    plain, taught = losses(folder / "plain"), losses(folder / "taught")
    assert taught[1] == pytest.approx(plain[1], rel=1e-6)  # by operators, and by a kernel
    assert taught[STEPS] != plain[STEPS]
    assert taught[STEPS] == pytest.approx(plain[STEPS], rel=0.05)


def test_checkpoints_hold_the_average_of_the_weights(folder: Path) -> None:
    """With a run that writes every step's weights, by hand."""
    words = (*SETTINGS, *EMA, "--checkpoint.every=1", "--checkpoint.keep-last=99")
    assert main(flags(folder / "corpus.txt", folder / "every", *words)) == 0
    found = [dict(checkpoint_of(folder / "every", step).tensors()) for step in range(1, STEPS + 1)]
    names = [name.removeprefix("model.") for name in found[0] if name.startswith("model.")]
    for before, after in itertools.pairwise(found):
        for name in names:
            expected = 0.75 * before[f"average.{name}"] + 0.25 * after[f"model.{name}"]
            torch.testing.assert_close(after[f"average.{name}"], expected, rtol=1e-6, atol=1e-8)
    assert not torch.equal(found[-1][f"average.{names[0]}"], found[-1][f"model.{names[0]}"])


def test_a_run_goes_on_bit_for_bit(folder: Path) -> None:
    assert main(goes_on(folder / "taught", folder / "again", HALF)) == 0
    assert losses(folder / "again") == losses(folder / "taught")
    found, expected = (dict(checkpoint_of(folder / name, STEPS).tensors()) for name in ("again", "taught"))
    assert all(torch.equal(found[name], one) for name, one in expected.items() if name != "random.torch")


def test_the_account_is_what_is_allocated(folder: Path) -> None:
    plain, taught = (decide(load_config(folder / name / "config.toml")) for name in ("plain", "taught"))
    average = dict(checkpoint_of(folder / "taught", STEPS).tensors("average."))
    weights = sum(one.numel() * one.element_size() for one in average.values())
    before, costs = plain.memory.costs, taught.memory.costs
    assert costs.checkpoint_copy - before.checkpoint_copy == weights
    hidden = 4 * taught.micro_batch_tokens * taught.architecture.width
    assert costs.resident - before.resident == hidden
    for name in ("plain", "taught"):  # each in a process of its own
        counted = max(record.get("tensor_peak_bytes") or 0 for record in records(folder / name))
        predicted = Plan.read(folder / name / "plan.json").predicted.peak_device_bytes
        assert predicted == pytest.approx(counted, rel=0.05), name


@pytest.mark.slow
def test_formats_are_proven_beside_the_average(folder: Path) -> None:
    words = flags(folder / "corpus.txt", folder / "in-fp8", *SETTINGS, *EMA, "--precision=fp8,head=fp8")
    assert main(words) == 0
    assert losses(folder / "in-fp8")[STEPS] == pytest.approx(losses(folder / "taught")[STEPS], rel=0.02)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--objective.name=next-token"], "do not go together"),
        (["--objective.teachers=ema,{plain}"], "stands alone"),
        (["--objective.teacher-weight=0"], "teach nothing"),
        (["--objective.written=0.5"], "not carried out"),
        (["--objective.teacher-momentum=1"], "out of range"),
        (["--adapter.rank=4", "--model.weights={plain}"], "adapter.rank 4 is not carried out"),
        (["--memory.weights=host"], "memory.weights host is not carried out"),
    ],
)
def test_what_it_does_not_go_with_is_refused_before_a_folder_is_made(
    folder: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [word.format(plain=folder / "plain") for word in more]
    keys = {word.partition("=")[0] for word in words}
    own = flags(folder / "corpus.txt", folder / "refused", *SETTINGS, *EMA)
    own = [word for word in own if word.partition("=")[0] not in keys]
    capsys.readouterr()
    assert main([*own, *words]) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "refused").exists()


def test_a_run_may_begin_from_weights_and_be_read_by_others(folder: Path) -> None:
    words = flags(folder / "corpus.txt", folder / "onward", *SETTINGS, *EMA)
    assert main([*words, f"--model.weights={folder / 'taught'}", "--optimizer.from-weights"]) == 0
    assert losses(folder / "onward")[1] < losses(folder / "taught")[1]
    assert main(["verify", str(folder / "onward")]) == 0
    assert main(["export", str(folder / "onward"), str(folder / "exported")]) == 0


@pytest.fixture(scope="module")
def on_two(folder: Path) -> Path:
    """With runs on two ranks, and one that goes on from them alone."""
    corpus = folder / "corpus.txt"
    ours = [*SETTINGS, *EMA]
    on_ranks(
        2,
        folder / "two",
        flags(corpus, folder / "fsdp", *ours, "--layout.fsdp=2"),
        flags(corpus, folder / "zero 1", *ours, "--layout.fsdp=2", "--layout.zero=1"),
        flags(corpus, folder / "copies", *ours, "--layout.dp=2"),
        goes_on(folder / "taught", folder / "from one to two", HALF),
    )
    assert main(goes_on(folder / "fsdp", folder / "from two to one", HALF)) == 0
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp", "zero 1", "copies", "from one to two", "from two to one"])
def test_ranks_learn_what_one_process_learns(on_two: Path, name: str) -> None:
    check_same_course(on_two / name, on_two / "taught")
    check_same_tensors(on_two / name, on_two / "taught", STEPS)


@pytest.mark.slow
def test_ranks_go_on_bit_for_bit(on_two: Path) -> None:
    on_ranks(2, on_two / "again ranks", goes_on(on_two / "fsdp", on_two / "fsdp again", HALF))
    assert losses(on_two / "fsdp again") == losses(on_two / "fsdp")
