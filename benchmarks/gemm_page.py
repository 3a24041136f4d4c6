"""What `gemm.py` measured, as Markdown: a summary with the targets, then every row. Imports no torch."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import Any

from environment import markdown_table

GEMMS = ("fprop", "dgrad", "wgrad")
CONTROL = "bf16"
FP8 = ("fp8", "fp8_tensor", "fp8_row")
MOST_OVER_FLOOR, LEAST_SPEED_UP, TARGET_MODEL = 1.3, 1.4, "qwen2.5-7b"
Row = dict[str, Any]
Target = tuple[str, bool, str]
"""What was promised, whether it is kept, and the figures that show it."""


def page(record: dict[str, Any]) -> str:
    """The whole result."""
    environment, settings = record["environment"], record["settings"]
    text = [
        "# GEMMs per recipe and back end",
        "",
        f"{settings['tokens']} tokens, {environment['device']}, torch {environment['versions']['torch']}; "
        f"{settings['repeats']} rounds. Measured; how: the docstring of `benchmarks/gemm.py`.",
        "",
        f"- command: {environment['command']}",
        f"- commit: {environment['commit']}",
        f"- versions: {', '.join(f'{name} {version}' for name, version in environment['versions'].items())}",
        f"- a large copy moves {record['copy_bytes_per_s'] / 1e9:,.0f} GB/s, read and written",
        "",
        *summary_lines(record),
        "",
        *_details(record["rows"]),
    ]
    if record["left_out"]:
        text += ["", f"Left out, for the time was up: {', '.join(record['left_out'])}."]
    if record["failed"]:
        text += ["", "Failed:", "", *(f"- {what}" for what in record["failed"])]
    if record["refused"]:
        reasons: dict[str, list[str]] = {}
        for what, why in record["refused"].items():
            reasons.setdefault(why, []).append(what)
        text += ["", "Not run:", "", *(f"- {', '.join(found)}: {why}" for why, found in reasons.items())]
    return "\n".join([*text, ""])


def summary_lines(record: dict[str, Any]) -> list[str]:
    """Per model what a reader wants first, and the targets."""
    rows = record["rows"]
    promises = targets(rows) if record["settings"]["device"] == "cuda" else []
    lines: list[str] = []
    tables: list[tuple[str, Sequence[str], Sequence[Sequence[str]]]] = [
        (
            "The three GEMMs over all layers of a model, TFLOP/s (times bf16):",
            ("model", "recipe", "back end", *GEMMS, "note"),
            gemm_summary(rows),
        ),
        (
            "Forward and backward pass of a linear layer, times bf16, from the slowest to the fastest layer:",
            ("model", "recipe", "runs on", "times bf16", "note"),
            linear_summary(rows),
        ),
        (
            "Quantizers alone, time over the floor and over a copy of as many bytes (best to worst matrix):",
            ("quantizer", "times floor", "times copy"),
            quantizer_summary(rows),
        ),
        (
            "Targets for Hopper:",
            ("target", "kept", "figures"),
            [(what, "yes" if kept else "NO", figure) for what, kept, figure in promises],
        ),
    ]
    for title, columns, table in tables:
        if table:
            lines += [*([""] if lines else []), title, "", *markdown_table(columns, table)]
    return lines


def targets(rows: Sequence[Row]) -> list[Target]:
    """The promises that the rows can decide; none for what was not measured. Only a GPU's count."""
    found = []
    floors = {(r["what"], r["sizes"]): 1 / middle(r["ratios"]) for r in rows if r["recipe"] == "floor"}
    if floors:
        worst = max(floors, key=lambda key: floors[key])
        figure = f"{floors[worst]:.2f}: {worst[0]}, {worst[1]}"
        name = f"quantizers within {MOST_OVER_FLOOR} times the memory floor"
        found.append((name, floors[worst] <= MOST_OVER_FLOOR, figure))
    linear = [row for row in rows if row["what"] == "linear"]
    ours = fastest(row for row in linear if row["recipe"] in FP8)
    best = {key: row for key, row in ours.items() if key[0] == TARGET_MODEL}
    if best:
        slowest = min(best.values(), key=lambda row: middle(row["ratios"]))
        ratio = middle(slowest["ratios"])
        figure = f"{ratio:.2f} times bf16 at {slowest['layer']} ({slowest['recipe']}, {slowest['runner']})"
        name = f"FP8 linear at least {LEAST_SPEED_UP} times bf16 at {TARGET_MODEL}"
        found.append((name, ratio >= LEAST_SPEED_UP, figure))
    theirs = fastest(row for row in linear if row["recipe"] == "peer")
    met = {key: middle(ours[key]["ratios"]) / middle(theirs[key]["ratios"]) for key in theirs if key in ours}
    if met:
        worst_case = min(met, key=lambda key: met[key])
        num_kept = sum(ratio >= 1 for ratio in met.values())
        figure = f"{num_kept} of {len(met)}; worst {met[worst_case]:.2f} at {' '.join(worst_case)}"
        found.append(("as fast as the best peer at every shape", num_kept == len(met), figure))
    return found


def fastest(rows: Iterable[Row]) -> dict[tuple[str, str], Row]:
    """By model and layer the row with the greatest speed over bf16."""
    best: dict[tuple[str, str], Row] = {}
    for row in rows:
        key = (row["model"], row["layer"])
        if key not in best or middle(row["ratios"]) > middle(best[key]["ratios"]):
            best[key] = row
    return best


def gemm_summary(rows: Sequence[Row]) -> list[list[str]]:
    """One line per model, recipe and back end: all its layers together."""
    groups: dict[tuple[str, str, str], dict[str, list[Row]]] = {}
    control: dict[tuple[str, str, str], float] = {}
    for row in rows:
        if row["what"] not in GEMMS:
            continue
        groups.setdefault((row["model"], row["recipe"], row["runner"]), {}).setdefault(
            row["what"], []
        ).append(row)
        if row["recipe"] == CONTROL:
            control[row["model"], row["layer"], row["what"]] = middle(row["seconds"])
    table = []
    for (model, recipe, runner), by_gemm in groups.items():
        cells = [_together(by_gemm.get(gemm, []), control) for gemm in GEMMS]
        table.append(
            [model, recipe, runner, *cells, _note(row for found in by_gemm.values() for row in found)]
        )
    return table


def _together(rows: Sequence[Row], control: dict[tuple[str, str, str], float]) -> str:
    if not rows:
        return "-"
    seconds = sum(middle(row["seconds"]) for row in rows)
    flops = sum(row["tflops_per_s"] * middle(row["seconds"]) for row in rows)
    reference = sum(control[row["model"], row["layer"], row["what"]] for row in rows)
    return f"{short(flops / seconds)} ({reference / seconds:.2f})"


def linear_summary(rows: Sequence[Row]) -> list[list[str]]:
    """One line per model and contender."""
    groups: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        if row["what"] == "linear" and row["recipe"] != CONTROL:
            groups.setdefault((row["model"], row["recipe"], row["runner"]), []).append(row)
    return [
        [*key, spread([middle(row["ratios"]) for row in found]), _note(found)]
        for key, found in groups.items()
    ]


def quantizer_summary(rows: Sequence[Row]) -> list[list[str]]:
    """One line per quantizer."""
    groups: dict[str, dict[str, list[float]]] = {}
    for row in rows:
        if row["recipe"] in ("floor", "copy"):
            over = 1 / middle(row["ratios"])
            groups.setdefault(row["what"], {}).setdefault(row["recipe"], []).append(over)
    return [[name, spread(found["floor"]), spread(found["copy"])] for name, found in groups.items()]


def _details(rows: Sequence[Row]) -> list[str]:
    columns = (
        "model",
        "layer",
        "sizes",
        "what",
        "recipe",
        "runs on",
        "ms",
        "ms, range",
        "launching, ms",
        "TFLOP/s",
        "times bf16 (range)",
        "operands, MiB",
        "quantizing, MiB",
        "note",
    )
    return ["Every row:", "", *markdown_table(columns, map(_cells, rows))]


def _cells(row: Row) -> list[str]:
    ratios = row["ratios"]
    milliseconds = [1e3 * seconds for seconds in row["seconds"]]
    return [
        *(row[name] for name in ("model", "layer", "sizes", "what", "recipe", "runner")),
        f"{middle(milliseconds):.3f}",
        f"{min(milliseconds):.3f} to {max(milliseconds):.3f}",
        f"{1e3 * row['host_s']:.3f}",
        "" if row["tflops_per_s"] is None else short(row["tflops_per_s"]),
        f"{middle(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})",
        *(mebibytes(row[name]) for name in ("operand_bytes", "quantize_bytes")),
        _note([row]),
    ]


def _note(rows: Iterable[Row]) -> str:
    return "emulated" if any(row["emulated"] for row in rows) else ""


def middle(values: Sequence[float]) -> float:
    """The median."""
    return statistics.median(values)


def spread(values: Sequence[float]) -> str:
    """Lowest to highest."""
    return f"{min(values):.2f} to {max(values):.2f}"


def short(rate: float) -> str:
    """TFLOP/s of a GPU or of a CPU."""
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.2g}"


def mebibytes(num_bytes: int | None) -> str:
    """Empty where it is not counted."""
    return "" if num_bytes is None else f"{num_bytes / 2**20:,.1f}"
