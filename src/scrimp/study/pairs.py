"""Rows side by side: the figure of a variant less that of the control, seed by seed.

Only runs that read the same data are a pair; where they did not, nothing is compared.
"""

from __future__ import annotations

from collections.abc import Mapping

from scrimp.errors import DataError
from scrimp.study.definition import Study
from scrimp.study.rows import Key, Row


def differences(
    study: Study, rows: Mapping[Key, Row], variant: str, step: int | None = None
) -> dict[int, float]:
    """By seed, of all pairs that are there.

    Args:
        step: at which; None: at the last that the variant has, and with halving the control at the same one.

    Raises:
        DataError: runs of a pair have read different data.
    """
    found = {}
    at = last_steps(rows, variant) if step is None else step
    its = at if step is not None or study.halving is not None else last_steps(rows, study.control)
    for seed in seeds_of(study, rows):
        mine, control = rows.get((variant, seed, at)), rows.get((study.control, seed, its))
        if mine is None or control is None:
            continue
        value, other = mine.figures.get(study.figure), control.figures.get(study.figure)
        if value is None or other is None:
            continue
        _refuse_other_data(mine, control)
        found[seed] = value - other
    return found


def last_steps(rows: Mapping[Key, Row], variant: str) -> int:
    """The last step at which any run of a variant has a row."""
    return max((steps for name, _, steps in rows if name == variant), default=0)


def seeds_of(study: Study, rows: Mapping[Key, Row]) -> list[int]:
    """The study's seeds, and further ones that rows have."""
    return list(dict.fromkeys([*study.seeds, *(seed for _, seed, _ in rows)]))


def _refuse_other_data(mine: Row, control: Row) -> None:
    if mine.data and control.data and mine.data != control.data:
        raise DataError(
            f"{mine.variant} and {control.variant} of seed {mine.seed} have read different data",
            got=f"corpora {mine.data[:12]} and {control.data[:12]}",
            expected="one corpus for all runs of a study",
            do="name the same data on all machines, and run the study again in another --out",
        )
