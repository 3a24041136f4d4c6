"""`scrimp study` without training: what it refuses, and pages from rows."""

from __future__ import annotations

from pathlib import Path

import pytest
from fakes import rows_for, study_of

from scrimp.cli import main
from scrimp.study.conduct import STUDY_FILE
from scrimp.study.rows import append_row


def results(folder: Path) -> Path:
    """A folder of results: a study of three variants, of which one has a run less."""
    study = study_of()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / STUDY_FILE).write_text(study.text)
    for row in rows_for(study, {"a": [3.0, 3.2, 2.9], "b": [2.5, 2.71, 2.41], "c": [3.3, 3.1]}).values():
        append_row(folder, row)
    return folder


def test_a_folder_of_results_gives_its_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = results(tmp_path / "mine")
    assert main(["study", str(folder)]) == 0
    shown = capsys.readouterr().out
    assert "lower by 0.4933" in shown
    assert "the same study with --seeds 97 would probably tell of c" in shown
    assert f"report: {folder / 'study.html'}" in shown
    assert "<h1>mine</h1>" in (folder / "study.html").read_text()


def test_report_of_a_file_runs_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").write_text(study_of().text)
    assert main(["study", "mine.toml", "--report"]) == 2
    assert "has no rows" in capsys.readouterr().err
    results(tmp_path / "studies" / "mine")
    assert main(["study", "mine.toml", "--report"]) == 0
    assert main(["study", "mine.toml", "--report", "--out", "elsewhere"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [(("--seeds=2", "--hours=1"), "both say how many seeds"), (("--hours=0",), "--hours is out of range")],
)
def test_hours_that_say_nothing_are_refused(
    words: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "mine.toml").write_text(study_of().text)
    assert main(["study", str(tmp_path / "mine.toml"), f"--out={tmp_path / 'out'}", *words]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_file_is_not_overwritten_by_settings_of_the_command_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    file = tmp_path / STUDY_FILE
    file.write_text(study_of().text)
    assert main(["study", STUDY_FILE, "--out=.", "--set", "train.steps=4"]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert file.read_text() == study_of().text


def test_a_failed_run_makes_the_exit_code_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = results(tmp_path)
    (row,) = rows_for(study_of(seeds=1), {"c": [None]}).values()
    append_row(folder, row)
    assert main(["study", str(folder)]) == 1
    shown = capsys.readouterr().out
    assert "c, seed 0, failed: it broke" in shown
    assert "--seeds" not in shown  # first it has to run


def test_runs_that_are_missing_are_counted_before_further_seeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    study = study_of("ab", seeds=9)
    (tmp_path / STUDY_FILE).write_text(study.text)
    for row in rows_for(study, {"a": [3.0, 3.0, 3.0], "b": [3.1, 3.5, 3.6]}).values():
        append_row(tmp_path, row)
    assert main(["study", str(tmp_path)]) == 0
    assert "the runs that are still missing would probably tell of b" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["none"], "there is no study 'none'"),
        (["empty"], "is no study's folder"),
        (["mine", "--out", "other"], "--out"),
        (["mine", "--trust-code"], "--trust-code"),
        (["mine", "--dry-run"], "--dry-run"),
        (["mine", "--seeds", "5", "--at-once", "2", "--ray", "local"], "--seeds, --at-once, --ray"),
        (["mine.toml", "--seeds", "0"], "--seeds is out of range"),
        (["mine.toml", "--at-once", "0"], "--at-once is out of range"),
        (["mine.toml", "--out", "mine", "--dry-run"], "rows of other settings"),
        (["mine.toml", "--out", "mine", "--report"], "rows of other settings"),
    ],
)
def test_what_cannot_be_done_is_refused(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    results(tmp_path / "mine")
    (tmp_path / "empty").mkdir()
    (tmp_path / "mine.toml").write_text(study_of(("b", "a", "c")).text)
    assert main(["study", *words]) == 2
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown


def test_a_folder_that_is_called_as_a_study_does_not_hide_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "formats").mkdir()
    assert main(["study", "formats", "--report"]) == 2
    assert "studies/formats/rows.jsonl has no rows" in capsys.readouterr().err
