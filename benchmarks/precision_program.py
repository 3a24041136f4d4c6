"""Time and quality of the program that chooses a format per GEMM.

Question  How long does a plan for a 70B Llama take on one core, and how close is it to the best?
Programs  80 layers x 7 linears x 3 GEMMs, 4 formats (bf16, fp8, two of 4 bits), 8 stages.
          shares            at least 75 % of FLOPs in 4 bits, and 60 % in every stage
          seconds           every stage within 1.3 times its least time; times log-normal about those of peaks
          shares, seconds   both
          ..., two phases   a decision per GEMM for each of two parts of training, 90 and 10 % of the steps
Costs     Harm of each GEMM log-normal (sigma 1.5), times 0, 0.02, 1 and 1.2, each log-normal (sigma 0.3); a
          seed per program.
Figures   Seconds of the whole call of `solve`, model included, one thread. Proven gap: to the
          solver's own bound; it may stop at 0.1 %.
Run       python benchmarks/precision_program.py
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # before numpy is imported

import argparse
import statistics
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from scrimp.planner.solver import Limit, Program, solve

SIZES = np.array([8.0, 1.0, 1.0, 8.0, 28.0, 28.0, 28.0])
"""Weights of q, k, v, o, gate, up, down of a 70B Llama, in units of 8192 x 1024."""
STAGES = 8
PHASES = {"": (1.0,), ", two phases": (0.9, 0.1)}
RATES = np.array([1.0, 1.9, 3.4, 3.6])
"""Speed of the formats over bf16."""
COLUMNS = ("program", "decisions", "seconds", "proven gap, %")


def main() -> None:
    """Measure, print, and write both files."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--layers", type=int, default=80)
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    asked = {name: getattr(options, name) for name in ("date", "seeds", "layers")}
    before = (
        facts("highspy", "numpy") | {"device": cpu(), "threads": 1, "load_before": os.getloadavg()[0]} | asked
    )
    rows = [
        measure(limits, phases, options.seeds, options.layers)
        for phases in PHASES
        for limits in ("shares", "seconds", "shares, seconds")
    ]
    table = Table(title="a format per GEMM")
    for column in COLUMNS:
        table.add_column(column)
    for row in rows:
        table.add_row(*cells(row))
    path = write_pair(
        options.out,
        f"{options.date}-precision-program",
        {"environment": before, "results": rows},
        page(rows, before),
    )
    Console().print(table, f"written: {path}")


def measure(limits: str, phases: str, seeds: int, layers: int) -> dict[str, Any]:
    """Seconds and proven gaps over the seeds."""
    problems = [program(seed, limits, PHASES[phases], layers) for seed in range(seeds)]
    solutions = [solve(problem) for problem in problems]
    return {
        "program": limits + phases,
        "decisions": len(problems[0].costs),
        "seconds": [solution.seconds for solution in solutions],
        "gap": [solution.gap for solution in solutions],
    }


def program(seed: int, limits: str, phases: tuple[float, ...], layers: int) -> Program:
    """The program of one seed; see the module."""
    random = np.random.default_rng(seed)
    sizes = np.concatenate([np.tile(np.repeat(SIZES, 3), layers) * share for share in phases])
    count = len(sizes) // len(phases)
    stage = np.tile(np.arange(count) * STAGES // count, len(phases))
    harm = random.lognormal(0.0, 1.5, (len(sizes), 1)) * np.repeat(phases, count)[:, None]
    costs = harm * random.lognormal(0.0, 0.3, (len(sizes), 4)) * [0.0, 0.02, 1.0, 1.2]
    seconds = sizes[:, None] / RATES * random.lognormal(0.0, 0.05, (count, 4))[np.arange(len(sizes)) % count]
    made: list[Limit] = []
    if "shares" in limits:
        made.append(share("the FP4 share", sizes, np.full(len(sizes), True), 0.75))
        made += [share(f"the FP4 share of stage {s}", sizes, stage == s, 0.6) for s in range(STAGES)]
    if "seconds" in limits:
        for s in range(STAGES):
            there = np.where((stage == s)[:, None], seconds, 0.0)
            made.append(Limit(f"seconds of stage {s}", there, most=1.3 * there.min(axis=1).sum()))
    return Program(costs, tuple(made))


def share(name: str, sizes: NDArray[np.float64], among: NDArray[np.bool_], least: float) -> Limit:
    """At least a share of the FLOPs of some decisions in 4 bits."""
    shares = np.where(among, sizes, 0.0) / sizes[among].sum()
    return Limit(name, shares[:, None] * [0.0, 0.0, 1.0, 1.0], least=least)


def cells(row: dict[str, Any]) -> list[str]:
    """One row as text: median (least to most)."""
    return [
        row["program"],
        f"{row['decisions']:,}",
        spread(row["seconds"], 1.0, 2),
        spread(row["gap"], 100.0, 4),
    ]


def spread(values: list[float], factor: float, digits: int) -> str:
    """Median, least and most."""
    scaled = [factor * value for value in values]
    return f"{statistics.median(scaled):.{digits}f} ({min(scaled):.{digits}f} to {max(scaled):.{digits}f})"


def page(rows: list[dict[str, Any]], before: dict[str, Any]) -> str:
    """The result as Markdown."""
    versions = before["versions"]
    lines = [
        "# The program that chooses a format per GEMM",
        "",
        f"{before['layers']} layers x 7 linears x 3 GEMMs x 4 formats, {STAGES} stages, shapes of a 70B Llama; "
        f"{before['seeds']} seeds of log-normal costs. Measured; median (least to most). Programs, costs and "
        "figures: the docstring of `benchmarks/precision_program.py`.",
        "",
        f"- command: {before['command']}",
        f"- commit: {before['commit']}",
        f"- device: {before['device']}, 1 thread, load {before['load_before']:.1f} before",
        f"- highspy {versions['highspy']}, numpy {versions['numpy']}, Python {versions['python']}",
        "",
        *markdown_table(COLUMNS, map(cells, rows)),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
