"""The precision map on the page: layers down, GEMMs across, the colour is the format.

Problem  A plan of an 80-block model is 1,680 decisions, and a run makes many plans. All must be seen at once,
         and each must be open to a question: how much harm, what else, how sure.
Method   One table with a cell per GEMM, blocks as rows (`layer_grid`). A cell has a colour and a letter. What
         is known of the cell under the pointer or the keyboard stands in a card beside the table. The page
         holds the newest plan as plain HTML; `precision.js` steps through the others and fills the card.
         Without the script remain the newest plan, its legend, the card of the GEMM that does most harm, and
         a table of all figures.
Limits   At most `CELLS` cells are drawn; figures of single GEMMs are kept for `DETAILS` cells in all, for the
         newest plans first, so that the page stays below about a megabyte.
Checked  tests/report/test_precision_map.py; in headless Chromium by tests/report/test_precision_browser.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from scrimp.precision import GEMMS
from scrimp.report.html import Markup, cut, join, tag
from scrimp.report.layer_grid import Grid, Row, label_every, short_names
from scrimp.report.precision_cells import (
    NAME_LIMIT,
    REASON_LIMIT,
    MapData,
    cell_facts,
    described,
    payload,
    percent,
    plan_summary,
    plan_title,
)
from scrimp.report.precision_choices import UNSURE, certainty_of, flop_shares, gemm_share
from scrimp.report.precision_palette import css_class, letter
from scrimp.report.precision_record import PlanAt
from scrimp.report.units import MISSING, format_percent

_SHORT: Final = 14
"""Characters of a layer's name that fit over three cells."""
_FEW_COLUMNS: Final = 5
_VALUE_ROWS: Final = 400


def precision_map(data: MapData) -> Markup:
    """Stepper, legend, tables and card for the newest plan, with the data of all others."""
    more = f"{data.left_out:,} more layers stand in plan.json." if data.left_out else None
    return tag(
        "div",
        _stepper(data),
        _legend(data),
        tag(
            "div",
            tag("div", *[_table(grid, data) for grid in data.grids], class_="map-tables"),
            _card(data),
            class_="map-body",
        ),
        tag("p", more, class_="note") if more else None,
        _values(data),
        class_="map",
        data_precision=json.dumps(payload(data), separators=(",", ":"), ensure_ascii=False),
    )


def share_bar(names: Sequence[str], shares: Mapping[str, float], class_: str, height: int) -> Markup:
    """Shares beside each other in one bar of `height` pixels; `names` give the order."""
    parts, start = [], 0.0
    for name in names:
        span = {"x": f"{100 * start:.3f}%", "width": f"{100 * shares.get(name, 0.0):.3f}%"}
        parts.append(tag("rect", height=height, class_=css_class(name), **span))
        start += shares.get(name, 0.0)
    return tag("svg", *parts, class_=class_, height=height, width="100%", aria_hidden="true")


def _stepper(data: MapData) -> Markup:
    last = len(data.plans) - 1
    title = tag("b", plan_title(data, last), class_="map-title")
    label = tag("p", title, " ", tag("span", plan_summary(data, last), class_="map-summary"))
    if not last:
        return tag("div", label, class_="map-head")
    slider = tag(
        "input",
        type="range",
        min=0,
        max=last,
        value=last,
        step=1,
        aria_label="plan",
        aria_valuetext=plan_title(data, last),
        autocomplete="off",
    )
    # Hidden until the script shows it: without one it would do nothing.
    steps = tag(
        "div",
        tag("button", "‹", type="button", class_="earlier", aria_label="earlier plan"),
        slider,
        tag("button", "›", type="button", class_="later", aria_label="later plan", disabled=True),
        class_="map-steps",
        hidden=True,
    )
    return tag("div", steps, label, class_="map-head")


def _legend(data: MapData) -> Markup:
    shares = flop_shares(data.plans[-1], data.shares)
    of_what = "of the planned layers' linear FLOPs (counted)" if data.shares else "of the GEMMs (counted)"
    items = [
        tag(
            "li",
            tag("span", letter(name), class_=f"swatch {css_class(name)}", aria_hidden="true"),
            tag("span", cut(name, NAME_LIMIT)),
            tag("b", format_percent(shares.get(name, 0.0))),
        )
        for name in data.formats
    ]
    items.append(tag("li", of_what, class_="of"))
    if any(plan.analysis is not None for plan in data.plans):
        items.append(tag("li", tag("span", class_="swatch mark unsure"), f"less than {UNSURE:.0%} certain"))
    if len(data.plans) > 1:
        items.append(tag("li", tag("span", class_="swatch mark changed"), "changed by this plan"))
    return join([share_bar(data.formats, shares, "map-bar", 12), tag("ul", *items, class_="map-legend")])


def _table(grid: Grid, data: MapData) -> Markup:
    num_rows, many = len(grid.rows), len(grid.columns) > _FEW_COLUMNS
    size = "roomy" if num_rows <= 20 or grid.is_list else "compact" if num_rows <= 48 else "dense"
    every = 1 if grid.is_list else label_every(num_rows)
    rows = []
    for index, row in enumerate(grid.rows):
        labelled = index % every == 0 or index == num_rows - 1
        rows.append(_row(row, data, labelled=labelled, border=_begins_stage(grid, index, data.plans[-1])))
    words = ["pmap", size, "many" if many else "few"]
    table = tag("table", _head(grid, many), tag("tbody", *rows), class_=" ".join(words))
    alone = sum(not other.is_list for other in data.grids) == 1
    name = "other layers" if grid.is_list else "" if alone else grid.prefix
    heading = tag("h3", cut(name, NAME_LIMIT)) if name and len(data.grids) > 1 else None
    return join([heading, tag("div", table, class_="wide")])


def _head(grid: Grid, many: bool) -> Markup:
    longest = max(map(len, grid.columns))
    titles = grid.columns if longest <= _SHORT and not many else short_names(grid.columns)
    gemms = [tag("th", gemm[0] if many else gemm, scope="col", title=gemm) for gemm in GEMMS]
    corner = tag("th", grid.row_title, scope="col")
    second = tag("tr", corner, *gemms * len(titles))
    if grid.is_list:
        return tag("thead", second)
    columns = [tag("th", cut(title, NAME_LIMIT), scope="colgroup", colspan=3) for title in titles]
    return tag("thead", tag("tr", tag("td"), *columns), second)


def _begins_stage(grid: Grid, index: int, plan: PlanAt) -> bool:
    stages = plan.analysis.stages if plan.analysis is not None else {}
    before, here = (
        next((stages[layer] for layer in row.layers if layer is not None and layer in stages), None)
        for row in (grid.rows[max(index - 1, 0)], grid.rows[index])
    )
    return here is not None and here != before


def _row(row: Row, data: MapData, *, labelled: bool, border: bool) -> Markup:
    cells = [
        _cell(data, layer, gemm) if layer is not None else tag("td", class_="none")
        for layer in row.layers
        for gemm in GEMMS
    ]
    label = cut(row.label, NAME_LIMIT)
    name = tag("th", label if labelled else tag("span", label, class_="unseen"), scope="row")
    return tag("tr", name, *cells, class_="stage" if border else None)


def _cell(data: MapData, layer: str, gemm: str) -> Markup:
    plan = data.plans[-1]
    name, certainty = plan.recipe(layer, gemm), certainty_of(plan, layer, gemm)
    words = [css_class(name)]
    if certainty is not None and certainty < UNSURE:
        words.append("unsure")
    if len(data.plans) > 1 and data.plans[-2].recipe(layer, gemm) not in ("", name):
        words.append("changed")
    return tag("td", letter(name) if name else MISSING, class_=" ".join(words))


def _card(data: MapData) -> Markup:
    """What is known of one GEMM; the script exchanges the texts."""
    plan = data.plans[-1]
    layer, gemm = data.cells[data.most_harmful]
    rows = [("format", described(plan.recipe(layer, gemm)), "format")]
    if any(plan.analysis is not None for plan in data.plans):
        facts = cell_facts(plan, layer, gemm)
        share = gemm_share(plan.analysis, layer) if plan.analysis is not None else None
        known = facts is not None and facts.other in data.names
        rows += [
            ("harm, predicted", facts.harm if facts else MISSING, "harm"),
            ("from the loss", facts.loss or MISSING if facts else MISSING, "loss"),
            ("from the update", facts.update or MISSING if facts else MISSING, "update"),
            (
                "next best, predicted",
                f"{facts.other}: {facts.change} harm" if known and facts else MISSING,
                "other",
            ),
            ("certainty", facts.certainty or MISSING if facts else MISSING, "certainty"),
            ("share of linear FLOPs", percent(share), "flops"),
        ]
    rows.append(("reason", cut(plan.reasons.get(layer, MISSING), REASON_LIMIT), "reason"))
    pairs = [tag("div", tag("dt", title), tag("dd", text, data_field=field)) for title, text, field in rows]
    where = tag("p", tag("b", cut(layer, NAME_LIMIT)), " ", tag("span", gemm), class_="map-where")
    hint = "Point at a cell, or focus the map and use the arrow keys."
    return tag(
        "div",
        where,
        tag("dl", *pairs),
        tag("p", hint, class_="note map-hint", hidden=True),
        class_="map-card",
    )


def _values(data: MapData) -> Markup:
    """The newest plan as text, for readers who do not see the map."""
    plan = data.plans[-1]
    rows = []
    for layer in data.layers[:_VALUE_ROWS]:
        texts = [_value(plan, layer, gemm) for gemm in GEMMS]
        rows.append(
            tag("tr", tag("th", cut(layer, NAME_LIMIT), scope="row"), *[tag("td", text) for text in texts])
        )
    head = tag("tr", *[tag("th", name, scope="col") for name in ("layer", *GEMMS)])
    what = "format, harm (predicted), certainty" if plan.analysis is not None else "formats"
    left_out = len(data.layers) + data.left_out - len(rows)
    more = tag("p", f"{left_out:,} more layers stand in plan.json.", class_="note") if left_out else None
    table = tag("div", tag("table", tag("thead", head), tag("tbody", *rows)), class_="wide")
    return tag("details", tag("summary", f"Values: {what}"), table, more, class_="values")


def _value(plan: PlanAt, layer: str, gemm: str) -> str:
    facts = cell_facts(plan, layer, gemm)
    parts = [cut(plan.recipe(layer, gemm), NAME_LIMIT) or MISSING]
    parts += [part for part in (facts.harm, facts.certainty) if part] if facts is not None else []
    return " · ".join(parts)
