"""Whole runs with moments in every format: resumed bit for bit, as good as fp32, and from before the setting."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
from tiny_run import flags, losses, write_corpus

from scrimp.cli import main
from scrimp.config import load_config
from scrimp.training.checkpoint_manifest import seal

FORMATS = {
    "bf16 without masters": ("--precision=bf16", "--optimizer.master-weights=false"),
    "8-bit without masters": (
        "--precision=bf16",
        "--optimizer.master-weights=false",
        "--optimizer.moments=8bit",
    ),
    "8-bit with masters": ("--precision=bf16", "--optimizer.moments=8bit"),
    "8-bit of fp32": ("--precision=fp32", "--optimizer.moments=8bit"),
}
LATER = (8, 12)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def run(corpus: Path, folder: Path, *more: str) -> Path:
    steps = ("--train.steps=12", "--checkpoint.every=4", "--checkpoint.keep-last=3", "--train.micro-batch=2")
    assert main(flags(corpus, folder, *steps, *more)) == 0
    return folder


def resumed_at_four(whole: Path, folder: Path) -> Path:
    shutil.copytree(whole, folder)
    for step in LATER:
        shutil.rmtree(folder / "checkpoints" / f"step-{step:08d}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("options", FORMATS.values(), ids=FORMATS)
def test_a_resumed_run_repeats_the_same_losses(
    corpus: Path, tmp_path: Path, options: tuple[str, ...]
) -> None:
    whole = run(corpus, tmp_path / "whole", *options)
    resumed = resumed_at_four(whole, tmp_path / "resumed")
    assert main(["train", f"--run.dir={resumed}", "--resume"]) == 0
    assert losses(resumed) == losses(whole)


@pytest.mark.slow
def test_a_run_from_before_the_setting_goes_on_as_often_as_it_likes(corpus: Path, tmp_path: Path) -> None:
    whole = run(corpus, tmp_path / "whole", "--precision=bf16")
    old = resumed_at_four(whole, tmp_path / "old")
    for path in old.rglob("config.toml"):
        path.write_text(
            re.sub(r"(?m)^moments *=.*\n", "", path.read_text(encoding="utf-8")), encoding="utf-8"
        )
        assert load_config(path).optimizer.moments == "auto"
    seal(old / "checkpoints" / "step-00000004", 4)
    assert main(["verify", str(old)]) == 0
    for again in ("", "--optimizer.moments=fp32"):
        for step in LATER:
            shutil.rmtree(old / "checkpoints" / f"step-{step:08d}", ignore_errors=True)
        assert main(["train", f"--run.dir={old}", "--resume", *again.split()]) == 0
        assert losses(old) == losses(whole)
    assert load_config(old / "config.toml").optimizer.moments == "fp32"


@pytest.mark.slow
def test_other_moments_are_refused_on_resume_by_name(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = run(corpus, tmp_path / "whole")
    assert main(["train", f"--run.dir={whole}", "--resume", "--optimizer.moments=8bit"]) == 2
    assert "optimizer.moments = 8bit" in capsys.readouterr().err
