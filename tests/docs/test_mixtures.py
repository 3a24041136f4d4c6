"""The guide to mixtures: its command runs as it stands, and a run says and records what it claims."""

from __future__ import annotations

import inspect
import json
import re
import shlex
import textwrap
from pathlib import Path

import pytest
from tiny_run import TINY, records

from scrimp.cli import main

GUIDE = (Path(__file__).resolve().parents[2] / "docs" / "mixtures.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_command_of_the_guide_runs_and_its_records_are_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = re.findall(r"```sh\n(.*?)```", GUIDE, flags=re.DOTALL)
    (program, *words), (_, *weighed) = map(shlex.split, blocks)
    for name, module in (("web.jsonl", inspect), ("books.jsonl", textwrap)):
        lines = inspect.getsource(module).split("\n\n")
        (tmp_path / name).write_text("".join(json.dumps({"text": one}) + "\n" for one in lines))
    monkeypatch.chdir(tmp_path)
    assert program == "scrimp"
    assert main([*words, *TINY, f"--data.cache={tmp_path / 'cache'}"]) == 0
    assert "eval_loss/web.jsonl" in records(Path("runs/mixed"))[-1]
    (mixture,) = (one for one in records(Path("runs/mixed"), "events.jsonl") if one["kind"] == "mixture")
    assert mixture["reason"].startswith("mixture: web.jsonl 50.0% of the samples, ")
    assert [source["share"] for source in mixture["sources"]] == [0.5, 0.3, 0.2]
    assert main([*weighed, *TINY, f"--data.cache={tmp_path / 'cache'}"]) == 0
    assert {"loss/web.jsonl", "weight/books.jsonl"} <= records(Path("runs/weighed"))[-1].keys()
