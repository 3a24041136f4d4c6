"""Two small tables for the terminal: bytes by category with a bar, and names with values.

All text goes in as it is: a name with square brackets is not taken for rich's markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from scrimp.report.html import visible
from scrimp.report.units import format_bytes, format_percent

_BAR_CELLS: Final = 24
_EIGHTHS: Final = " ▏▎▍▌▋▊▉█"


def account_table(rows: Sequence[tuple[str, int]], title: str) -> Table:
    """Bytes by category: amount, share of the sum, and a bar; the sum last."""
    table = Table(title=_text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    table.add_column("category")
    table.add_column("bytes", justify="right")
    table.add_column("share", justify="right")
    table.add_column("", no_wrap=True, min_width=_BAR_CELLS)
    total = sum(count for _, count in rows)
    for name, count in rows:
        share = count / total if total else 0.0
        table.add_row(_text(name), format_bytes(count), format_percent(share), Text(bar(share), style="cyan"))
    table.add_section()
    table.add_row(_text("total"), format_bytes(total), "", "")
    return table


def key_value_table(rows: Sequence[tuple[str, str]], title: str) -> Table:
    """Names on the left, values on the right."""
    table = Table(
        title=_text(title), title_justify="left", box=SIMPLE_HEAD, pad_edge=False, show_header=False
    )
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in rows:
        table.add_row(_text(name), _text(value))
    return table


def bar(share: float, cells: int = _BAR_CELLS) -> str:
    """`share` of a bar, to an eighth of a character; anything above zero leaves a mark."""
    eighths = round(min(max(share, 0.0), 1.0) * cells * 8)
    if share > 0:
        eighths = max(eighths, 1)
    whole, rest = divmod(eighths, 8)
    return "█" * whole + (_EIGHTHS[rest] if rest else "")


def _text(value: object) -> Text:
    return Text(visible(str(value)))
