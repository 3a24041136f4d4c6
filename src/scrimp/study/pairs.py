"""Rows side by side: the figure of a variant less that of the control, seed by seed.

Only runs that read the same data are a pair; where they did not, their seed is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from scrimp.study.definition import Study
from scrimp.study.rows import Key, Row


def differences(
    study: Study, rows: Mapping[Key, Row], variant: str, step: int | None = None
) -> dict[int, float]:
    """By seed, of all pairs that are there. Of a target infinite where one of the two never reached it, NaN where both
    did not.

    Args:
        step: at which; None: at `compared_step`.
    """
    found = {}
    for mine, control in _beside_control(study, rows, variant, step):
        value, other = figure_of(study, mine), figure_of(study, control)
        if value is not None and other is not None and not read_other_data(mine, control):
            found[mine.seed] = value - other
    return found


def figure_of(study: Study, row: Row) -> float | None:
    """What a run has of the study's figure; None: it failed. Of a target that it never reached infinity."""
    if study.figure != "steps_to_target":
        return row.figures.get(study.figure)
    if study.target is None or row.held_out is None or row.error is not None:
        return None
    return row.held_out.first_at_most(study.target)


def with_other_data(study: Study, rows: Mapping[Key, Row], variant: str) -> dict[int, str]:
    """By seed, in words, runs that are no pair with the control's, since they have read other data."""
    return {
        mine.seed: f"it has read other data than {control.variant} (corpora {mine.data[:12]} and "
        f"{control.data[:12]}), and is not compared; name the same data on all machines, and run the study again "
        "in another --out"
        for mine, control in _beside_control(study, rows, variant)
        if read_other_data(mine, control)
    }


def compared_step(study: Study, rows: Mapping[Key, Row], variant: str) -> int:
    """The step at which a variant is compared: the last that it has, with halving the last that has a pair."""
    last = last_steps(rows, variant)
    if study.halving is None:
        return last
    ends = sorted({steps for name, _, steps in rows if name == variant}, reverse=True)
    return next((end for end in ends if differences(study, rows, variant, end)), last)


def step_of_control(study: Study, rows: Mapping[Key, Row], variant: str, step: int) -> int:
    """The step of the control that a variant's is compared with: its last one, with halving that of the same round."""
    if study.halving is None:
        return last_steps(rows, study.control)
    return study.step_of_control(variant, step)


def last_steps(rows: Mapping[Key, Row], variant: str) -> int:
    """The last step at which any run of a variant has a row."""
    return max((steps for name, _, steps in rows if name == variant), default=0)


def seeds_of(study: Study, rows: Mapping[Key, Row]) -> list[int]:
    """The study's seeds, and further ones that rows have."""
    return list(dict.fromkeys([*study.seeds, *(seed for _, seed, _ in rows)]))


def _beside_control(
    study: Study, rows: Mapping[Key, Row], variant: str, step: int | None = None
) -> Iterator[tuple[Row, Row]]:
    """The row of a variant and that of the control, of each seed that has both."""
    at = compared_step(study, rows, variant) if step is None else step
    at_of_control = step_of_control(study, rows, variant, at)
    for seed in seeds_of(study, rows):
        mine, control = rows.get((variant, seed, at)), rows.get((study.control, seed, at_of_control))
        if mine is not None and control is not None:
            yield mine, control


def read_other_data(mine: Row, control: Row) -> bool:
    """Whether both say what they have read, and it is not the same."""
    return bool(mine.data and control.data and mine.data != control.data)
