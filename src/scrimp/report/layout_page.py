"""A page of a plan for hardware that is not here: the best plans, their pictures, and why others lost.

Problem  A plan for a cluster is read by those who pay for it and by those who run it, on machines that have neither
         Scrimp nor a network.
Method   One page in the style of a run's (`page`), from the answer as JSON (`planner.layout.as_json`) and the passes of
         its best plan. It has no script; all text goes through `html.tag`; a content security policy forbids all else.
Limits   Of long steps the first micro-batches are drawn.
Checked  tests/report/test_layout_page.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from typing import Any

from scrimp.files import write_whole
from scrimp.planner.layout.pipeline_times import PlayedPass
from scrimp.planner.layout.stage_memory import CATEGORIES
from scrimp.planner.layout.stage_texts import StageText
from scrimp.report.html import Markup, escape, join, tag
from scrimp.report.layout_picture import (
    legend,
    memory_svg,
    precision_svg,
    split_svg,
    timeline_svg,
    width_of,
)
from scrimp.report.page import policy_of, resource
from scrimp.report.units import format_bytes, format_count, format_duration, format_rate

_DEGREES = ("dp", "fsdp", "tp", "pp", "cp", "ep", "etp", "virtual", "zero")


@dataclass(frozen=True, kw_only=True)
class LayoutPage:
    """What is shown."""

    answer: Mapping[str, Any]
    """As JSON has it; with `what_if` where that was asked."""
    passes: Sequence[PlayedPass]
    """Passes of the best plan."""
    shown_micro_batches: int
    """That `passes` has."""
    micro_batches: int
    """That a step has."""
    stages: Sequence[StageText]
    room: float
    """Bytes of a device."""


def write_layout_page(page: LayoutPage, path: Path) -> None:
    """Write it whole.

    Raises:
        StorageError: it cannot be written.
    """
    write_whole(path, build_layout_page(page), shared=True)


def build_layout_page(page: LayoutPage) -> str:
    """The page as text."""
    style, answer = resource("page.css") + resource("layout.css"), page.answer
    question = answer["question"]
    title = f"{format_count(question['parameters'])} parameters on {answer['hardware']['name']}"
    sections = [
        ("plans", "The best plans", _plans(answer)),
        ("timeline", "The pipeline of the first plan", _timeline(page)),
        ("memory", "Memory of the first plan", _memory(page)),
        ("precision", "Precision of the first plan", _precision(page)),
        ("why-not", "Why not", _losers(answer["losers"])),
        ("explain", "This and the best", _explain(answer["explain"]) if "explain" in answer else None),
        ("tried", "What was tried", _tried(answer["tried"]) if answer["tried"] else None),
        ("what-if", "What if", _changes(answer["what_if"]) if answer.get("what_if") else None),
        ("hardware", "Hardware", _hardware(answer["hardware"])),
    ]
    return Template(resource("layout_page.html")).substitute(
        policy=policy_of(style, ""),
        title=escape(title, 120),
        style=style,
        header=join([_facts(answer), _cards(answer)]),
        main=join(
            tag("section", tag("h2", name), body, id=slug)
            for slug, name, body in sections
            if body is not None
        ),
    )


def _facts(answer: Mapping[str, Any]) -> Markup:
    question = answer["question"]
    rows = {
        "objective": question["objective"],
        "devices": f"{answer['hardware']['devices']:,}",
        "sequence": f"{question['sequence']:,} tokens",
        "batch": f"{question['global_batch']:,} sequences",
        "precision": ", ".join(question["formats"] or [question["precision"]]),
        "software": question["software"],
        "settings tried": f"{answer['settings_tried']:,}",
        "do not fit": f"{answer['do_not_fit']:,}",
        "Scrimp": answer["scrimp"],
    }
    return tag(
        "dl",
        *[tag("div", tag("dt", name), tag("dd", str(value))) for name, value in rows.items()],
        class_="facts",
    )


def _cards(answer: Mapping[str, Any]) -> Markup:
    best, devices = answer["best"][0], answer["hardware"]["devices"]
    each = best["tokens_per_second_per_device"]
    rows = [
        ("a step", format_duration(best["step_seconds"]), layout_text(best)),
        ("all devices", format_rate(each * devices), f"{each:,.0f} tok/s each"),
        ("a day", format_count(best["tokens_per_day"]), "tokens"),
    ]
    price, tokens = best["dollars_per_billion_tokens"], answer["question"]["tokens"]
    if price is not None:
        rows.append(("a billion tokens", f"${price:,.2f}", "by the prices of the hardware files"))
    if tokens:
        dollars = f"${best['dollars']:,.0f}" if price is not None else ""
        rows.append((f"{format_count(tokens)} tokens", f"{best['days']:,.3g} days", dollars))
    cards = [
        tag("div", tag("dt", name), tag("dd", value, class_="value"), tag("dd", note, class_="note"))
        for name, value, note in rows
    ]
    return tag("dl", *cards, class_="cards")


def layout_text(plan: Mapping[str, Any]) -> str:
    """The degrees of a plan that are not 1."""
    layout = plan["layout"]
    found = [f"{name} {layout[name]}" for name in _DEGREES if name != "zero" and (layout[name] or 1) > 1]
    found += ["ulysses"] * (layout["cp"] > 1 and layout["cp_method"] == "ulysses")
    return " ".join(found + [f"zero {layout['zero']}"] * (layout["fsdp"] > 1)) or "one device"


def _plans(answer: Mapping[str, Any]) -> Markup:
    rows = [
        [
            str(number),
            layout_text(one),
            str(one["micro_batch"]),
            one["blocks_text"],
            ", ".join(name for name, is_there in one["offload"].items() if is_there) or "nothing",
            format_duration(one["step_seconds"]),
            f"{one['tokens_per_second_per_device']:,.0f}",
        ]
        for number, one in enumerate(answer["best"], start=1)
    ]
    head = ["plan", "layout", "micro-batch", "blocks", "on the host", "a step", "tok/s each"]
    seconds = [one["seconds"] for one in answer["best"]]
    return join([_table(head, rows), split_svg(seconds), legend("part", list(seconds[0]))])


def _timeline(page: LayoutPage) -> Markup:
    ranks = max(one.rank for one in page.passes) + 1
    note = (
        f"The first {page.shown_micro_batches} of {page.micro_batches} micro-batches of a step, as if it ended with "
        "them; each number is a micro-batch."
        if page.shown_micro_batches < page.micro_batches
        else f"All {page.micro_batches} micro-batches of a step, but for what comes after the last pass."
    )
    return join(
        [
            timeline_svg(page.passes, ranks),
            legend("pass", ["forward", "backward"]),
            tag("p", note, class_="note"),
        ]
    )


def _memory(page: LayoutPage) -> Markup:
    ranks = [one["peak_bytes"] for one in page.answer["best"][0]["stages"]]
    names = [name for name in CATEGORIES if name in ranks[0]]
    names += [name for name in ranks[0] if name not in names]
    rows = [
        [f"rank {rank}", *[format_bytes(one[name]) for name in names], format_bytes(sum(one.values()))]
        for rank, one in enumerate(ranks)
    ]
    return join(
        [memory_svg(ranks, page.room), legend("bytes", names), _table(["", *names, "together"], rows)]
    )


def _precision(page: LayoutPage) -> Markup:
    rows = []
    for one in page.stages:
        counts: dict[str, int] = {}
        for block in one.blocks:
            for name, count in block.recipes.items():
                counts[name] = counts.get(name, 0) + count
        does: dict[str, int] = {}
        for block in one.blocks:
            does[block.does] = does.get(block.does, 0) + 1
        blocks = f"{one.blocks[0].number} to {one.blocks[-1].number}"
        text = ", ".join(f"{count:,} in {name}" for name, count in counts.items())
        acts = ", ".join(f"{name} {count}" for name, count in does.items())
        rows.append([f"stage {one.stage}", f"rank {one.rank}", blocks, text, acts])
    widths = dict.fromkeys(width_of(block.recipe) for one in page.stages for block in one.blocks)
    head = ["", "", "blocks", "products", "what blocks make again, send away or keep whole"]
    note = (
        "All products are taken to suffer alike: there are no statistics of this model."
        if page.answer["question"]["formats"]
        else "Formats are given, not chosen."
    )
    return join(
        [
            precision_svg(page.stages),
            legend("cell", list(widths)),
            _table(head, rows),
            tag("p", note, class_="note"),
        ]
    )


def _losers(losers: Sequence[Mapping[str, Any]]) -> Markup:
    if not losers:
        return tag("p", "No other layout was tried.", class_="note")
    rows = [
        [
            " ".join(f"{key.removeprefix('layout.')} {value}" for key, value in one["with"].items()),
            layout_text(one),
            "" if one["slower"] is None else f"{one['slower']:.0%}",
            one["killed_by"],
            one["why"],
        ]
        for one in sorted(losers, key=lambda one: (one["slower"] is None, one["slower"] or 0.0))
    ]
    return _table(["with", "at best", "slower", "killed by", ""], rows)


def _explain(explain: Mapping[str, Any]) -> Markup:
    """The answer to --explain."""
    if "objections" in explain:
        words = "; ".join(explain["objections"]) or "the best plan has it"
        return tag("p", f"{explain['asked']}: {words}")
    parts = [tag("p", f"{explain['asked']}: {layout_text(explain['plan'])}")]
    for name, show in (("seconds", format_duration), ("peak_bytes", format_bytes)):
        rows = [
            [cause.replace("_", " "), show(one["best"]), show(one["other"])]
            for cause, one in explain.get(name, {}).items()
        ]
        parts.append(_table([name.replace("_", " "), "the best", explain["asked"]], rows))
    return join(parts)


def _tried(tried: Sequence[Mapping[str, Any]]) -> Markup:
    rows = [
        [
            one["name"],
            f"{one['devices']:,}",
            format_duration(one["step_seconds"]) if "step_seconds" in one else "",
            f"{one['days']:,.3g}" if "days" in one else "",
            one["note"],
        ]
        for one in tried
    ]
    return _table(["", "devices", "a step", "days", ""], rows)


def _changes(changes: Sequence[Mapping[str, Any]]) -> Markup:
    rows = [
        [
            one["change"],
            format_duration(best["step_seconds"]),
            f"{best['tokens_per_second_per_device']:,.0f}",
            layout_text(best),
        ]
        if (best := one["best"])
        else [one["change"], "", "", "none fits" if one["settings_tried"] else "none has this size"]
        for one in changes
    ]
    return _table(["change", "a step", "tok/s each", "layout"], rows)


def _hardware(hardware: Mapping[str, Any]) -> Markup:
    rows = [
        [
            f"{one['count']:,} x {one['node']}",
            f"{one['devices']} x {one['device']}",
            f"${one['price_per_hour']:,.2f}" if one["price_per_hour"] else "",
            ", ".join(dict.fromkeys(one["estimates"])) or "none",
            f"{one['node_sha256'][:12]}, {one['device_sha256'][:12]}",
        ]
        for one in hardware["nodes"]
    ]
    return _table(
        ["nodes", "devices", "an hour of a device", "estimates", "digests of node and device"], rows
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Markup:
    top = tag("tr", *[tag("th", name, scope="col") for name in head])
    body = [
        tag("tr", tag("th", row[0], scope="row"), *[tag("td", escape(cell, 400)) for cell in row[1:]])
        for row in rows
    ]
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body)), class_="wide", tabindex=0)
