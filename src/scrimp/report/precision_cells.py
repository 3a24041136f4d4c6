"""What the precision map draws, as text and as data: the order of its cells, and what is known of each.

Everything is formatted here; `precision_map` makes HTML of it, `precision.js` shows it. For the script a
plan is a string with one character per cell, and one with a few short texts per cell: 1,680 GEMMs over
seven plans take about 0.4 MB. Checked in tests/report/test_precision_map.py.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any, Final

from scrimp.precision import GEMMS
from scrimp.report.html import cut, visible
from scrimp.report.layer_grid import Grid, arrange
from scrimp.report.precision_choices import (
    UNSURE,
    certainty_of,
    flop_shares,
    gemm_share,
    moves,
    next_best,
    width,
)
from scrimp.report.precision_palette import by_width, css_class, letter
from scrimp.report.precision_record import PlanAt
from scrimp.report.units import MISSING, format_number

CELLS: Final = 6_000
"""Cells that are drawn at most."""
DETAILS: Final = 12_000
"""Cells, over all plans, whose figures the page keeps: those of the newest plans."""
NAME_LIMIT: Final = 60
REASON_LIMIT: Final = 200
_REASONS: Final = 40
_CODES: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
_NO_FORMAT: Final = "-"


@dataclass(frozen=True)
class MapData:
    """What is drawn, in the same order of cells for every plan."""

    plans: Sequence[PlanAt]
    """Oldest first; at least one."""
    grids: Sequence[Grid]
    formats: Sequence[str]
    """Formats of any of the plans, narrow ones first: the legend."""
    names: Sequence[str]
    """Those, and behind them the formats that an analysis only offers."""
    shares: Mapping[str, float] | None
    """Layer to FLOPs, or None: GEMMs are counted instead."""
    left_out: int
    """Layers that are not drawn."""

    @cached_property
    def cells(self) -> list[tuple[str, str]]:
        """(layer, GEMM) in the order in which they are drawn."""
        return [(layer, gemm) for grid in self.grids for layer in grid.layers() for gemm in GEMMS]

    @property
    def layers(self) -> list[str]:
        """The layers of the cells, three cells each."""
        return [layer for layer, _ in self.cells[:: len(GEMMS)]]

    @cached_property
    def most_harmful(self) -> int:
        """The cell whose choice does most harm in the newest plan: the one that the card begins with."""
        harms = [_harm(self.plans[-1], *cell) or 0.0 for cell in self.cells]
        return harms.index(max(harms))


@dataclass(frozen=True)
class CellFacts:
    """What an analysis knows of one GEMM as texts, empty where it does not."""

    harm: str
    loss: str
    update: str
    other: str
    """The next best format."""
    change: str
    """How that format would change the harm."""
    certainty: str
    """Percent, rounded down."""


def map_data(plans: Sequence[PlanAt], shares: Mapping[str, float] | None) -> MapData:
    """Arrange the layers of all plans; the newest one gives the order."""
    layers = dict.fromkeys(layer for plan in reversed(plans) for layer in plan.choices)
    grids, room = [], CELLS // len(GEMMS)
    for grid in arrange(layers):
        rows = []
        for row in grid.rows:
            room -= sum(layer is not None for layer in row.layers)
            if room >= 0:
                rows.append(row)
        if rows:
            grids.append(Grid(grid.prefix, grid.columns, tuple(rows)))
    formats = by_width(name for plan in plans for choice in plan.choices.values() for name in choice)
    analyses = [plan.analysis for plan in plans if plan.analysis is not None]
    offered = by_width(name for one in analyses for found in one.gemms.values() for name in found.harm)
    return MapData(
        plans=plans,
        grids=grids,
        formats=formats[: len(_CODES)],
        names=list(dict.fromkeys([*formats, *offered]))[: len(_CODES)],
        shares=shares or None,
        left_out=len(layers) - sum(1 for grid in grids for _ in grid.layers()),
    )


def plan_title(data: MapData, index: int) -> str:
    """Which plan this is."""
    if len(data.plans) == 1 and data.plans[0].step is None:
        return "The plan of the run"
    label = data.plans[index].label
    place = f" ({index + 1} of {len(data.plans)})" if len(data.plans) > 1 else ""
    return f"{label[0].upper()}{label[1:]}{place}"


def plan_summary(data: MapData, index: int) -> str:
    """What it changed, how sure it is, and whose figures it has."""
    plan, parts = data.plans[index], []
    if index:
        gemms = len(GEMMS) * len(plan.choices)
        parts.append(f"{num_changed(data.plans[index - 1], plan):,} of {gemms:,} GEMMs changed")
    known = [certainty_of(plan, layer, gemm) for layer in plan.choices for gemm in GEMMS]
    sure = [certainty for certainty in known if certainty is not None]
    if sure:
        unsure = sum(certainty < UNSURE for certainty in sure)
        parts.append(f"{unsure:,} of {len(sure):,} choices less than {UNSURE:.0%} certain")
    if plan.analysis is not None and not plan.has_own_analysis:
        parts.append(f"figures of the analysis of step {plan.analysis.step:,}")
    return " · ".join(parts)


def num_changed(before: PlanAt, after: PlanAt) -> int:
    """GEMMs that have another recipe; a layer that only one of the plans has does not count."""
    return sum(
        one != other
        for layer in after.choices.keys() & before.choices.keys()
        for one, other in zip(before.choices[layer], after.choices[layer], strict=True)
    )


def cell_facts(plan: PlanAt, layer: str, gemm: str) -> CellFacts | None:
    """None where the analysis does not know the GEMM, or not its format."""
    harm = _harm(plan, layer, gemm)
    if plan.analysis is None or harm is None:
        return None
    found, name = plan.analysis.gemms[layer, gemm], plan.recipe(layer, gemm)
    other = next_best(moves(plan, layer, gemm))
    certainty = certainty_of(plan, layer, gemm)
    return CellFacts(
        harm=format_number(harm, 2),
        loss=format_number(found.loss[name], 2) if name in found.loss else "",
        update=format_number(found.update[name], 2) if name in found.update else "",
        other=other.other if other is not None else "",
        change=signed(other.change) if other is not None else "",
        certainty="" if certainty is None else f"{math.floor(100 * certainty + 1e-9)}%",
    )


def signed(change: float) -> str:
    """With two digits and a sign: +0.0031, −2.1e-5."""
    return ("−" if change < 0 else "+") + format_number(abs(change), 2)


def percent(share: float | None) -> str:
    """With two digits, however small: 0.64%, 0.0076%."""
    return MISSING if share is None else f"{format_number(100 * share, 2)}%"


def described(name: str) -> str:
    """A format with its width."""
    bits = width(name)
    return f"{name}, {bits} bit" if bits else cut(name, NAME_LIMIT) or MISSING


def _harm(plan: PlanAt, layer: str, gemm: str) -> float | None:
    found = plan.analysis.gemms.get((layer, gemm)) if plan.analysis is not None else None
    return found.harm.get(plan.recipe(layer, gemm)) if found is not None else None


def payload(data: MapData) -> dict[str, Any]:
    """Everything that the script needs, to be written as JSON."""
    room, plans = DETAILS, []
    for index in reversed(range(len(data.plans))):
        room -= len(data.cells)
        newest = index == len(data.plans) - 1
        plans.append(_plan_payload(data, index, in_full=newest or room >= 0))
    return {
        "layers": [visible(cut(layer, NAME_LIMIT)) for layer in data.layers],
        "gemms": list(GEMMS),
        "names": [visible(cut(name, NAME_LIMIT)) for name in data.names],
        "described": [visible(described(name)) for name in data.names],
        "classes": [css_class(name) for name in data.names],
        "letters": [letter(name) for name in data.names],
        "selected": data.most_harmful,
        "missing": MISSING,
        "unsure": round(100 * UNSURE),
        "plans": plans[::-1],
    }


def _plan_payload(data: MapData, index: int, *, in_full: bool) -> dict[str, Any]:
    plan = data.plans[index]
    shares = flop_shares(plan, data.shares)
    codes = dict(zip(data.names, _CODES, strict=False))
    found: dict[str, Any] = {
        "title": plan_title(data, index),
        "summary": plan_summary(data, index),
        "formats": "".join(codes.get(plan.recipe(*cell), _NO_FORMAT) for cell in data.cells),
        "shares": [round(100 * shares.get(name, 0.0), 3) for name in data.formats],
    }
    if not in_full:
        return found
    if plan.analysis is not None:
        found["facts"] = "|".join(_joined(cell_facts(plan, *cell), codes) for cell in data.cells)
        found["flops"] = [percent(gemm_share(plan.analysis, layer)) for layer in data.layers]
    texts = [visible(cut(plan.reasons.get(layer, MISSING), REASON_LIMIT)) for layer in data.layers]
    unique = list(islice(dict.fromkeys(texts), _REASONS + 1))
    if len(unique) <= _REASONS:
        found["reasons"] = unique
        found["reason"] = [unique.index(text) for text in texts]
    return found


def _joined(facts: CellFacts | None, codes: Mapping[str, str]) -> str:
    if facts is None:
        return ""
    other = codes.get(facts.other, "")
    return ";".join((facts.harm, facts.loss, facts.update, other, facts.change, facts.certainty))
