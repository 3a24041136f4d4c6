"""The rounds of a study: which variants run to which step, by the rows of the rounds before.

Without halving there is one. With it a round ends at a step; the best by mean difference from the control go on, and
the control with them. What is done follows from rows alone, so that a study that was killed decides the same again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from scrimp.config import Config
from scrimp.study.definition import Study
from scrimp.study.pairs import differences
from scrimp.study.rows import Key, Row
from scrimp.study.variants import Variant


@dataclass(frozen=True)
class Round:
    """Variants that all run to one step."""

    variants: tuple[Variant, ...]
    steps: dict[str, int]
    """The step at which the round ends, by variant."""
    is_last: bool


def count_of(study: Study) -> int:
    """How many rounds there are."""
    return 1 + (study.halving.rounds if study.halving else 0)


def round_of(study: Study, rows: Mapping[Key, Row], number: int) -> Round:
    """The variants of a round, from 0, by the rows of those before it."""
    variants = study.variants
    if study.halving is None:
        return Round(variants, {one.name: steps_of(one) for one in variants}, True)
    ends = study.halving.steps(steps_of(variants[0]))
    for end in ends[:number]:
        others = [one for one in variants if one.name != study.control]
        scores = {one.name: _score(study, rows, one.name, end) for one in others}
        ranked = sorted(others, key=lambda one: scores[one.name])
        kept = {one.name for one in ranked[: survivors(len(others), study.halving.factor)]} | {study.control}
        variants = tuple(one for one in variants if one.name in kept)
    steps = dict.fromkeys((one.name for one in variants), ends[number])
    return Round(variants, steps, number == len(ends) - 1)


def reached_round(study: Study, rows: Mapping[Key, Row]) -> Round:
    """The round that the study is in: all runs of those before it have a row."""
    for number in range(count_of(study)):
        now = round_of(study, rows, number)
        keys = [(one.name, seed, now.steps[one.name]) for one in now.variants for seed in study.seeds]
        if now.is_last or any(key not in rows for key in keys):
            break
    return now


def _score(study: Study, rows: Mapping[Key, Row], variant: str, step: int) -> tuple[int, float]:
    """A key that ranks variants, the best first: runs that failed, then the mean difference from the control."""
    keys = [(variant, seed, step) for seed in study.seeds]
    failed = sum(key not in rows or rows[key].error is not None for key in keys)
    found = list(differences(study, rows, variant, step).values())
    if not found:  # of a control that failed, the figures themselves
        values = [rows[key].figures.get(study.figure) for key in keys if key in rows]
        found = [value for value in values if value is not None]
    return failed, sum(found) / len(found) if found else float("inf")


def is_finished(study: Study, rows: Mapping[Key, Row]) -> bool:
    """Whether every run of every round has its figures."""
    for number in range(count_of(study)):
        now = round_of(study, rows, number)
        keys = [(one.name, seed, now.steps[one.name]) for one in now.variants for seed in study.seeds]
        if any(key not in rows or rows[key].error is not None for key in keys):
            return False
    return True


def survivors(count: int, factor: int) -> int:
    """How many of so many variants go on after a round."""
    return max(1, -(-count // factor))


def steps_of(variant: Variant) -> int:
    """Steps of a whole run."""
    return int(variant.settings.get("train.steps") or Config().train.steps)
