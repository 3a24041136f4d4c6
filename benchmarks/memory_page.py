"""What `memory.py` shows of its runs: lines, tables and the page of a part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import memory_checks as checks
from environment import markdown_table
from memory_cases import GIB, MIB, PUBLISHED
from rich.table import Table

BYTES = (
    "configuration",
    "peak, predicted",
    "measured",
    "error",
    "building",
    "reserved",
    "host, planned",
    "process",
)
SECONDS = ("step, predicted", "measured (fastest, slowest; steps)", "error", "tokens/s")
UNTIMED = ("peaks",)
"""Parts whose runs share the device, so that their seconds say nothing."""


def columns_of(part: str) -> tuple[str, ...]:
    """The columns of a part's table."""
    return BYTES if part in UNTIMED else BYTES + SECONDS


def size_of(nbytes: float | None) -> str:
    """In the unit that suits; empty for None."""
    if nbytes is None:
        return ""
    return f"{nbytes / GIB:,.2f} GiB" if nbytes >= GIB else f"{nbytes / MIB:,.1f} MiB"


def row_of(run: Mapping[str, Any], part: str) -> list[str]:
    """Predictions beside what was measured."""
    columns = columns_of(part)
    if checks.failure_of(run):
        return [str(run["name"]), *["failed"] * (len(columns) - 1)]
    predicted = run["predicted"]
    row = [str(run["name"]), size_of(predicted["device"]), size_of(run["device"])]
    row += [f"{checks.peak_error(run):+.2%}", size_of(run["building"]), size_of(run["reserved"])]
    row += [size_of(predicted["host"]), size_of(run["host"])]
    return [*row, *_seconds(run)][: len(columns)]


def _seconds(run: Mapping[str, Any]) -> list[str]:
    median, fastest, slowest = checks.step_seconds(run)
    seconds, count = run["predicted"]["seconds"], len(checks.timed_steps(run))
    return [
        "none" if seconds is None else f"{seconds:.3f} s",
        f"{median:.3f} s ({fastest:.3f}, {slowest:.3f}; {count})",
        "" if seconds is None else f"{checks.time_error(run):+.1%}",
        f"{rate_of(run):,.0f}",
    ]


def rate_of(run: Mapping[str, Any]) -> float:
    """Tokens per second, by the median step."""
    return float(run["settings"]["batch_tokens"] / checks.step_seconds(run)[0])


def sentence(run: Mapping[str, Any], part: str) -> str:
    """A run in one line, as it ends."""
    if checks.failure_of(run):
        return f"  {run['name']}: FAILED in {run['wall']:.0f} s: {checks.failure_of(run)}"
    return f"  {' | '.join(row_of(run, part))} | {run['wall']:.0f} s"


def page(record: Mapping[str, Any]) -> str:
    """A part as Markdown."""
    runs, part = record["runs"], record["part"]
    rows = [(name, "yes" if held else "**no**", figure) for name, held, figure in record["checks"]]
    lines = [
        f"# Memory, predicted and measured: {part}",
        "",
        f"{record['device']}, torch {record['versions']['torch']}; command `{record['command']}`, commit "
        f"{record['commit']}. How: the docstring of `benchmarks/memory.py`.",
        "",
        *markdown_table(("check", "held", "figure"), rows),
        "",
        *markdown_table(columns_of(part), [row_of(run, part) for run in runs]),
        "",
        *[f"- {run['name']}: {plan_of(run)}" for run in runs if not checks.failure_of(run)],
    ]
    if part in PUBLISHED:
        lines += ["", "Published by others, on other machines, not measured here:", ""]
        lines += markdown_table(("system, hardware", "format", "tokens/s"), published_rows(part))
    return "\n".join([*lines, ""])


def plan_of(run: Mapping[str, Any]) -> str:
    """What was done, in the settings that count."""
    settings = run["settings"]
    shape = f"{settings['micro_batch']} x {settings['sequence']} of {settings['batch_tokens']:,} tokens"
    formats = (
        f"{settings['precision']} GEMMs, {settings['parameters']} weights, {settings['moments']} moments"
    )
    return f"{shape}; {formats}, compile {settings['compile']}; {run['plan']}"


def published_rows(part: str) -> list[tuple[str, str, str]]:
    """Others' figures."""
    return [(name, precision, f"{rate:,}") for name, precision, rate in PUBLISHED[part]]


def summary(title: str, parts: Sequence[tuple[str, Sequence[checks.Outcome], Sequence[checks.Run]]]) -> Table:
    """All checks; of reference cases with the speed and what others published."""
    table = Table(title=title)
    for column in ("part", "check", "held", "figure"):
        table.add_column(column)
    for part, outcomes, runs in parts:
        for name, held, figure in outcomes:
            table.add_row(part, name, "yes" if held else "NO", figure)
        if part not in PUBLISHED:
            continue
        for run in runs[-1:]:  # those before it are probes
            if not checks.failure_of(run):
                table.add_row(part, f"tokens/s of {run['name']}, measured", "", f"{rate_of(run):,.0f}")
        for name, precision, rate in published_rows(part):
            table.add_row(part, f"tokens/s, published: {name}", "", f"{rate} ({precision})")
    return table
