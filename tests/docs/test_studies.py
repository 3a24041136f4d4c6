"""What docs/studies.md shows can be read, and its first file runs."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tiny_run import TINY, scrimp, write_corpus

from scrimp.study.definition import parse_study, shipped_studies
from scrimp.study.rows import read_rows

PAGE = (Path(__file__).parents[2] / "docs" / "studies.md").read_text(encoding="utf-8")
FILES = re.findall(r"```toml\n(.*?)```", PAGE, flags=re.DOTALL)


@pytest.mark.parametrize("number", range(len(FILES)))
def test_the_files_of_the_page_are_studies(number: int) -> None:
    study = parse_study(FILES[number], name="rates", where="docs/studies.md")
    assert len(study.variants) in (2, 3, 36)


def test_the_page_names_all_studies_that_ship() -> None:
    for name in shipped_studies():
        assert f"| `{name}`" in PAGE


@pytest.mark.slow
def test_the_first_file_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    corpus = write_corpus(tmp_path)
    settings = [word.removeprefix("--").replace("-", "_").split("=") for word in TINY if "=" in word]
    lines = [f"{key} = {value if value.isdecimal() else json.dumps(value)}" for key, value in settings]
    lines += [f'data.source = "{corpus}"', f'data.cache = "{tmp_path / "cache"}"']
    text = FILES[0].replace("train.steps = 200", "train.steps = 6\n" + "\n".join(lines))
    text = text.replace("seeds = 3 ", "seeds = 2 ").replace("1e-3, 3e-3, 1e-2", "3e-3, 1e-2")
    (tmp_path / "rates.toml").write_text(text, encoding="utf-8")
    done = scrimp("study", "rates.toml", timeout=500)
    assert done.returncode == 0, done.stderr + done.stdout
    assert "smallest visible difference: " in done.stderr
    assert "as its file says" in done.stderr
    assert len(read_rows(tmp_path / "studies" / "rates")) == 4
    again = scrimp("study", "studies/rates", timeout=100)
    assert again.returncode == 0, again.stderr
    assert "report: studies/rates/study.html" in again.stdout
