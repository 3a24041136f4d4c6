"""study.html: what a study found, on one page that needs no network.

Method   In the style of a run's page (`scrimp.report.page`), with its charts by uPlot, its walls against foreign text
         (`html.tag`, a content security policy), and a table beside every picture. All of it comes from `Results`: the
         same file and rows give the same bytes.
Limits   Beyond eight variants colours are used again, with dashed lines.
Checked  tests/study/test_study_page.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

from scrimp.files import write_whole
from scrimp.report.charts import Chart, Kind, Series, render
from scrimp.report.html import Markup, escape, join, tag
from scrimp.report.page import policy_of, resource
from scrimp.report.units import format_duration, format_number, format_percent
from scrimp.study.comparisons import Comparison
from scrimp.study.definition import Halving, Study
from scrimp.study.looks import SHARE_OF_ALL_LOOKS
from scrimp.study.picture import interval_svg
from scrimp.study.results import FIGURES, UNITS, Outcome, Results, mean_curve, mean_gap, ranked_by
from scrimp.study.rounds import steps_of
from scrimp.study.rows import Row

FILE_NAME: Final = "study.html"
_COLOURS: Final = 8
_BATCHES: Final = {
    "same": "the same for all runs of a seed",
    "by model": "as large as each model asks for: train.batch_tokens or train.sequence is not set",
    "other": "not the same: train.batch_tokens, train.sequence, data.tokens, data.mix or the draw differs",
}


def write_page(results: Results, folder: Path, findings: Sequence[str] = ()) -> Path:
    """Write the page into the study's folder; its path.

    Args:
        findings: what the study's recipe says of the results, a sentence each.

    Raises:
        StorageError: it cannot be written.
    """
    path = folder / FILE_NAME
    write_whole(path, build_page(results, findings), shared=True)
    return path


def build_page(results: Results, findings: Sequence[str] = ()) -> str:
    """The page as text; arguments as of `write_page`."""
    licence = f"/*\n{resource('vendor/LICENSE')}*/\n"
    script = licence + resource("vendor/uPlot.iife.min.js") + resource("charts.js")
    sections = [
        ("verdicts", "Verdicts", join([_said(findings), _verdicts(results)])),
        ("curves", "Curves", _curves(results)),
        ("pairs", "Paired differences", _pairs(results)),
        ("runs", "Runs", _runs(results)),
        ("study", "The study", tag("pre", escape(results.study.text, 20_000), class_="definition")),
        ("environment", "Environment", _environment(results)),
    ]
    return page_of(
        results.study.name,
        _header(results),
        sections,
        command="scrimp study",
        origin="the study",
        script=script,
    )


def _said(findings: Sequence[str]) -> Markup | None:
    return tag("ul", *[tag("li", escape(one, 400)) for one in findings]) if findings else None


def page_of(
    title: str,
    header: Markup,
    sections: Sequence[tuple[str, str, Markup]],
    *,
    command: str,
    origin: str,
    script: str = "",
) -> str:
    """A page of one or several studies.

    Args:
        sections: end of an address, heading, and body.
        command: that wrote it.
        origin: of its rows.
    """
    style = resource("vendor/uPlot.min.css") + resource("page.css") + _own("page.css")
    return Template(_own("page.html")).substitute(
        policy=policy_of(style, script),
        title=escape(title, 120),
        style=style,
        script=script,
        header=header,
        main=join(_section(slug, name, body) for slug, name, body in sections),
        command=command,
        origin=origin,
    )


def _own(name: str) -> str:
    return resources.files("scrimp.study").joinpath(name).read_text(encoding="utf-8")


def _section(slug: str, title: str, body: Markup) -> Markup:
    return tag(
        "section", tag("h2", title, id=f"{slug}-heading"), body, id=slug, aria_labelledby=f"{slug}-heading"
    )


def _header(results: Results) -> Markup:
    study = results.study
    word = "finished" if results.is_finished else "open"
    ending = f"{results.done} of {results.planned} runs have a figure"
    facts = {
        "compared": f"{FIGURES[study.figure]}, {UNITS[study.figure]}",
        **({} if study.target is None else {"target": f"held-out loss {format_number(study.target, 5)}"}),
        "control": study.control,
        "pairs": f"runs of one seed: {', '.join(map(str, study.seeds[:12]))}"
        + " ..." * (len(study.seeds) > 12),
        "intervals": f"{level(results.confidence)}, {study.interval}",
        "batches": _BATCHES[study.batches] + ("" if study.shares_steps else "; the number of steps differs"),
        "begin": _begin(results),
        **({} if study.halving is None else {"rounds": _rounds(study, study.halving)}),
        "errors": "of all comparisons together" if study.all_together else "of each comparison by itself",
    }
    return join(
        [
            tag("p", study.about, class_="about") if study.about else None,
            tag("p", tag("span", word, class_=f"state {word}"), " ", ending, class_="status"),
            tag(
                "dl",
                *[tag("div", tag("dt", name), tag("dd", value)) for name, value in facts.items()],
                class_="facts",
            ),
            _failures(results),
        ]
    )


def _rounds(study: Study, halving: Halving) -> str:
    ends = " and after ".join(study.ends_in_words(halving)[:-1])
    return f"after {ends} one of {halving.factor} goes on, ranked by {ranked_by(study)}"


def _begin(results: Results) -> str:
    trunk = results.study.trunk
    if trunk is None:
        return "with first weights"
    moments = " and moments" * (results.study.runs[0].settings.get("optimizer.from_weights") is not False)
    return f"runs of a seed with the weights{moments} of one run of {steps_of(trunk):,} steps"


def _failures(results: Results) -> Markup | None:
    words = [
        f"{one.name}, seed {seed}, failed: {error}"
        for one in results.outcomes
        for seed, error in one.failures.items()
    ]
    if not words:
        return None
    return tag("ul", *[tag("li", escape(one, 400)) for one in words[:20]], class_="warnings", role="note")


def _verdicts(results: Results) -> Markup:
    unit = UNITS[results.study.figure]
    head = [
        "variant",
        "runs",
        centre_name(results),
        f"difference, {unit}",
        "interval",
        "in per cent",
        "visible",
        "verdict",
    ]
    note = (
        "Difference: variant less control, seed by seed, and the mean of these. Visible: the smallest true difference "
        f"that so many pairs of this scatter find in {format_percent(results.study.power, 0)} of studies. "
        "Every further look at a comparison, with other pairs, has a fifth of the error of the one before: all looks "
        f"at one together err with at most {level(SHARE_OF_ALL_LOOKS * (1 - results.confidence))}."
    )
    again = [one.earlier_looks for one in results.others if one.earlier_looks]
    if again:
        note += f" Of the verdicts here {len(again)} had such looks before, up to {max(again)}."
    return join(
        [
            interval_svg(results),
            html_table(
                head,
                [_cells(results, one) for one in results.outcomes],
                [_kind(one) for one in results.outcomes],
            ),
            tag("p", note, class_="note"),
        ]
    )


def _kind(outcome: Outcome) -> str:
    return "" if outcome.comparison is None else outcome.comparison.verdict.split()[0]


def _cells(results: Results, one: Outcome) -> list[str | Markup]:
    found = one.comparison
    name = f"{one.name} ({dropped_text(results, one)})" if one.is_dropped else one.name
    if found is None:
        return [name, str(len(one.values)), centre_text(results, one), "", "", "", "", one.verdict]
    return [
        name,
        str(len(one.values)),
        centre_text(results, one),
        signed(found.mean),
        interval_text(results, found),
        f"{100 * one.relative:+.2f}%" if one.relative is not None else "",
        format_number(found.visible, 3) if found.visible is not None else "",
        tag("span", one.verdict, class_="verdict"),
    ]


def dropped_text(results: Results, one: Outcome) -> str:
    """When a variant was dropped, and by what."""
    return f"dropped after step {one.steps:,} by {ranked_by(results.study).partition(':')[0]}"


def level(confidence: float) -> str:
    """A confidence in per cent."""
    return f"{100 * confidence:.6g}%"


def interval_text(results: Results, found: Comparison | None) -> str:
    """An interval, and in which way it is another one than the study's."""
    if found is None or found.low is None:
        return ""
    other = [level(found.confidence)] if found.confidence != results.confidence else []
    other += [found.interval] if found.interval != results.study.interval else []
    return f"{signed(found.low)} to {signed(found.high)}" + (f" ({', '.join(other)})" if other else "")


def centre_name(results: Results) -> str:
    """What `centre_text` is."""
    return "median" if results.study.figure == "steps_to_target" else "mean"


def centre_text(results: Results, outcome: Outcome) -> str:
    """The figure of a variant, over its seeds."""
    if outcome.centre is None or results.study.figure != "steps_to_target":
        return format_number(outcome.centre, 5)
    return "never" if outcome.centre == math.inf else f"{outcome.centre:,g}"


def signed(value: float | None) -> str:
    """A difference with its sign; of a target that was not reached, by whom."""
    if value is not None and not math.isfinite(value):
        return "neither" if math.isnan(value) else "never" if value > 0 else "control never"
    return "" if value is None else ("+" if value > 0 else "") + format_number(value, 3)


def _curves(results: Results) -> Markup:
    hint = (
        "Drag over a chart to zoom all of them, double-click to zoom out; a click on a name hides its curve."
    )
    missing = "The charts need JavaScript. The tables do not."
    charts = [
        Chart(
            slug="training",
            title="Training loss",
            subtitle="Mean of all seeds, of parts of the run",
            series=_series(results, "training", is_gap=False),
            format=format_number,
            log_steps=True,
            height=300,
        ),
        Chart(
            slug="training-gap",
            title=f"Training loss less that of {results.study.control}",
            subtitle=(
                "Of the same batches, seed by seed" if results.study.batches == "same" else "At the same step"
            )
            + "; mean of all seeds",
            series=_series(results, "training", is_gap=True),
            format=format_number,
            zero=True,
            height=220,
        ),
        Chart(
            slug="held-out",
            title="Held-out loss",
            subtitle="Mean of all seeds",
            series=_series(results, "held_out", is_gap=False),
            format=format_number,
            height=220,
        ),
    ]
    notes = [
        tag("p", hint, class_="note chart-hint", hidden=True),
        tag("noscript", tag("p", missing, class_="note chart-hint")),
    ]
    return join([*notes, *[render(chart) for chart in charts]])


def _series(results: Results, kind: str, *, is_gap: bool) -> list[Series]:
    found = []
    for number, one in enumerate(results.outcomes):
        if is_gap and one.comparison is None:
            continue
        steps, values = (mean_gap if is_gap else mean_curve)(results, one.name, kind)
        look: Kind = "dots" if kind == "held_out" and len(steps) < 2 else "line"
        if look == "line" and number >= _COLOURS:
            look = "dashed"
        found.append(
            Series(name=one.name, steps=steps, values=values, kind=look, colour=1 + number % _COLOURS)
        )
    return found


def _pairs(results: Results) -> Markup:
    seeds = sorted({seed for one in results.others if one.comparison for seed in one.comparison.differences})
    rows = []
    for one in results.others:
        found = one.comparison.differences if one.comparison else {}
        scatter = one.comparison.scatter if one.comparison else None
        cells = [signed(found.get(seed)) for seed in seeds]
        rows.append([one.name, *cells, format_number(scatter, 3) if scatter is not None else ""])
    if not seeds:
        return tag("p", "There is no pair of runs yet.", class_="note")
    return html_table(["variant", *[f"seed {seed}" for seed in seeds], "scatter"], rows)


def _runs(results: Results) -> Markup:
    rows = sorted(results.rows, key=lambda row: (row.seed, row.variant, row.steps))
    head = [
        "run",
        "seed",
        "steps",
        "held-out loss",
        "training loss",
        "tokens/s",
        "took",
        "at once",
        "machine",
        "",
    ]
    kinds = ["failed" if row.error else "" for row in rows]
    return html_table(head, [_run_cells(row) for row in rows], kinds)


def _run_cells(row: Row) -> list[str | Markup]:
    def figure(name: str, digits: int) -> str:
        value = row.figures.get(name)
        return "" if value is None else format_number(value, digits)

    return [
        row.variant,
        str(row.seed),
        f"{row.steps:,}",
        figure("held_out_loss", 5),
        figure("training_loss", 5),
        figure("tokens_per_second", 4),
        format_duration(row.seconds) if row.seconds else "",
        str(row.at_once),
        row.machine,
        escape(row.error or "", 400),
    ]


def _environment(results: Results) -> Markup:
    """What runs ran on; where they differ, all of it."""
    names = dict.fromkeys(name for row in results.rows for name in row.environment)
    rows = [
        [name, ", ".join(dict.fromkeys(str(row.environment.get(name, "")) for row in results.rows))]
        for name in names
    ]
    data = dict.fromkeys(row.data[:12] for row in results.rows if row.data)
    return html_table(["", ""], [*rows, ["data", ", ".join(data)]])


def html_table(
    head: list[str], rows: list[list[str | Markup]] | list[list[str]], kinds: list[str] | None = None
) -> Markup:
    """A table whose first column names its rows; `kinds` are classes of these."""
    top = tag("tr", *[tag("th", name, scope="col") for name in head])
    body = [
        tag(
            "tr",
            tag("th", row[0], scope="row"),
            *[tag("td", cell) for cell in row[1:]],
            class_=(kinds[number] or None) if kinds else None,
        )
        for number, row in enumerate(rows)
    ]
    return tag("div", tag("table", tag("thead", top), tag("tbody", *body)), class_="wide", tabindex=0)
