"""Where the time of a step goes: each pass beside its floor, on a GPU of which there is an account.

Checked in tests/training/test_step_passes.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from scrimp.report.html import Markup, cut, tag, wide
from scrimp.report.read_run import RunRecord, mapping
from scrimp.report.units import format_duration, is_number

EVENT: Final = "step-passes"
_NAME_LIMIT: Final = 60


def step_section(run: RunRecord) -> Markup | None:
    """The table; None of a run that has no account."""
    event = next((one for one in reversed(run.events) if one.get("kind") == EVENT), None)
    rows = [] if event is None else _rows(event.get("passes"))
    if event is None or not rows:
        return None
    step, floor = (sum(one[key] for one in rows) for key in ("seconds", "floor"))
    measured = event.get("measured_seconds")
    words = f"Measured: {format_duration(measured)} a step. " if is_number(measured) else ""
    words += (
        f"Predicted for {event.get('card')}: {format_duration(step)}, of which {format_duration(step - floor)} lie "
        "above the same step with every pass fused as far as it goes, which reads and writes each number once."
    )
    shown = [*rows, {"name": "all", "seconds": step, "floor": floor}]
    names = ("predicted", "floor", "above", "of the step")
    head = tag("tr", tag("td"), *[tag("th", name, scope="col", class_="num") for name in names])
    table = tag(
        "table", tag("thead", head), tag("tbody", *[_row(one, step) for one in shown]), class_="figures"
    )
    return tag("div", tag("p", cut(words, 400), class_="note"), wide(table))


def _rows(passes: object) -> list[dict[str, Any]]:
    """Rows that can be shown, of a record that may be damaged."""
    found = (
        [mapping(one) for one in passes]
        if isinstance(passes, Sequence) and not isinstance(passes, str)
        else []
    )
    return [dict(one) for one in found if is_number(one.get("seconds")) and is_number(one.get("floor"))]


def _row(one: dict[str, Any], step: float) -> Markup:
    above = one["seconds"] - one["floor"]
    share = f"{above / step:+.1%}" if step else ""
    cells = [format_duration(one["seconds"]), format_duration(one["floor"]), format_duration(above), share]
    name = tag("th", cut(str(one.get("name")), _NAME_LIMIT), scope="row")
    return tag("tr", name, *[tag("td", cell, class_="num") for cell in cells])
