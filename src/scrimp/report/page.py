"""`report.html`: one page that tells how a run went, complete without network.

Problem  The page shows text that nobody vouches for (corpora, samples, names, paths), and is
         opened from disk, mailed, and put on servers.
Method   Three walls. All text goes through `html.tag`, which escapes it. A content security
         policy forbids every load and every script and style but the two inline ones of this
         package, which it names by their hash; so text that got past the first wall would
         still not run. And hidden characters are made visible, so that nothing is reordered.
         The charts are drawn by uPlot (`vendor/`); all else needs no script.
         The page is a pure function of the run folder: the same files give the same bytes.
Limits   Size grows with the number of charts, events and samples shown, all of which are
         bounded: about 0.4 MB for a run of a million steps.
Checked  tests/report/test_page.py; in headless Chromium by tests/report/test_browser.py
"""

from __future__ import annotations

import base64
import hashlib
from importlib import resources
from pathlib import Path
from string import Template
from typing import Final

from scrimp.files import write_whole
from scrimp.report.figures import loss_figure, small_figures
from scrimp.report.html import Markup, escape, join, tag
from scrimp.report.plan_section import plan_section
from scrimp.report.precision_section import precision_section
from scrimp.report.read_run import RunRecord, read_run
from scrimp.report.sections import configuration, environment, event_table, facts, key_figures, samples
from scrimp.report.step_section import step_section
from scrimp.report.summary import summarise

FILE_NAME: Final = "report.html"
_STATE_WORDS: Final = {
    "finished": "finished",
    "interrupted": "interrupted",
    "stopped": "stopped early",
    "open": "not finished",
}


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    Raises:
        CheckpointError: the folder is not there, or is not a run's.
        StorageError: a file cannot be read, or the page cannot be written.
    """
    page = build_page(read_run(run_dir))
    path = run_dir / FILE_NAME
    write_whole(path, page, shared=True)
    return path


def build_page(run: RunRecord) -> str:
    """The page as text."""
    style = "".join(map(resource, ("vendor/uPlot.min.css", "page.css", "precision.css")))
    licence = f"/*\n{resource('vendor/LICENSE')}*/\n"
    script = licence + "".join(map(resource, ("vendor/uPlot.iife.min.js", "charts.js", "precision.js")))
    summary = summarise(run)
    header = join(
        [
            tag(
                "p",
                tag("span", _STATE_WORDS[summary.state], class_=f"state {summary.state}"),
                " ",
                tag("span", escape(summary.ending, 600), class_="ending"),
                class_="status",
            ),
            facts(run, summary),
            _notes(run),
            key_figures(summary),
        ]
    )
    precision = precision_section(run)
    precision = _section("precision", "Precision map", precision) if precision is not None else None
    step = step_section(run)
    sections = [
        _section("curves", "Training", join([_chart_notes(), loss_figure(run), small_figures(run)])),
        _section("samples", "Samples", samples(run)),
        precision,
        _section("plan", "Plan", plan_section(run)),
        None if step is None else _section("step", "Where a step's time goes", step),
        _section("events", "Events", event_table(run)),
        _section("configuration", "Configuration", configuration(run)),
        _section("environment", "Environment", environment(run)),
    ]
    return Template(resource("page.html")).substitute(
        policy=policy_of(style, script),
        title=escape(run.name, 120),
        style=style,
        script=script,
        header=header,
        main=join(sections),
    )


def _section(slug: str, title: str, content: Markup | None) -> Markup:
    heading = tag("h2", title, id=f"{slug}-heading")
    body = content if content is not None else tag("p", "Nothing was recorded.", class_="note")
    return tag("section", heading, body, id=slug, aria_labelledby=f"{slug}-heading")


def _chart_notes() -> Markup:
    hint = (
        "Drag over a chart to zoom all of them, double-click to zoom out; a click on a name hides its curve."
    )
    missing = "The charts need JavaScript. The tables do not."
    return join(
        [
            tag("p", hint, class_="note chart-hint", hidden=True),
            tag("noscript", tag("p", missing, class_="note chart-hint")),
        ]
    )


def _notes(run: RunRecord) -> Markup | None:
    if not run.notes:
        return None
    return tag("ul", *[tag("li", escape(note, 400)) for note in run.notes], class_="warnings", role="note")


def policy_of(style: str, script: str) -> str:
    """No loads at all; of scripts and styles only those with these contents."""
    return (
        f"default-src 'none'; script-src '{_hash(script)}'; style-src '{_hash(style)}'; "
        "base-uri 'none'; form-action 'none'"
    )


def _hash(content: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()


def resource(name: str) -> str:
    """A file of this package."""
    return resources.files("scrimp.report").joinpath(name).read_text(encoding="utf-8")
