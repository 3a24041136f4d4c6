"""Time to result for the terminal and as a page that needs no network, in the style of a study's.

Checked  tests/study/test_workloads.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from scrimp.files import write_whole
from scrimp.report.html import Markup, join, tag, visible
from scrimp.report.units import MISSING, format_count, format_number, format_percent
from scrimp.study.page import html_table, page_of
from scrimp.study.profile_picture import profile_svg
from scrimp.study.time_to_result import MOST, profile
from scrimp.study.workloads import Entry, Standing, Workload

_TAUS: Final = (1.0, 1.25, 1.5, 2.0, 3.0, MOST)
_ABOUT: Final = (
    "A workload: steps to a target, which all submissions take on the same data in batches of the same size. Ratio: "
    f"median steps over those of the fastest submission; none of more than {MOST:g}, where the target was never "
    "reached, or where it was not on a held-out variant of the workload. Score: area below the performance profile "
    f"from 1 to {MOST:g}, as a share of all of it; 1 is the fastest everywhere."
)

_MEASURED: Final = (
    "Steps times the measured time of a step, evaluations left out: of submissions in working formats, whose runs had "
    "their machine for themselves."
)
_PREDICTED: Final = (
    "Steps times the planner's seconds of a step by its best layout, evaluations left out. Nothing ran there."
)


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """Seconds of a step on a card that need not be here."""

    card: str
    step_seconds: dict[str, dict[str, float | None]]
    """By workload, then by submission; None: not known."""
    unknown: tuple[str, ...]
    """Why not, a sentence for each submission."""


def score_table(found: Standing) -> Table:
    """A row for each submission, the best first."""
    title = f"time to result, {_ruleset(found)}"
    return _terminal_table(title, ["submission", "score", *found.ratios], _scores(found))


def steps_table(found: Standing) -> Table:
    """Median steps and tokens of each submission on each workload, held-out variants too."""
    title = "median steps (tokens) to the target"
    return _terminal_table(title, ["submission", *[one.name for one in found.workloads]], _steps(found))


def measured_table(found: Standing) -> Table | None:
    """Measured seconds of each submission to the targets; None where no runs have any."""
    if not _has_seconds(found):
        return None
    head = ["submission", *[one.name for one in found.workloads]]
    return _terminal_table("measured seconds of the steps to the target", head, _measured(found))


def predicted_table(found: Standing, predicted: Predicted) -> Table:
    """Predicted seconds of each submission to the targets."""
    head = ["submission", *[one.name for one in found.workloads]]
    return _terminal_table(f"predicted seconds on {predicted.card}", head, _predicted(found, predicted))


def _terminal_table(title: str, head: list[str], rows: list[list[str]]) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, name in enumerate(head):
        table.add_column(visible(name), justify="right" if number else "left", overflow="fold")
    for row in rows:
        table.add_row(*[Text(visible(cell)) for cell in row])
    return table


def write_score_page(found: Standing, path: Path, predicted: Predicted | None = None) -> Path:
    """Write the page; its path.

    Raises:
        StorageError: it cannot be written.
    """
    write_whole(path, build_score_page(found, predicted), shared=True)
    return path


def build_score_page(found: Standing, predicted: Predicted | None = None) -> str:
    """The page as text."""
    header = join([tag("p", _ABOUT, class_="about"), tag("p", _ruleset(found), class_="status")])
    names = [one.name for one in found.workloads]
    sections: list[tuple[str, str, Markup]] = [
        ("scores", "Scores", html_table(["submission", "score", *found.ratios], _scores(found))),
        ("profiles", "Performance profiles", join([profile_svg(found), _profiles(found)])),
        ("steps", "Steps to the target", html_table(["submission", *names], _steps(found))),
    ]
    if _has_seconds(found):
        table = html_table(["submission", *names], _measured(found))
        sections.append(("measured", "Measured seconds", join([table, tag("p", _MEASURED)])))
    if predicted is not None:
        table = html_table(["submission", *names], _predicted(found, predicted))
        why = [tag("p", one) for one in (_PREDICTED, *predicted.unknown)]
        sections.append(("seconds", f"Predicted seconds on {predicted.card}", join([table, *why])))
    sections.append(("workloads", "Workloads", _workloads(found)))
    return page_of("Time to result", header, sections, command="scrimp score", origin="the studies")


def _ruleset(found: Standing) -> str:
    trials = found.workloads[0].trials
    return "self-tuning" if trials == 1 else f"external tuning, {trials} trials for each seed"


def _scores(found: Standing) -> list[list[str]]:
    return [
        [
            name,
            f"{value:.3f}",
            *[MISSING if one == math.inf else f"{one:.2f}" for one in found.ratios_of(name)],
        ]
        for name, value in found.scores.items()
    ]


def _steps(found: Standing) -> list[list[str]]:
    return [[name, *[steps_text(one, one.entries[name]) for one in found.workloads]] for name in found.scores]


def _has_seconds(found: Standing) -> bool:
    return any(entry.seconds is not None for one in found.workloads for entry in one.entries.values())


def _measured(found: Standing) -> list[list[str]]:
    return [
        [name, *[_seconds_text(one.entries[name].seconds) for one in found.workloads]]
        for name in found.scores
    ]


def _predicted(found: Standing, predicted: Predicted) -> list[list[str]]:
    return [
        [
            name,
            *[
                _seconds_text(_product(one.entries[name].steps, predicted.step_seconds[one.name][name]))
                for one in found.workloads
            ],
        ]
        for name in found.scores
    ]


def _product(steps: float, step_seconds: float | None) -> float | None:
    return None if step_seconds is None else steps * step_seconds


def _seconds_text(seconds: float | None) -> str:
    if seconds is None:
        return MISSING
    return "never" if seconds == math.inf else f"{seconds:.3g}"


def steps_text(workload: Workload, entry: Entry) -> str:
    """Median steps, tokens, and what a reader has to know beside them."""
    text = f"never in {workload.most_steps:,}"
    if entry.steps < math.inf:
        text = f"{entry.steps:,.0f} ({format_count(entry.steps * workload.batch_tokens)})"
    if entry.reached < workload.seeds:
        text += f", {entry.reached} of {workload.seeds}"
    return text + (f", {entry.failed} failed" if entry.failed else "")


def _profiles(found: Standing) -> Markup:
    rows = [
        [name, *[format_percent(profile(found.ratios_of(name), tau), 0) for tau in _TAUS]]
        for name in found.scores
    ]
    return html_table(["workloads within a ratio of", *[f"{tau:g}" for tau in _TAUS]], rows)


def _workloads(found: Standing) -> Markup:
    head = [
        "workload",
        "held-out variant of",
        "target, held-out loss",
        "most steps",
        "tokens a step",
        "seeds",
        "",
    ]
    rows = [
        [
            one.name,
            one.study.held_out_of,
            format_number(one.target, 5),
            f"{one.most_steps:,}",
            f"{one.batch_tokens:,}",
            f"{one.seeds}",
            one.study.about,
        ]
        for one in found.workloads
    ]
    return html_table(head, rows)
