"""A descent ends where no neighbour is better, runs what it needs and no more, and goes on from its rows."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
from fakes import PROBE, FakePlaces, Watched
from hypothesis import given
from hypothesis import strategies as st

from scrimp.study.conduct import begin, conduct
from scrimp.study.definition import Study, parse_study
from scrimp.study.descent import Descent, Point
from scrimp.study.job import Job
from scrimp.study.results import descent_text, results_of
from scrimp.study.rounds import is_finished
from scrimp.study.rows import read_rows

TEXT = """
seeds = 2
[settings]
train.steps = 8
[descent]
optimizer.lr = [1e-3, 2e-3, 4e-3, 8e-3]
optimizer.weight_decay = [0.1, 0.4, 1.6]
"""


def read(text: str = TEXT) -> Study:
    return parse_study(text, name="mine", where="mine.toml")


def loss(job: Job) -> float:
    """Best at 0.008 and 0.4."""
    rate = math.log2(job.settings["optimizer.lr"] / 8e-3)
    decay = math.log2(job.settings["optimizer.weight_decay"] / 0.4)
    return 2 + rate**2 + decay**2 + job.seed / 100


def run(folder: Path, places: FakePlaces, study: Study) -> Watched:
    watched = Watched()
    folder.mkdir(exist_ok=True)
    begin(study, folder)
    conduct(study, folder, places, {one.name: PROBE for one in study.runs_of_a_seed}, watched)
    return watched


def ended(descent: Descent, table: dict[Point, float]) -> tuple[Point, list[Point]]:
    """Where a descent over a table ends, and all points that it has asked for."""
    asked, at = list[Point](), descent.start
    for points in descent.path(table.__getitem__):
        asked += points
        at = min(points, key=table.__getitem__)
    return at, asked


@given(st.data())
def test_it_ends_where_no_neighbour_is_better(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(2, 4), min_size=1, max_size=3))
    descent = Descent({str(axis): list(range(size)) for axis, size in enumerate(shape)})
    points = list(itertools.product(*map(range, shape)))
    losses = data.draw(
        st.lists(st.integers(0, 5) | st.just(math.inf), min_size=len(points), max_size=len(points))
    )
    table = dict(zip(points, losses, strict=True))
    at, asked = ended(descent, table)
    around = [one for one in points if sum(abs(a - b) for a, b in zip(one, at, strict=True)) == 1]
    assert all(table[at] <= table[one] for one in around)
    assert set(around) <= set(asked)
    assert table[at] <= table[descent.start]
    assert [descent.number(one) for one in points] == list(range(len(points)))


def test_of_settings_that_act_alone_it_finds_the_best_of_all() -> None:
    descent = Descent({"a": list(range(5)), "b": list(range(4)), "c": list(range(3))})
    points = list(itertools.product(range(5), range(4), range(3)))
    for best in points:
        table = {one: float(sum((a - b) ** 2 for a, b in zip(one, best, strict=True))) for one in points}
        assert ended(descent, table)[0] == best


def test_it_runs_what_lies_on_its_way(tmp_path: Path) -> None:
    study = read()
    assert study.control == "lr=0.002,weight_decay=0.4"
    watched = run(tmp_path, FakePlaces(study, loss), study)
    of_first_seed = [one.variant for one in watched.started_jobs if one.seed == 0]
    assert of_first_seed == [
        "lr=0.002,weight_decay=0.4",
        "lr=0.001,weight_decay=0.4",
        "lr=0.004,weight_decay=0.4",
        "lr=0.008,weight_decay=0.4",
        "lr=0.008,weight_decay=0.1",
        "lr=0.008,weight_decay=1.6",
    ]
    assert len(watched.started_jobs) == 12
    assert not any(one.stops_there for one in watched.started_jobs)
    assert watched.gone == []
    rows = read_rows(tmp_path)
    assert is_finished(study, rows)
    results = results_of(study, rows)
    assert {one.name for one in results.outcomes} == set(of_first_seed)
    assert (results.done, results.planned, results.is_finished) == (12, 12, True)
    said = descent_text(study, rows)
    assert said[0] == (
        "The descent ends at optimizer.lr = 0.008, optimizer.weight_decay = 0.4: held-out loss 2.0050, "
        "6 of 12 combinations."
    )
    assert said[1:] == ["optimizer.lr = 0.008 is the end of its list: a better one may lie beyond."]


def test_killed_at_any_run_it_goes_the_same_way(tmp_path: Path) -> None:
    study = read()
    whole = {one.name for one in run(tmp_path / "whole", FakePlaces(study, loss), study).started_jobs}
    for count in range(1, 12, 3):
        calls: list[str] = []

        def until_killed(job: Job, calls: list[str] = calls, count: int = count) -> float:
            if len(calls) == count:
                raise KeyboardInterrupt
            calls.append(job.name)
            return loss(job)

        folder = tmp_path / str(count)
        with pytest.raises(KeyboardInterrupt):
            run(folder, FakePlaces(study, until_killed, count=1), study)
        assert not is_finished(study, read_rows(folder))
        # Of the first three points, both seeds each, all runs have to be there before it moves.
        where = "0.002" if count < 6 else "0.004" if count < 8 else "0.008"
        assert (
            f"is not finished, and stands at optimizer.lr = {where},"
            in descent_text(study, read_rows(folder))[0]
        )
        later = run(folder, FakePlaces(study, loss), study)
        assert {*calls, *(one.name for one in later.started_jobs)} == whole
        assert len(calls) + len(later.started_jobs) == 12


def test_a_run_that_fails_is_passed_by_and_tried_again(tmp_path: Path) -> None:
    study = read()
    broken = run(
        tmp_path, FakePlaces(study, lambda job: None if "lr=0.004" in job.variant else loss(job)), study
    )
    assert "lr=0.008" not in " ".join(one.variant for one in broken.started_jobs)
    assert not is_finished(study, read_rows(tmp_path))
    again = run(tmp_path, FakePlaces(study, loss), study)
    assert "lr=0.004,weight_decay=0.4" in {one.variant for one in again.started_jobs}
    assert descent_text(study, read_rows(tmp_path))[0].startswith("The descent ends at optimizer.lr = 0.008")
