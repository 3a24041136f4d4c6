"""What the rows of a study say: a comparison and a verdict for each variant, and curves over all seeds.

A page, a table and a test read it from here; it is a function of the study's file and its rows, with the looks
that there were before, so that a report can be made again where the runs' folders are gone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from scrimp.report.curves import Array
from scrimp.report.units import format_number, format_percent
from scrimp.study.comparisons import MOST_PAIRS, Comparison, compare
from scrimp.study.definition import FigureName, Study
from scrimp.study.looks import Look, Looks, confidence_of, number_of
from scrimp.study.pairs import (
    compared_step,
    differences,
    figure_of,
    seeds_of,
    step_of_control,
    with_other_data,
)
from scrimp.study.rounds import descent_point, is_finished, loss_of, reached_round, steps_of, visited
from scrimp.study.rows import Curve, Key, Row

FIGURES: Final[dict[FigureName, str]] = {
    "held_out_loss": "held-out loss",
    "mean_source_loss": "held-out loss, mean of the sources",
    "training_loss": "training loss of the last quarter",
    "tokens_per_second": "tokens per second",
    "steps_to_target": "steps to the target",
}
UNITS: Final[dict[FigureName, str]] = {
    "held_out_loss": "nats a token",
    "mean_source_loss": "nats a token",
    "training_loss": "nats a token",
    "tokens_per_second": "tokens a second",
    "steps_to_target": "steps",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One variant."""

    name: str
    steps: int
    """The step at which its figures were taken: of a variant that was dropped, the end of its last round."""
    values: dict[int, float]
    """Its figure by seed."""
    centre: float | None
    """The mean of these; of steps to a target the median, infinite where most runs never reached it."""
    failures: dict[int, str]
    """By seed, why a run has no figure, or is no pair with the control's."""
    comparison: Comparison | None
    """Its pairs with the control; None for the control itself."""
    relative: float | None
    """The mean difference as a share of the control's mean."""
    verdict: str
    """The comparison in words."""
    is_dropped: bool = False
    earlier_looks: int = 0
    """Looks at this comparison, with other pairs, before this one."""
    look: Look | None = None
    """What showing the verdict is; None of fewer than two pairs, which have none."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that a report shows."""

    study: Study
    outcomes: tuple[Outcome, ...]
    confidence: float
    """Confidence of each interval, at the first look at it."""
    seeds: tuple[int, ...]
    """The study's, and further ones that rows have."""
    done: int
    """Runs that have the compared figure, of all seeds."""
    planned: int
    """Variants times seeds."""
    is_finished: bool
    """Every run of every round has its figures."""
    rows: tuple[Row, ...]

    @property
    def others(self) -> list[Outcome]:
        """All but the control."""
        return [one for one in self.outcomes if one.comparison is not None]

    def whole_runs(self, variant: str) -> list[Row]:
        """The rows of a variant's runs that went to their end, and did not fail."""
        steps = steps_of(self.study.named(variant))
        return [one for one in self.rows if (one.variant, one.steps, one.error) == (variant, steps, None)]

    def figure_by_seed(self, variant: str, figure: str) -> dict[int, float]:
        """A figure of these; empty of a variant that the study does not have."""
        rows = self.whole_runs(variant) if any(one.name == variant for one in self.study.variants) else []
        return {row.seed: value for row in rows if (value := row.figures.get(figure)) is not None}


def shared_seeds(figures: Iterable[Collection[int]]) -> list[int]:
    """The seeds that all of these have, in order; none where there is nothing."""
    found = [set(one) for one in figures]
    return sorted(set.intersection(*found)) if found else []


def of_seeds(wins: int, count: int) -> str:
    """On how many of so many seeds, in words."""
    return f"{wins} of {count} {'seed' if count == 1 else 'seeds'}"


def results_of(study: Study, rows: Mapping[Key, Row], looks: Looks | None = None) -> Results:
    """What the rows say so far.

    Args:
        looks: at verdicts of the study, before this one.
    """
    whole, study = study, replace(study, variants=visited(study, rows), descent=None)
    seeds, names = seeds_of(study, rows), [one.name for one in study.variants]
    going_on = reached_round(whole, rows).steps if whole.halving is not None else names
    outcomes = tuple(
        _outcome(study, rows, name, (looks or {}).get(name, ()), is_dropped=name not in going_on)
        for name in names
    )
    done = sum(len(one.values) for one in outcomes)
    return Results(
        study=study,
        outcomes=outcomes,
        confidence=study.confidence_of_each,
        seeds=tuple(seeds),
        done=done,
        planned=len(names) * len(seeds),
        is_finished=is_finished(whole, rows),
        rows=tuple(rows.values()),
    )


def _outcome(
    study: Study, rows: Mapping[Key, Row], name: str, looks: Sequence[Look], *, is_dropped: bool
) -> Outcome:
    steps = compared_step(study, rows, name)
    mine = {seed: row for (variant, seed, at), row in rows.items() if variant == name and at == steps}
    values = {seed: value for seed, row in mine.items() if (value := figure_of(study, row)) is not None}
    failures = {
        seed: row.error
        for (variant, seed, at), row in rows.items()
        if variant == name and at >= steps and row.error is not None
    }
    comparison, earlier, look = None, 0, None
    if name != study.control:
        failures |= with_other_data(study, rows, name)
        found = differences(study, rows, name)
        this = Look(steps=steps, seeds=sorted(found), figure=study.figure, control=study.control)
        earlier, look = number_of(this, looks), this if len(found) > 1 else None
        comparison = compare(
            found,
            interval=study.interval,
            confidence=confidence_of(study.confidence_of_each, earlier),
            power=study.power,
            matters=study.matters,
            next_confidence=confidence_of(study.confidence_of_each, earlier + 1),
        )
    control = _control_mean(study, rows, comparison, step_of_control(study, rows, name, steps))
    relative = comparison.mean / control if comparison and comparison.mean is not None and control else None
    return Outcome(
        name=name,
        steps=steps,
        values=values,
        centre=_centre(study, values.values()) if values else None,
        failures=failures,
        comparison=comparison,
        relative=relative,
        verdict="the control" if comparison is None else verdict_text(study, comparison, relative),
        is_dropped=is_dropped,
        earlier_looks=earlier,
        look=look,
    )


def _control_mean(
    study: Study, rows: Mapping[Key, Row], comparison: Comparison | None, at: int
) -> float | None:
    """The mean figure of the control's runs, at a step, that are part of the pairs."""
    seeds = comparison.differences if comparison else {}
    found = [figure_of(study, rows[study.control, seed, at]) for seed in seeds]
    values = [value for value in found if value is not None]
    return statistics.fmean(values) if values else None


def _centre(study: Study, values: Collection[float]) -> float:
    return (statistics.median if study.figure == "steps_to_target" else statistics.fmean)(values)


def descent_text(study: Study, rows: Mapping[Key, Row]) -> list[str]:
    """Where a descent stands, and what says that its lists are too short; nothing of another study."""
    descent = study.descent
    if descent is None:
        return []
    loss, ran = loss_of(study, descent, rows), len(visited(study, rows))
    at = descent_point(study, descent, rows)
    point = dict(zip(descent.values, at, strict=True))
    words = ", ".join(f"{key} = {descent.values[key][index]}" for key, index in point.items())
    ended = "ends at" if is_finished(study, rows) else "is not finished, and stands at"
    found = [
        f"The descent {ended} {words}: {FIGURES[study.figure]} {format_number(loss(at), 5)}, "
        f"{ran} of {len(study.variants)} combinations."
    ]
    for key, index in point.items():
        if index in (0, len(descent.values[key]) - 1):
            found.append(
                f"{key} = {descent.values[key][index]} is the end of its list: a better one may lie beyond."
            )
    return found


def verdict_text(study: Study, comparison: Comparison, relative: float | None = None) -> str:
    """A verdict in words."""
    differences = comparison.differences.values()
    if not all(map(math.isfinite, differences)):
        never, of_control = (
            sum(math.isnan(one) or one == sign * math.inf for one in differences) for sign in (1, -1)
        )
        return (
            f"no interval: of {len(differences)} pairs the target was never reached in {never}, "
            f"by the control in {of_control}"
        )
    if comparison.mean is None:
        return "cannot tell: no pair of runs yet"
    if comparison.low is None or comparison.high is None:
        return "cannot tell: needs two pairs of runs"
    if comparison.verdict == "cannot tell":
        more = comparison.more_pairs
        if more is None:
            return f"cannot tell: {2 * MOST_PAIRS:,} runs would not either"
        seeds = "1 more seed" if more == 1 else f"{more:,} more seeds"
        return f"cannot tell: {2 * more:,} more runs would probably ({seeds} of both)"
    if comparison.verdict == "same":
        if study.matters is None:
            return "the same"
        if comparison.low <= 0 <= comparison.high:
            return f"the same: within ±{format_number(study.matters)}"
        word = "lower" if comparison.high < 0 else "higher"
        return f"the same: {word} by {format_number(abs(comparison.mean))}, which does not matter"
    size = format_number(abs(comparison.mean))
    share = f" ({format_percent(abs(relative), 2)})" if relative is not None else ""
    return f"{comparison.verdict} by {size}{share}"


def ranked_by(study: Study) -> str:
    """What decides which variants go on after a round."""
    by_signal = study.halving is not None and study.halving.by == "early-signal"
    return "early signal: a low gradient norm, a high training loss" if by_signal else FIGURES[study.figure]


# -- curves ------------------------------------------------------------------------------------


def mean_curve(results: Results, variant: str, kind: str) -> tuple[Array, Array]:
    """(steps, values) of a variant, averaged over its seeds.

    Args:
        kind: training or held_out.
    """
    return _mean([curve for row in _rows_of(results, variant) if (curve := _curve(row, kind)) is not None])


def mean_gap(results: Results, variant: str, kind: str) -> tuple[Array, Array]:
    """(steps, values) of a variant less the control of the same seed, averaged over seeds."""
    # At the same step: parts of a training loss are as long as its run is.
    control = {(row.seed, row.steps): row for row in results.rows if row.variant == results.study.control}
    gaps = []
    for row in _rows_of(results, variant):
        other = control.get((row.seed, row.steps))
        mine, theirs = _curve(row, kind), _curve(other, kind) if other is not None else None
        if mine is not None and theirs is not None:
            gaps.append(_less(mine, theirs))
    return _mean(gaps)


def _rows_of(results: Results, variant: str) -> list[Row]:
    rows = [row for row in results.rows if row.variant == variant and row.error is None]
    last = max((row.steps for row in rows), default=0)
    return [row for row in rows if row.steps == last]


def _curve(row: Row, kind: str) -> Curve | None:
    return row.training if kind == "training" else row.held_out


def _less(one: Curve, other: Curve) -> Curve:
    """The difference at the steps that both have."""
    mine = dict(zip(one.steps, one.values, strict=True))
    theirs = dict(zip(other.steps, other.values, strict=True))
    steps = [step for step in one.steps if step in theirs]
    pairs = [(mine[step], theirs[step]) for step in steps]
    return Curve(steps=steps, values=[None if a is None or b is None else a - b for a, b in pairs])


def _mean(curves: Sequence[Curve]) -> tuple[Array, Array]:
    """The mean of curves, at the steps that all have."""
    if not curves:
        return np.empty(0), np.empty(0)
    tables = [dict(zip(one.steps, one.values, strict=True)) for one in curves]
    steps = sorted(set.intersection(*(set(one) for one in tables)))
    values = []
    for step in steps:
        found = [value for one in tables if (value := one[step]) is not None]
        values.append(statistics.fmean(found) if len(found) == len(tables) else np.nan)
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)
