"""Finished studies as workloads: who reached which target when, and what that scores (`time_to_result`).

Problem  A score is read as if all submissions had run the same races. A run that is missing, or read other data, must
         not pass for one that never reached the target, nor the other way round.
Method   A study with `figure = "steps_to_target"` is a workload; its submissions are its variants, or what its table
         `[submissions]` makes of them. A run that failed counts by the evaluations that it had: mostly it never
         reached the target. All else that would make the comparison uneven is refused by name: runs that are missing,
         other submissions or numbers of trials, other data, a held-out variant without its workload.
Seconds  Of a run n B / r, with n its steps to the target, B the tokens of a step and r its tokens a second; their
         median as of steps. Only where they say anything: in working formats, which no device emulates, of runs that
         had their machine for themselves, all of the workload's on one machine and device.
Limits   Scores are of steps. On a workload all submissions have the same batch, so that tokens and steps have the same
         ratios. Seconds have no evaluations in them.
Checked  tests/study/test_workloads.py
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from scrimp.errors import ConfigError
from scrimp.precision import HIGH_PRECISION
from scrimp.study.conduct import rows_of, study_of
from scrimp.study.definition import Study
from scrimp.study.pairs import seeds_of, with_other_data
from scrimp.study.rounds import steps_of
from scrimp.study.rows import Key, Row
from scrimp.study.time_to_result import ratios, score, time_of


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A submission on a workload."""

    steps: float
    """Median over seeds to the target; infinite: never reached on most of them."""
    reached: int
    """Seeds on which it was."""
    failed: int
    """Runs that ended with an error."""
    seconds: float | None
    """Measured time of these steps; None: of emulated formats, or of runs beside others."""


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A finished study as a race to its target."""

    study: Study
    seeds: int
    entries: dict[str, Entry]
    """By submission."""

    @property
    def name(self) -> str:
        """The study's."""
        return self.study.name

    @property
    def target(self) -> float:
        """Held-out loss."""
        assert self.study.target is not None
        return self.study.target

    @property
    def most_steps(self) -> int:
        """After which a run ends, reached or not."""
        return steps_of(self.study.variants[0])

    @property
    def batch_tokens(self) -> int:
        """Tokens of a step."""
        return _batch_tokens(self.study)

    @property
    def trials(self) -> int:
        """Runs of a submission for each seed."""
        return len(next(iter(self.study.submissions.values())))


@dataclass(frozen=True, kw_only=True)
class Standing:
    """All that a report shows."""

    workloads: tuple[Workload, ...]
    ratios: dict[str, dict[str, float]]
    """By workload, held-out variants left out, then by submission."""
    scores: dict[str, float]
    """By submission, the best first."""

    def ratios_of(self, submission: str) -> list[float]:
        """On all workloads."""
        return [row[submission] for row in self.ratios.values()]


def standing(folders: Sequence[Path]) -> Standing:
    """What the studies in these folders say together.

    Raises:
        ConfigError: one is no workload, is not finished, or does not go with the others.
    """
    workloads = tuple(_workload(folder) for folder in folders)
    _check_together(workloads)
    found = ratios(
        {one.name: {name: entry.steps for name, entry in one.entries.items()} for one in workloads},
        {one.name: one.study.held_out_of for one in workloads if one.study.held_out_of},
    )
    scores = {name: score([row[name] for row in found.values()]) for name in workloads[0].entries}
    ranked = dict(sorted(scores.items(), key=lambda pair: -pair[1]))
    return Standing(workloads=workloads, ratios=found, scores=ranked)


def _workload(folder: Path) -> Workload:
    study = study_of(folder)
    if study.target is None:
        raise ConfigError(
            f"{folder} is no workload",
            got=f'a study with figure = "{study.figure}"',
            expected='figure = "steps_to_target", and a target',
        )
    rows = rows_of(study, folder)
    _check_rows(study, rows, folder)
    seeds = _seeds_begun(study, rows)
    entries = {name: _entry(study, rows, trials, seeds) for name, trials in study.submissions.items()}
    if len({(row.machine, str(row.environment)) for row in rows.values()}) > 1:
        entries = {name: replace(one, seconds=None) for name, one in entries.items()}
    return Workload(study=study, seeds=len(seeds), entries=entries)


def _entry(study: Study, rows: Mapping[Key, Row], trials: Sequence[str], seeds: Sequence[int]) -> Entry:
    steps = {one.name: steps_of(one) for one in study.variants}
    runs = [[rows[name, seed, steps[name]] for name in trials] for seed in seeds]
    times = [[_steps_to_target(study, row) for row in of_seed] for of_seed in runs]
    return Entry(
        steps=time_of(times),
        seconds=_seconds(study, trials, runs),
        reached=sum(min(of_seed) < math.inf for of_seed in times),
        failed=sum(row.error is not None for of_seed in runs for row in of_seed),
    )


def _seconds(study: Study, trials: Sequence[str], runs: Sequence[Sequence[Row]]) -> float | None:
    """The measured time of the steps to the target, of submissions in working formats whose runs were timed alone; None
    of others.

    Args:
        runs: of each seed, those of all trials.
    """
    rows = [row for of_seed in runs for row in of_seed]
    are_native = all(study.named(one).settings.get("precision") in (None, *HIGH_PRECISION) for one in trials)
    if not are_native or any(row.at_once > 1 or not row.figures.get("tokens_per_second") for row in rows):
        return None
    return time_of([[_seconds_to_target(study, row) for row in of_seed] for of_seed in runs])


def _seconds_to_target(study: Study, row: Row) -> float:
    rate = row.figures["tokens_per_second"]
    assert rate, "_seconds has looked"
    return _steps_to_target(study, row) * _batch_tokens(study) / rate


def _batch_tokens(study: Study) -> int:
    return int(study.variants[0].settings["train.batch_tokens"])


def _steps_to_target(study: Study, row: Row) -> float:
    assert study.target is not None
    return math.inf if row.held_out is None else row.held_out.first_at_most(study.target)


def _check_rows(study: Study, rows: Mapping[Key, Row], folder: Path) -> None:
    missing = [
        f"{one.name} seed {seed}"
        for seed in _seeds_begun(study, rows)
        for one in study.variants
        if (one.name, seed, steps_of(one)) not in rows
    ]
    if missing:
        raise ConfigError(
            f"{folder} is not finished",
            got=f"{len(missing)} runs missing: {', '.join(missing[:4])}" + " ..." * (len(missing) > 4),
            do="carry the study out to its end",
        )
    for one in study.others:
        for seed, words in with_other_data(study, rows, one.name).items():
            raise ConfigError(f"{one.name}, seed {seed}, in {folder} cannot be scored", got=words)


def _seeds_begun(study: Study, rows: Mapping[Key, Row]) -> list[int]:
    """Those with rows, since `--seeds` may have run fewer than the file has; all where there are no rows at all."""
    with_rows = {seed for _, seed, _ in rows}
    return [seed for seed in seeds_of(study, rows) if seed in with_rows] or list(study.seeds)


def _check_together(workloads: Sequence[Workload]) -> None:
    first, names = workloads[0], [one.name for one in workloads]
    for one in workloads[1:]:
        if (one.entries.keys(), one.trials) != (first.entries.keys(), first.trials):
            raise ConfigError(
                f"{one.name} has different submissions from {first.name}",
                got=_submissions(one),
                expected=_submissions(first),
            )
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two workloads are called {twice}", do="give their folders other names")
    base = [one.name for one in workloads if not one.study.held_out_of]
    for one in workloads:
        if one.study.held_out_of and one.study.held_out_of not in base:
            raise ConfigError(
                f"{one.name} is a held-out variant of a workload that is not there",
                got=one.study.held_out_of,
                expected=f"one of {', '.join(base)}" if base else "its workload beside it",
                do="name its folder too; it has to be called so",
            )


def _submissions(one: Workload) -> str:
    return f"{', '.join(one.entries)}, {one.trials} {'trial' if one.trials == 1 else 'trials'} each"
