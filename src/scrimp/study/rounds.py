"""The rounds of a study: which variants run to which step, by the rows of the rounds before.

Usually there is one. With halving a round ends at a share of each variant's steps; the best by mean difference from the
control, or by what they show early (`scrimp.study.early`), go on, and the control with them. A descent
(`scrimp.study.descent`) has a round for each place and setting: the variant there and its neighbours. What is done
follows from rows alone, so that a study that was killed decides the same again.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from scrimp.config import Config
from scrimp.study.definition import Halving, Study
from scrimp.study.descent import Descent, Point
from scrimp.study.early import Signal, early_scores, signal_of
from scrimp.study.pairs import differences, figure_of, read_other_data
from scrimp.study.rows import Key, Row
from scrimp.study.variants import Variant


@dataclass(frozen=True)
class Round:
    """Variants that run to a step each."""

    variants: tuple[Variant, ...]
    steps: dict[str, int]
    """The step at which the round ends, by variant."""
    ends_runs: bool = True
    """Whether that is the runs' last step; else the best go on."""


def rounds(study: Study, rows: Mapping[Key, Row]) -> Iterator[Round]:
    """The rounds one after the other; when the next one is asked for, the rows of those before it are there."""
    if study.descent is not None:
        for points in study.descent.path(loss_of(study, study.descent, rows)):
            yield _at(study, study.descent, points)
    elif study.halving is not None:
        yield from _halved(study, study.halving, rows)
    else:
        yield Round(study.variants, {one.name: steps_of(one) for one in study.variants})


def _at(study: Study, descent: Descent, points: Sequence[Point]) -> Round:
    variants = tuple(study.variants[descent.number(one)] for one in points)
    return Round(variants, {one.name: steps_of(one) for one in variants})


def _halved(study: Study, halving: Halving, rows: Mapping[Key, Row]) -> Iterator[Round]:
    variants = study.variants
    ends = {one.name: halving.steps(steps_of(one)) for one in variants}
    for number in range(halving.rounds + 1):
        steps = {one.name: ends[one.name][number] for one in variants}
        yield Round(variants, steps, number == halving.rounds)
        others = [one for one in variants if one.name != study.control]
        scores = _scores(study, halving, rows, {one.name: steps[one.name] for one in others})
        ranked = sorted(others, key=lambda one: scores[one.name])
        kept = {one.name for one in ranked[: survivors(len(others), halving.factor)]} | {study.control}
        variants = tuple(one for one in variants if one.name in kept)


def loss_of(study: Study, descent: Descent, rows: Mapping[Key, Row]) -> Callable[[Point], float]:
    """The mean figure of a point's runs; infinite where one is missing or failed."""

    def loss(point: Point) -> float:
        variant = study.variants[descent.number(point)]
        found = [rows.get((variant.name, seed, steps_of(variant))) for seed in study.seeds]
        values = [None if row is None else figure_of(study, row) for row in found]
        return statistics.fmean(math.inf if one is None else one for one in values)

    return loss


def reached_round(study: Study, rows: Mapping[Key, Row]) -> Round:
    """The round that the study is in: all runs of those before it have a row."""
    for now in rounds(study, rows):
        if any(key not in rows for key in _keys(study, now)):
            break
    return now


def is_finished(study: Study, rows: Mapping[Key, Row]) -> bool:
    """Whether every run of every round has its figures."""
    return all(
        key in rows and rows[key].error is None for now in rounds(study, rows) for key in _keys(study, now)
    )


def descent_point(study: Study, descent: Descent, rows: Mapping[Key, Row]) -> Point:
    """Where a descent stands: the best of the last round of which all runs have a row."""
    loss = loss_of(study, descent, rows)
    at = descent.start
    for points in descent.path(loss):
        if any(key not in rows for key in _keys(study, _at(study, descent, points))):
            break
        at = min(points, key=loss)
    return at


def visited(study: Study, rows: Mapping[Key, Row]) -> tuple[Variant, ...]:
    """The variants that rounds so far had; without a descent all."""
    if study.descent is None:
        return study.variants
    found = dict[str, None]()
    for now in rounds(study, rows):
        found |= dict.fromkeys(now.steps)
        if any(key not in rows for key in _keys(study, now)):
            break
    return tuple(one for one in study.variants if one.name in found)


def _keys(study: Study, now: Round) -> list[Key]:
    return [(name, seed, steps) for name, steps in now.steps.items() for seed in study.seeds]


def _scores(
    study: Study, halving: Halving, rows: Mapping[Key, Row], steps: Mapping[str, int]
) -> dict[str, tuple[int, float]]:
    """By variant a key that ranks them, the best first: runs that failed, then what the study ranks by.

    Args:
        steps: where each variant's round ends.
    """
    if halving.by == "figure":
        return _mean_figures(study, rows, steps)
    signals = {name: _signals(study, rows, name, step) for name, step in steps.items()}
    scores = early_scores(signals)
    return {
        name: (len(study.seeds) - len(found), scores.get(name, math.inf)) for name, found in signals.items()
    }


def _signals(study: Study, rows: Mapping[Key, Row], variant: str, step: int) -> dict[int, Signal]:
    """By seed, what runs show that did not fail, and have read what the control has."""
    found = {}
    for seed in study.seeds:
        row = rows.get((variant, seed, step))
        control = rows.get((study.control, seed, study.step_of_control(variant, step)))
        if row is None or (control is not None and read_other_data(row, control)):
            continue
        if (signal := signal_of(row)) is not None:
            found[seed] = signal
    return found


def _mean_figures(
    study: Study, rows: Mapping[Key, Row], steps: Mapping[str, int]
) -> dict[str, tuple[int, float]]:
    """By variant, runs that failed, and the mean difference from the control; infinite where there is none."""
    found = {name: differences(study, rows, name, step) for name, step in steps.items()}
    found = {name: {seed: one[seed] for seed in study.seeds if seed in one} for name, one in found.items()}
    if not any(found.values()):  # a control that failed: the figures themselves
        found = {name: _figures_of(study, rows, name, step) for name, step in steps.items()}
    ended = {key for key, row in rows.items() if row.error is None}
    failed = {
        name: sum((name, seed, end) not in ended for seed in study.seeds) for name, end in steps.items()
    }
    return {
        name: (failed[name], statistics.fmean(one.values()) if one else math.inf)
        for name, one in found.items()
    }


def _figures_of(study: Study, rows: Mapping[Key, Row], name: str, step: int) -> dict[int, float]:
    found = {seed: rows[name, seed, step] for seed in study.seeds if (name, seed, step) in rows}
    values = {seed: row.figures.get(study.figure) for seed, row in found.items()}
    return {seed: value for seed, value in values.items() if value is not None}


def survivors(count: int, factor: int) -> int:
    """How many of so many variants go on after a round."""
    return max(1, -(-count // factor))


def steps_of(variant: Variant) -> int:
    """Steps of a whole run."""
    return int(variant.settings.get("train.steps") or Config().train.steps)
