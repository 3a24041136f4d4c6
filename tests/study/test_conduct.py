"""Which runs a study begins, in which order, and what it does with their rows: with places that train nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from fakes import PROBE, FakePlaces, Watched, row_for, study_of

from scrimp.errors import ConfigError, StorageError
from scrimp.study.conduct import STUDY_FILE, begin, conduct, jobs_of, lock_folder
from scrimp.study.definition import Study
from scrimp.study.job import Job
from scrimp.study.rounds import is_finished, round_of
from scrimp.study.rows import append_row, read_rows

LOSSES = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 3.0, "e": 0.7}


def loss(job: Job) -> float:
    return LOSSES[job.variant] + job.seed / 100


def run(study: Study, folder: Path, places: FakePlaces) -> Watched:
    watched = Watched()
    begin(study, folder)
    conduct(study, folder, places, {one.name: PROBE for one in study.variants}, watched)
    return watched


def test_every_run_leaves_a_row_and_seeds_go_first(tmp_path: Path) -> None:
    study = study_of()
    places = FakePlaces(study, loss)
    watched = run(study, tmp_path, places)
    assert [(one.variant, one.seed) for one in watched.started_jobs] == [
        (name, seed) for seed in range(3) for name in "abc"
    ]
    assert len(read_rows(tmp_path)) == 9
    assert places.most == 2
    assert places.is_closed
    assert (tmp_path / STUDY_FILE).read_text() == study.text


def test_rows_that_are_there_are_not_made_again(tmp_path: Path) -> None:
    study = study_of()
    calls: list[str] = []

    def until_killed(job: Job) -> float:
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(job.name)
        return loss(job)

    places = FakePlaces(study, until_killed, count=1)
    with pytest.raises(KeyboardInterrupt):
        run(study, tmp_path, places)
    assert places.is_closed
    watched = run(study, tmp_path, FakePlaces(study, loss))
    assert [one.name for one in watched.started_jobs] == [
        "b-seed1",
        "c-seed1",
        "a-seed2",
        "b-seed2",
        "c-seed2",
    ]
    assert {key: row.figures for key, row in read_rows(tmp_path).items()} == {
        (name, seed, 8): {"held_out_loss": LOSSES[name] + seed / 100} for name in "abc" for seed in range(3)
    }


def test_further_seeds_add_runs(tmp_path: Path) -> None:
    run(study_of(seeds=2), tmp_path, FakePlaces(study_of(), loss))
    more = run(study_of(seeds=2).with_seeds(3), tmp_path, FakePlaces(study_of(), loss))
    assert [one.seed for one in more.started_jobs] == [2, 2, 2]


def test_a_run_that_fails_is_a_row_and_is_tried_again(tmp_path: Path) -> None:
    study = study_of()
    broken = run(study, tmp_path, FakePlaces(study, lambda job: None if job.name == "b-seed1" else loss(job)))
    assert len(broken.rows) == 9
    assert read_rows(tmp_path)["b", 1, 8].error == "it broke"
    again = run(study, tmp_path, FakePlaces(study, loss))
    assert [one.name for one in again.started_jobs] == ["b-seed1"]
    assert read_rows(tmp_path)["b", 1, 8].error is None


def test_other_settings_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    run(study_of(), tmp_path, FakePlaces(study_of(), loss))
    with pytest.raises(ConfigError, match="rows of other settings"):
        begin(study_of(("b", "a", "c")), tmp_path)
    assert (tmp_path / STUDY_FILE).read_text() == study_of().text


def test_rows_of_seeds_that_the_file_no_longer_names_are_checked_too(tmp_path: Path) -> None:
    run(study_of(seeds=3), tmp_path, FakePlaces(study_of(), loss))
    assert len(begin(study_of(seeds=2), tmp_path)) == 9
    append_row(tmp_path, replace(row_for(study_of(), "b", 7, 2.0), digest="other"))
    with pytest.raises(ConfigError) as refusal:
        begin(study_of(seeds=2), tmp_path)
    assert refusal.value.got == "1: b seed 7"


def test_rows_of_variants_that_are_gone_are_left_out(tmp_path: Path) -> None:
    run(study_of(), tmp_path, FakePlaces(study_of(), loss))
    assert {row.variant for row in begin(study_of("ab"), tmp_path).values()} == {"a", "b"}
    assert len(read_rows(tmp_path)) == 9


def test_timed_runs_take_turns_in_changing_order() -> None:
    study = study_of(("a", "b"), head='figure = "tokens_per_second"')
    jobs = jobs_of(study, round_of(study, {}, 0), Path(), dict.fromkeys("ab", PROBE), at_once=1, trusts=False)
    assert [one.name for one in jobs] == ["a-seed0", "b-seed0", "b-seed1", "a-seed1", "a-seed2", "b-seed2"]


def test_runs_get_the_micro_batch_of_their_probe_and_keep_their_digest() -> None:
    study = study_of()
    jobs = jobs_of(
        study, round_of(study, {}, 0), Path(), dict.fromkeys("abc", PROBE), at_once=1, trusts=False
    )
    assert jobs[0].settings["train.micro_batch"] == 4
    assert "train.micro_batch" not in study.settings_of(study.variants[0], 0)


def test_halving_keeps_the_best_and_the_control(tmp_path: Path) -> None:
    study = study_of("abcde", seeds=2, tail="[halving]\nfactor = 2\nrounds = 2\n")
    watched = run(study, tmp_path, FakePlaces(study, loss))
    # a is the control; of b, c, d, e the better half goes on, then the better one of these.
    assert watched.gone == [(("b", "d"), 2), (("e",), 4)]
    ends = {(row.variant, row.steps) for row in watched.rows}
    assert ends == {*((name, 2) for name in "abcde"), *((name, 4) for name in "ace"), ("a", 8), ("c", 8)}
    assert [one.stops_there for one in watched.started_jobs] == [True] * 16 + [False] * 4
    # The same from the rows alone: nothing is left to do.
    rows = read_rows(tmp_path)
    assert is_finished(study, rows)
    assert not is_finished(study, {key: row for key, row in rows.items() if key != ("c", 1, 8)})
    assert run(study, tmp_path, FakePlaces(study, loss)).started_jobs == []


def test_halving_lets_variants_that_fail_go_first(tmp_path: Path) -> None:
    study = study_of("abc", seeds=2, tail="[halving]\n")
    watched = run(
        study, tmp_path, FakePlaces(study, lambda job: None if job.name == "c-seed1" else loss(job))
    )
    assert watched.gone == [(("c",), 4)]


def test_a_folder_is_of_one_study_at_a_time(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path / "new"),
        pytest.raises(StorageError, match="in use"),
        lock_folder(tmp_path / "new"),
    ):
        pass
