"""`scrimp study`: from a file, a name or a folder of results to runs, a table and a page."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from scrimp.cli.show import plain_console, say
from scrimp.config.read_toml import expand_home
from scrimp.errors import ConfigError
from scrimp.files import make_folder
from scrimp.recipes import PREFIX, check, file_of, findings, is_recipe
from scrimp.study.announce import announcement
from scrimp.study.conduct import (
    STUDY_FILE,
    begin,
    conduct,
    lock_folder,
    lock_looks,
    rows_of,
    study_of,
)
from scrimp.study.definition import Study, load_study, shipped_studies
from scrimp.study.estimate import (
    Probe,
    done_of,
    places_here,
    probe_all,
    seconds_of,
    steps_left,
    threads_of,
    within,
)
from scrimp.study.job import RUNS
from scrimp.study.looks import read_looks, record_looks
from scrimp.study.page import write_page
from scrimp.study.processes import LocalPlaces, Places
from scrimp.study.progress import StudyProgress
from scrimp.study.results import Results, descent_text, results_of
from scrimp.study.rows import ROWS, Key, Row
from scrimp.study.table import verdict_table
from scrimp.study.variants import MOST_RUNS

if TYPE_CHECKING:
    from scrimp.cli.commands import StudyCommand


def study(command: StudyCommand) -> int:
    """Carry a study out, or report on what there is of it; 1 where a run failed.

    Raises:
        ConfigError: there is no such study, or it cannot be carried out.
    """
    if not command.study.strip():
        raise ConfigError("no study is named", expected="a TOML file, a name, or a folder of results")
    source = expand_home("the study", Path(command.study))
    of_running = {
        "--dry-run": command.dry_run,
        "--hours": command.hours is not None,
        "--at-once": command.at_once is not None,
        "--ray": command.ray is not None,
    }
    if source.is_dir() and ((source / STUDY_FILE).exists() or command.study not in shipped_studies()):
        others = {
            "--out": command.out is not None,
            "--seeds": command.seeds is not None,
            "--set": bool(command.set),
            "--trust-code": command.trust_code,
        }
        what = f"{source} is a folder of results, from which a page is made"
        _refuse(others | of_running, what, "leave that out, or name the study's file or name")
        return _report(study_of(source), source)
    found = _load(command)
    folder = expand_home("--out", command.out or Path("studies") / found.name)
    if command.seeds is not None:
        if command.hours is not None:
            raise ConfigError("--seeds and --hours both say how many seeds there are", do="leave one out")
        found = found.with_seeds(command.seeds)
    if command.report:
        _refuse(of_running, "--report runs nothing", "leave that out")
        return _report(found, folder)
    with lock_folder(folder):
        return _carry_out(found, folder, command)


def _refuse(options: Mapping[str, bool], what: str, do: str) -> None:
    """Refuse options that are given where they mean nothing."""
    given = [name for name, is_given in options.items() if is_given]
    if given:
        raise ConfigError(what, got=", ".join(given), do=do)


def _load(command: StudyCommand) -> Study:
    """The study of a recipe, a file, or a name."""
    if is_recipe(command.study):
        name = command.study.removeprefix(PREFIX)
        return load_study(str(file_of(command.study, "study")), command.set, name=name)
    found = load_study(command.study, command.set)
    check(found.recipe)
    return found


def _report(found: Study, folder: Path) -> int:
    check(found.recipe)
    rows = rows_of(found, folder)
    if not rows:
        raise ConfigError(
            f"{folder / ROWS} has no rows",
            expected="a study of which a run has ended",
            do="run the study first",
        )
    return _show(found, rows, folder)


def _carry_out(found: Study, folder: Path, command: StudyCommand) -> int:
    looks, threads = read_looks(folder), threads_of(found, folder)
    begin(found, folder)
    make_folder(folder / RUNS)
    probes = probe_all(found, folder, threads, say, trusts=command.trust_code)
    of_most = found if command.hours is None else found.with_seeds(MOST_RUNS // len(found.variants))
    with _places(of_most, probes, threads, command) as (places, why):
        if command.hours is not None:
            found = replace(within(found, probes, command.hours, places.count), threads=threads)
        rows = rows_of(found, folder)
        done = done_of(rows)
        for line in announcement(
            found,
            rows,
            probes,
            places=places.count,
            limited_by=why,
            seconds=seconds_of(found, probes, done, places.count),
            threads=threads,
            looks=looks,
        ):
            say(line)
        if command.dry_run:
            return 0
        lines = StudyProgress(*steps_left(found, done), plain_console())
        with lines.shown():
            rows = conduct(found, folder, places, probes, lines, trusts=command.trust_code)
    return _show(found, rows, folder)


@contextlib.contextmanager
def _places(
    found: Study, probes: Mapping[str, Probe], threads: int, command: StudyCommand
) -> Iterator[tuple[Places, str]]:
    if command.ray is None:
        environments, why = places_here(found, probes, threads, command.at_once)
        yield LocalPlaces(environments, say), why
        return
    from scrimp.study.on_ray import ray_places

    with ray_places(found, probes, threads, command.at_once, command.ray) as opened:
        yield opened


def _show(found: Study, rows: Mapping[Key, Row], folder: Path) -> int:
    with lock_looks(folder):
        looks = read_looks(folder)
        results = results_of(found, rows, looks)
        record_looks(folder, looks, {one.name: one.look for one in results.others if one.look is not None})
    console = plain_console()
    console.print(verdict_table(results))
    for one in results.outcomes:
        for seed, error in one.failures.items():
            console.print(f"{one.name}, seed {seed}, failed: {error}", soft_wrap=True)
    advice = _next(results)
    if advice:
        console.print(advice, soft_wrap=True)
    said = [*descent_text(found, rows), *findings(results)]
    for line in said:
        console.print(line, soft_wrap=True, markup=False, emoji=False)
    console.print(f"report: {write_page(results, folder, said)}", soft_wrap=True)
    return 1 if any(one.failures for one in results.outcomes) else 0


def _next(results: Results) -> str | None:
    """How many seeds would probably tell of the variant that takes fewest, of those whose runs do not fail."""
    open_ones = [
        (len(one.comparison.differences) + one.comparison.more_pairs, one.name)
        for one in results.others
        if one.comparison is not None
        and one.comparison.more_pairs is not None
        and not one.is_dropped
        and not one.failures
    ]
    if not open_ones:
        return None
    seeds, name = min(open_ones)
    if seeds <= len(results.seeds):
        return f"the runs that are still missing would probably tell of {name}"
    return f"the same study with --seeds {seeds} would probably tell of {name}"
