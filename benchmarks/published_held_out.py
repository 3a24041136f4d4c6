"""Published runs that nobody had looked at before they were predicted: first predictions beside today's.

Method   Rows of `benchmarks/published/held_out.jsonl` were written down, with all that their sources say, and predicted
         before the model was changed for them; `first` keeps that. What was mended since is a cause that a source
         names, so today's figures are no longer held out, and those of other sources are nearer to the first ones.
Limits   A row that was refused at first (a device that did not ship) has no first error. What a row said wrong at first
         was mended (`extra.after_first`), and the first prediction is that of the row as it stood.
Run      python benchmarks/published_runs.py
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from published_runs import Row

HELD_OUT = (
    "source",
    "rows scored",
    "first: median error",
    "90th percentile",
    "bias",
    "not to fit",
    "today: median error",
    "90th percentile ",
    "bias ",
    "not to fit ",
)


def held_out_lines(sources: dict[str, list[Row]]) -> list[list[str]]:
    """A line for each source, and the median of their figures."""
    columns, lines = [], []
    for name, own in sources.items():
        first = [row.first / row.measured - 1.0 for row in own if row.first]
        today = [row.error for row in own]
        figures = [*_figures(first), *_figures(today)]
        columns.append([*figures[:2], *figures[3:5]])
        unfit = [sum(not row.fitted_first for row in own), sum(not row.fits for row in own)]
        texts = [f"{one:+.1%}" if at % 3 == 2 else f"{one:.1%}" for at, one in enumerate(figures)]
        lines.append([name, str(len(own)), *texts[:3], str(unfit[0]), *texts[3:], str(unfit[1])])
    middle = [f"{statistics.median(column):.1%}" for column in zip(*columns, strict=True)]
    return [*lines, ["median of the sources", "", *middle[:2], "", "", *middle[2:], "", ""]]


def _figures(errors: Sequence[float]) -> tuple[float, float, float]:
    """Median, 90th percentile and bias."""
    sizes = sorted(map(abs, errors))
    return (
        statistics.median(sizes),
        sizes[min(len(sizes) - 1, int(0.9 * len(sizes)))],
        statistics.median(errors),
    )
