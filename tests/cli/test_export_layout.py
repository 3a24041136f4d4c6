"""`scrimp export-layout`, and the commands of docs/planner.md for other trainers and the second opinion."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from scrimp.cli import main

PAGE = (Path(__file__).parents[2] / "docs" / "planner.md").read_text(encoding="utf-8")


def commands(section: str) -> list[list[str]]:
    text = PAGE.split(f"## {section}\n")[1].split("\n## ")[0]
    (block,) = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return [shlex.split(line)[1:] for line in block.splitlines()]


@pytest.mark.slow
def test_the_page_exports_a_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for words in commands("Plans for other trainers"):
        assert main(words) == 0
    assert "def scrimp_plan()" in Path("llama_plan.py").read_text(encoding="utf-8")
    assert "setup_experiment.py" in Path("llama_plan.sh").read_text(encoding="utf-8")
    printed = capsys.readouterr().out
    assert "written: llama_plan.py" in printed
    assert "not as planned" not in printed


@pytest.mark.slow
def test_the_page_simulates_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    (words,) = commands("A second opinion on its memory")
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "rank 1 of 2" in printed
    assert "fake process group of 64 ranks" in printed


LINE = {
    "model": "llama-3.1-8b",
    "hardware": "8xh100",
    "sequence": 8192,
    "global_batch": 64,
    "micro_batch": 1,
    "layout": {"fsdp": 8},
    "recompute": "selective",
}


def test_what_cannot_be_said_is_refused_until_it_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = tmp_path / "plan.json", tmp_path / "out.py"
    source.write_text(json.dumps(LINE), encoding="utf-8")
    words = ["export-layout", str(source), str(out), "--target", "torchtitan"]
    assert main(words) == 2
    assert "norms and gates" in capsys.readouterr().err
    assert not out.exists()
    assert main([*words, "--approximate"]) == 0
    assert "not as planned: recomputation of norms and gates" in capsys.readouterr().out
    assert main([*words, "--approximate"]) == 2
    assert "exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no single plan"),
        ("{}\n{}\n", "no single plan"),
        ("{", "plan.json"),
        ('{"model": "llama-3m"}', "hardware"),
        ('\ufeff{"model": "llama-3m"}', "missing hardware"),
        (json.dumps(LINE | {"blocks": [{"recompute": "ful"}] * 32}), "blocks[0]"),
        (json.dumps(LINE | {"blocks": [{}] * 31}), "blocks are not those of the model"),
    ],
)
def test_what_is_no_plan_is_refused(
    text: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / "plan.json"
    source.write_text(text, encoding="utf-8")
    assert main(["export-layout", str(source), str(tmp_path / "out"), "--target", "megatron-bridge"]) == 2
    assert says in capsys.readouterr().err
