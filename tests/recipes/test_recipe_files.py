"""Every recipe can be named, its run and its study can be read, and what it says is made of results alone."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

from scrimp.cli import main
from scrimp.cli.build import build
from scrimp.cli.ranks import papers_of
from scrimp.errors import ConfigError
from scrimp.recipes import file_of, recipes
from scrimp.study.definition import load_study


@pytest.mark.parametrize("name", recipes())
def test_a_recipe_has_a_run_and_a_study_that_names_it(name: str) -> None:
    command, given = build("train", [f"recipe:{name}", "--train.steps=7"])
    assert command.config.train.steps == 7  # type: ignore[union-attr]
    assert "train.batch_tokens" in given
    assert load_study(str(file_of(f"recipe:{name}", "study"))).recipe == name


def test_a_recipe_that_is_not_there_is_refused_with_the_nearest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for command in ("train", "plan", "study"):
        assert main([command, "recipe:data-limitd"]) == 2
        assert "did you mean recipe:data-limited?" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="no recipe"):
        file_of("recipe:", "train")
    assert not list(tmp_path.iterdir())


def test_ranks_agree_on_the_file_of_a_recipe() -> None:
    """`scrimp launch ... train recipe:NAME`: what ranks compare is the recipe's file."""
    words = ["recipe:data-limited"]
    command, _ = build("train", words)
    papers = papers_of(command, ["train", *words])
    assert (
        papers["the settings file"]
        == hashlib.sha256(file_of(words[0], "train").read_bytes()).hexdigest()[:12]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", recipes())
def test_a_recipe_s_study_takes_its_first_steps_and_says_its_hours(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fewer = "--set=train.batch_tokens=1024", "--set=train.micro_batch=2", "--set=evaluation.tokens=1024"
    assert (
        main(["study", f"recipe:{name}", "--dry-run", f"--out={tmp_path / 'out'}", "--seeds=2", *fewer]) == 0
    )
    said = capsys.readouterr()
    assert "for what is left (predicted from first steps" in said.out + said.err
    assert not (tmp_path / "out" / "rows.jsonl").exists()
