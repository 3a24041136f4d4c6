"""What training under a plan costs: gaps to bf16 of the same seed, how sure they are, and what was expected of them.

::

    gap        100 (loss / loss of bf16 at the same seed - 1), in per cent: of the held-out loss evaluated in bf16, of
               the same evaluated in the plan's formats, of the training loss of the last 5 % of steps, step by step
    interval   mean +- t(0.975, n - 1) s / sqrt(n) over n seeds; of a comparison, over the differences by seed
    random     the mean of its draws counts as one policy
    floor      |gap| of bf16 from weights moved by one part in 10^6

A comparison is of seeds that both have. A run whose loss is not a number stays in, as an infinite gap. Policies in
FIXED know no budget: their one run stands beside every budget, with its own share of FLOPs in 4 bits.
Checked  tests/benchmarks/test_snip_gaps.py
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

CONTROL, AGAIN = "bf16", "bf16-again"
UNIFORM = ("fp8", "fp4")
BASELINES = ("first-last", "layer-type", "min-abs-err", "min-rel-err", "random", "last-blocks")
FAMILY = ("snip", "snip-layer", "snip-paper")
FIXED = (CONTROL, AGAIN, *UNIFORM, "last-blocks")
MEASURES = {
    "held_out": "held-out loss, in bf16",
    "in_plan": "held-out loss, in the plan's formats",
    "training": "training loss, last 5 % of steps",
}
LAST = 0.05
_T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
_Z = 1.959964


@dataclass(frozen=True, order=True)
class Setting:
    """What gaps are compared within."""

    step: int
    """Step of the trunk from which all go on."""
    low: str
    high: str

    def __str__(self) -> str:
        return f"from step {self.step}, {self.low} and {self.high}"


@dataclass(frozen=True, eq=False)
class Cell:
    """One run under one policy."""

    setting: Setting
    seed: int
    budget: str
    """As in file names; empty for policies that know none."""
    policy: str
    share: float
    """Share of the planned FLOPs in 4 bits."""
    held_out: float
    in_plan: float
    losses: tuple[float, ...]
    recipes: Mapping[str, Sequence[str]]


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    values: tuple[float, ...]

    @property
    def mean(self) -> float:
        return float(np.mean(self.values))

    @property
    def interval(self) -> tuple[float, float] | None:
        """95 %; None of one value, or where a run has diverged."""
        n = len(self.values)
        if n < 2 or not np.isfinite(self.values).all():
            return None
        reach = t_quantile(n - 1) * float(np.std(self.values, ddof=1)) / math.sqrt(n)
        return self.mean - reach, self.mean + reach


@dataclass(frozen=True)
class Expectation:
    """One thing that the issue expects."""

    what: str
    figure: str
    answer: str
    """yes, no, not measured, cannot be said."""
    note: str = ""


def t_quantile(degrees: int) -> float:
    """Student's t at 0.975: a table to 10 degrees of freedom, above it Cornish and Fisher's expansion."""
    if degrees <= len(_T):
        return _T[degrees - 1]
    z, n = _Z, float(degrees)
    terms = (z**3 + z) / 4 / n, (5 * z**5 + 16 * z**3 + 3 * z) / 96 / n**2
    return z + sum(terms) + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384 / n**3


def read_cell(path: Path) -> Cell:
    """One file of the part `train`."""
    row: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return Cell(
        Setting(row["step"], row["low"], row["high"]),
        row["seed"],
        "" if row["policy"] in FIXED else f"{row['budget']:g}",
        row["policy"],
        row["fp4_flops"],
        row["held_out"],
        row["held_out_in_plan"],
        tuple(row["losses"]),
        row["recipes"],
    )


class Cells:
    """All runs of a work folder, and their gaps."""

    def __init__(self, cells: Iterable[Cell]) -> None:
        self._cells = {(c.setting, c.budget, c.policy, c.seed): c for c in cells}

    @classmethod
    def read(cls, work: Path) -> Cells:
        """Whatever is there."""
        return cls(read_cell(path) for path in sorted((work / "cells").glob("*.json")))

    def __len__(self) -> int:
        return len(self._cells)

    @property
    def settings(self) -> list[Setting]:
        return sorted({setting for setting, *_ in self._cells})

    @property
    def num_steps(self) -> list[int]:
        """Lengths of the runs; one number if they compare."""
        return sorted({len(cell.losses) for cell in self._cells.values()})

    def budgets(self, setting: Setting) -> list[str]:
        """Those that some policy has run under."""
        return sorted({b for s, b, _, _ in self._cells if s == setting and b}, key=float)

    def policies(self, setting: Setting) -> list[str]:
        """All but controls, draws of random as one: SNIP's, baselines, uniform formats, then others (ablations)."""
        names = {_group(policy) for s, _, policy, _ in self._cells if s == setting} - {CONTROL, AGAIN}
        known = [*FAMILY, *BASELINES, *UNIFORM]
        return [name for name in known if name in names] + sorted(names - set(known))

    def ablations(self, setting: Setting) -> list[str]:
        """Policies that are none of SNIP's, no baseline and no uniform format."""
        return [name for name in self.policies(setting) if name not in (*FAMILY, *BASELINES, *UNIFORM)]

    def of(self, setting: Setting, budget: str, policy: str) -> list[Cell]:
        """By seed, and by draw where the policy is random."""
        where = "" if policy in FIXED else budget
        found = [
            c for (s, b, p, _), c in self._cells.items() if (s, b, _group(p)) == (setting, where, policy)
        ]
        return sorted(found, key=lambda cell: (cell.seed, cell.policy))

    def all_gaps(
        self, setting: Setting, budget: str, policy: str, measure: str = "held_out"
    ) -> dict[int, list[float]]:
        """Seed to the gaps of its runs, in per cent; only of seeds that have a control."""
        controls = {cell.seed: cell for cell in self.of(setting, "", CONTROL)}
        found: dict[int, list[float]] = {}
        for cell in self.of(setting, budget, policy):
            if cell.seed in controls:
                found.setdefault(cell.seed, []).append(gap(cell, controls[cell.seed], measure))
        return found

    def gaps(self, setting: Setting, budget: str, policy: str, measure: str = "held_out") -> dict[int, float]:
        """Seed to its gap in per cent, the mean of its draws."""
        found = self.all_gaps(setting, budget, policy, measure)
        return {seed: float(np.mean(values)) for seed, values in found.items()}

    def difference(
        self,
        setting: Setting,
        budget: str,
        first: str,
        second: str,
        measure: str = "held_out",
        *,
        factor: float = 1.0,
    ) -> Estimate | None:
        """Gap of the first less `factor` times that of the second, by seeds that both have; None without any."""
        a, b = (self.gaps(setting, budget, policy, measure) for policy in (first, second))
        values = tuple(a[seed] - factor * b[seed] for seed in sorted(a.keys() & b.keys()))
        return Estimate(values) if values else None

    def equal_plans(self, setting: Setting, budget: str) -> dict[tuple[str, str], int]:
        """Pairs of policies to the number of seeds in which both chose the same formats: their runs are one."""
        solved = [name for name in self.policies(setting) if name not in (*FIXED, "random")]
        plans = {name: {c.seed: c.recipes for c in self.of(setting, budget, name)} for name in solved}
        found = {
            (a, b): sum(_same(plans[a][seed], plans[b][seed]) for seed in plans[a].keys() & plans[b].keys())
            for a, b in itertools.combinations(solved, 2)
        }
        return {pair: count for pair, count in found.items() if count}

    def floor(self, setting: Setting, measure: str = "held_out") -> Estimate | None:
        """|gap| of bf16 to bf16."""
        values = tuple(abs(value) for value in self.gaps(setting, "", AGAIN, measure).values())
        return Estimate(values) if values else None


def gap(cell: Cell, control: Cell, measure: str) -> float:
    """In per cent; infinite where the run has diverged."""
    if measure == "training":
        last = max(1, round(LAST * len(cell.losses)))
        ours, theirs = np.array(cell.losses[-last:]), np.array(control.losses[-last:])
        found = 100 * float(np.mean(ours / theirs - 1)) if len(ours) == len(theirs) else math.nan
    else:
        found = 100 * (getattr(cell, measure) / control.held_out - 1)
    return found if math.isfinite(found) else math.inf


def _group(policy: str) -> str:
    return "random" if policy.startswith("random:") else policy


def _same(first: Mapping[str, Sequence[str]], second: Mapping[str, Sequence[str]]) -> bool:
    return {k: tuple(v) for k, v in first.items()} == {k: tuple(v) for k, v in second.items()}


# -- what was expected -------------------------------------------------------------------------


def expectations(cells: Cells, setting: Setting) -> list[Expectation]:
    """The issue's, one by one."""
    below = [below_baselines(cells, setting, budget) for budget in ("0.5", "0.75", "0.8")]
    gemms = [below_layers(cells, setting, budget) for budget in cells.budgets(setting) or ["0.75"]]
    return [*below, at_most_half(cells, setting, "0.75"), *gemms]


def below_baselines(cells: Cells, setting: Setting, budget: str) -> Expectation:
    """SNIP's mean gap is lower than that of every simple baseline."""
    what = f"SNIP below every baseline at {float(budget):.0%}"
    found = {name: cells.difference(setting, budget, "snip", name) for name in BASELINES}
    there = {name: one for name, one in found.items() if one is not None}
    if not there:
        return Expectation(what, "", "not measured")
    worst = max(there, key=lambda name: there[name].mean)
    figure = f"{there[worst].mean:+.3f} points to {worst}, the nearest"
    certain = sum(one.interval is not None and one.interval[1] < 0 for one in there.values())
    won = sum(one.mean < 0 for one in there.values())
    note = f"below {won} of {len(there)}; the interval excludes 0 for {certain}"
    missing = [name for name in BASELINES if name not in there]
    note += f"; not measured: {', '.join(missing)}" if missing else ""
    for measure in ("in_plan", "training"):
        others = [cells.difference(setting, budget, "snip", name, measure) for name in there]
        lower = sum(one is not None and one.mean < 0 for one in others)
        note += f"; by {MEASURES[measure]}: below {lower} of {len(there)}"
    return Expectation(what, figure, "yes" if won == len(there) else "no", note)


def at_most_half(cells: Cells, setting: Setting, budget: str) -> Expectation:
    """SNIP's gap is at most half of the best simple baseline's."""
    what = f"SNIP's gap at {float(budget):.0%} at most half of the best simple baseline's"
    means = {}
    for name in BASELINES:
        gaps, ours = (cells.gaps(setting, budget, policy) for policy in (name, "snip"))
        common = sorted(gaps.keys() & ours.keys())
        if common:
            means[name] = np.mean([ours[seed] for seed in common]), np.mean([gaps[seed] for seed in common])
    if not means:
        return Expectation(what, "", "not measured")
    best = min(means, key=lambda name: means[name][1])
    ours_mean, theirs = (float(value) for value in means[best])
    figure = f"SNIP {ours_mean:+.3f} %, {best} {theirs:+.3f} %"
    if not (theirs > 0 and math.isfinite(theirs)):
        return Expectation(what, figure, "cannot be said", "the best baseline has no gap to halve")
    half = cells.difference(setting, budget, "snip", best, factor=0.5)
    reach = None if half is None else half.interval
    notes = (
        [] if reach is None else [f"SNIP less half of it: {reach[0]:+.3f} to {reach[1]:+.3f} points (95 %)"]
    )
    eight = cells.gaps(setting, budget, "fp8")
    if eight:  # what no plan of the two formats can be expected to undercut
        notes.append(f"everything in the higher format: {np.mean(list(eight.values())):+.3f} %")
    notes += [f"by {MEASURES[m]}: {_ratio(cells, setting, budget, best, m)}" for m in ("in_plan", "training")]
    answer = "yes" if ours_mean <= theirs / 2 else "no"
    return Expectation(what, f"{figure}: ratio {ours_mean / theirs:.2f}", answer, "; ".join(notes))


def _ratio(cells: Cells, setting: Setting, budget: str, best: str, measure: str) -> str:
    """SNIP's mean gap over another policy's by another measure, over common seeds."""
    ours, theirs = (cells.gaps(setting, budget, policy, measure) for policy in ("snip", best))
    common = sorted(ours.keys() & theirs.keys())
    mean = [float(np.mean([gaps[seed] for seed in common])) for gaps in (ours, theirs)]
    return f"ratio {mean[0] / mean[1]:.2f}" if mean[1] > 0 else "no gap to halve"


def below_layers(cells: Cells, setting: Setting, budget: str) -> Expectation:
    """A decision per GEMM costs less than one per layer."""
    what = f"per-GEMM SNIP below per-layer SNIP at {float(budget):.0%}"
    found = cells.difference(setting, budget, "snip", "snip-layer")
    if found is None:
        return Expectation(what, "", "not measured")
    reach = found.interval
    note = "one seed" if reach is None else f"{reach[0]:+.3f} to {reach[1]:+.3f} points (95 %)"
    return Expectation(what, f"{found.mean:+.3f} points", "yes" if found.mean < 0 else "no", note)
