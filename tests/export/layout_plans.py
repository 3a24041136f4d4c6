"""Plans for the tests of exported layouts."""

from __future__ import annotations

from typing import Any

from scrimp.planner.layout.lines import LayoutLine, Line, setting_of
from scrimp.planner.layout.setting import Setting


def plan(model: str, ranks: int, layout: dict[str, Any], **others: Any) -> Setting:
    """A plan of sequences of 8,192 tokens."""
    given = {"sequence": 8192, "global_batch": 64, "micro_batch": 1, "hardware": f"{ranks}xh100", **others}
    return setting_of(Line(model=model, layout=LayoutLine(**layout), **given))
