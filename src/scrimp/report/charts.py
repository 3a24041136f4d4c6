"""A chart as inline SVG that keeps its text readable at every width.

Problem  An SVG with a viewBox shrinks its labels with the page: unreadable on a phone.
Method   Two nested drawings. The outer one has no viewBox: labels and grid lines stand at
         percentages of the width and pixels of the height, so text keeps its size. The inner
         one stretches 1000 x height units over the same rectangle, and strokes do not scale.
         A dot is a line of length zero with round ends, which stays round when stretched.
         Everything works without scripts: a title and a description for screen readers, the
         figures as a table below. `page.js` only adds a read-out under the pointer, from
         text prepared here.
Limits   At most BUCKETS columns of pixels are distinguished; the read-out has READOUTS.
Checked  tests/report/test_charts.py; tests/report/test_browser.py
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from scrimp.report.axes import Array, Point, Scale, axis, bucket_medians, bucket_slices, downsample
from scrimp.report.html import Markup, join, tag
from scrimp.report.units import format_count, format_integer

BUCKETS: Final = 480
READOUTS: Final = 160
TABLE_ROWS: Final = 12
_UNITS: Final = 1000
"""Width of the inner drawing."""

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
    """1 to 4: a class of the style sheet."""
    decides_range: bool = False
    """Every value must be inside the chart; spikes of other series may be cut off."""
    derived: bool = False
    """A smoothed copy or a prediction: its values are not counted as measurements."""


@dataclass(frozen=True, kw_only=True)
class Mark:
    """An event that belongs on the time axis."""

    step: float
    label: str
    kind: Literal["skipped", "event"] = "event"


@dataclass(frozen=True, kw_only=True)
class Chart:
    """What one figure shows."""

    slug: str
    title: str
    subtitle: str
    series: Sequence[Series]
    format: Format
    tick_format: Format | None = None
    tick_unit: float = 1.0
    """Ticks are round in this unit: 2^30 for GiB."""
    log: bool = False
    log_steps: bool = False
    zero: bool = False
    height: int = 190
    marks: Sequence[Mark] = field(default=())
    note: str = ""


def render(chart: Chart) -> Markup:
    """The figure, or a sentence in its place when nothing was recorded."""
    shown = [series for series in chart.series if np.isfinite(series.values).any()]
    heading = tag("h3", chart.title)
    if not shown:
        caption = tag("figcaption", heading, tag("p", "Nothing was recorded.", class_="sub"))
        return tag("figure", caption, class_="chart empty", id=f"chart-{chart.slug}")
    x = _step_scale(shown, chart.log_steps)
    y = _value_scale(chart, shown, x)
    beyond = sum(y.num_beyond(series.values) for series in shown if not series.derived)
    cut = f"{beyond:,} {'value lies' if beyond == 1 else 'values lie'} beyond the axis." if beyond else ""
    note = " ".join(part for part in (chart.note, cut) if part)
    caption = tag(
        "figcaption",
        heading,
        tag("p", chart.subtitle, class_="sub"),
        _legend(shown) if len(shown) > 1 else None,
    )
    return tag(
        "figure",
        caption,
        tag("div", _plot(chart, shown, x, y), class_="frame"),
        tag("p", note, class_="note") if note else None,
        _table(chart, shown),
        class_="chart",
        id=f"chart-{chart.slug}",
        data_readout=json.dumps(_readout(chart, shown, x), separators=(",", ":"), ensure_ascii=False),
    )


def _step_scale(shown: Sequence[Series], log: bool) -> Scale:
    low = min(float(series.steps.min()) for series in shown)
    high = max(float(series.steps.max()) for series in shown)
    if log:
        low = max(low, 1.0)
        return Scale(low, max(high, low * 1.01), True)
    return Scale(low - 0.5, high + 0.5) if high == low else Scale(low, high)


def _value_scale(chart: Chart, shown: Sequence[Series], x: Scale) -> Scale:
    # Weighed by pixels, not by steps: over logarithmic steps the first ones fill half the chart.
    medians = [bucket_medians(x.place(series.steps), series.values, BUCKETS) for series in shown]
    always = [series.values for series in shown if series.decides_range]
    return axis(
        np.concatenate([series.values for series in shown]),
        log=chart.log,
        zero=chart.zero,
        always=np.concatenate(always) if always else None,
        typical=np.concatenate(medians),
    )


def _plot(chart: Chart, shown: Sequence[Series], x: Scale, y: Scale) -> Markup:
    height = chart.height
    title, description = f"{chart.slug}-title", f"{chart.slug}-desc"
    inner = tag(
        "svg",
        join(_drawing(series, x, y, height) for series in shown),
        viewBox=f"0 0 {_UNITS} {height}",
        preserveAspectRatio="none",
        width="100%",
        height=height,
        class_="ink",
    )
    return tag(
        "svg",
        tag("title", chart.title, id=title),
        tag("desc", _description(chart, shown), id=description),
        _grid(chart, x, y),
        join(_mark(mark, x, height) for mark in chart.marks),
        inner,
        tag("line", class_="cursor", x1="0", x2="0", y1="0", y2=height, visibility="hidden"),
        class_="plot",
        role="img",
        aria_labelledby=f"{title} {description}",
        height=height,
        width="100%",
    )


def _grid(chart: Chart, x: Scale, y: Scale) -> Markup:
    height, parts = chart.height, []
    label = chart.tick_format or chart.format
    for value in y.ticks(max(3, height // 45), chart.tick_unit):
        level = _level(y, value, height)
        if not -0.5 <= level <= height + 0.5:
            continue
        parts.append(tag("line", x1="0", x2="100%", y1=f"{level:.1f}", y2=f"{level:.1f}", class_="grid"))
        parts.append(
            tag("text", _short(label(value)), x="-8", y=f"{level:.1f}", dy="0.32em", class_="tick y")
        )
    for value in x.ticks(5):
        place = float(x.place(value)) * 100
        if not -0.01 <= place <= 100.01 or (not x.log and value != round(value)):
            continue
        at = f"{place:.2f}%"
        parts.append(tag("line", x1=at, x2=at, y1=height, y2=height + 4, class_="axis"))
        parts.append(tag("text", _step_label(value), x=at, y=height + 17, class_="tick x"))
    parts.append(tag("line", x1="0", x2="100%", y1=height, y2=height, class_="axis"))
    return tag("g", *parts, aria_hidden="true")


def _step_label(step: float) -> str:
    return format_integer(step) if step < 10_000 else _short(format_count(step))


def _short(label: str) -> str:
    """Without zeros that say nothing on an axis: 10.0k is 10k, 0.50 is 0.5."""
    return re.sub(r"(?<=\d)\.0+(?!\d)|(\.\d*?[1-9])0+(?!\d)", r"\1", label)


def _level(y: Scale, value: float, height: int) -> float:
    return height * (1 - float(y.place(value)))


def _mark(mark: Mark, x: Scale, height: int) -> Markup:
    place = f"{float(x.place(mark.step)) * 100:.2f}%"
    label = tag("title", mark.label)
    if mark.kind == "skipped":
        return tag("text", label, "×", x=place, y=height - 3, class_="skipped")
    return tag("line", label, x1=place, x2=place, y1="0", y2=height, class_="event")


def _drawing(series: Series, x: Scale, y: Scale, height: int) -> Markup:
    places, levels = x.place(series.steps), y.place(series.values)
    css = f"{series.kind} c{series.colour}"
    if series.kind == "dots":
        points = [point for line in downsample(places, levels, BUCKETS) for point in line]
        path = " ".join(f"M{_at(point, height)}h0" for point in points)
        thread = tag("path", d=_line(points, height), class_=f"thread c{series.colour}")
        return join([thread, tag("path", d=path, class_=css, data_points=len(points))])
    lines = downsample(places, levels, BUCKETS)
    path = " ".join(_line(line, height) for line in lines)
    return tag("path", d=path, class_=css, data_points=sum(len(line) for line in lines))


def _line(points: Sequence[Point], height: int) -> str:
    if len(points) == 1:
        return f"M{_at(points[0], height)}h0"
    return "M" + "L".join(_at(point, height) for point in points)


def _at(point: Point, height: int) -> str:
    level = min(max(1 - point[1], 0.0), 1.0) * height  # what lies beyond the axis is drawn on its edge
    return f"{point[0] * _UNITS:.1f} {level:.1f}"


def _legend(shown: Iterable[Series]) -> Markup:
    items = []
    for series in shown:
        if series.kind == "dots":
            sample = tag("circle", cx="9", cy="5", r="3.5", class_=f"dot c{series.colour}")
        else:
            sample = tag("line", x1="0", x2="18", y1="5", y2="5", class_=f"{series.kind} c{series.colour}")
        swatch = tag("svg", sample, width="18", height="10", aria_hidden="true")
        items.append(tag("li", swatch, tag("span", series.name)))
    return tag("ul", *items, class_="legend")


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


def _readout(chart: Chart, shown: Sequence[Series], x: Scale) -> dict[str, object]:
    """Text for the pointer: places in [0, 1], a label for each, and one column of text per series."""
    steps = np.unique(np.concatenate([series.steps for series in shown]))
    places = x.place(steps)
    groups = bucket_slices(places, READOUTS)
    if len(steps) <= READOUTS:
        groups = [(index, index + 1) for index in range(len(steps))]
    middles = [round(float(places[start:stop].mean()), 4) for start, stop in groups]
    labels = [_span(steps[start], steps[stop - 1]) for start, stop in groups]
    columns = [[series.name, *_means(chart, series, steps, groups)] for series in shown]
    return {"x": middles, "label": labels, "series": columns}


def _span(first: float, last: float) -> str:
    return f"step {first:,.0f}" if first == last else f"steps {first:,.0f} to {last:,.0f}, mean"


def _means(chart: Chart, series: Series, steps: Array, groups: Sequence[tuple[int, int]]) -> list[str]:
    texts = []
    for start, stop in groups:
        low, high = np.searchsorted(series.steps, [steps[start], steps[stop - 1] + 0.5])
        texts.append(chart.format(_mean(series.values[low:high])) if high > low else "")
    return texts


def _mean(values: Array) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


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
