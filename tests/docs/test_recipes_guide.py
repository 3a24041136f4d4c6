"""The guide to recipes: its table names every recipe, and what it shows of teachers runs."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tiny_run import TINY, write_corpus

from scrimp.cli import main
from scrimp.recipes import recipes
from scrimp.training.run_folder import saved_config

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "recipes.md").read_text(encoding="utf-8")


def test_the_table_has_every_recipe() -> None:
    assert set(re.findall(r"^\| `([a-z-]+)` \|", GUIDE, flags=re.MULTILINE)) == set(recipes())


@pytest.mark.slow
def test_a_student_of_two_runs_as_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smaller = [*TINY, f"--data.source={write_corpus(tmp_path)}", f"--data.cache={tmp_path / 'cache'}"]
    monkeypatch.chdir(tmp_path)
    commands = [
        shlex.split(line)[1:]
        for line in re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)[0].splitlines()
    ]
    for words in commands:
        assert main([*words, *smaller]) == 0
    teachers = saved_config(tmp_path / "runs" / "student").objective.teachers
    assert teachers == f"{tmp_path / 'runs' / 'first'},{tmp_path / 'runs' / 'second'}"
