"""The intervals of a study as a picture without scripts: a line for each variant, its pairs as dots, zero as a line.

Lengths are pixels of a view that the page scales; colours are classes of the style sheet. The numbers stand in the
table beside it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Final

from scrimp.report.html import Markup, tag
from scrimp.report.units import format_number
from scrimp.study.results import UNITS, Outcome, Results

_WIDTH: Final = 1000
_LEFT: Final = 190
_LANE: Final = 26
_LONGEST_NAME: Final = 28
_WIDEST: Final = 4.0
"""Times the largest pair or mean that an interval may widen the picture to; wider ones leave it."""


def interval_svg(results: Results) -> Markup | None:
    """The differences from the control; None where there is none yet."""
    shown = [one for one in results.others if one.comparison and one.comparison.mean is not None]
    if not shown:
        return None
    reach = _reach(results, shown)
    scale = (_WIDTH - _LEFT - 20) / (2 * reach)

    def place(value: float) -> float:
        inside = min(max(value, -1.02 * reach), 1.02 * reach)
        return round(_LEFT + 10 + (inside + reach) * scale, 2)

    high = len(shown) * _LANE
    parts = []
    matters = results.study.matters
    if matters is not None:
        left, right = place(-matters), place(matters)
        title = tag("title", f"smaller than what matters, {format_number(matters)}")
        parts.append(
            tag("rect", title, x=left, y=0, width=round(right - left, 2), height=high, class_="matters")
        )
    parts.append(tag("line", x1=place(0), x2=place(0), y1=0, y2=high, class_="zero"))
    parts += [_lane(one, number, place) for number, one in enumerate(shown)]
    parts += [
        tag("text", format_number(value, 2), x=place(value), y=high + 16, text_anchor="middle")
        for value in (-reach, -reach / 2, 0.0, reach / 2, reach)
    ]
    words = f"Differences from {results.study.control} in {UNITS[results.study.figure]}"
    svg = tag(
        "svg", tag("title", words), *parts, viewBox=f"0 0 {_WIDTH} {high + 24}", role="img", aria_label=words
    )
    return tag("div", svg, class_="picture wide", tabindex=0)


def _reach(results: Results, shown: list[Outcome]) -> float:
    """The largest difference in the picture, rounded up to one digit."""
    pairs, ends = [results.study.matters or 0.0], [0.0]
    for one in shown:
        assert one.comparison is not None
        pairs += map(abs, one.comparison.differences.values())
        ends += [abs(end) for end in (one.comparison.low, one.comparison.high) if end is not None]
    largest = max(pairs) or 1.0
    reach = max(largest, min(max(ends), _WIDEST * largest))
    unit = 10.0 ** math.floor(math.log10(reach))
    return math.ceil(reach / unit * 2) / 2 * unit


def _lane(one: Outcome, number: int, place: Callable[[float], float]) -> Markup:
    assert one.comparison is not None
    assert one.comparison.mean is not None
    middle = number * _LANE + _LANE / 2
    short = one.name if len(one.name) <= _LONGEST_NAME else one.name[: _LONGEST_NAME - 1] + "…"
    parts = [tag("text", short, x=0, y=middle + 4, class_="name")]
    if one.comparison.low is not None and one.comparison.high is not None:
        ends = {"x1": place(one.comparison.low), "x2": place(one.comparison.high)}
        parts.append(tag("line", y1=middle, y2=middle, class_="interval", **ends))
    for seed, value in one.comparison.differences.items():
        title = tag("title", f"seed {seed}: {format_number(value)}")
        parts.append(tag("circle", title, cx=place(value), cy=middle, r=3, class_="pair"))
    mean = one.comparison.mean
    box = {"x": round(place(mean) - 4, 2), "y": middle - 4, "width": 8, "height": 8}
    title = tag("title", f"{one.name}: {one.verdict}")
    parts.append(tag("rect", title, class_="mean", **box))
    return tag("g", *parts, class_=one.comparison.verdict.split()[0])
