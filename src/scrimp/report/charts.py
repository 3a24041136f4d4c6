"""A chart as a figure of the page: its data as JSON for `charts.js`, and the same in words and as a table.

Problem  A chart should answer more than it shows: the value at a step, what happened there, a closer look.
         The page must not carry a million steps for that, and must say something without scripts.
Method   `render` writes a figure whose attribute `data-chart` holds everything that is drawn: thinned series
         (`curves.thinned`), ranges that spikes do not flatten, marks. `charts.js` makes a uPlot chart of it.
         Beside it stand a description for screen readers and up to `TABLE_ROWS` steps as a table, which need
         no script. An attribute, not a script element, because `html.tag` escapes it as all other text.
Limits   Values carry six digits.
Checked  tests/report/test_charts.py; in headless Chromium by tests/report/test_chart_browser.py
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, Final, Literal

import numpy as np

from scrimp.report.curves import Array, bounded, thinned, usual_range
from scrimp.report.html import Markup, tag, visible

TABLE_ROWS: Final = 12

Kind = Literal["line", "faint", "dashed", "dots"]
Format = Callable[[float | None], str]


@dataclass(frozen=True, kw_only=True)
class Series:
    """One measured quantity over steps."""

    name: str
    steps: Array
    values: Array
    kind: Kind = "line"
    colour: int = 1
    """1 to 4, of a study 1 to 8: a variable of the style sheet."""
    decides_range: bool = False
    """Every value must be inside the chart; spikes of other series may be cut off."""
    derived: bool = False
    """A smoothed copy or a prediction: no measurement decides by it what is usual."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event that belongs on the time axis."""

    step: float
    label: str
    kind: Literal["skipped", "event"] = "event"


@dataclass(frozen=True, kw_only=True)
class Unit:
    """How numbers are written on an axis and under the cursor."""

    name: str = ""
    size: float = 1.0
    """Values are divided by it: 2^30 for GiB."""
    prefixes: bool = False
    """With k, M, m, µ and the like."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What one figure shows."""

    slug: str
    title: str
    subtitle: str
    series: Sequence[Series]
    format: Format
    """How the table writes values."""
    unit: Unit = field(default=Unit())
    log: bool = False
    log_steps: bool = False
    """A box above the chart makes the steps logarithmic."""
    zero: bool = False
    """The axis begins at 0."""
    height: int = 190
    """Pixels between the axes."""
    marks: Sequence[Mark] = field(default=())
    note: str = ""


def render(chart: Chart) -> Markup:
    """The figure, or a sentence in its place when nothing was recorded."""
    shown = [series for series in chart.series if np.isfinite(series.values).any()]
    heading = tag("h3", chart.title)
    if not shown:
        caption = tag("figcaption", heading, tag("p", "Nothing was recorded.", class_="sub"))
        return tag("figure", caption, class_="chart empty", id=f"chart-{chart.slug}")
    return tag(
        "figure",
        tag("figcaption", heading, tag("p", chart.subtitle, class_="sub"), _switch(chart)),
        tag("div", class_="frame", role="group", aria_label=f"{chart.title}. {_description(chart, shown)}"),
        tag("p", chart.note, " ", tag("span", class_="beyond"), class_="note"),
        _table(chart, shown),
        class_="chart",
        id=f"chart-{chart.slug}",
        data_chart=json.dumps(data_of(chart, shown), separators=(",", ":"), ensure_ascii=False),
    )


def data_of(chart: Chart, shown: Sequence[Series]) -> dict[str, Any]:
    """All that is drawn, for `charts.js`: values in the chart's unit, None where one is missing."""
    return {
        "tables": [
            _table_of(chart, list(group))
            for _, group in groupby(shown, lambda series: series.steps.tobytes())
        ],
        "series": [
            {"name": visible(series.name), "kind": series.kind, "colour": series.colour} for series in shown
        ],
        "views": [_view(chart, shown, log_steps=log) for log in (False, True)[: 1 + chart.log_steps]],
        "unit": chart.unit.name,
        "prefixes": chart.unit.prefixes,
        "log": chart.log,
        "zero": chart.zero,
        "height": chart.height,
        "marks": [[_rounded(mark.step, 17), mark.kind, visible(mark.label)] for mark in chart.marks],
    }


def _table_of(chart: Chart, group: Sequence[Series]) -> list[list[float | None]]:
    """Steps, then the values of every series over them: as uPlot joins tables."""
    steps = group[0].steps
    columns = [_drawable(chart, series.values) for series in group]
    measured = [
        column for column, series in zip(columns, group, strict=True) if not series.derived
    ] or columns
    kept = set(thinned(steps, measured))
    if chart.log_steps:
        kept |= set(thinned(steps, measured, log=True))
    rows = sorted(kept)
    return [
        [_rounded(step, 17) for step in steps[rows]],
        *[[_rounded(value / chart.unit.size) for value in column[rows]] for column in columns],
    ]


def _drawable(chart: Chart, values: Array) -> Array:
    numbers = bounded(values)
    return np.where(numbers > 0, numbers, np.nan) if chart.log else numbers


def _rounded(value: float, digits: int = 6) -> float | None:
    """As JSON has it: no NaN, and no ".0" behind a whole number."""
    if not math.isfinite(value):
        return None
    short = float(f"{value:.{digits}g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _view(chart: Chart, shown: Sequence[Series], *, log_steps: bool) -> dict[str, Any]:
    """The range of a chart that is not zoomed, None for all values, and how many values lie beyond it."""
    measured = [series for series in shown if not series.derived] or shown
    curves = [(series.steps, series.values) for series in measured]
    if log_steps:
        curves = [(steps[steps >= 1], values[steps >= 1]) for steps, values in curves]
    always = [series.values for series in shown if series.decides_range]
    always += [np.zeros(1)] if chart.zero else []
    found = usual_range(curves, log=chart.log, log_steps=log_steps, always=always)
    if found is None:
        return {"range": None, "beyond": 0}
    columns = [_drawable(chart, values) for _, values in curves]
    beyond = sum(int(((column < found[0]) | (column > found[1])).sum()) for column in columns)
    return {"range": [_rounded(end / chart.unit.size) for end in found], "beyond": beyond}


def _switch(chart: Chart) -> Markup | None:
    if not chart.log_steps:
        return None
    box = tag("input", type="checkbox", autocomplete="off")
    return tag("label", box, " logarithmic steps", class_="switch", hidden=True)


def _description(chart: Chart, shown: Sequence[Series]) -> str:
    parts = [chart.subtitle.rstrip(".") + "."]
    for series in shown:
        finite = np.flatnonzero(np.isfinite(series.values))
        ends = [
            f"{chart.format(float(series.values[index]))} at step {series.steps[index]:,.0f}"
            for index in finite[[0, -1]]
        ]
        parts.append(f"{series.name}: {', '.join(ends)}.")
    return " ".join(parts)


def _table(chart: Chart, shown: Sequence[Series]) -> Markup:
    """Up to TABLE_ROWS steps spread over the run, for readers who do not see the drawing."""
    shown = [series for series in shown if series.kind != "faint"] or list(shown)
    dots = [series for series in shown if series.kind == "dots"]
    steps = np.unique(np.concatenate([series.steps[np.isfinite(series.values)] for series in dots or shown]))
    picked = np.unique(np.linspace(0, len(steps) - 1, min(TABLE_ROWS, len(steps))).round().astype(int))
    rows = []
    for step in steps[picked]:
        cells = [tag("td", chart.format(_value_at(series, step)), class_="num") for series in shown]
        rows.append(tag("tr", tag("th", f"{step:,.0f}", scope="row", class_="num"), *cells))
    names = [tag("th", series.name, scope="col", class_="num") for series in shown]
    head = tag("thead", tag("tr", tag("th", "step", scope="col", class_="num"), *names))
    table = tag("table", head, tag("tbody", *rows))
    return tag("details", tag("summary", "Values"), tag("div", table, class_="wide"), class_="values")


def _value_at(series: Series, step: float) -> float:
    index = int(np.searchsorted(series.steps, step))
    found = index < len(series.steps) and series.steps[index] == step
    return float(series.values[index]) if found else math.nan
