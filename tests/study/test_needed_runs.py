"""Variants that need others' runs: what a file may say, in which order runs go, where they find what they need."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from fakes import PROBE, FakePlaces, Watched, write_finished

from scrimp.errors import ConfigError
from scrimp.study.conduct import begin, conduct, jobs_of
from scrimp.study.definition import Study, parse_study
from scrimp.study.job import Job, refuse_other_settings
from scrimp.study.rounds import reached_round
from scrimp.study.rows import Row, read_rows

HEAD = """
seeds = 2
control = "plain"
[settings]
train.steps = 8
data.vocab_size = 512
"""
STUDENT = """
[[variants]]
name = "student"
objective.name = "distill"
objective.teachers = "run:plain, run:other"
"""
RUNS = """
[[variants]]
name = "plain"
[[variants]]
name = "other"
draw = 1
"""
ENSEMBLE = """
[[variants]]
name = "both"
ensemble = ["plain", "other"]
"""


NAMES = ("plain", "other", "longer")


def study_of(text: str) -> Study:
    return parse_study(HEAD + text, name="mine", where="mine.toml")


class Places(FakePlaces):
    """Runs that leave what finished ones leave."""

    def _over(self, job: Job) -> Row:
        row = super()._over(job)
        write_finished(job.run_folder, job.steps)
        return row


def run(study: Study, folder: Path, loss: float | None = 3.0, fails: str = "") -> Watched:
    watched = Watched()
    begin(study, folder)
    places = Places(study, lambda job: None if job.variant == fails else loss)
    conduct(study, folder, places, {one.name: PROBE for one in study.variants}, watched)
    return watched


def test_runs_follow_what_they_need_and_are_told_where_it_lies(tmp_path: Path) -> None:
    watched = run(study_of(STUDENT + RUNS), tmp_path)
    assert [one.variant for one in watched.started_jobs if one.seed == 0] == ["plain", "other", "student"]
    student = watched.started_jobs[[one.name for one in watched.started_jobs].index("student-seed1")]
    runs = (tmp_path / "runs").absolute()
    assert student.settings["objective.teachers"] == f"{runs / 'plain-seed1'}, {runs / 'other-seed1'}"
    assert "data.vocab_size" not in student.settings


def test_a_draw_has_a_seed_of_its_own_that_no_other_run_has() -> None:
    study = study_of(RUNS)
    seeds = {study.settings_of(one, seed)["run.seed"] for one in study.variants for seed in (0, 1, 2**31)}
    assert len(seeds) == 6
    assert study.batches == "other"


def test_a_needed_run_whose_folder_is_gone_is_made_again(tmp_path: Path) -> None:
    study = study_of(RUNS + STUDENT)
    run(study, tmp_path)
    rows = (tmp_path / "rows.jsonl").read_text().splitlines()
    kept = [row for row in rows if '"student"' not in row or '"seed":0' not in row]
    assert len(kept) == len(rows) - 1
    (tmp_path / "rows.jsonl").write_text("\n".join(kept) + "\n")
    for name in ("other", "student"):
        shutil.rmtree(tmp_path / "runs" / f"{name}-seed0")
    assert [one.name for one in run(study, tmp_path).started_jobs] == ["other-seed0", "student-seed0"]
    assert run(study, tmp_path).started_jobs == []


def test_a_run_whose_needed_run_failed_is_a_row_that_says_so(tmp_path: Path) -> None:
    run(study_of(RUNS + STUDENT), tmp_path, fails="other")
    assert read_rows(tmp_path)["student", 0, 8].error == "other failed: it broke"
    assert read_rows(tmp_path)["plain", 0, 8].error is None


def test_a_digest_covers_the_runs_that_are_needed() -> None:
    first, second = (study_of(RUNS.replace("draw = 1", f"draw = {n}") + STUDENT + ENSEMBLE) for n in (1, 2))
    for name in ("student", "both"):
        assert first.digest(first.named(name), 0) != second.digest(second.named(name), 0)
    assert first.digest(first.named("plain"), 0) == second.digest(second.named("plain"), 0)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (RUNS + STUDENT.replace("run:other", "run:nobody"), "needs a run that is not there"),
        (RUNS + ENSEMBLE + STUDENT.replace("run:other", "run:both"), "needs a run that is not there"),
        (RUNS + '[[variants]]\nname = "a"\nmodel.weights = "run:a"\n', "need one another"),
        (RUNS + ENSEMBLE.replace('"other"', '"plain"'), "cannot be used"),
        (RUNS + ENSEMBLE.replace(', "other"', ""), "cannot be used"),
        (RUNS + ENSEMBLE + "optimizer.lr = 1e-3\n", "settings of a run of its own"),
        (RUNS.replace("draw = 1", "draw = -1"), "draw of other"),
        (RUNS + STUDENT + "[halving]\nfactor = 2\n", "needs runs of other variants"),
        (RUNS + '[trunk]\nobjective.teachers = "run:plain"\n', "the trunk in mine.toml needs runs"),
        (RUNS.replace('"other"', '"a,b"') + STUDENT.replace("run:other", "run:a,b"), "without a comma"),
    ],
)
def test_what_cannot_be_needed_is_refused(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        study_of(text)


def test_seeds_that_are_other_draws_are_refused() -> None:
    with pytest.raises(ConfigError, match="too large beside a draw"):
        parse_study(HEAD.replace("seeds = 2", f"seeds = [{2**40}]") + RUNS, name="mine", where="mine.toml")


def test_beside_a_trunk_members_are_the_runs_alone(tmp_path: Path) -> None:
    study = study_of(RUNS + ENSEMBLE + "[trunk]\ntrain.steps = 5\n")
    probes = {one.name: PROBE for one in study.runs_of_a_seed}
    jobs = jobs_of(study, reached_round(study, {}), tmp_path, probes, at_once=1, trusts=False)
    needs = {job.variant: [name for name, _, _ in job.needs] for job in jobs}
    assert needs == {"trunk": [], "plain": ["trunk"], "other": ["trunk"], "both": ["plain", "other"]}


def test_a_run_that_began_from_another_one_is_not_taken_over(tmp_path: Path) -> None:
    """Where runs lie may change, which they are may not."""
    text = RUNS + '[[variants]]\nname = "longer"\nmodel.weights = "run:plain"\n'
    first, second = study_of(text), study_of(text.replace("run:plain", "run:other"))
    job, moved, other = (
        next(
            job
            for job in jobs_of(
                study, reached_round(study, {}), folder, dict.fromkeys(NAMES, PROBE), at_once=1, trusts=False
            )
            if job.variant == "longer"
        )
        for study, folder in ((first, tmp_path), (first, tmp_path / "moved"), (second, tmp_path))
    )
    job.run_folder.mkdir(parents=True)
    (job.run_folder / "config.toml").touch()
    job.settings_file.write_text(moved.toml)
    refuse_other_settings(job)
    with pytest.raises(ConfigError, match="begun with other settings"):
        refuse_other_settings(other)


def test_a_combined_control_is_refused() -> None:
    with pytest.raises(ConfigError, match="is no run"):
        parse_study(HEAD.replace("plain", "both") + RUNS + ENSEMBLE, name="mine", where="mine.toml")
