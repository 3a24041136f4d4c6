"""`scrimp eval --tasks`: one model, several side by side, and their checkpoints."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import eval_tasks, main
from scrimp.cli.trained import load_executable
from scrimp.config import Config, replace_values, to_toml
from scrimp.tasks import BUILT_IN, figures_of, read_texts, score
from scrimp.training.trained_weights import open_target

STEPS = (2, 4, 6)


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two seeds of one model, and one seed of a wider one, each with three checkpoints."""
    folder = tmp_path_factory.mktemp("runs")
    corpus = write_corpus(folder)
    more = ["--train.steps=6", "--checkpoint.every=2", "--checkpoint.keep-every=2", "--optimizer.lr=0.01"]
    more.append("--model.context=512")
    for name, own in (("a0", ["--run.seed=0"]), ("a1", ["--run.seed=1"]), ("b0", ["--model.width=48"])):
        assert main(flags(corpus, folder / name, *more, *own)) == 0
    items = [
        {"context": "import", "choices": [" re", " zz"], "answer": 0},
        {"context": "x" * 600, "choices": ["y", "x"], "answer": 1},
    ]
    (folder / "mine.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    return folder


def rows(text: str) -> list[list[str]]:
    """The cells of the tables in a text."""
    return [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]


def test_figures_are_those_of_the_newest_checkpoint(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    corpus = str(runs / "corpus.txt")
    words = ["--tasks", f"closing,{runs / 'mine.jsonl'}", "--data", corpus, "--device=cpu"]
    assert main(["eval", str(runs / "a0"), *words]) == 0
    shown = capsys.readouterr().out
    target = open_target(runs / "a0" / "checkpoints" / "step-00000006")
    task = BUILT_IN["closing"].task("closing", read_texts(corpus, "text"))
    accuracy, margin = figures_of(score(load_executable(target, "cpu"), target.tokenizer, task))
    expected = f"{accuracy.value:.4f} ± {accuracy.error:.4f}"
    assert ["closing", "accuracy", expected, "0.3333", str(len(task.items))] in rows(shown)
    assert f"{margin.value:.4f} ± {margin.error:.4f}" in shown
    assert "1 of 2 items of mine.jsonl are longer than the model's context" in shown


def test_models_are_compared_on_the_same_items(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--tasks", "copying", "--beside", str(runs / "b0"), "--device=cpu"]
    assert main(["eval", str(runs / "a0"), *words]) == 0
    shown = capsys.readouterr().out
    task = BUILT_IN["copying"].task("copying", [])
    targets = [open_target(runs / name) for name in ("a0", "b0")]
    first, other = (figures_of(score(load_executable(one, "cpu"), one.tokenizer, task))[1] for one in targets)
    less = other.less(first)
    assert less is not None
    assert f"{less[0]:+.4f} ± {less[1]:.4f}" in shown


@pytest.mark.slow
def test_checkpoints_are_a_series_and_give_the_early_signal(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    beside = [word for name in ("a1", "b0") for word in ("--beside", str(runs / name))]
    words = ["--tasks", "copying", "--checkpoints", *beside, "--device=cpu"]
    assert main(["eval", str(runs / "a0"), *words]) == 0
    shown = capsys.readouterr()
    found = rows(shown.out)
    target = open_target(runs / "a0" / "checkpoints" / "step-00000004")
    task = BUILT_IN["copying"].task("copying", [])
    accuracy, margin = figures_of(score(load_executable(target, "cpu"), target.tokenizer, task))
    series = [row for row in found if row[0] in map(str, STEPS)]
    assert [row[0] for row in series] == ["2", "4", "6"] * 2
    assert series[1][1] == f"{accuracy.value:.4f}"
    assert series[4][1] == f"{margin.value:.4f}"
    assert all(len(row) == 4 for row in series)
    assert "early signal: 3 runs of 2 models" in shown.out
    assert [row[:2] for row in found[-2:]] == [["copying", "accuracy"], ["copying", "margin"]]
    assert all("-" not in row[2:] for row in found[-2:])
    for name in ("a0", "a1", "b0"):
        for step in STEPS:
            assert f"{runs / name}: step {step}" in shown.err


def test_a_model_without_checkpoints_has_no_series(
    runs: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(runs / "a0"), str(tmp_path / "out")]) == 0
    assert main(["eval", str(tmp_path / "out"), "--tasks", "copying", "--checkpoints", "--device=cpu"]) == 2
    assert "has no checkpoints" in capsys.readouterr().err
    shutil.rmtree(tmp_path / "out")


def test_students_of_other_teachers_are_no_seeds_of_one_model(tmp_path: Path) -> None:
    settings = {"a": "one", "b": "one", "c": "other"}
    for seed, (name, teacher) in enumerate(settings.items()):
        (tmp_path / name).mkdir()
        config = {"objective.name": "distill", "objective.teachers": teacher, "run.seed": seed}
        (tmp_path / name / "config.toml").write_text(to_toml(replace_values(Config(), config)))
    a, b, c = (eval_tasks._model_of(tmp_path / name) for name in settings)
    assert a == b != c
