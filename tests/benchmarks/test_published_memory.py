"""Printed peaks of memory, and settings that ended out of memory, beside the planner's account of them."""

from __future__ import annotations

import json
import statistics
from functools import partial

import pytest
from published_memory import FOLDER, outcomes, peaks
from published_runs import setting_for, shapes

from scrimp.planner.layout.stage_memory import peak_bytes

made = partial(setting_for, kinds=shapes())


def test_settings_that_ended_out_of_memory_are_predicted_not_to_fit() -> None:
    found = [one for one in outcomes(made) if one.scored]
    assert sum(not one.ran for one in found) >= 10
    sweep = [one for one in found if one.source.startswith("efficient")]
    wrong = [one for one in found if one.ran != (one.share <= 1)]
    assert [one.name for one in wrong if one not in sweep] == []
    assert len(wrong) <= 0.2 * len(sweep)  # trials of a program that keeps more than is counted


def test_printed_peaks_are_predicted_within_5_percent_in_the_median() -> None:
    found = [one for one in peaks(made) if one.scored]
    assert len(found) >= 28
    assert statistics.median(abs(one.error) for one in found) <= 0.05


def test_what_was_allocated_leaves_out_what_an_allocator_keeps() -> None:
    row = json.loads((FOLDER / "peaks.jsonl").read_text(encoding="utf-8").splitlines()[0])
    assert row["extra"]["counts"] == "allocated"
    last = peak_bytes(made(row["setting"]))[-1]
    (found,) = [one for one in peaks(made) if one.measured == row["measured"]["peak_bytes"]]
    assert last.categories["margin"] > 0
    assert found.predicted == pytest.approx(last.total - last.categories["margin"])


@pytest.mark.parametrize("file", ["peaks.jsonl", "out_of_memory.jsonl"])
def test_rows_hold_the_named_keys(file: str) -> None:
    lines = (FOLDER / file).read_text(encoding="utf-8").splitlines()
    assert len(set(lines)) == len(lines)
    result = "outcome" if file.startswith("out") else "measured"
    for line in lines:
        row = json.loads(line)
        assert list(row) == ["source", "group", "setting", result, "scored", "why_not", "assumed", "extra"]
        assert row["scored"] == (row["why_not"] is None)
        if result == "outcome":
            assert row["outcome"] in ("out of memory", "ran")
