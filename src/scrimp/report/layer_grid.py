"""Names of layers as grids: blocks down, the linear layers of a block across.

Problem  A model of 80 blocks has 560 linear layers. As a list nobody reads them; as a grid a pattern over
         depth or over kinds of layers is seen at once. Layers may have any names.
Method   A name with a number in it (``blocks.3.mlp.down``) is a place in a grid: what stands before the
         number names the grid, the number the row, the rest the column. A grid that would be wider than
         `MAX_COLUMNS` (experts: ``blocks.3.experts.17.up``) is split at the last number instead. What has
         no place in a grid (``head``, the layers of an nn.Sequential) is a row by its own name.
Limits   Only decimal numbers between dots count.
Checked  tests/report/test_layer_grid.py: every layer is in exactly one place, and its name can be rebuilt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

MAX_COLUMNS: Final = 16
"""Linear layers beside each other, three GEMMs each."""
ITSELF: Final = "(the module itself)"
"""The label of the layer without a name: a module that is a linear layer."""
_DIGITS: Final = 7


@dataclass(frozen=True)
class Row:
    """One block, or one layer that is in none."""

    label: str
    layers: tuple[str | None, ...]
    """Full names in the order of the grid's columns; None where this block has no such layer."""


@dataclass(frozen=True)
class Grid:
    """Blocks with the same name before their number; or, with an empty `columns` name, single layers."""

    prefix: str
    columns: tuple[str, ...]
    rows: tuple[Row, ...]

    @property
    def is_list(self) -> bool:
        """Single layers, a row each."""
        return self.columns == ("",)

    @property
    def row_title(self) -> str:
        """What a row is: a block, a layer, an expert; by what stands before the number."""
        if self.is_list:
            return "layer"
        last = self.prefix.rpartition(".")[2]
        return last.removesuffix("s")[:12] or "block"

    def layers(self) -> Iterator[str]:
        """Full names, row by row."""
        return (layer for row in self.rows for layer in row.layers if layer is not None)


def arrange(names: Iterable[str]) -> list[Grid]:
    """All layers in grids: in the order of first appearance, rows by number, single layers last."""
    placed: dict[str, dict[int, dict[str, str]]] = {}
    single: list[str] = []
    for name in dict.fromkeys(names):
        _put(placed, single, name, _split(name, last=False))
    for prefix in [prefix for prefix, rows in placed.items() if len(_columns(rows)) > MAX_COLUMNS]:
        for name in [name for row in placed.pop(prefix).values() for name in row.values()]:
            _put(placed, single, name, _split(name, last=True))
    too_wide = [prefix for prefix, rows in placed.items() if len(_columns(rows)) > MAX_COLUMNS]
    for prefix in too_wide:
        single += [name for row in placed.pop(prefix).values() for name in row.values()]
    grids = [_grid(prefix, rows) for prefix, rows in placed.items()]
    if single:
        grids.append(Grid("", ("",), tuple(Row(name or ITSELF, (name,)) for name in single)))
    return grids


def short_names(columns: Iterable[str]) -> list[str]:
    """The last parts of dotted names where they tell the names apart, else the names as they are."""
    names = list(columns)
    last = [name.rpartition(".")[2] for name in names]
    return last if len(set(last)) == len(names) else names


def label_every(rows: int) -> int:
    """Which rows of a grid are labelled so that labels do not touch: every 1st, 4th, 5th, 10th or 20th."""
    return next((every for most, every in ((20, 1), (48, 4), (100, 5), (200, 10)) if rows <= most), 20)


def _put(
    placed: dict[str, dict[int, dict[str, str]]],
    single: list[str],
    name: str,
    place: tuple[str, int, str] | None,
) -> None:
    if place is None:
        single.append(name)
        return
    prefix, number, column = place
    row = placed.setdefault(prefix, {}).setdefault(number, {})
    # blocks.3.up and blocks.03.up would share a place.
    if column in row:
        single.append(name)
    else:
        row[column] = name


def _split(name: str, *, last: bool) -> tuple[str, int, str] | None:
    """(before the number, number, after it); None where nothing stands after a number."""
    parts = name.split(".")
    inside = [index for index, part in enumerate(parts[:-1]) if _is_number(part) and any(parts[index + 1 :])]
    if not inside:
        return None
    place = inside[-1 if last else 0]
    return ".".join(parts[:place]), int(parts[place]), ".".join(parts[place + 1 :])


def _is_number(part: str) -> bool:
    return part.isascii() and part.isdecimal() and len(part) <= _DIGITS


def _columns(rows: dict[int, dict[str, str]]) -> list[str]:
    return list(dict.fromkeys(column for row in rows.values() for column in row))


def _grid(prefix: str, rows: dict[int, dict[str, str]]) -> Grid:
    columns = _columns(rows)
    return Grid(
        prefix,
        tuple(columns),
        tuple(
            Row(str(number), tuple(rows[number].get(column) for column in columns)) for number in sorted(rows)
        ),
    )
