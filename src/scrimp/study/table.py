"""Verdicts for the terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from scrimp.report.html import visible
from scrimp.study.page import centre_name, centre_text, dropped_text, interval_text, signed
from scrimp.study.results import FIGURES, UNITS, Outcome, Results


def verdict_table(results: Results) -> Table:
    """A row for each variant."""
    study = results.study
    title = f"{study.name}: {FIGURES[study.figure]} against {study.control}, {UNITS[study.figure]}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    centre = centre_name(results)
    for name in ("variant", "runs", centre, "difference", "interval", "verdict"):
        table.add_column(
            name, justify="right" if name in ("runs", centre, "difference") else "left", overflow="fold"
        )
    for one in results.outcomes:
        table.add_row(*[Text(visible(cell)) for cell in _cells(results, one)])
    return table


def _cells(results: Results, one: Outcome) -> list[str]:
    found = one.comparison
    failed = f"; {len(one.failures)} failed" if one.failures else ""
    dropped = f"; {dropped_text(results, one)}" if one.is_dropped else ""
    return [
        one.name,
        str(len(one.values)),
        centre_text(results, one),
        signed(found.mean) if found else "",
        interval_text(results, found),
        one.verdict + failed + dropped,
    ]
