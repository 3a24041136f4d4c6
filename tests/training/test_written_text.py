"""Text that teachers write: in whole runs, beside the corpus, the same when a run goes on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from tiny_run import flags, losses, scrimp, write_corpus

from scrimp.cli import main
from scrimp.config import load_config
from scrimp.training import written_text

STEPS = ("--train.steps=4", "--checkpoint.every=2", "--checkpoint.keep-last=9", "--data.held-out=0.1")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With two teachers, and a student for whom they write a half."""
    folder = tmp_path_factory.mktemp("written")
    corpus = write_corpus(folder)
    for seed in (7, 8):
        teacher = ("--train.steps=10", f"--run.seed={seed}", "--model.context=128")
        assert main(flags(corpus, folder / f"teacher{seed}", *teacher)) == 0
    assert main(student(folder, "taught")) == 0
    return folder


def student(folder: Path, name: str, *more: str) -> list[str]:
    distill = (
        "--objective.name=distill",
        f"--objective.teachers={folder / 'teacher7'},{folder / 'teacher8'}",
    )
    cache = f"--data.cache={folder / 'cache'}"
    return flags(
        folder / "corpus.txt", folder / name, *STEPS, *distill, "--objective.written=0.5", cache, *more
    )


def written(folder: Path, cache: str = "cache") -> list[Path]:
    return sorted((folder / cache).glob("written-*"))


def test_teachers_write_the_share_that_is_asked_for(folder: Path) -> None:
    (found,) = written(folder)
    manifest, rows = json.loads((found / "written.json").read_text()), np.load(found / "rows-00000.npy")
    config = load_config(folder / "taught" / "config.toml")
    assert config.train.batch_tokens is not None
    assert config.train.sequence == rows.shape[1] - 1
    per_step = config.train.batch_tokens // config.train.sequence
    assert manifest["samples"] == len(rows) == per_step * 4 // 2
    assert (rows[:, 0] == 256).all()
    assert rows.max() < 257


def test_less_is_read_again_and_again(folder: Path) -> None:
    cache = f"--data.cache={folder / 'less-cache'}"
    few = ("--objective.written-tokens=129", "--train.sequence=64", cache)
    assert main(student(folder, "less", *few)) == 0
    (found,) = written(folder, "less-cache")
    assert len(np.load(found / "rows-00000.npy")) == 3


def test_a_run_goes_on_with_the_same_text_bit_for_bit(folder: Path) -> None:
    shutil.copytree(folder / "taught", folder / "killed")
    before = {one: one.stat().st_mtime_ns for one in written(folder)[0].iterdir()}
    assert main(["train", f"--run.dir={folder / 'killed'}", "--resume", "--resume-from=2"]) == 0
    assert losses(folder / "killed") == losses(folder / "taught")
    assert {one: one.stat().st_mtime_ns for one in written(folder)[0].iterdir()} == before


def test_text_that_is_gone_is_written_again(folder: Path) -> None:
    shutil.copytree(folder / "taught", folder / "again")
    shutil.rmtree(written(folder)[0])
    assert main(["train", f"--run.dir={folder / 'again'}", "--resume", "--resume-from=2"]) == 0
    assert losses(folder / "again") == losses(folder / "taught")


def test_another_text_is_refused_on_resuming(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copytree(folder / "taught", folder / "other")
    shutil.copytree(folder / "cache", folder / "other-cache")
    (found,) = written(folder, "other-cache")
    rows = np.load(found / "rows-00000.npy")
    np.save(found / "rows-00000.npy", rows[::-1].copy())
    cache = f"--data.cache={folder / 'other-cache'}"
    resume = ["train", f"--run.dir={folder / 'other'}", "--resume", "--resume-from=2", cache]
    capsys.readouterr()
    assert main(resume) == 2
    assert "is damaged" in capsys.readouterr().err
    (found / "written.json").unlink()  # as if another machine had written it
    assert main(resume) == 2
    assert "have written another text" in capsys.readouterr().err


def test_teachers_without_weight_write_and_take_nothing(folder: Path) -> None:
    """A step by their text alone: the same samples as with weight, and the plain loss of them."""
    texts = written(folder)
    assert main(student(folder, "unweighted", "--objective.teacher-weight=0")) == 0
    unweighted, taught = losses(folder / "unweighted"), losses(folder / "taught")
    assert unweighted[1] == pytest.approx(taught[1], rel=1e-6)  # by a kernel, and by operators
    assert unweighted[2] != taught[2]
    plans = [json.loads((folder / name / "plan.json").read_text()) for name in ("unweighted", "taught")]
    less, more = (plan["predicted"]["peak_device_bytes"] for plan in plans)
    assert less < more
    assert written(folder) == texts  # what was written for the run with weight


def test_teachers_that_differ_in_weights_alone_write_texts_of_their_own(folder: Path) -> None:
    cache = f"--data.cache={folder / 'exports-cache'}"
    for seed in (7, 8):
        assert main(["export", str(folder / f"teacher{seed}"), str(folder / f"export{seed}")]) == 0
        teacher = (f"--objective.teachers={folder / f'export{seed}'}", cache)
        words = [
            one
            for one in student(folder, f"of{seed}")
            if not one.startswith(("--objective.teachers", "--data.cache"))
        ]
        assert main([*words, *teacher]) == 0
    assert len(written(folder, "exports-cache")) == 2


def test_teachers_without_room_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(written_text, "device_limit", lambda *_: 1000)
    capsys.readouterr()
    assert main(student(folder, "no-room", "--run.seed=99")) == 2
    assert "no room to write" in capsys.readouterr().err
    assert not (folder / "no-room").exists()


@pytest.mark.slow
def test_ranks_read_what_one_of_them_wrote(folder: Path) -> None:
    done = scrimp("launch", "--ranks=2", *student(folder, "ranks", "--layout.fsdp=2"))
    assert done.returncode == 0, done.stderr
    assert list(losses(folder / "ranks").values()) == pytest.approx(
        list(losses(folder / "taught").values()), rel=1e-5
    )


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--objective.written=1"], "out of range"),
        (["--objective.written=0.0000001"], "is no share of samples"),
        (["--objective.written=0.9999999"], "is no share of samples"),
        (["--objective.written=0", "--objective.written-tokens=64"], "where teachers write nothing"),
        (["--objective.name=next-token"], "objective.written applies to objective.name distill"),
        (["--data.mix=stdlib=1,copy=1"], "does not go with data.mix"),
    ],
)
def test_what_cannot_be_written_is_refused(
    folder: Path, more: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    words = student(folder, "refused", *more)
    if "--data.mix" in more[0]:
        words = [one for one in words if not one.startswith("--data.source")]
    capsys.readouterr()
    assert main(words) == 2
    assert says in capsys.readouterr().err
    assert not (folder / "refused").exists()
