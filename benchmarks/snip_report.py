"""The report of the SNIP study: reads a work folder, and writes a record, a page and plots.

Whatever is there is reported, and what was asked for and is missing is named. Nothing is trained or measured here.

Reads     cells/ damage/ profiles/ plans.json overhead/ parts.jsonl, and config.toml and plan.json of the trunks
Writes    <date>-snip-study.json and .md, <date>-snip-study-{damage,gaps,plans}.svg
Checked   tests/benchmarks/test_snip_report.py
"""

from __future__ import annotations

import dataclasses
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from environment import cpu, facts, write_pair
from snip_cadence import Cadence, amortised, extrapolated
from snip_damage import MAIN, Damage, interval, pairs, rank_correlation, read_damages, unreadable
from snip_figures import draw_damage, draw_gaps, draw_plans
from snip_gaps import FIXED, MEASURES, Cells, Expectation, Setting
from snip_overhead_page import overhead_expectations, overhead_section
from snip_page import (
    ablations_section,
    answers,
    damage_expectations,
    damage_section,
    plans_section,
    published_section,
    setting_expectations,
    training_section,
)
from snip_plans import read_plans, stability

SETTINGS = ("preset", "steps", "sequence", "batch_tokens", "micro_batch", "lr", "parameters")
LIMITS = (
    "A model of a few million parameters on the standard library's source, and short runs: differences are small, "
    "and the t-interval of three seeds is wide. Nothing here says how a large model behaves.",
    "All formats are emulated: no figure says anything of the speed of FP4 or FP8.",
    "The noise floor is of two bf16 runs that differ by 10^-6 at the start; runs in other formats differ by far more, "
    "and drift apart by at least as much.",
    "Baselines are as reconstructed (spec, section 9). Policies marked * know no budget: their one run stands beside "
    "every budget with its own share in 4 bits.",
    "The best simple baseline is picked by its mean on the same seeds, which favours it against SNIP.",
)


@dataclass(frozen=True)
class Grid:
    """What was asked for."""

    seeds: Sequence[int]
    phases: Sequence[int]
    budgets: Sequence[float]
    policies: Sequence[str]
    low: str
    high: str


def write_report(work: Path, grid: Grid, out: Path, day: str) -> Path:
    """Everything that is there; returns the page.

    Args:
        day: as the files' names have it.
    """
    name = f"{day}-snip-study"
    environment = facts("torch", "numpy", "highspy") | {"device": cpu(), "parts": parts(work)}
    out.mkdir(parents=True, exist_ok=True)
    cells, damages, plans = Cells.read(work), read_damages(work), read_plans(work)
    overheads = [read_json(path) for path in sorted((work / "overhead").glob("*.json"))]
    drawn = {
        "damage": draw_damage(damages, out / f"{name}-damage.svg"),
        "gaps": draw_gaps(cells, out / f"{name}-gaps.svg"),
        "plans": draw_plans(plans, out / f"{name}-plans.svg"),
    }
    plots = {what: path.name for what, path in drawn.items() if path is not None}
    rows, cadence = [damage_row(one) for one in damages], Cadence.default()
    expected: dict[str, list[Expectation]] = {"": damage_expectations(rows)}
    expected |= {where or "no runs": found for where, found in setting_expectations(cells).items()}
    expected["overhead"] = overhead_expectations(overheads, cadence)
    missing = missing_cells(cells, grid) + missing_damage(damages, grid)
    missing += [f"profile {file}: this version cannot read it" for file in unreadable(work)]
    record = {
        "environment": environment,
        "settings": settings(work, cells, grid),
        "plots": plots,
        "expectations": {
            where: [dataclasses.asdict(one) for one in found] for where, found in expected.items()
        },
        "damage": rows,
        "training": training_rows(cells),
        "plans": {"rows": plans, "stability": stability(plans)},
        "overhead": [overhead_row(one, cadence) for one in overheads],
        "missing": missing,
    }
    text = [
        *head(record),
        *answers(expected),
        *damage_section(rows, plots.get("damage")),
        *training_section(cells, missing, plots.get("gaps")),
        *plans_section(plans, plots.get("plans")),
        *overhead_section(overheads, cadence),
        *ablations_section(cells),
        *published_section(),
        *["## Limits", "", *(f"- {limit}" for limit in LIMITS), ""],
    ]
    return write_pair(out, name, finite(record), "\n".join(text)).with_suffix(".md")


# -- what was done -----------------------------------------------------------------------------


def head(record: Mapping[str, Any]) -> list[str]:
    """Question, settings, and where the figures come from."""
    environment, chosen = record["environment"], record["settings"]
    ran = sorted({(p["part"], p["commit"], p["device"], p["command"]) for p in environment["parts"]})
    versions = ", ".join(f"{name} {version}" for name, version in environment["versions"].items())
    return [
        "# Does SNIP choose well?",
        "",
        "Of the linear layers' FLOPs a share must run in 4 bits. Does the plan that measured statistics choose cost "
        "less loss than rules of thumb, and do the predictions behind it hold? How: the docstring of "
        "`benchmarks/snip_study.py`.",
        "",
        f"- report: {environment['command']}, commit {environment['commit']}, {environment['device']}; {versions}",
        *(
            f"- {part}: commit {commit}, {device}" + (f"; {command}" if command else "")
            for part, commit, device, command in ran or [("runs", "not recorded", chosen["device"], "")]
        ),
        f"- trunk: {chosen['trunk']}",
        f"- runs under policies: {', '.join(map(str, chosen['steps_under_policies'])) or 'no'} steps each, learning "
        "rate falling to a tenth; gaps are to bf16 of the same seed, in per cent of the loss, with a t-interval over "
        "seeds",
        "",
    ]


def parts(work: Path) -> list[dict[str, Any]]:
    """Which code ran which part, where it has been noted."""
    path = work / "parts.jsonl"
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


def settings(work: Path, cells: Cells, grid: Grid) -> dict[str, Any]:
    """What decides the numbers, read from the trunks."""
    trunks = sorted(work.glob("seed*/config.toml"))
    config = tomllib.loads(trunks[0].read_text(encoding="utf-8")) if trunks else {}
    source = Path(config.get("data", {}).get("source", "")).name  # a path elsewhere says nothing to a reader
    values = config.get("model", {}) | config.get("train", {}) | {"source": source or None}
    text = ", ".join(
        f"{name} {values[name]}" for name in (*SETTINGS, "source") if values.get(name) is not None
    )
    plans = sorted(work.glob("seed*/plan.json"))
    device = read_json(plans[0])["fingerprint"]["device"] if plans else "unknown device"
    return {
        "trunk": f"{len(trunks)} seeds in bf16: {text}" if trunks else "none",
        "device": device,
        "steps_under_policies": cells.num_steps,
        "asked_for": dataclasses.asdict(grid),
    }


def missing_cells(cells: Cells, grid: Grid) -> list[str]:
    """Runs that were asked for and are not there: a line per phase and policy."""
    found = []
    for phase in grid.phases:
        setting = Setting(phase, grid.low, grid.high)
        for policy in grid.policies:
            group = "random" if policy.startswith("random:") else policy
            lacking = []
            for budget in [""] if policy in FIXED else [f"{b:g}" for b in sorted(grid.budgets)]:
                there = {c.seed for c in cells.of(setting, budget, group) if c.policy == policy}
                seeds = ", ".join(str(seed) for seed in grid.seeds if seed not in there)
                if seeds:
                    lacking.append((f"at {float(budget):.0%} " if budget else "") + f"seeds {seeds}")
            if lacking:
                found.append(f"step {phase}, {policy}: {'; '.join(lacking)}")
    return found


def missing_damage(damages: Sequence[Damage], grid: Grid) -> list[str]:
    """Checkpoints without measured damage."""
    there = {(one.step, one.seed) for one in damages if one.low == grid.low}
    found = []
    for phase in grid.phases:
        seeds = ", ".join(str(seed) for seed in grid.seeds if (phase, seed) not in there)
        if seeds:
            found.append(f"step {phase}, damage of {grid.low}: seeds {seeds}")
    return found


# -- figures as JSON ---------------------------------------------------------------------------


def damage_row(one: Damage) -> dict[str, Any]:
    """Spearman and interval of every row; of stored figures, without interval, where the profile is gone."""
    row: dict[str, Any] = {"seed": one.seed, "step": one.step, "format": one.low}
    row["size_ratio"] = {what: one.stored.get(f"{what}, size ratio") for what in MAIN}
    if one.profile is None:
        kept = {name: value for name, value in one.stored.items() if "size ratio" not in name}
        row["rows"] = {name: {"spearman": value, "interval": None} for name, value in kept.items()}
        return row | {"note": f"seed {one.seed}: no profile that can be read, so there are no intervals"}
    compared = pairs(one.profile, one.low, one.loss, one.update)
    row["rows"] = {
        name: {"spearman": rank_correlation(*pair), "interval": interval(*pair)}
        for name, pair in compared.items()
    }
    for what, name in MAIN.items():
        row["size_ratio"][what] = float(np.median(compared[name][0] / compared[name][1]))
    moved = {
        name: value
        for name, value in one.stored.items()
        if name in compared and abs(value - row["rows"][name]["spearman"]) > 0.005
    }
    if moved:
        row["note"] = (
            f"seed {one.seed}: predictions have changed since the damage was measured, of {', '.join(moved)}"
        )
    return row


def training_rows(cells: Cells) -> list[dict[str, Any]]:
    """Every policy at every budget: gaps by seed, means, intervals."""
    found = []
    for setting in cells.settings:
        for budget in ["", *cells.budgets(setting)]:
            for policy in cells.policies(setting) + ([] if budget else ["bf16-again"]):
                runs = cells.of(setting, budget, policy)
                if not runs or (policy in FIXED) != (budget == ""):
                    continue
                row = dataclasses.asdict(setting) | {"budget": budget or None, "policy": policy}
                row |= {"fp4_flops": float(np.mean([run.share for run in runs]))}
                for measure in MEASURES:
                    row[measure] = cells.all_gaps(setting, budget, policy, measure)
                found.append(row)
    return found


def overhead_row(record: Mapping[str, Any], cadence: Cadence) -> dict[str, Any]:
    """What was measured and what follows from it."""
    return {
        **record,
        "cadence": dataclasses.asdict(cadence),
        "amortised": amortised(record, cadence),
        "extrapolated": extrapolated(record, cadence),
    }


def finite(value: Any) -> Any:
    """The same without numbers that JSON does not have: they become null."""
    if isinstance(value, Mapping):
        return {key: finite(one) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(one) for one in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_json(path: Path) -> Any:
    """A file's content."""
    return json.loads(path.read_text(encoding="utf-8"))
