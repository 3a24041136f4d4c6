"""The text parts of the page: key figures, configuration, events, samples, environment.

What is cut says so: events are limited per kind (the first and the last of each), samples to
the newest, texts to a number of characters. Checked in tests/report/test_page.py.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from scrimp.report.html import Markup, cut, escape, join, tag, wide
from scrimp.report.read_run import RunRecord, mapping
from scrimp.report.step_section import EVENT as STEP_PASSES
from scrimp.report.summary import Summary
from scrimp.report.units import (
    MISSING,
    format_bytes,
    format_count,
    format_duration,
    format_integer,
    format_number,
    format_percent,
    format_rate,
    is_number,
)

SAMPLES_SHOWN: Final = 6
SAMPLE_CHARACTERS: Final = 6_000
EVENTS_PER_KIND: Final = 30
_VALUE_CHARACTERS: Final = 600
_NAME_CHARACTERS: Final = 60
_KNOWN_FIELDS: Final = frozenset({"kind", "step", "time", "reason", "prompt", "text"})
_CONFIG_LINE: Final = re.compile(r"""^\s*([A-Za-z0-9_-]+|"[^"]*"|'[^']*')\s*=\s*(.*)$""")
_COMMENT: Final = re.compile(r"""^((?:[^#"']|"(?:\\.|[^"\\])*"|'[^']*')*)#(.*)$""")


def facts(run: RunRecord, summary: Summary) -> Markup:
    """One line under the title: what was trained, on what, how far."""
    model = run.setting("model.weights") or run.setting("model.preset")
    parameters = summary.parameters
    device = mapping(run.plan.get("fingerprint")).get("device") or run.setting("device")
    planned = f" of {summary.planned_steps:,}" if summary.planned_steps is not None else ""
    items = [
        ("model", model),
        ("parameters", f"{format_count(parameters)} (counted)" if is_number(parameters) else None),
        ("device", run.start_field("device") or device),
        ("precision", _rules(run.setting("precision"))),
        ("steps", f"{summary.last_step:,}{planned}" if run.num_steps else "none recorded"),
        ("tokens", format_count(summary.tokens) if summary.tokens is not None else None),
        ("time in steps", f"{format_duration(summary.seconds)} (measured)" if summary.seconds else None),
    ]
    pairs = [
        tag("div", tag("dt", name), tag("dd", escape(value, 200)))
        for name, value in items
        if value is not None
    ]
    return tag("dl", *pairs, class_="facts")


def _rules(precision: object) -> str | None:
    """Rules with a space behind each comma, where a line may break."""
    return None if precision is None else ", ".join(part.strip() for part in str(precision).split(","))


def key_figures(summary: Summary) -> Markup:
    """The large numbers. All are measured."""
    s = summary
    mean = f"last step; mean of the last {s.loss_mean_steps:,}: {format_number(s.loss_mean)}"
    at = f"at step {s.eval_step:,}" if s.eval_step is not None else "not evaluated yet"
    full = f"causal form; full form {format_percent(s.mfu_full)}" if s.mfu_full is not None else "causal form"
    cards = [
        ("training loss", format_number(s.loss), mean if s.loss is not None else "last step"),
        ("held-out loss", format_number(s.eval_loss), at),
        ("bits per byte", format_number(s.bits_per_byte), "held-out text"),
        ("throughput", format_rate(s.tokens_per_s), "median over steps"),
        ("MFU, BF16 peak", format_percent(s.mfu_causal), full),
        ("speed of light", format_percent(s.sol), "median; planned formats"),
        ("tensors", format_bytes(s.tensor_peak_bytes), "on the device, peak"),
        ("process growth", format_bytes(s.process_growth_bytes), "resident set, peak"),
    ]
    return tag("dl", *[_card(*card) for card in cards], class_="cards")


def _card(name: str, value: str, note: str) -> Markup:
    word = "measured" if value != MISSING else "not measured"
    number, _, unit = value.partition(" ")
    shown = join([number, tag("span", f" {unit}", class_="unit") if unit else None])
    return tag(
        "div",
        tag("dt", name),
        tag("dd", shown, class_="value"),
        tag("dd", tag("span", word, class_="how"), f" {note}", class_="note"),
    )


def configuration(run: RunRecord) -> Markup | None:
    """config.toml as a table: key, value, and the reason that stands in its comment."""
    rows, sections = [], []
    for key, value, reason in _config_lines(run.config_text):
        section, _, name = key.rpartition(".")
        if section and section not in sections:
            sections.append(section)
            rows.append(
                tag(
                    "tr",
                    tag("th", cut(section, _NAME_CHARACTERS), scope="colgroup", colspan="3"),
                    class_="group",
                )
            )
        cells = [tag("td", tag("code", escape(value, _VALUE_CHARACTERS))), tag("td", escape(reason, 600))]
        rows.append(tag("tr", tag("th", cut(name, _NAME_CHARACTERS), scope="row"), *cells))
    if not rows:
        return None
    head = tag("tr", *[tag("th", name, scope="col") for name in ("setting", "value", "why Scrimp chose it")])
    return wide(tag("table", tag("thead", head), tag("tbody", *rows), class_="config"))


def _config_lines(text: str) -> Iterable[tuple[str, str, str]]:
    """(dotted key, value, comment) of every line; a line that is no setting has only a value."""
    section = above = ""
    for line in text.splitlines():
        stripped = line.strip()
        if stripped.startswith("#"):
            above = f"{above} {stripped.lstrip('# ')}".strip()
            continue
        setting = _CONFIG_LINE.match(line)
        if setting:
            comment = _COMMENT.match(setting[2])
            value, reason = (comment[1], comment[2]) if comment else (setting[2], "")
            key = f"{section}.{setting[1]}" if section else setting[1]
            yield key, _unquoted(value.strip()), " ".join(part for part in (above, reason.strip()) if part)
        elif stripped.startswith("[") and stripped.endswith("]"):
            section = stripped.strip("[]").strip()
        elif stripped:
            yield f"{section}." if section else "", stripped, above
        above = ""


def _unquoted(value: str) -> str:
    simple = len(value) >= 2 and value[0] == value[-1] == '"' and "\\" not in value
    return value[1:-1] if simple and '"' not in value[1:-1] else value


def event_table(run: RunRecord) -> Markup | None:
    """What happened, with a count of each kind; of many of one kind the first and the last."""
    events = [event for event in run.events if event.get("kind") not in ("sample", STEP_PASSES)]
    if not events:
        return None
    counts = Counter(str(event.get("kind", "unknown"))[:40] for event in events)
    chips = [
        tag("li", tag("b", format_integer(number)), f" {kind}") for kind, number in counts.most_common(20)
    ]
    shown = some_of_each_kind(events)
    rows = [_event_row(event) for event in shown]
    head = tag("tr", *[tag("th", name, scope="col") for name in ("step", "event", "what happened", "time")])
    left_out = len(events) - len(shown)
    more = tag("p", f"{left_out:,} more events stand in events.jsonl.", class_="note") if left_out else None
    table = tag("table", tag("thead", head), tag("tbody", *rows), class_="events")
    return tag("div", tag("ul", *chips, class_="chips"), wide(table), more)


def some_of_each_kind(events: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """All events of a kind where they are few; the first and the last where they are many."""
    places: dict[str, list[int]] = {}
    for index, event in enumerate(events):
        places.setdefault(str(event.get("kind")), []).append(index)
    keep: set[int] = set()
    for indices in list(places.values())[:40]:
        head, tail = EVENTS_PER_KIND // 3, EVENTS_PER_KIND - EVENTS_PER_KIND // 3
        keep.update(indices if len(indices) <= EVENTS_PER_KIND else indices[:head] + indices[-tail:])
    return [events[index] for index in sorted(keep)]


def _event_row(event: Mapping[str, Any]) -> Markup:
    kind = str(event.get("kind", "unknown"))
    loud = kind in ("skipped", "outlier", "signal", "checkpoint-failed", "failed", "error", "stopped")
    time = str(event.get("time") or MISSING)
    moment = re.sub(r"^(\d{4}-\d\d-\d\d)T(\d\d:\d\d:\d\d)(?:\.\d+)?", r"\1 \2", time)
    moment = re.sub(r"(\+00:00|Z)$", " UTC", moment)
    return tag(
        "tr",
        tag("td", format_integer(step) if is_number(step := event.get("step")) else MISSING, class_="num"),
        tag("td", tag("span", escape(kind, 40), class_="kind loud" if loud else "kind")),
        tag("td", escape(event.get("reason") or "", _VALUE_CHARACTERS), " ", extra_fields(event)),
        tag("td", escape(moment, 40), class_="time"),
    )


def extra_fields(event: Mapping[str, Any], known: Iterable[str] = ()) -> Markup | None:
    """What an event says beside the fields that all events have, and those in `known`."""
    extra = [
        f"{key} {_field(value)}"
        for key, value in event.items()
        if key not in _KNOWN_FIELDS
        and key not in known
        and not isinstance(value, dict | list)
        and value is not None
    ]
    return tag("span", escape("· " + "; ".join(extra), 400), class_="extra") if extra else None


def _field(value: object) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def samples(run: RunRecord) -> Markup | None:
    """Generated text, newest first; the prompt is told from the continuation by colour and by word."""
    events = run.events_of("sample")
    if not events:
        return None
    shown = [_sample(event) for event in reversed(events[-SAMPLES_SHOWN:])]
    left_out = len(events) - len(shown)
    more = f"{left_out:,} earlier samples stand in events.jsonl." if left_out else None
    key = tag(
        "p",
        tag("span", "prompt", class_="prompt"),
        " given to the model, then its ",
        tag("span", "continuation", class_="continuation"),
        ".",
        class_="note",
    )
    return tag("div", key, *shown, tag("p", more, class_="note") if more else None)


def _sample(event: Mapping[str, Any]) -> Markup:
    prompt, text = _string(event.get("prompt")), _string(event.get("text"))
    if prompt and text.startswith(prompt):
        text = text[len(prompt) :]
    step = event.get("step")
    title = f"after step {step:,}" if is_number(step) else "sample"
    about = f"{title} · {event['reason']}" if event.get("reason") else title
    body = tag(
        "pre",
        tag("span", "Prompt: ", class_="unseen"),
        tag("span", escape(prompt, SAMPLE_CHARACTERS), class_="prompt"),
        tag("span", " Continuation: ", class_="unseen"),
        tag("span", escape(text, SAMPLE_CHARACTERS), class_="continuation"),
        dir="auto",
    )
    return tag("figure", tag("figcaption", escape(about, 300)), body, class_="sample")


def environment(run: RunRecord) -> Markup | None:
    """What the run noted about the machine and the software."""
    found: dict[str, object] = {}
    found.update(mapping(run.plan.get("fingerprint")))
    for event in run.events_of("start", "resume"):
        found.update(
            {key: value for key, value in event.items() if key not in _KNOWN_FIELDS and not mapping(value)}
        )
        found.update(mapping(event.get("environment")))
    found = {key: value for key, value in found.items() if value is not None}
    if not found:
        return None
    rows = [
        tag(
            "tr",
            tag("th", cut(key, _NAME_CHARACTERS), scope="row"),
            tag("td", escape(value, _VALUE_CHARACTERS)),
        )
        for key, value in found.items()
    ]
    return wide(tag("table", tag("tbody", *rows), class_="environment"))


def _string(value: object) -> str:
    return value if isinstance(value, str) else "" if value is None else str(value)
