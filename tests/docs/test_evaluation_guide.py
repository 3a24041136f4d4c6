"""The guide to tasks: its commands run, its files are read, and it names every task that ships."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.tasks import BUILT_IN, read_task

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "evaluation.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    found = re.search(rf"```{language}\n(.*?)```", GUIDE, flags=re.DOTALL)
    assert found
    return found[1]


def test_the_guide_names_every_task_with_its_chance() -> None:
    shown = dict(re.findall(r"^\| `([\w-]+)` \|.*\| (1/\d) \|$", GUIDE, flags=re.MULTILINE))
    assert shown == dict.fromkeys(BUILT_IN, "1/4") | {"closing": "1/3"}


def test_the_items_of_the_guide_are_read(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text(block("json"), encoding="utf-8")
    assert len(read_task(tmp_path / "mine.jsonl").items) == 2


@pytest.mark.slow
def test_the_commands_of_the_guide_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    corpus = write_corpus(tmp_path)
    (tmp_path / "held-out.txt").write_text(corpus.read_text(encoding="utf-8"), encoding="utf-8")
    (tmp_path / "mine.jsonl").write_text(block("json"), encoding="utf-8")
    more = ["--model.context=512", "--train.steps=3", "--checkpoint.every=1", "--checkpoint.keep-every=1"]
    for name, own in (("a", "--run.seed=1"), ("b", "--run.seed=2"), ("c", "--precision=fp8")):
        assert main(flags(corpus, tmp_path / "runs" / name, *more, own)) == 0
    assert main(["export", str(tmp_path / "runs" / "a"), str(tmp_path / "my-model")]) == 0
    monkeypatch.chdir(tmp_path)
    for line in block("console").splitlines():
        program, *words = shlex.split(line.removeprefix("$ "))
        assert program == "scrimp"
        assert main([*words, "--device=cpu"]) == 0, f"{line}\n{capfd.readouterr().err}"
    assert "early signal: 3 runs of 2 models" in capfd.readouterr().out
