"""The plan on the page: formats per block and GEMM, places of the states, predicted beside measured.

Consecutive blocks with the same decisions share a row, and layers with the same reason share a
sentence, so that a uniform plan of 80 blocks takes three lines and a mixed one shows where it
changes. Read from the JSON as it is, not through `Plan.read`: an older or damaged plan still
gets shown as far as it goes. Checked in tests/report/test_page.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

import numpy as np

from scrimp.precision import RECIPES, RECOMPUTE
from scrimp.report.html import Markup, cut, tag, wide
from scrimp.report.read_run import RunRecord, mapping
from scrimp.report.units import (
    MISSING,
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    is_number,
)

GEMMS: Final = ("fprop", "dgrad", "wgrad")
STATES: Final = ("weights", "gradients", "optimizer")
_STEP: Final = "counted_in_step"
_COLOURS: Final = {32: "fp32", 16: "bf16", 8: "fp8", 4: "fp4"}
_ROW_LIMIT: Final = 400
_NAME_LIMIT: Final = 60
_LABELS: Final = {
    "peak_device_bytes": "tensors on the device, peak",
    "peak_host_bytes": "tensors on the host, peak",
    "process_peak_bytes": "process, peak resident set",
    "process_growth_bytes": "process, growth since the model was built",
    "step_seconds": "time per step",
    "loss_divergence": "loss divergence",
    "weight_divergence": "weight divergence",
}


def plan_section(run: RunRecord) -> Markup | None:
    """The whole section, or None without a plan."""
    if not run.plan:
        return None
    return tag(
        "div",
        _figures(run),
        _decisions(run.plan),
        _reasons(run.plan),
        _limits(run.plan),
    )


def _figures(run: RunRecord) -> Markup:
    predicted, measured = mapping(run.plan.get("predicted")), mapping(run.plan.get("measured"))
    rows = []
    for key in dict.fromkeys([*_LABELS, *predicted, *measured]):
        if key == _STEP:
            continue
        guess, fact = predicted.get(key), measured.get(key)
        if not is_number(fact):
            fact = _from_metrics(run, key)
        if not is_number(guess) and not is_number(fact):
            continue
        error = fact / guess - 1 if is_number(guess) and is_number(fact) and guess else None
        change = f"{error:+.1%}" if error is not None else MISSING
        cells = [figure(key, guess), figure(key, fact), change]
        name = tag("th", _label_of(key, measured), scope="row")
        rows.append(tag("tr", name, *[tag("td", cell, class_="num") for cell in cells]))
    if not rows:
        return tag("p", "The plan predicts no figures.", class_="note")
    names = ("predicted", "measured", "difference")
    head = tag("tr", tag("td"), *[tag("th", name, scope="col", class_="num") for name in names])
    return wide(tag("table", tag("thead", head), tag("tbody", *rows), class_="figures"))


def _label_of(key: str, measured: Mapping[str, Any]) -> str:
    """What a figure is; of tensors that were counted, in which step."""
    step = measured.get(_STEP)
    if key == "peak_device_bytes" and is_number(step):
        return f"{_LABELS[key]} (counted in step {step:,})"
    return _LABELS.get(key, cut(key, _NAME_LIMIT))


def figure(key: str, value: object) -> str:
    """A figure with the unit that its name ends in."""
    if not is_number(value):
        return MISSING
    if key.endswith(("_bytes", "_memory")) and key != "saved_bytes":
        return format_bytes(value)
    if key.endswith(("_seconds", "_s")):
        return format_duration(value)
    is_share = key.endswith("_flops") or key == "saved_bytes"
    return format_percent(value) if is_share and value <= 1 else format_number(value)


def _from_metrics(run: RunRecord, key: str) -> float | None:
    """What the step records measured, where the plan has no measurement yet."""
    column = {"step_seconds": "step_s", "peak_device_bytes": "tensor_peak_bytes"}.get(key, key)
    if column not in ("step_s", "tensor_peak_bytes", "process_peak_bytes", "process_growth_bytes"):
        return None
    values = run.recorded(column)[1]
    if not values.size:
        return None
    return float(np.median(values) if column == "step_s" else values.max())


def _decisions(plan: Mapping[str, Any]) -> Markup | None:
    gemms, blocks, states = (mapping(plan.get(key)) for key in ("gemms", "blocks", "states"))
    layers = _layers_by_block(gemms)
    columns = list(dict.fromkeys(name for row in layers.values() for name in row if name))
    names = _ordered([*layers, *blocks, *states])
    if not names:
        return None
    cells = {name: _row(name, columns, layers, blocks, states) for name in names}
    rows = []
    for first, last in _runs_of_equal(names, cells):
        label = f"blocks {first} to {last}" if first != last else _block_label(first)
        rows.append(tag("tr", tag("th", label, scope="row"), *cells[first]))
    left_out = len(rows) - _ROW_LIMIT
    titles = [*columns, "activations", *STATES]
    if any("" in row for row in layers.values()):
        titles = ["GEMMs", *titles] if not columns else titles
    head = tag("tr", tag("td"), *[tag("th", cut(title, _NAME_LIMIT), scope="col") for title in titles])
    table = tag("table", tag("thead", head), tag("tbody", *rows[:_ROW_LIMIT]), class_="plan")
    note = (
        "Formats of the GEMMs in the order fprop · dgrad · wgrad, one name where all three agree; "
        "then what happens to the activations, and where the states live."
    )
    more = tag("p", f"{left_out:,} more rows stand in plan.json.", class_="note") if left_out > 0 else None
    return tag("div", tag("h3", "Decisions"), wide(table), tag("p", note, class_="note"), more)


def _layers_by_block(gemms: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Block number to layer name to choice; what is in no block (the head) has the layer name ''."""
    layers: dict[str, dict[str, Any]] = {}
    for layer, choice in gemms.items():
        parts = layer.split(".", 2)
        inside = len(parts) == 3 and parts[0] == "blocks"
        block, name = (parts[1], parts[2]) if inside else (layer, "")
        layers.setdefault(block, {})[name] = choice
    return layers


def _ordered(names: Iterable[str]) -> list[str]:
    unique = dict.fromkeys(names)
    numbers = sorted((name for name in unique if _is_block(name)), key=int)
    return [*numbers, *(name for name in unique if not _is_block(name))]


def _is_block(name: str) -> bool:
    return name.isdecimal() and name.isascii() and len(name) < 7


def _block_label(name: str) -> str:
    return f"block {name}" if _is_block(name) else cut(name, _NAME_LIMIT)


def _row(
    name: str,
    columns: Sequence[str],
    layers: Mapping[str, Mapping[str, Any]],
    blocks: Mapping[str, Any],
    states: Mapping[str, Any],
) -> list[Markup]:
    row = layers.get(name, {})
    if "" in row and columns:
        cells = [tag("td", formats(row[""]), colspan=len(columns))]
    else:
        cells = [tag("td", formats(row.get(column))) for column in columns]
    places = [mapping(blocks.get(name)).get("activations")]
    places += [mapping(states.get(name)).get(state) for state in STATES]
    return [*cells, *[tag("td", MISSING if place is None else str(place)[:40]) for place in places]]


def formats(choice: object) -> Markup:
    """One label where the three GEMMs agree, else three in the order fprop, dgrad, wgrad."""
    if not mapping(choice):
        return tag("span", MISSING)
    names = [str(mapping(choice).get(gemm, MISSING))[:16] for gemm in GEMMS]
    saved = mapping(choice).get("saved")
    if len(set(names)) == 1:
        labels = [_label(names[0], "fprop, dgrad and wgrad")]
    else:
        labels = [_label(name, gemm) for name, gemm in zip(names, GEMMS, strict=True)]
    if saved == RECOMPUTE:
        labels.append(tag("span", "recomputes its input", class_="saved"))
    elif saved is not None and any(saved != name for name in names):
        labels.append(tag("span", f"saves {str(saved)[:16]}", class_="saved"))
    return tag("span", *labels, class_="formats")


def _label(name: str, title: str) -> Markup:
    # A recipe has the colour of its width.
    known = _COLOURS[RECIPES[name].bits] if name in RECIPES else "fp16" if name == "fp16" else "other"
    return tag("span", name, class_=f"fmt {known}", title=title)


def _runs_of_equal(names: Sequence[str], cells: Mapping[str, Sequence[Markup]]) -> list[tuple[str, str]]:
    """First and last name of each row: consecutive blocks with equal cells share one."""
    starts = [0]
    for index, (before, name) in enumerate(pairwise(names), start=1):
        adjacent = _is_block(before) and _is_block(name) and int(name) == int(before) + 1
        if not (adjacent and cells[before] == cells[name]):
            starts.append(index)
    return [(names[start], names[stop - 1]) for start, stop in pairwise([*starts, len(names)])]


def _reasons(plan: Mapping[str, Any]) -> Markup | None:
    titles = {"gemms": "Formats", "blocks": "Activations", "states": "States"}
    items = []
    for section, title in titles.items():
        by_reason: dict[str, list[str]] = {}
        for name, choice in mapping(plan.get(section)).items():
            reason = mapping(choice).get("reason")
            if reason:
                by_reason.setdefault(cut(reason, 500), []).append(name)
        for reason, names in list(by_reason.items())[:40]:
            total = len(mapping(plan.get(section)))
            whom = "all" if len(names) == total else _some(names, total)
            items.append(tag("li", tag("b", f"{title}, {whom}: "), reason))
    return tag("div", tag("h3", "Reasons"), tag("ul", *items, class_="reasons")) if items else None


def _some(names: Sequence[str], total: int) -> str:
    if len(names) > 4:
        return f"{len(names):,} of {total:,}"
    return ", ".join(_block_label(name) for name in names)


def _limits(plan: Mapping[str, Any]) -> Markup | None:
    layout = mapping(plan.get("layout"))
    parts = []
    spent = [f"{key} {figure(key, value)}" for key, value in mapping(plan.get("budget")).items()]
    budget = cut(", ".join(spent), 300)
    parts.append(f"Budget: {budget or 'what the machine has free'}.")
    degrees = ", ".join(f"{key} {value}" for key, value in layout.items() if key != "stages")
    if degrees:
        parts.append(f"Layout: {cut(degrees, 300)}.")
    return tag("p", " ".join(parts), class_="note")
