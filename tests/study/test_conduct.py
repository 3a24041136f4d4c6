"""Which runs a study begins, in which order, and what it does with their rows: with places that train nothing."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from fakes import PROBE, FakePlaces, Watched, row_for, study_of, write_finished

from scrimp.errors import ConfigError, StorageError
from scrimp.study.conduct import STUDY_FILE, begin, conduct, jobs_of, lock_folder
from scrimp.study.definition import Study, parse_study
from scrimp.study.estimate import steps_left
from scrimp.study.job import Job, refuse_other_settings
from scrimp.study.results import results_of
from scrimp.study.rounds import is_finished, reached_round
from scrimp.study.rows import append_row, read_rows

LOSSES = {"a": 1.0, "b": 2.0, "c": 0.5, "d": 3.0, "e": 0.7}


def loss(job: Job) -> float:
    return LOSSES[job.variant] + job.seed / 100


def run(study: Study, folder: Path, places: FakePlaces) -> Watched:
    watched = Watched()
    begin(study, folder)
    conduct(study, folder, places, {one.name: PROBE for one in study.runs_of_a_seed}, watched)
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
    jobs = jobs_of(
        study, reached_round(study, {}), Path(), dict.fromkeys("ab", PROBE), at_once=1, trusts=False
    )
    assert [one.name for one in jobs] == ["a-seed0", "b-seed0", "b-seed1", "a-seed1", "a-seed2", "b-seed2"]


def test_runs_get_the_micro_batch_of_their_probe_and_keep_their_digest() -> None:
    study = study_of()
    jobs = jobs_of(
        study, reached_round(study, {}), Path(), dict.fromkeys("abc", PROBE), at_once=1, trusts=False
    )
    assert jobs[0].settings["train.micro_batch"] == 4
    assert "train.micro_batch" not in study.settings_of(study.variants[0], 0)


TRUNK = "[trunk]\ntrain.steps = 5\n"


def with_trunk(job: Job) -> float:
    return 9.0 if job.variant == "trunk" else loss(job)


def test_runs_wait_for_the_trunk_of_their_seed_and_go_on_from_it(tmp_path: Path) -> None:
    study = study_of("ab", seeds=2, tail=TRUNK)
    places = FakePlaces(study, with_trunk, count=3)
    watched = run(study, tmp_path, places)
    # Three places: both trunks go first, and only then has any run something to go on from.
    assert [one.name for one in watched.started_jobs] == [
        "trunk-seed0",
        "trunk-seed1",
        "a-seed0",
        "b-seed0",
        "a-seed1",
        "b-seed1",
    ]
    trunk, _, run_of_a, *_ = watched.started_jobs
    assert (trunk.steps, run_of_a.steps) == (5, 8)
    assert run_of_a.settings["model.weights"] == str(trunk.run_folder)
    assert run_of_a.settings["optimizer.from_weights"] is True
    assert trunk.settings["run.seed"] not in [one.settings["run.seed"] for one in watched.started_jobs[1:]]
    assert run(study, tmp_path, FakePlaces(study, with_trunk)).started_jobs == []


PHASES = """
seeds = 1
figure = "mean_source_loss"
[settings]
train.steps = 8
data.mix = "one=1,two=1"
[[variants]]
name = "stacked"
[[variants]]
name = "second"
model.weights = "run:first"
[[variants]]
name = "first"
[trunk]
train.steps = 5
data.source = "text"
"""


def test_a_run_of_another_run_goes_on_from_that_and_not_from_the_trunk(tmp_path: Path) -> None:
    study = parse_study(PHASES, name="mine", where="mine.toml")
    losses = {"trunk": 9.0, "stacked": 1.0, "first": 2.0, "second": 3.0}
    watched = run(study, tmp_path, FakePlaces(study, lambda job: losses[job.variant]))
    trunk, stacked, first, second = watched.started_jobs
    assert [one.variant for one in watched.started_jobs] == ["trunk", "stacked", "first", "second"]
    assert (trunk.figure, stacked.figure) == ("held_out_loss", "mean_source_loss"), "the text has no sources"
    assert "data.mix" not in trunk.settings
    assert first.settings["model.weights"] == str(trunk.run_folder)
    assert second.settings["model.weights"] == str(first.run_folder)
    assert (second.needs, first.needs) == ((first.key,), (trunk.key,))
    assert "optimizer.from_weights" not in second.settings
    longer = parse_study(PHASES.replace("= 5", "= 6"), name="mine", where="mine.toml")
    assert longer.digest(longer.named("second"), 0) != study.digest(study.named("second"), 0)


def test_a_trunk_that_is_gone_is_made_again_only_where_a_run_needs_it(tmp_path: Path) -> None:
    study = study_of("ab", seeds=2, tail=TRUNK)
    run(study, tmp_path, FakePlaces(study, with_trunk))
    shutil.rmtree(tmp_path / "runs")
    assert run(study, tmp_path, FakePlaces(study, with_trunk)).started_jobs == []
    more = study_of("abc", seeds=2, tail=TRUNK).with_seeds(2)
    again = run(more, tmp_path, FakePlaces(more, with_trunk, count=1))
    assert [one.name for one in again.started_jobs] == ["trunk-seed0", "c-seed0", "trunk-seed1", "c-seed1"]


def test_a_trunk_that_was_being_made_again_when_its_study_was_killed_is_made_to_its_end(
    tmp_path: Path,
) -> None:
    study = study_of("ab", seeds=1, tail=TRUNK)
    run(study, tmp_path, FakePlaces(study, with_trunk))
    trunk = tmp_path / "runs" / "trunk-seed0"
    more = study_of("abc", seeds=1, tail=TRUNK)
    write_finished(trunk, 3, is_over=False)
    again = run(more, tmp_path, FakePlaces(more, with_trunk, count=1))
    assert [one.name for one in again.started_jobs] == ["trunk-seed0", "c-seed0"]
    last = run(more, tmp_path, FakePlaces(more, with_trunk, count=1))
    assert last.started_jobs == []


def test_runs_of_a_trunk_that_failed_fail_with_it_and_are_tried_again(tmp_path: Path) -> None:
    study = study_of("ab", seeds=2, tail=TRUNK)
    broken = run(
        study, tmp_path, FakePlaces(study, lambda job: None if job.name == "trunk-seed0" else with_trunk(job))
    )
    assert [one.name for one in broken.started_jobs] == ["trunk-seed0", "trunk-seed1", "a-seed1", "b-seed1"]
    assert read_rows(tmp_path)["a", 0, 8].error == "its trunk failed: it broke"
    again = run(study, tmp_path, FakePlaces(study, with_trunk))
    assert [one.name for one in again.started_jobs] == ["trunk-seed0", "a-seed0", "b-seed0"]
    assert is_finished(study, read_rows(tmp_path))


def test_a_trunk_that_failed_is_left_to_the_next_call_in_later_rounds_too(tmp_path: Path) -> None:
    study = study_of("abc", seeds=2, tail=TRUNK + "[halving]\nfactor = 2\nrounds = 1\n")
    calls: list[str] = []

    def fails_once(job: Job) -> float | None:
        calls.append(job.name)
        return None if job.name == "trunk-seed0" and calls.count(job.name) == 1 else with_trunk(job)

    run(study, tmp_path, FakePlaces(study, fails_once))
    assert calls.count("trunk-seed0") == 1
    assert read_rows(tmp_path)["c", 0, 8].error == "its trunk failed: it broke"


def test_a_study_with_a_trunk_goes_on_in_another_place(tmp_path: Path) -> None:
    study = study_of("ab", seeds=1, tail=TRUNK)
    here, there = tmp_path / "here", tmp_path / "there"
    here.mkdir()
    run(study, here, FakePlaces(study, lambda job: None if job.variant == "b" else with_trunk(job)))
    here.rename(there)
    again = run(study, there, FakePlaces(study, with_trunk))
    assert [one.name for one in again.started_jobs] == ["b-seed0"]
    refuse_other_settings(again.started_jobs[0])
    (there / "runs" / "b-seed0.toml").write_text("optimizer.lr = 9.0\n")
    with pytest.raises(ConfigError, match="begun with other settings"):
        refuse_other_settings(again.started_jobs[0])


def test_a_variant_may_be_called_trunk_where_there_is_none(tmp_path: Path) -> None:
    study = study_of(("a", "trunk"), seeds=1)
    assert len(run(study, tmp_path, FakePlaces(study, with_trunk)).started_jobs) == 2


def test_rows_of_another_trunk_are_refused(tmp_path: Path) -> None:
    study = study_of("ab", seeds=1, tail=TRUNK)
    run(study, tmp_path, FakePlaces(study, with_trunk))
    with pytest.raises(ConfigError, match="rows of other settings"):
        begin(study_of("ab", seeds=1, tail=TRUNK.replace("5", "6")), tmp_path)


def test_halving_keeps_the_best_and_the_control(tmp_path: Path) -> None:
    study = study_of("abcde", seeds=2, tail="[halving]\nfactor = 2\nrounds = 2\n")
    watched = run(study, tmp_path, FakePlaces(study, loss))
    # a is the control; of b, c, d, e the better half goes on, then the better one of these.
    assert watched.gone == [{"b": 2, "d": 2}, {"e": 4}]
    ends = {(row.variant, row.steps) for row in watched.rows}
    assert ends == {*((name, 2) for name in "abcde"), *((name, 4) for name in "ace"), ("a", 8), ("c", 8)}
    assert [one.stops_there for one in watched.started_jobs] == [True] * 16 + [False] * 4
    # The same from the rows alone: nothing is left to do.
    rows = read_rows(tmp_path)
    assert is_finished(study, rows)
    assert not is_finished(study, {key: row for key, row in rows.items() if key != ("c", 1, 8)})
    assert run(study, tmp_path, FakePlaces(study, loss)).started_jobs == []


def test_halving_ends_rounds_at_the_same_share_of_each_variants_steps(tmp_path: Path) -> None:
    """c has a quarter of the steps: it is compared with the control where as large a share of both is over."""
    study = study_of("abcd", seeds=1, tail="[halving]\nfactor = 2\nrounds = 1\n")
    short = {name: 2 if name == "c" else 8 for name in "abcd"}
    variants = [
        replace(one, settings=one.settings | {"train.steps": short[one.name]}) for one in study.variants
    ]
    study = replace(study, variants=tuple(variants))
    found = {("a", 4): 3.0, ("b", 4): 2.9, ("c", 1): 2.5, ("d", 4): 3.5, ("a", 8): 2.0, ("b", 8): 2.1}
    watched = run(study, tmp_path, FakePlaces(study, lambda job: found.get((job.variant, job.steps), 1.5)))
    assert watched.gone == [{"d": 4}]
    assert {(row.variant, row.steps) for row in watched.rows} == {*found, ("c", 2)}
    (outcome,) = [one for one in results_of(study, read_rows(tmp_path)).outcomes if one.name == "c"]
    assert outcome.comparison is not None
    assert outcome.comparison.differences == {0: -0.5}
    assert outcome.relative == pytest.approx(-0.5 / 2.0)
    assert steps_left(study, {}) == (7, 8 + 8 + 2 + 4)


def test_halving_lets_variants_that_fail_go_first(tmp_path: Path) -> None:
    study = study_of("abc", seeds=2, tail="[halving]\n")
    watched = run(
        study, tmp_path, FakePlaces(study, lambda job: None if job.name == "c-seed1" else loss(job))
    )
    assert watched.gone == [{"c": 4}]


def test_halving_ranks_differences_by_differences_alone(tmp_path: Path) -> None:
    """The control failed on seed 1 and b on seed 0: b has no pair, and its loss is not ranked among differences."""
    found = {"a0": 3.0, "b1": 1.5, "c0": 5.0, "d0": 3.5, "d1": 3.5}
    study = study_of("abcd", seeds=2, tail="[halving]\n")
    watched = run(study, tmp_path, FakePlaces(study, lambda job: found.get(f"{job.variant}{job.seed}")))
    assert watched.gone == [{"b": 4}]


def test_a_folder_is_of_one_study_at_a_time(tmp_path: Path) -> None:
    with (
        lock_folder(tmp_path / "new"),
        pytest.raises(StorageError, match="in use"),
        lock_folder(tmp_path / "new"),
    ):
        pass
