"""The section around the precision map: figures, the nearest choices, all plans, the history of re-plans.

Every figure says whether it is predicted, measured or counted. Checked in
tests/report/test_precision_section.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, Final

from scrimp.config import base_architecture, load_config
from scrimp.config.snip import keeps_budget
from scrimp.errors import ScrimpError
from scrimp.models import place, spec_of
from scrimp.report.html import Markup, cut, join, tag, wide
from scrimp.report.precision_cells import map_data, num_changed, percent, signed
from scrimp.report.precision_choices import Direction, Move, flop_shares, nearest, total_harm
from scrimp.report.precision_map import precision_map, share_bar
from scrimp.report.precision_record import Analysis, PlanAt, timeline
from scrimp.report.read_run import RunRecord
from scrimp.report.sections import extra_fields, some_of_each_kind
from scrimp.report.units import (
    MISSING,
    format_duration,
    format_integer,
    format_number,
    format_percent,
    is_number,
)

EVENTS: Final = ("replan", "promotion", "probe", "device")
_OF_PLANS: Final = ("replan", "promotion")
MOVES_SHOWN: Final = 8
_UNTOLD: Final = "a plan was left in plans/, without an event"
_NAME_LIMIT: Final = 60
_TEXT_LIMIT: Final = 600
_LABELS: Final = {
    "fp4_flops": "linear FLOPs in 4 bit",
    "saved_bytes": "inputs kept for backward, of their bytes in bf16",
    "loss_divergence": "loss divergence",
    "weight_divergence": "weight divergence",
    "step_seconds": "time per step",
    "divergence": "divergence, share of the lowest format's",
}


def precision_section(run: RunRecord) -> Markup | None:
    """The whole section, or None without a plan for any layer."""
    plans = timeline(run.plan, run.plans)
    if not plans:
        return None
    data = map_data(plans, _layer_shares(run, plans[-1]))
    analysed = [plan for plan in plans if plan.has_own_analysis]
    return join(
        [
            tag("p", _introduction(plans[-1]), class_="note"),
            precision_map(data),
            _figures(plans[-1].analysis),
            _moves_table(plans[-1]),
            _plans_table(analysed, data.formats, data.shares),
            _history(run, plans),
        ]
    )


def _introduction(plan: PlanAt) -> str:
    text = (
        "A cell is one GEMM of a linear layer: fprop makes its output, dgrad the gradient of its input, "
        "wgrad that of its weight. The colour is the format that it runs in."
    )
    if plan.analysis is not None:
        text += (
            " Harm is predicted: the variance that a choice adds to the loss, plus that which it adds to the "
            "update, each as a share of what the lowest format everywhere would add. Harms of GEMMs add up."
        )
    return text


def _layer_shares(run: RunRecord, plan: PlanAt) -> dict[str, float] | None:
    """Layer to its FLOPs, or to a share of them: of the analysis, else counted from the configuration."""
    if plan.analysis is not None:
        return dict(plan.analysis.shares)
    try:
        config = load_config(run.folder / "config.toml")
        if config.model.weights is not None:
            return None
        shapes = spec_of(base_architecture(config, None)).shapes
    except ScrimpError:  # an older or a damaged configuration: GEMMs are counted instead
        return None
    places = {layer: place(layer) for layer in plan.choices}
    kinds = {layer: kind for layer, (block, kind) in places.items() if block is not None}
    if any(kind not in shapes for kind in kinds.values()):
        return None
    return {layer: float(shapes[kind].parameters) for layer, kind in kinds.items()}


# -- predicted and measured -------------------------------------------------------------------------


def figure(key: str, value: float | None) -> str:
    """A figure with the unit that its name ends in; a share of FLOPs or bytes in percent."""
    if value is None:
        return MISSING
    if key.endswith("_seconds"):
        return format_duration(value)
    is_share = key.endswith("_flops") or key == "saved_bytes"
    return format_percent(value) if is_share and 0 <= value <= 1 else format_number(value, 3)


def _figures(analysis: Analysis | None) -> Markup | None:
    if analysis is None:
        return None
    rows = []
    for key in dict.fromkeys([*_LABELS, *analysis.budget, *analysis.predicted, *analysis.measured]):
        values = [part.get(key) for part in (analysis.budget, analysis.predicted, analysis.measured)]
        if any(value is not None for value in values):
            cells = [tag("td", figure(key, value), class_="num") for value in values]
            cells.append(tag("td", _difference(*values[1:]), class_="num"))
            rows.append(tag("tr", tag("th", _LABELS.get(key, cut(key, _NAME_LIMIT)), scope="row"), *cells))
    names = ("budget", "predicted", "measured", "difference")
    head = tag("tr", tag("td"), *[tag("th", name, scope="col", class_="num") for name in names])
    missing = "" if analysis.measured else " Not measured yet: the plan's own effect shows a few steps later."
    return join(
        [
            tag("h3", f"Predicted and measured, analysis of step {analysis.step:,}"),
            _facts(analysis),
            wide(tag("table", tag("thead", head), tag("tbody", *rows), class_="figures")) if rows else None,
            tag("p", missing.strip(), class_="note") if missing else None,
        ]
    )


def _difference(predicted: float | None, measured: float | None) -> str:
    if predicted is None or measured is None or not predicted:
        return MISSING
    return f"{measured / predicted - 1:+.1%}"


def _facts(analysis: Analysis) -> Markup:
    seconds = [
        f"{format_duration(analysis.seconds[key])} {words}"
        for key, words in (("measure", "measuring"), ("solve", "solving"), ("stall", "training stood still"))
        if key in analysis.seconds
    ]
    solver = analysis.solver or MISSING
    if analysis.gap is not None:
        solver += f", gap {format_percent(analysis.gap, 2)}"
    without_budget = "" if analysis.budget or keeps_budget(analysis.policy) else "which keeps no budget"
    unit = {"gemm": "per GEMM", "layer": "per layer"}.get(analysis.granularity, analysis.granularity)
    pairs = [
        ("policy", ", ".join(part for part in (analysis.policy, unit, without_budget) if part)),
        ("formats offered", ", ".join(analysis.formats)),
        ("statistics of step", format_integer(analysis.measured_at) if analysis.measured_at else ""),
        (
            "certainty (resampled)",
            format_percent(analysis.certainty) if analysis.certainty is not None else "",
        ),
        ("95% interval (predicted)", _intervals(analysis)),
        ("solver", f"{solver}: {analysis.solver_note}" if analysis.solver_note else solver),
        ("time (measured)", ", ".join(seconds)),
    ]
    items = [tag("div", tag("dt", name), tag("dd", cut(text, _TEXT_LIMIT))) for name, text in pairs if text]
    return tag("dl", *items, class_="facts")


def _intervals(analysis: Analysis) -> str:
    """How far the predictions may be off, by the batches that were measured."""
    if analysis.batches == 1:
        return "none: one batch was measured"
    parts = [
        f"{_LABELS.get(key, cut(key, _NAME_LIMIT))} {format_number(low, 2)} to {format_number(high, 2)}"
        for key, (low, high) in analysis.intervals.items()
    ]
    return f"{', '.join(parts)}, from {analysis.batches or 'several'} batches" if parts else ""


# -- the nearest choices ----------------------------------------------------------------------------


def _moves_table(plan: PlanAt) -> Markup | None:
    if plan.analysis is None:
        return None
    titles: tuple[tuple[Direction, str], ...] = (
        ("promotion", "Promotions that would save most harm for their FLOPs"),
        ("demotion", "Demotions that would cost least harm for their FLOPs"),
        ("swap", "Other formats of the same width that would change least"),
    )
    bodies = []
    for direction, title in titles:
        moves = nearest(plan, direction, MOVES_SHOWN)
        if moves:
            group = tag("tr", tag("th", title, scope="colgroup", colspan=8), class_="group")
            bodies.append(tag("tbody", group, *[_move_row(move) for move in moves]))
    if not bodies:
        return None
    names = (
        "layer",
        "GEMM",
        "now",
        "next best",
        "harm now → then",
        "change",
        "linear FLOPs",
        "per 1% of FLOPs",
    )
    head = tag(
        "tr",
        *[
            tag("th", name, scope="col", class_="num" if place > 3 else None)
            for place, name in enumerate(names)
        ],
    )
    note = (
        f"Harms are predicted, shares of FLOPs counted. One move at a time; the sum over all GEMMs is "
        f"{format_number(total_harm(plan), 3)} (predicted)."
    )
    return join(
        [
            tag("h3", "Nearest choices"),
            wide(tag("table", tag("thead", head), *bodies, class_="moves")),
            tag("p", note, class_="note"),
        ]
    )


def _move_row(move: Move) -> Markup:
    rate = signed(move.rate) if move.share else MISSING
    harms = f"{format_number(move.harm_now, 2)} → {format_number(move.harm_other, 2)}"
    numbers = (harms, signed(move.change), percent(move.share), rate)
    return tag(
        "tr",
        tag("th", cut(move.layer, _NAME_LIMIT), scope="row"),
        *[tag("td", cut(text, _NAME_LIMIT)) for text in (move.gemm, move.now, move.other)],
        *[tag("td", text, class_="num") for text in numbers],
    )


# -- all plans, and why they changed ----------------------------------------------------------------


def _plans_table(
    plans: Sequence[PlanAt], formats: Sequence[str], shares: Mapping[str, float] | None
) -> Markup | None:
    if len(plans) < 2:
        return None
    rows = []
    for plan in plans:
        analysis = plan.analysis
        if analysis is None:
            continue
        cells = [tag("td", share_bar(formats, flop_shares(plan, shares), "bar", 12))]
        cells.append(_number_cell(figure("fp4_flops", analysis.predicted.get("fp4_flops"))))
        cells.append(_number_cell(figure("saved_bytes", analysis.predicted.get("saved_bytes"))))
        cells.append(_number_cell(format_number(total_harm(plan), 3)))
        for key in ("loss_divergence", "weight_divergence"):
            both = (figure(key, part.get(key)) for part in (analysis.predicted, analysis.measured))
            cells.append(_number_cell(" / ".join(both)))
        cells.append(_number_cell(format_percent(analysis.certainty)))
        cells.append(_number_cell(format_percent(analysis.gap, 2)))
        rows.append(tag("tr", tag("th", format_integer(plan.step), scope="row", class_="num"), *cells))
    names = (
        "step", "formats", "4-bit FLOPs", "inputs kept", "harm", "loss divergence", "weight divergence", "certainty",
        "solver gap",
    )  # fmt: skip
    head = tag(
        "tr", *[tag("th", name, scope="col", class_=None if name == "formats" else "num") for name in names]
    )
    note = (
        "4-bit FLOPs, inputs kept for backward (of their bytes in bf16) and harm are predicted; "
        "divergences are predicted / measured."
    )
    return join(
        [
            tag("h3", "All analysed plans"),
            wide(tag("table", tag("thead", head), tag("tbody", *rows), class_="plans")),
            tag("p", note, class_="note"),
        ]
    )


def _number_cell(text: str) -> Markup:
    return tag("td", text, class_="num")


def _history(run: RunRecord, plans: Sequence[PlanAt]) -> Markup | None:
    events = run.events_of(*EVENTS)
    shown = some_of_each_kind(events)
    changes = {after.step: num_changed(before, after) for before, after in pairwise(plans)}
    rows = [(_step(event), _event_row(event, changes)) for event in shown]
    told = {_step(event) for event in events if event.get("kind") in _OF_PLANS}
    kept = {plan.step: plan for plan in plans if plan.step is not None}
    for step, plan in kept.items():
        if step not in told:
            is_start = step == min(kept) and plan.analysis is None
            words = "the formats before the first plan" if is_start else _UNTOLD
            rows.append((step, _row(step, "plan", words, "", changes.get(step))))
    if not rows:
        return None
    rows.sort(key=lambda row: row[0])
    names = ("step", "event", "what happened", "why", "GEMMs changed")
    head = tag(
        "tr", *[tag("th", name, scope="col", class_="num" if name == names[-1] else None) for name in names]
    )
    left_out = len(events) - len(shown)
    more = tag("p", f"{left_out:,} more events stand in events.jsonl.", class_="note") if left_out else None
    table = tag("table", tag("thead", head), tag("tbody", *[row for _, row in rows]), class_="events history")
    return join([tag("h3", "History of re-plans"), wide(table), more])


def _step(event: Mapping[str, Any]) -> float:
    step = event.get("step")
    return step if is_number(step) else -1


def _event_row(event: Mapping[str, Any], changes: Mapping[int | None, int]) -> Markup:
    kind, step = str(event.get("kind")), event.get("step")
    sentence, reason = event.get("sentence"), event.get("reason")
    what, why = (sentence, reason) if sentence else (reason, "")
    said = event.get("changed")
    changed = said if is_number(said) else changes.get(int(_step(event))) if kind in _OF_PLANS else None
    extra = extra_fields(event, ("sentence", "changed"))
    return _row(step, kind, what or "", why or "", changed, extra)


def _row(
    step: object, kind: str, what: object, why: object, changed: float | None, extra: Markup | None = None
) -> Markup:
    loud = "kind loud" if kind == "promotion" else "kind"
    return tag(
        "tr",
        tag("td", format_integer(step) if is_number(step) else MISSING, class_="num"),
        tag("td", tag("span", kind, class_=loud)),
        tag("td", cut(what, _TEXT_LIMIT), " ", extra),
        tag("td", cut(why, _TEXT_LIMIT)),
        tag("td", format_integer(changed), class_="num"),
    )
