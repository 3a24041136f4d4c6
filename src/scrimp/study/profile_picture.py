"""Performance profiles as a picture without scripts: a staircase for each submission.

Staircases that coincide are drawn one below the other by a pixel or two. The numbers stand in the table beside it.
"""

from __future__ import annotations

from typing import Final

from scrimp.report.html import Markup, tag
from scrimp.study.time_to_result import MOST, profile
from scrimp.study.workloads import Standing

_LEFT: Final = 50
_RIGHT: Final = 760
_HIGH: Final = 300
_TOP: Final = 12
_LANE: Final = 22
_APART: Final = 1.5
_COLOURS: Final = 8
_LONGEST_NAME: Final = 26


def profile_svg(found: Standing) -> Markup:
    """The share of workloads over the factor of the fastest time."""
    words = "Share of workloads on which a submission takes at most so many times the fastest one's steps"
    parts = [tag("path", d=f"M {_LEFT} {_y(share)} H {_RIGHT}", class_="grid") for share in (0, 0.5, 1)]
    parts += [
        tag("text", f"{share:g}", x=_LEFT - 8, y=_y(share) + 4, text_anchor="end") for share in (0, 0.5, 1)
    ]
    ticks = range(1, int(MOST) + 1)
    parts += [tag("text", f"{tau}", x=_x(tau), y=_y(0) + 22, text_anchor="middle") for tau in ticks]
    for number, name in enumerate(found.scores):
        kind = f"s{1 + number % _COLOURS}" + (" dashed" if number >= _COLOURS else "")
        middle = _TOP + 10 + number * _LANE
        short = name if len(name) <= _LONGEST_NAME else name[: _LONGEST_NAME - 1] + "…"
        stairs = _stairs(found.ratios_of(name), number * _APART)
        parts += [
            tag("path", tag("title", name), d=stairs, class_=kind),
            tag("path", d=f"M {_RIGHT + 20} {middle} h 24", class_=kind),
            tag("text", short, x=_RIGHT + 52, y=middle + 4, class_="name"),
        ]
    high = max(_y(0) + 30, _TOP + 20 + len(found.scores) * _LANE)
    svg = tag("svg", tag("title", words), *parts, viewBox=f"0 0 1000 {high}", role="img", aria_label=words)
    return tag("div", svg, class_="picture profile wide", tabindex=0)


def _stairs(ratios: list[float], lower: float) -> str:
    path = f"M {_x(1)} {_y(profile(ratios, 1)) + lower}"
    for ratio in sorted({one for one in ratios if 1 < one <= MOST}):
        path += f" H {_x(ratio)} V {_y(profile(ratios, ratio)) + lower}"
    return f"{path} H {_RIGHT}"


def _x(tau: float) -> float:
    return round(_LEFT + (tau - 1) / (MOST - 1) * (_RIGHT - _LEFT), 2)


def _y(share: float) -> float:
    return round(_TOP + (1 - share) * _HIGH, 2)
