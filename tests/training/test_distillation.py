"""Distillation in real runs: what a teacher changes, resuming, memory, and teachers that are refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from tiny_run import flags, losses, records, scrimp, write_corpus

from scrimp.cli import main
from scrimp.config import load_config
from scrimp.models.model import build_model
from scrimp.training.setup import decide
from scrimp.training.trained_weights import architecture_of_weights

STEPS = ("--train.steps=4", "--checkpoint.every=2", "--checkpoint.keep-last=9", "--data.held-out=0.1")


def student(folder: Path, name: str, teachers: str, *more: str) -> list[str]:
    """The command line of a run that learns from teachers."""
    distill = ("--objective.name=distill", f"--objective.teachers={teachers}")
    return flags(folder / "corpus.txt", folder / name, *STEPS, *distill, *more)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a run of 30 steps to learn from, a plain run of four, and one that learns from the first."""
    folder = tmp_path_factory.mktemp("distill")
    corpus = write_corpus(folder)
    teacher = ("--train.steps=30", "--run.seed=7", "--model.context=128")
    assert main(flags(corpus, folder / "teacher", *teacher)) == 0
    assert main(flags(corpus, folder / "plain", *STEPS)) == 0
    assert main(student(folder, "taught", str(folder / "teacher"))) == 0
    return folder


def test_the_loss_that_is_shown_is_that_of_the_text(folder: Path) -> None:
    plain, taught = losses(folder / "plain"), losses(folder / "taught")
    assert taught[1] == pytest.approx(
        plain[1], rel=1e-6
    )  # a kernel has no teachers: operators round otherwise
    assert taught[2] != plain[2]


@pytest.mark.slow
def test_formats_are_proven_beside_a_teacher(folder: Path) -> None:
    """The first step's products are compared with the plan, in which the teacher's are not."""
    assert main(student(folder, "in-fp8", str(folder / "teacher"), "--precision=fp8,head=fp8")) == 0
    assert losses(folder / "in-fp8")[4] == pytest.approx(losses(folder / "taught")[4], rel=0.01)
    proof = next(event for event in records(folder / "in-fp8", "events.jsonl") if event["kind"] == "proof")
    assert "gave the numbers of their formats" in str(proof)


@pytest.mark.slow
def test_a_teacher_of_no_weight_changes_nothing(folder: Path) -> None:
    assert main(student(folder, "untaught", str(folder / "teacher"), "--objective.teacher-weight=1e-12")) == 0
    assert list(losses(folder / "untaught").values()) == pytest.approx(
        list(losses(folder / "plain").values()), rel=1e-6
    )


def test_two_equal_teachers_are_one(folder: Path) -> None:
    shutil.copytree(folder / "teacher", folder / "again")
    assert main(student(folder, "by-two", f"{folder / 'teacher'}, {folder / 'again'}")) == 0
    assert losses(folder / "by-two") == losses(folder / "taught")


def test_a_run_that_was_killed_goes_on_with_its_teacher_bit_for_bit(folder: Path) -> None:
    shutil.copytree(folder / "taught", folder / "killed")
    resume = ["train", f"--run.dir={folder / 'killed'}", "--resume", "--resume-from=2"]
    assert main(resume) == 0
    assert losses(folder / "killed") == losses(folder / "taught")


def test_a_teacher_that_was_trained_further_is_refused_on_resuming(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "teacher", folder / "moving")
    assert main(student(folder, "follower", str(folder / "moving"))) == 0
    shutil.rmtree(max((folder / "moving" / "checkpoints").glob("step-*")))
    shutil.copytree(folder / "plain" / "checkpoints", folder / "moving" / "checkpoints", dirs_exist_ok=True)
    capsys.readouterr()
    assert main(["train", f"--run.dir={folder / 'follower'}", "--resume", "--resume-from=2"]) == 2
    assert "what objective.teachers names has changed" in capsys.readouterr().err


def test_a_teacher_may_have_moved_on_resuming_and_no_other_one_takes_its_place(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "teacher", folder / "here")
    assert main(student(folder, "pupil", str(folder / "here"))) == 0
    (folder / "here").rename(folder / "there")
    resume = ["train", f"--run.dir={folder / 'pupil'}", "--resume", "--resume-from=2"]
    assert main(resume) == 2
    assert "say with --objective.teachers where it lies now" in capsys.readouterr().err
    assert main([*resume, f"--objective.teachers={folder / 'plain'}"]) == 2
    assert "what objective.teachers names has changed" in capsys.readouterr().err
    assert main([*resume, f"--objective.teachers={folder / 'there'}"]) == 0
    assert losses(folder / "pupil") == losses(folder / "taught")


def test_the_account_has_what_teachers_take(folder: Path) -> None:
    plain, taught = (decide(load_config(folder / name / "config.toml")) for name in ("plain", "taught"))
    architecture = architecture_of_weights(folder / "teacher")
    weights = sum(one.numel() for one in build_model(architecture).parameters())
    tokens, before, costs = taught.micro_batch_tokens, plain.memory.costs, taught.memory.costs
    assert costs.resident - before.resident == 4 * (weights + tokens * architecture.width)
    # Their logits, and the probabilities that these become.
    assert costs.ends.head_peak - before.ends.head_peak >= 4 * tokens * architecture.vocab_size


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--objective.teachers=nowhere"], "nowhere does not exist"),
        (["--objective.name=next-token"], "do not go together"),
        (["--objective.teachers=,"], "do not go together"),
        (["--objective.teachers={teacher},{teacher}"], "names a folder twice"),
        (["--objective.teacher-weight=0"], "teach nothing"),
        (["--objective.teacher-weight=1.5"], "out of range"),
        (["--data.tokenizer=bpe", "--data.vocab-size=300"], "does not have the tokenizer of the data"),
        (["--model.vocab-size=512"], "another number of words"),
        (["--train.sequence=256"], "shorter context"),
    ],
)
def test_unfit_teachers_are_refused_before_a_folder_is_made(
    folder: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    teacher = str(folder / "teacher")
    words = student(folder, "refused", teacher)
    keys = {word.format(teacher=teacher).partition("=")[0] for word in more}
    words = [word for word in words if word.partition("=")[0] not in keys]
    capsys.readouterr()
    assert main([*words, *(word.format(teacher=teacher) for word in more)]) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "refused").exists()


@pytest.mark.slow
def test_ranks_learn_what_one_process_learns(folder: Path) -> None:
    words = student(folder, "ranks", str(folder / "teacher"), "--layout.fsdp=2")
    done = scrimp("launch", "--ranks=2", *words)
    assert done.returncode == 0, done.stderr
    assert list(losses(folder / "ranks").values()) == pytest.approx(
        list(losses(folder / "taught").values()), rel=1e-5
    )
    assert len(records(folder / "ranks")) == 4
