"""Carries a study out: rounds of runs, as many at once as there are places, a row for each, from wherever it stopped.

Problem  A study is killed, a run fails, a machine goes away; rows that there are must never be made again, and those
         that are missing must come out as they would have without any of this.
Method   What is to be done follows from the file and the rows alone: the runs of the round without a row, by seed, so
         that at any time whole pairs are there. A run that failed is a row with its error, which is tried again by the
         next call; the others go on. With halving a round ends when all of its runs have a row; then the variants with
         the best mean difference from the control, or the best early signal, go on, and the control with them.
         Runs that go on from a trunk, or need runs of other variants, wait until these have ended; one of which the
         folder is gone is made again, with the same losses, where a run needs it. Models that are combined are
         evaluated by this process, between runs.
         Runs that are timed take turns, in one order for even seeds and in the other for odd ones, so that a machine
         that slows down slows all.
         The folder is locked: two studies in one would write each other's rows.
Limits   A study may be moved between calls. Runs that were killed go on there, students with their teachers where these
         lie now; not runs of adapters, which look for their base where it was.
Checked  tests/study/test_conduct.py, with places that train nothing; tests/study/test_study_runs.py, with runs
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Protocol

from scrimp.errors import ConfigError, StorageError
from scrimp.files import folder_lock, make_folder, read_bounded, write_whole
from scrimp.study.definition import Study, load_study, parse_study
from scrimp.study.estimate import Probe, threads_of, with_micro_batch
from scrimp.study.job import RUNS, Job, finished_row, has_reached, read_run_of, row_of, run_name
from scrimp.study.processes import Places
from scrimp.study.rounds import Round, rounds, steps_of
from scrimp.study.rows import Key, Row, append_row, read_rows, rows_of_study
from scrimp.study.variants import TRUNK, Variant

STUDY_FILE: Final = "study.toml"
_LOOK_S: Final = 0.2


class Watcher(Protocol):
    """Who is told how far a study is."""

    def started(self, job: Job) -> None:
        """A run begins, or goes on."""
        ...

    def going(self, steps: Mapping[str, int]) -> None:
        """The last steps of runs that go on."""
        ...

    def ended(self, job: Job, row: Row) -> None:
        """A run ended, well or with an error."""
        ...

    def dropped(self, ends: Mapping[str, int]) -> None:
        """A round ended, and these variants do not go on from the steps that they have reached."""
        ...


@contextlib.contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the folder of a study's results for this process alone.

    Raises:
        StorageError: another process has it.
    """

    def refuse() -> None:
        raise StorageError(
            f"{folder} is in use",
            got="another study runs in it",
            do="wait for it, stop it, or give another --out",
        )

    make_folder(folder)
    with folder_lock(folder, refuse):
        yield


def lock_looks(folder: Path) -> contextlib.AbstractContextManager[None]:
    """Hold a study's looks for this process, waiting for others: a report is made beside a study that runs, too, which
    holds the folder."""
    return folder_lock(folder / RUNS if (folder / RUNS).is_dir() else folder, lambda: None)


def study_of(folder: Path) -> Study:
    """The study whose results lie in a folder.

    Raises:
        ConfigError: there is none.
    """
    file = folder / STUDY_FILE
    if not file.is_file():
        raise ConfigError(
            f"{folder} is no study's folder",
            got=f"no {STUDY_FILE} in it",
            expected="a folder that `scrimp study` wrote: study.toml and rows.jsonl",
            do="name that folder, a TOML file, or a study that ships",
        )
    return parse_study(load_study(str(file)).text, name=folder.resolve().name, where=str(file))


def begin(study: Study, folder: Path) -> dict[Key, Row]:
    """Put the study's file into its folder; the rows of its variants that are there.

    Raises:
        ConfigError: rows were made with other settings, or the file is another one, of which nothing has run.
    """
    rows, file = rows_of(study, folder), folder / STUDY_FILE
    if file.exists() and not rows and not (folder / RUNS).exists():
        before = read_bounded(file, error=ConfigError, do="give another folder with --out", at_most=2**24)
        if before != study.text.encode():
            raise ConfigError(
                f"{file} would be overwritten",
                got="another study, or other settings, of which nothing has run",
                do="give another folder with --out, or move that file",
            )
    write_whole(file, study.text)
    return rows


def conduct(
    study: Study,
    folder: Path,
    places: Places,
    probes: Mapping[str, Probe],
    watcher: Watcher,
    *,
    trusts: bool = False,
) -> dict[Key, Row]:
    """Run what is missing; all rows afterwards. Whatever ends it, runs that go on are ended with a checkpoint."""
    rows = rows_of(study, folder)
    retried: set[Key] = {key for key, row in rows.items() if row.error is not None}
    try:
        before: Round | None = None
        for now in rounds(study, rows):
            if before is not None and not before.ends_runs:
                watcher.dropped({name: end for name, end in before.steps.items() if name not in now.steps})
            jobs = jobs_of(study, now, folder, probes, at_once=places.count, trusts=trusts)
            _run(_waiting(jobs, rows, retried), folder, rows, places, watcher)
            before = now
    finally:
        places.close()
    return rows


def jobs_of(
    study: Study,
    now: Round,
    folder: Path,
    probes: Mapping[str, Probe],
    *,
    at_once: int,
    trusts: bool,
) -> list[Job]:
    """All runs of a round, in the order in which they are begun: of each seed its trunk, then the variants, each after
    those that it needs."""
    threads, found = threads_of(study, folder), []
    runs = (folder / RUNS).absolute()
    for turn, seed in enumerate(study.seeds):
        variants = list(now.variants[:: -1 if study.is_timed and turn % 2 else 1])
        for variant in [*([] if study.trunk is None else [study.trunk]), *variants]:
            is_trunk = variant is study.trunk
            found.append(
                Job(
                    variant=variant.name,
                    seed=seed,
                    digest=study.digest(variant, seed),
                    settings=_settings_of(study, variant, seed, probes[variant.name], runs),
                    steps=steps_of(variant) if is_trunk else now.steps[variant.name],
                    stops_there=not now.ends_runs and not is_trunk,
                    folder=runs,
                    figure=study.recorded_figure_of(variant),
                    threads=threads,
                    needs=_needs_of(study, variant, seed),
                    combined=variant.combined,
                    trusts=trusts,
                    at_once=at_once,
                )
            )
    return found


def _settings_of(study: Study, variant: Variant, seed: int, probe: Probe, runs: Path) -> dict[str, Any]:
    """All that a run is told but for its folder, with the folders of the runs that it needs."""
    folders = {name: runs / run_name(name, seed) for name in variant.needs}
    settings = with_micro_batch(study.settings_of(variant, seed) | variant.named_in(folders), probe)
    if _goes_on_from_trunk(study, variant):
        settings["model.weights"] = str(runs / run_name(TRUNK, seed))
        settings.setdefault("optimizer.from_weights", True)
    return settings


def _goes_on_from_trunk(study: Study, variant: Variant) -> bool:
    """Whether a variant is a run that begins with its trunk's weights, not with those of another variant's run."""
    is_run = variant.combined is None and variant is not study.trunk
    return study.trunk is not None and is_run and "model.weights" not in variant.naming


def _needs_of(study: Study, variant: Variant, seed: int) -> tuple[Key, ...]:
    """The runs that have to be there before one of a variant begins."""
    trunk = [study.trunk] if _goes_on_from_trunk(study, variant) else []
    needed = [*trunk, *map(study.named, variant.needs)]
    return tuple((one.name, seed, steps_of(one)) for one in needed if one is not None)


def _waiting(jobs: Sequence[Job], rows: dict[Key, Row], retried: set[Key]) -> list[Job]:
    """Those without a row, and those that failed in an earlier call, with all that these need and is not there; no
    trunk that nothing needs."""
    trunks = {key for job in jobs for key in job.needs if key[0] == TRUNK}
    found = {job.key for job in jobs if job.key not in trunks and (job.key not in rows or job.key in retried)}
    by_key = {job.key: job for job in jobs}
    for job in reversed(jobs):  # each comes after what it needs
        if job.key in found:
            found |= {key for key in job.needs if _is_to_be_made(by_key[key], rows, retried)}
    for key in found:
        rows.pop(key, None)
        retried.discard(key)
    return [job for job in jobs if job.key in found]


def _is_to_be_made(needed: Job, rows: Mapping[Key, Row], retried: Collection[Key]) -> bool:
    """Whether a run that another one needs has no row, failed in an earlier call, or is not there to its end: the row
    outlives the folder, and a run that was being made again may have been killed."""
    row = rows.get(needed.key)
    if row is None or row.error is not None:
        return row is None or needed.key in retried
    run = read_run_of(needed)
    return run is None or not has_reached(needed, run)


def rows_of(study: Study, folder: Path) -> dict[Key, Row]:
    """The rows of the study's variants, also of seeds that it no longer names.

    Raises:
        ConfigError: one was made with other settings.
    """
    variants = {one.name: one for one in study.runs_of_a_seed}

    def digest(name: str, seed: int) -> str | None:
        return study.digest(variants[name], seed) if name in variants else None

    return rows_of_study(read_rows(folder), digest, folder)


def _run(waiting: list[Job], folder: Path, rows: dict[Key, Row], places: Places, watcher: Watcher) -> None:
    """Run these jobs, and add their rows."""

    def add(job: Job, row: Row) -> None:
        append_row(folder, row)
        rows.pop(row.key, None)
        rows[row.key] = row
        watcher.ended(job, row)

    going = 0
    while waiting or going:
        while going < places.count and (job := _next(waiting, rows)) is not None:
            waiting.remove(job)
            done = _failed_with_needed(job, rows) or _combined(job) or finished_row(job)
            if done is not None:
                add(job, done)
                continue
            places.start(job)
            going += 1
            watcher.started(job)
        for job, row in places.ended():
            going -= 1
            add(job, row)
        if going:
            watcher.going(places.steps())
            time.sleep(_LOOK_S)


def _next(waiting: Sequence[Job], rows: Mapping[Key, Row]) -> Job | None:
    """The first of which all that it needs has ended; None: all wait, or there is none."""
    return next((job for job in waiting if all(key in rows for key in job.needs)), None)


def _failed_with_needed(job: Job, rows: Mapping[Key, Row]) -> Row | None:
    """The row of a run that lacks one which it needs."""
    for key in job.needs:
        if (error := rows[key].error) is not None:
            name = "its trunk" if key[0] == TRUNK else key[0]
            return row_of(job, seconds=0.0, error=f"{name} failed: {error}")
    return None


def _combined(job: Job) -> Row | None:
    """The row of models that are evaluated together; None of a run."""
    if job.combined is None:
        return None
    from scrimp.study.combined import combined_row  # which needs torch

    return combined_row(job)
