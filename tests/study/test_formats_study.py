"""The study `formats` means by its figures what the dated results of 2026-11-21 mean, which a script made."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from scrimp.study.definition import load_study
from scrimp.study.job import Job, row_of
from scrimp.study.results import Results, results_of
from scrimp.study.rows import Key, Row

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RECORD = json.loads((RESULTS / "2026-11-21-format-losses.json").read_text(encoding="utf-8"))


def rows_of_record(folder: Path) -> dict[Key, Row]:
    """The runs of the record, as the study would read them from their folders."""
    study, found = load_study("formats"), {}
    for run in RECORD["runs"]:
        steps = len(run["losses"])
        job = Job(
            variant=run["recipe"],
            seed=run["seed"],
            digest="",
            settings={},
            steps=steps,
            folder=folder,
            figure=study.figure,
        )
        job.run_folder.mkdir()
        rows = [{"step": step, "loss": loss} for step, loss in enumerate(run["losses"], start=1)]
        rows[-1]["eval_loss"] = run["held_out_loss"]
        (job.run_folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        row = row_of(job, seconds=0.0)
        found[row.key] = row
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[Key, Row], Results]:
    """The rows of the record, and what the study makes of them."""
    rows = rows_of_record(tmp_path_factory.mktemp("record"))
    return rows, results_of(load_study("formats"), rows)


def test_its_settings_are_those_of_the_record() -> None:
    study, settings = load_study("formats"), RECORD["settings"]
    assert {one.name for one in study.variants} == {run["recipe"] for run in RECORD["runs"]}
    assert list(study.seeds) == sorted({run["seed"] for run in RECORD["runs"]})
    for variant in study.variants:
        assert variant.settings["precision"] == variant.name
        assert variant.settings["model.preset"] == settings["preset"]
        assert variant.settings["train.steps"] == settings["steps"] == len(RECORD["runs"][0]["losses"])
        assert variant.settings["train.batch_tokens"] == settings["batch_tokens"]
        assert variant.settings["evaluation.tokens"] == settings["eval_tokens"]


def test_its_table_is_that_of_the_record(found: tuple[dict[Key, Row], Results]) -> None:
    rows, results = found
    table = (RESULTS / "2026-11-21-format-losses.md").read_text(encoding="utf-8")
    printed = {
        name: (float(mean), float(gap), float(last))
        for name, mean, gap, last in re.findall(
            r"^\| (\w+) \| 3 \| ([\d.]+) \| ([+-][\d.]+) % \|[^|]*\| ([\d.]+) \|", table, re.MULTILINE
        )
    }
    assert len(printed) == 7
    for one in results.outcomes:
        mean, gap, last = printed[one.name]
        assert one.centre == pytest.approx(mean, abs=6e-5)
        if one.relative is not None:  # of means, where the script took the mean of ratios
            assert 100 * one.relative == pytest.approx(gap, abs=0.02)
        training = [row.figures["training_loss"] for row in rows.values() if row.variant == one.name]
        assert sum(value or 0.0 for value in training) / 3 == pytest.approx(last, abs=6e-5)


def test_three_seeds_could_not_tell_and_the_study_says_so(found: tuple[dict[Key, Row], Results]) -> None:
    outcomes = found[1].others
    assert all(one.verdict.startswith("cannot tell: ") for one in outcomes)
    assert all("more runs would" in one.verdict for one in outcomes)


def test_its_scatter_is_that_of_the_record(found: tuple[dict[Key, Row], Results]) -> None:
    study = load_study("formats")
    pairs = [one.comparison for one in found[1].others]
    squares = [one.scatter**2 for one in pairs if one is not None and one.scatter is not None]
    assert study.scatter == pytest.approx((sum(squares) / len(squares)) ** 0.5, abs=0.005)
