"""`scrimp plan --hardware`: what it prints, and what it refuses."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from scrimp.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")
SHAPE = (
    "layers = 4\nwidth = 512\nheads = 8\nkv_heads = 8\nhead_size = 64\nffn_width = 2048\nvocab_size = 32000\n"
)


def plan(*words: str) -> int:
    return main(["plan", *words])


def test_the_commands_of_the_page_run(capsys: pytest.CaptureFixture[str]) -> None:
    (commands,) = re.findall(r"```console\n(.*?)```", PAGE, flags=re.DOTALL)
    lines = [line.removeprefix("$ scrimp plan ") for line in commands.splitlines() if line.startswith("$ ")]
    assert len(lines) == 2
    for line in lines:
        assert plan(*shlex.split(line)) == 0
        assert "settings tried" in capsys.readouterr().out


def test_given_degrees_are_kept(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        plan("--hardware", "8xh100", "--model.preset", "llama-3.1-8b", "--layout.tp=4", "--layout.pp=2") == 0
    )
    rows = [line for line in capsys.readouterr().out.splitlines() if "zero" in line or "tp" in line]
    assert all("pp 2" in row and "tp 4" in row for row in rows if "tok/s" not in row and "split" not in row)


def test_a_shape_is_planned_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "shape.toml"
    file.write_text(SHAPE, encoding="utf-8")
    words = ["--hardware", "rtx4060ti", "--shape", str(file)]
    assert plan(*words, "--train.sequence=1024", "--train.batch-tokens=65536") == 0
    assert "one device" in capsys.readouterr().out
    assert plan(*words) == 2
    assert "give both" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--hardware 8xh10", "did you mean"),
        ("--hardware rtx4060ti --model.preset llama-3.1-8b", "no layout of the model fits"),
        ("--hardware 8xh100 --layout.tp=3", "no layout has these degrees"),
        ("--hardware 8xh100 --optimizer.lr=0.1", "does not ask for this"),
        ("--hardware 8xh100 --precision snip", "one format for all blocks"),
        ("--hardware 8xh100 --train.sequence=100 --train.batch-tokens=250", "multiple of train.sequence"),
        ("--hardware 8xh100 --model.weights somewhere", "reads no weights"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    words: str, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert plan(*words.split()) in (1, 2)
    assert says in capsys.readouterr().err


SMALL = "--hardware 4xh100 --model.preset llama-3m --train.sequence=512 --train.batch-tokens=32768"


def test_a_saved_plan_is_predicted_alike(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "plan.json"
    assert plan(*SMALL.split(), "--save", str(file)) == 0
    shown = next(line for line in capsys.readouterr().out.splitlines() if "fsdp" in line or "one dev" in line)
    assert plan("--batch", str(file)) == 0
    answer = json.loads(capsys.readouterr().out)
    assert f"{answer['step_seconds']:.3g}" in shown
    assert plan(*SMALL.split(), "--save", str(file)) == 2
    assert "exists already" in capsys.readouterr().err
    assert plan(*SMALL.split(), "--model.width=128", "--save", str(tmp_path / "other")) == 2
    assert "names a preset as it is" in capsys.readouterr().err


@pytest.mark.slow
def test_the_best_plan_is_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan(*SMALL.split(), "--layout.pp=2", "--simulate") == 0
    printed = capsys.readouterr().out
    assert "rank 1 of 2" in printed
    assert "rank 2 of 2" in printed
    assert plan(*SMALL.split(), "--layout.fsdp=4", "--layout.zero=3", "--simulate") == 0
    printed = capsys.readouterr().out
    weights = next(line for line in printed.splitlines() if line.startswith(" weights"))
    assert "+0." in weights
    shape = tmp_path / "shape.toml"
    shape.write_text(SHAPE, encoding="utf-8")
    assert plan("--hardware", "4xh100", "--shape", str(shape), "--simulate") == 2
    assert "a shape cannot be simulated" in capsys.readouterr().err
