"""What the rows of a study say: a comparison and a verdict for each variant, and curves over all seeds.

A page, a table and a test read it from here; it is a function of the study's file and its rows alone, so that a report
can be made again where the runs' folders are gone.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from scrimp.report.curves import Array
from scrimp.report.units import format_number, format_percent
from scrimp.study.comparisons import MOST_PAIRS, Comparison, compare, pairs_for_bootstrap, share_of_error
from scrimp.study.definition import FigureName, Study
from scrimp.study.pairs import differences, last_steps, seeds_of
from scrimp.study.rounds import is_finished
from scrimp.study.rows import Curve, Key, Row

FIGURES: Final[dict[FigureName, str]] = {
    "held_out_loss": "held-out loss",
    "training_loss": "training loss of the last quarter",
    "tokens_per_second": "tokens per second",
}
UNITS: Final[dict[FigureName, str]] = {
    "held_out_loss": "nats a token",
    "training_loss": "nats a token",
    "tokens_per_second": "tokens a second",
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """One variant."""

    name: str
    steps: int
    """At which its figures were taken: of a variant that was dropped, those of its last round."""
    values: dict[int, float]
    """Its figure by seed."""
    mean: float | None
    failures: dict[int, str]
    """Errors by seed."""
    comparison: Comparison | None
    """With the control; None for the control itself."""
    relative: float | None
    """The mean difference as a share of the control's mean."""
    verdict: str
    """In words."""
    is_dropped: bool = False


@dataclass(frozen=True, kw_only=True)
class Results:
    """All that a report shows."""

    study: Study
    outcomes: tuple[Outcome, ...]
    confidence: float
    """Of each interval."""
    done: int
    planned: int
    is_finished: bool
    rows: tuple[Row, ...]

    @property
    def others(self) -> list[Outcome]:
        """All but the control."""
        return [one for one in self.outcomes if one.comparison is not None]


def results_of(study: Study, rows: Mapping[Key, Row]) -> Results:
    """What the rows say so far."""
    seeds, names = seeds_of(study, rows), [one.name for one in study.variants]
    confidence = study.confidence
    if study.all_together:
        confidence = share_of_error(confidence, len(study.others))
    longest = max((last_steps(rows, name) for name in names), default=0)
    ended = {name: study.halving is not None and 0 < last_steps(rows, name) < longest for name in names}
    outcomes = tuple(_outcome(study, rows, name, confidence, is_dropped=ended[name]) for name in names)
    done = sum(len(one.values) for one in outcomes)
    return Results(
        study=study,
        outcomes=outcomes,
        confidence=confidence,
        done=done,
        planned=len(names) * len(seeds),
        is_finished=is_finished(study, rows),
        rows=tuple(rows.values()),
    )


def _outcome(
    study: Study, rows: Mapping[Key, Row], name: str, confidence: float, *, is_dropped: bool
) -> Outcome:
    steps = last_steps(rows, name)
    mine = {seed: row for (variant, seed, at), row in rows.items() if variant == name and at == steps}
    values = {
        seed: value for seed, row in mine.items() if (value := row.figures.get(study.figure)) is not None
    }
    comparison = None
    if name != study.control:
        found = differences(study, rows, name)
        interval = study.interval
        if interval == "bootstrap" and len(found) < pairs_for_bootstrap(1 - confidence):
            interval = "t"  # too few yet: of those that there are, t's interval is honest
        comparison = compare(
            found, interval=interval, confidence=confidence, power=study.power, matters=study.matters
        )
    control = _control_mean(study, rows, comparison, steps)
    relative = comparison.mean / control if comparison and comparison.mean is not None and control else None
    return Outcome(
        name=name,
        steps=steps,
        values=values,
        mean=statistics.fmean(values.values()) if values else None,
        failures={seed: row.error for seed, row in mine.items() if row.error is not None},
        comparison=comparison,
        relative=relative,
        verdict="the control" if comparison is None else verdict_text(study, comparison, relative),
        is_dropped=is_dropped,
    )


def _control_mean(
    study: Study, rows: Mapping[Key, Row], comparison: Comparison | None, steps: int
) -> float | None:
    """Of the control's runs that are part of the pairs."""
    at = steps if study.halving is not None else last_steps(rows, study.control)
    seeds = comparison.differences if comparison else {}
    found = [rows[study.control, seed, at].figures.get(study.figure) for seed in seeds]
    values = [value for value in found if value is not None]
    return statistics.fmean(values) if values else None


def verdict_text(study: Study, comparison: Comparison, relative: float | None = None) -> str:
    """A verdict in words."""
    if comparison.mean is None:
        return "cannot tell: no pair of runs yet"
    if comparison.verdict == "cannot tell":
        more = comparison.more_pairs
        if more is None:
            return f"cannot tell: {2 * MOST_PAIRS:,} runs would not either"
        return f"cannot tell: {2 * more:,} more runs would ({more:,} more seeds of both)"
    if comparison.verdict == "same":
        if study.matters is None:
            return "the same"
        return f"the same: within ±{format_number(study.matters)}"
    size = format_number(abs(comparison.mean))
    share = f" ({format_percent(abs(relative), 2)})" if relative is not None else ""
    return f"{comparison.verdict} by {size}{share}"


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
        mine, its = _curve(row, kind), _curve(other, kind) if other is not None else None
        if mine is not None and its is not None:
            gaps.append(_less(mine, its))
    return _mean(gaps)


def _rows_of(results: Results, variant: str) -> list[Row]:
    rows = [row for row in results.rows if row.variant == variant and row.error is None]
    last = max((row.steps for row in rows), default=0)
    return [row for row in rows if row.steps == last]


def _curve(row: Row, kind: str) -> Curve | None:
    return row.training if kind == "training" else row.held_out


def _less(one: Curve, other: Curve) -> Curve:
    """The difference at the steps that both have."""
    its = dict(zip(other.steps, other.values, strict=True))
    steps = [step for step in one.steps if step in its]
    mine = dict(zip(one.steps, one.values, strict=True))
    pairs = [(mine[step], its[step]) for step in steps]
    return Curve(steps=steps, values=[None if a is None or b is None else a - b for a, b in pairs])


def _mean(curves: Sequence[Curve]) -> tuple[Array, Array]:
    """At the steps that all have."""
    if not curves:
        return np.empty(0), np.empty(0)
    tables = [dict(zip(one.steps, one.values, strict=True)) for one in curves]
    steps = sorted(set.intersection(*(set(one) for one in tables)))
    values = []
    for step in steps:
        found = [value for one in tables if (value := one[step]) is not None]
        values.append(statistics.fmean(found) if len(found) == len(tables) else np.nan)
    return np.array(steps, dtype=np.float64), np.array(values, dtype=np.float64)
