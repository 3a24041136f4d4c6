"""`scrimp plan --hardware`: what it prints, and what it refuses."""

from __future__ import annotations

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
