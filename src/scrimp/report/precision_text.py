"""The precision map in the terminal: a row per block, three letters per linear layer.

::

    precision map, planned
    block     attention.qkv  attention.out  mlp.gate_up  mlp.down
              f d w          f d w          f d w        f d w
    0         8 8 N          8 8 8          8 N N        8 8 8
    1-10      N N N          N N N          N N N        8 N N
    11        8 8 N          8 8 8          8 N N        8 8 8
    head      b b b
    N nvfp4 75.2%   8 fp8 24.8%
    shares of the linear FLOPs (counted); f fprop, d dgrad, w wgrad

Consecutive blocks with equal rows share one, so that a uniform model of 80 blocks takes one line. Letters
say everything; colours, where the terminal has them, say it again. Checked in
tests/report/test_precision_text.py: every letter is read back to the plan it was printed from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Protocol, runtime_checkable

from rich.console import Group
from rich.table import Table
from rich.text import Text

from scrimp.errors import PlanError
from scrimp.precision import GEMMS
from scrimp.report.html import cut, visible
from scrimp.report.layer_grid import Grid, Row, arrange, short_names
from scrimp.report.precision_choices import flop_shares
from scrimp.report.precision_palette import by_width, letter, terminal_style
from scrimp.report.precision_record import PlanAt, Three
from scrimp.report.units import format_percent

ROWS: Final = 120
"""Rows of one grid, at most."""
_NAME_LIMIT: Final = 48
_WIDTH: Final = 78
"""Characters in which full names of columns have to fit; else their last parts are shown."""
_GEMM_CELL: Final = 6


@runtime_checkable
class ThreeGemms(Protocol):
    """Formats of a layer's GEMMs, as a `LinearPrecision` has them."""

    @property
    def fprop(self) -> str: ...
    @property
    def dgrad(self) -> str: ...
    @property
    def wgrad(self) -> str: ...


def precision_map_text(
    layers: Mapping[str, ThreeGemms | Sequence[str] | Mapping[str, str]],
    shares: Mapping[str, float] | None = None,
    *,
    title: str = "precision map, planned",
) -> Group:
    """The map as something that rich prints.

    Args:
        layers: full name, in any module, to the recipes of fprop, dgrad and wgrad.
        shares: full name to its FLOPs, or anything proportional to them, for the shares in the legend; a
            layer that is missing counts nothing there. None: the legend counts GEMMs.

    Raises:
        PlanError: a value that does not name three recipes.
    """
    choices = {layer: three(choice, layer) for layer, choice in layers.items()}
    grids = arrange(choices)
    parts: list[Table | Text] = [Text(visible(title), style="bold")]
    named = sum(not grid.is_list for grid in grids) > 1
    for grid in grids:
        if named and not grid.is_list:
            parts.append(Text(_name(grid.prefix)))
        parts.append(_table(grid, choices))
        left_out = len(_merged(grid, choices)) - ROWS
        if left_out > 0:
            parts.append(Text(f"… {left_out:,} more rows", style="dim"))
    parts.append(_legend(choices, shares) if choices else Text("no linear layers", style="dim"))
    return Group(*parts)


def three(choice: ThreeGemms | Sequence[str] | Mapping[str, str], layer: str = "") -> Three:
    """The recipes of fprop, dgrad and wgrad, whichever way they are given."""
    if isinstance(choice, Mapping):
        names = [choice.get(gemm) for gemm in GEMMS]
    elif isinstance(choice, Sequence) and not isinstance(choice, str):
        names = list(choice)
    else:
        names = [getattr(choice, gemm, None) for gemm in GEMMS]
    if len(names) == len(GEMMS) and all(isinstance(name, str) for name in names):
        return (str(names[0]), str(names[1]), str(names[2]))
    raise PlanError(
        f"{layer or 'a layer'} has no format for each of its three GEMMs",
        got=repr(choice),
        expected="fprop, dgrad and wgrad, as a LinearPrecision, a mapping or three names",
    )


def _table(grid: Grid, choices: Mapping[str, Three]) -> Table:
    rows = _merged(grid, choices)
    first = max([len(grid.row_title), *(len(label) for label, _ in rows)])
    full = first + sum(max(_GEMM_CELL, len(name)) + 2 for name in grid.columns) <= _WIDTH
    titles = list(grid.columns) if full else short_names(grid.columns)
    gap = 2 if len(titles) <= 8 else 1
    table = Table(box=None, pad_edge=False, padding=(0, gap, 0, 0), show_header=not grid.is_list)
    table.add_column(_name(grid.row_title), style="dim", no_wrap=True, header_style="dim")
    for title in titles:
        table.add_column(_name(title), no_wrap=True, header_style="", min_width=_GEMM_CELL)
    table.add_row(grid.row_title if grid.is_list else "", *[Text("f d w", style="dim")] * len(titles))
    for label, row in rows[:ROWS]:
        table.add_row(Text(label), *[_cells(layer, choices) for layer in row.layers])
    return table


def _cells(layer: str | None, choices: Mapping[str, Three]) -> Text:
    text = Text()
    for name in choices[layer] if layer is not None else ():
        text.append(f"{letter(name)} ", style=terminal_style(name))
    return text


def _merged(grid: Grid, choices: Mapping[str, Three]) -> list[tuple[str, Row]]:
    """(label, row): consecutive blocks with the same formats as one."""
    if grid.is_list:
        return [(_name(row.label), row) for row in grid.rows]
    found: list[tuple[str, Row]] = []
    for first, last in _spans(grid.rows, choices):
        found.append((first.label if first is last else f"{first.label}-{last.label}", first))
    return found


def _spans(rows: Sequence[Row], choices: Mapping[str, Three]) -> Iterator[tuple[Row, Row]]:
    def formats(row: Row) -> list[Three | None]:
        return [choices[layer] if layer is not None else None for layer in row.layers]

    first = last = rows[0]
    for row in rows[1:]:
        if formats(row) == formats(first) and int(row.label) == int(last.label) + 1:
            last = row
            continue
        yield first, last
        first = last = row
    yield first, last


def _legend(choices: Mapping[str, Three], shares: Mapping[str, float] | None) -> Text:
    found = flop_shares(PlanAt(step=None, choices=choices), shares)
    text = Text()
    for name in by_width(name for choice in choices.values() for name in choice):
        text.append(f"{letter(name)} ", style=terminal_style(name))
        text.append(f" {_name(name)} {format_percent(found.get(name, 0.0))}   ")
    of_what = "linear FLOPs" if shares else "GEMMs"
    text.append(f"\nshares of the {of_what} (counted); f fprop, d dgrad, w wgrad", style="dim")
    return text


def _name(name: str) -> str:
    return visible(cut(name, _NAME_LIMIT)).replace("\n", " ")
