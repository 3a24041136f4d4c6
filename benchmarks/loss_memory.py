"""Memory that the chunked loss saves: full logits against chunks, for one micro-batch.

Question  How much memory does the head's loss take, forward and backward, by chunk size?
Method    One call of `cross_entropy_sums` and its backward pass on random data, under the
          profiler: the largest sum of live bytes over its allocation events. The hidden
          states and the weight exist before and are not counted; their gradients are.
          "plain" is `F.cross_entropy(F.linear(hidden, weight).float(), targets)`. Time is the
          median of the repeats, all variants in turn.
Run       python benchmarks/loss_memory.py
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from environment import RESULTS, cpu, facts, markdown_table, write_pair
from rich.console import Console
from rich.table import Table
from step import allocator_peak
from torch import Tensor

from scrimp.objectives.cross_entropy import cross_entropy_sums

CHUNKS = (0, 1024, 256, 64)
COLUMNS = ("loss", "precision", "peak MiB", "of which gradients MiB", "median ms (fastest, slowest)")


def main() -> None:
    """Measure, print, and write the page."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--width", type=int, default=640)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--date", default=date.today().isoformat())
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    asked = ("date", "tokens", "width", "vocabulary", "threads", "repeats")
    before = facts("torch") | {"device": cpu()} | {name: getattr(options, name) for name in asked}
    rows = [row for precision in ("fp32", "bf16") for row in measure(precision, options)]
    rich = Table(title="memory of the loss, forward and backward")
    for column in COLUMNS:
        rich.add_column(column)
    for row in rows:
        rich.add_row(*cells(row))
    record = {"environment": before, "results": rows}
    path = write_pair(options.out, f"{options.date}-loss-memory", record, page(rows, before))
    Console().print(rich, f"written: {path}")


def measure(precision: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """One row per variant."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(options.tokens, options.width, generator=generator).requires_grad_()
    weight = (0.02 * torch.randn(options.vocabulary, options.width, generator=generator)).requires_grad_()
    targets = torch.randint(0, options.vocabulary, (options.tokens,), generator=generator)

    def chunked(chunk: int) -> Callable[[], Tensor]:
        return lambda: cross_entropy_sums(hidden, weight, targets, chunk=chunk).total / len(targets)

    def plain() -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    variants = {"plain": plain}
    variants |= {f"chunks of {chunk}" if chunk else "one chunk": chunked(chunk) for chunk in CHUNKS}

    def run(loss_of: Callable[[], Tensor]) -> None:
        hidden.grad = weight.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of()
        loss.backward()

    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(options.repeats):
        for name, loss_of in variants.items():
            start = time.perf_counter()
            run(loss_of)
            seconds[name].append(time.perf_counter() - start)
    shared = {"precision": precision, "gradient_bytes": (hidden.numel() + weight.numel()) * 4}
    rows = []
    for name, loss_of in variants.items():
        hidden.grad = weight.grad = None
        with torch.profiler.profile(profile_memory=True) as profile:
            run(loss_of)
        rows.append({"loss": name, **shared, "peak_bytes": allocator_peak(profile), "seconds": seconds[name]})
    return rows


def cells(row: dict[str, Any]) -> list[str]:
    """One row as text."""
    peak, gradients = (f"{row[name] / 2**20:,.0f}" for name in ("peak_bytes", "gradient_bytes"))
    ms = [1e3 * value for value in row["seconds"]]
    times = f"{statistics.median(ms):,.0f} ({min(ms):,.0f}, {max(ms):,.0f})"
    return [row["loss"], row["precision"], peak, gradients, times]


def page(rows: list[dict[str, Any]], before: dict[str, Any]) -> str:
    """The result as Markdown."""
    tokens, vocabulary = before["tokens"], before["vocabulary"]
    lines = [
        "# Memory of the loss: full logits against chunks",
        "",
        f"{tokens} tokens, width {before['width']}, vocabulary {vocabulary}: "
        f"the logits alone are {tokens * vocabulary * 4 / 2**20:,.0f} MiB in float32. "
        "Measured (allocator peak by torch's profiler); how: the docstring of `benchmarks/loss_memory.py`.",
        "",
        f"- command: {before['command']}",
        f"- commit: {before['commit']}",
        f"- device: {before['device']}, {before['threads']} threads",
        f"- torch {before['versions']['torch']}, Python {before['versions']['python']}",
        f"- times: {before['repeats']} repeats in turn",
        "",
        *markdown_table(COLUMNS, map(cells, rows)),
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
