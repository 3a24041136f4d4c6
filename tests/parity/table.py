"""docs/parity.md: a row for each layout of the matrix, written where all of them have passed (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from parity.matrix import LAYOUTS

PAGE = Path(__file__).parents[2] / "docs" / "parity.md"
HEAD = """# Layouts beside one process

Each row is a training of 20 steps on gloo processes, a CPU thread each, beside the same training in one process, all in
float32: a model of three blocks, gradients accumulated over two to four micro-batches and clipped, rows of packed
documents. `make test-all` trains all of them and writes this page (`tests/parity/`).

- loss: the largest difference of a step's loss, of that loss. Allowed is 1e-5, and 1e-6 in the first step.
- gradients: the largest `max|Δ| / (1e-5 max|g| + 1e-7)` of all weights' gradients in the first step. Allowed is 1.
- bytes: what all ranks send in a step's passes, by kind of collective, counted as rings send it. On each rank they are
  exactly what the formulas of `tests/parity/formulas.py` say.

Experts are chosen far from ties. Schedules, ZeRO stages, recomputation, other decoders and low formats are tested in
the same way over fewer steps, without a row here (`FURTHER` in `tests/parity/matrix.py`).

| layout | ranks | loss | gradients | bytes of a step |
| --- | --- | --- | --- | --- |
"""


def page_of(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The page.

    Args:
        rows: by name what was measured (`parity.Measured` as a dict), of all layouts.
    """
    lines = []
    for name, (ranks, _) in LAYOUTS.items():
        one = rows[name]
        sent = ", ".join(f"{kind} {count:,}" for kind, count in one["sent"].items())
        lines.append(f"| {name} | {ranks} | {one['loss']:.0e} | {one['gradient']:.2f} | {sent} |\n")
    return HEAD + "".join(lines)


def names_in(page: str) -> list[str]:
    """The layouts that a page has rows of."""
    return [line.split("|")[1].strip() for line in page.removeprefix(HEAD).splitlines()]
