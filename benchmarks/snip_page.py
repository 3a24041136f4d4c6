"""The study's page, section by section: lists of Markdown lines, from what `snip_damage`, `snip_gaps` and `snip_plans`
found."""

from __future__ import annotations

import io
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from environment import markdown_table
from rich.console import Console
from snip_damage import MAIN, METHODS, THRESHOLDS
from snip_gaps import FIXED, MEASURES, Cells, Estimate, Expectation, Setting, expectations
from snip_plans import shares_by_kind, stability

from scrimp.precision import GEMMS
from scrimp.report.precision_text import precision_map_text

GAP_COLUMNS = (
    "policy",
    "seeds",
    "FLOPs in 4 bits",
    *(f"{text}: gap, % [95 %]" for text in MEASURES.values()),
    "lowest to highest, held-out in bf16",
)
PUBLISHED = (
    ("SNIP, TinyLlama, 50k steps, 75 % FP4, mean accuracy", "44.21", "BF16 44.22; others: low 33s"),
    ("SNIP, TinyLlama, 80 %", "near BF16", "others do not converge"),
    ("SNIP, 1B from scratch, 75 %, loss, very short run", "5.34 (+1.3 %)", "BF16 5.27; others diverge"),
    (
        "SNIP, 70B, 50 %, short window",
        "near BF16",
        "uniform FP4, min-rel-err, layer-type worse",
    ),
    (
        "NVFP4 recipe, 12B, 10T tokens: 15 % of linears BF16",
        "loss gap < 1 %, 1.5 % in the decay",
        "0.5 % with a BF16 forward in the last 18 %",
    ),
    ("MXFP4, by the same authors", "loss gap 2.5 %", ""),
)
"""Summaries of arXiv 2602.01410 and 2509.25149: larger models and longer runs than any here."""


def number(value: float, digits: int = 3) -> str:
    """With its sign; a run that has no loss left has diverged."""
    return f"{value:+.{digits}f}" if math.isfinite(value) else "diverged"


def with_interval(estimate: Estimate | None) -> str:
    """Mean and interval."""
    if estimate is None:
        return ""
    reach = estimate.interval
    return number(estimate.mean) + ("" if reach is None else f" [{reach[0]:+.3f}, {reach[1]:+.3f}]")


# -- answers -----------------------------------------------------------------------------------


def damage_expectations(rows: Sequence[Mapping[str, Any]]) -> list[Expectation]:
    """The two thresholds, per phase and format: the mean over seeds counts."""
    found = []
    for what, row in MAIN.items():
        least = THRESHOLDS[what]
        text = f"Spearman of the {what} at least {least}"
        if not rows:
            found.append(Expectation(text, "", "not measured"))
        for low, step in _damage_settings(rows):
            values = [r["rows"][row]["spearman"] for r in rows if (r["format"], r["step"]) == (low, step)]
            mean = float(np.mean(values))
            figure = f"{mean:.2f} ({min(values):.2f} to {max(values):.2f}, {len(values)} seeds)"
            found.append(
                Expectation(f"{text}, {low} at step {step}", figure, "yes" if mean >= least else "no")
            )
    return found


def answers(found: Mapping[str, Sequence[Expectation]]) -> list[str]:
    """One table of everything that was expected."""
    rows = [
        (one.what + (f" ({where})" if where else ""), one.figure, f"**{one.answer}**", one.note)
        for where, group in found.items()
        for one in group
    ]
    return [
        "## What was expected, and what came out",
        "",
        *markdown_table(("expected", "figure", "answer", "note"), rows),
        "",
        "yes and no are of the means; the notes say whether the seeds can tell.",
        "",
    ]


def setting_expectations(cells: Cells) -> dict[str, list[Expectation]]:
    """Per setting; of none where nothing has run."""
    if not cells.settings:
        empty = Cells([])
        return {"": expectations(empty, Setting(0, "fp4", "fp8"))}
    return {str(setting): expectations(cells, setting) for setting in cells.settings}


# -- damage ------------------------------------------------------------------------------------


def damage_section(rows: Sequence[Mapping[str, Any]], plot: str | None) -> list[str]:
    """Spearman of every prediction."""
    text = ["## 1. Damage of single GEMMs, predicted and measured", ""]
    if not rows:
        return [*text, "Not measured yet.", ""]
    text += [
        "Each GEMM alone in the format, all else in bf16, on batches that the statistics have not seen. Spearman with "
        "95 % by bootstrap over GEMMs.",
        "",
    ]
    for low, step in _damage_settings(rows):
        members = [r for r in rows if (r["format"], r["step"]) == (low, step)]
        names = [name for name in members[0]["rows"] if " of " not in name or "norms of" in name]
        names = [name for name in names if not name.startswith("update of")]
        columns = (f"{low}, step {step}", *(f"seed {r['seed']}" for r in members), "mean")
        table = [
            (name, *(_sure(r["rows"].get(name)) for r in members), _mean(members, name)) for name in names
        ]
        text += [*markdown_table(columns, table), ""]
        gemms = [(m, *(_mean(members, f"update of {g}, {m}") for g in GEMMS)) for m in METHODS]
        text += [*markdown_table(("update by GEMM, mean over seeds", *map(str, GEMMS)), gemms), ""]
        ratios = {what: [r["size_ratio"].get(what) for r in members] for what in MAIN}
        text += [
            "Predicted over measured, median over GEMMs: "
            + "; ".join(f"{what} " + ", ".join(_plain(v) for v in values) for what, values in ratios.items())
            + " (by seed).",
            "",
        ]
        text += [f"- {r['note']}" for r in members if r.get("note")]
    return [*text, *_picture("predicted against measured damage", plot)]


def _damage_settings(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, int]]:
    return sorted({(row["format"], row["step"]) for row in rows})


def _sure(found: Mapping[str, Any] | None) -> str:
    if found is None:
        return ""
    reach = found["interval"]
    return _plain(found["spearman"]) + ("" if reach is None else f" [{reach[0]:.2f}, {reach[1]:.2f}]")


def _mean(members: Sequence[Mapping[str, Any]], name: str) -> str:
    values = [r["rows"][name]["spearman"] for r in members if name in r["rows"]]
    return _plain(float(np.mean(values))) if values else ""


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def _picture(text: str, plot: str | None) -> list[str]:
    return [f"![{text}]({plot})", ""] if plot else []


# -- training ----------------------------------------------------------------------------------


def training_section(cells: Cells, missing: Sequence[str], plot: str | None) -> list[str]:
    """Gaps of every policy at every budget, and SNIP against each."""
    text = ["## 2. Training under every policy", ""]
    for setting in cells.settings:
        text += [f"### {str(setting).capitalize()}", "", floor_line(cells, setting), ""]
        for budget in cells.budgets(setting) or [""]:
            names = [name for name in cells.policies(setting) if name not in cells.ablations(setting)]
            rows = [row for name in names if (row := gap_row(cells, setting, budget, name))]
            against = [row for name in names if (row := against_row(cells, setting, budget, name))]
            title = f"{float(budget):.0%} of FLOPs in 4 bits" if budget else "No budget"
            text += [f"#### {title}", "", *markdown_table(GAP_COLUMNS, rows), ""]
            if against:
                text += [
                    *markdown_table(("SNIP's gap less that of", "points [95 %]", "SNIP lower"), against),
                    "",
                ]
            equal = cells.equal_plans(setting, budget)
            if equal:
                pairs = (f"{a} and {b} ({count} seeds)" for (a, b), count in equal.items())
                text += [f"The same plan, and therefore the same run: {', '.join(pairs)}.", ""]
    if not cells.settings:
        text += ["No run has finished yet.", ""]
    if missing:
        text += ["Missing, and therefore not in any mean:", "", *(f"- {line}" for line in missing), ""]
    return [*text, *_picture("gap to bf16 by policy and budget", plot)]


def floor_line(cells: Cells, setting: Setting) -> str:
    """How far two bf16 runs are apart."""
    floors = {
        text: cells.floor(setting, measure) for measure, text in MEASURES.items() if measure != "in_plan"
    }
    parts = [
        f"{text} {one.mean:.3f} % (at most {max(one.values):.3f} %)" for text, one in floors.items() if one
    ]
    if not parts:
        return "Noise floor: not measured."
    return f"Noise floor, the mean |gap| of bf16 to bf16 from weights moved by 10^-6: {'; '.join(parts)}."


def gap_row(cells: Cells, setting: Setting, budget: str, policy: str) -> list[str] | None:
    """One policy; None where it has not run under this budget or has no control."""
    every = cells.all_gaps(setting, budget, policy)
    if not every:
        return None
    runs = cells.of(setting, budget, policy)
    flat = [value for values in every.values() for value in values]
    draws = len({run.policy for run in runs})
    name = policy + (f" (mean of {draws} draws)" if draws > 1 else "")
    estimates = [
        Estimate(tuple(cells.gaps(setting, budget, policy, measure).values())) for measure in MEASURES
    ]
    share = float(np.mean([run.share for run in runs]))
    spread = f"{number(min(flat))} to {number(max(flat))}"
    return [
        name + (" *" if policy in FIXED else ""),
        str(len(every)),
        f"{share:.1%}",
        *map(with_interval, estimates),
        spread,
    ]


def against_row(cells: Cells, setting: Setting, budget: str, policy: str) -> list[str] | None:
    """SNIP's gap less another's, by seed."""
    found = None if policy == "snip" else cells.difference(setting, budget, "snip", policy)
    if found is None:
        return None
    lower = sum(value < 0 for value in found.values)
    return [policy, with_interval(found), f"{lower} of {len(found.values)} seeds"]


# -- plans -------------------------------------------------------------------------------------


def plans_section(rows: Sequence[Mapping[str, Any]], plot: str | None, budget: float = 0.75) -> list[str]:
    """Maps, shares by kind, stability."""
    text = ["## 3. Plans", ""]
    if not rows:
        return [*text, "Not computed yet: `snip_study.py plans`.", ""]
    ours = [row for row in rows if row["policy"] == "snip"]
    budgets = sorted({row["budget"] for row in ours})
    shown = min(budgets, key=lambda b: abs(b - budget))
    for low, high, step in sorted({(r["low"], r["high"], r["step"]) for r in ours}):
        members = [r for r in ours if (r["low"], r["high"], r["step"]) == (low, high, step)]
        text += [f"### SNIP's plans at step {step}, {low} and {high}", ""]
        text += [
            f"Share of FLOPs in 4 bits by kind of layer and GEMM, mean over {_seeds(members)}, by budget:",
            "",
        ]
        by_budget = {b: shares_by_kind(r for r in members if r["budget"] == b) for b in budgets}
        kinds = list(by_budget[budgets[0]])
        table = [
            (f"{kind}, {gemm}", *(f"{by_budget[b][kind][str(gemm)]:.0%}" for b in budgets))
            for kind in kinds
            for gemm in GEMMS
        ]
        text += [*markdown_table(("kind and GEMM", *(f"{b:.0%}" for b in budgets)), table), ""]
        first = next(row for row in members if row["budget"] == shown)
        text += ["```", *map_lines(first, f"seed {first['seed']} at {shown:.0%}"), "```", ""]
    return [*text, *stability_lines(rows), *_picture("share of seeds with 4 bits, by GEMM", plot)]


def _seeds(members: Sequence[Mapping[str, Any]]) -> str:
    count = len({row["seed"] for row in members})
    return f"{count} seed{'s' if count > 1 else ''}"


def map_lines(row: Mapping[str, Any], title: str) -> list[str]:
    """The precision map as plain text."""
    console = Console(file=io.StringIO(), width=110, color_system=None)
    console.print(precision_map_text(row["recipes"], row["flops"], title=title))
    return [line.rstrip() for line in console.file.getvalue().rstrip().splitlines()]  # type: ignore[attr-defined]


def stability_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Churn between batches, seeds and phases."""

    def spread(values: Sequence[float]) -> str:
        return f"{np.mean(values):.1%} (most {max(values):.1%})" if values else ""

    table = [
        (
            f"{one['policy']}, {one['low']} and {one['high']}, {one['budget']:.0%}",
            *(spread(one[name]) for name in ("batches", "seeds", "phases")),
            f"{2 * one['share'] * (1 - one['share']):.1%}",
        )
        for one in stability(rows)
    ]
    columns = (
        "share of FLOPs that differs",
        "between batches of a profile",
        "between seeds",
        "between phases",
        "plans that know nothing of each other",
    )
    text = "Mean and most over pairs; seeds are compared at the same phase, phases at the same seed."
    return ["### How stable plans are", "", text, "", *markdown_table(columns, table), ""]


# -- the rest ----------------------------------------------------------------------------------


def ablations_section(cells: Cells) -> list[str]:
    """SNIP with parts of its cost left out or weighted otherwise."""
    text = ["## 5. Ablations", ""]
    text += [
        "Of the predictions (no propagation, one kind of noise, mean sensitivities): the rows of section 1.",
        "",
    ]
    for setting in cells.settings:
        for budget in cells.budgets(setting):
            others = cells.ablations(setting)
            rows = [row for name in others if (row := gap_row(cells, setting, budget, name))]
            if not rows:
                continue
            snip = gap_row(cells, setting, budget, "snip")
            found = [(name, cells.difference(setting, budget, "snip", name)) for name in others]
            less = (f"{name} {with_interval(one)}" for name, one in found if one is not None)
            text += [f"### {float(budget):.0%} of FLOPs in 4 bits, {setting}", ""]
            text += [*markdown_table(GAP_COLUMNS, ([snip] if snip else []) + rows), ""]
            text += [f"SNIP's gap less that of, in points [95 %]: {'; '.join(less) or 'not measured'}.", ""]
    if not any(cells.ablations(setting) for setting in cells.settings):
        text += ["No run under another weighting of the cost has finished.", ""]
    return text


def published_section() -> list[str]:
    """Other people's figures."""
    columns = ("run", "gap or figure", "beside it")
    return [
        "## Published figures",
        "",
        "From summaries of the papers, of larger models and longer runs: no comparison, a scale.",
        "",
        *markdown_table(columns, PUBLISHED),
        "",
    ]
