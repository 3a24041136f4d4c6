"""The table of what trains where is that of the recorded result."""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]


def test_what_trains_where_is_what_was_recorded() -> None:
    text = (ROOT / "docs/memory.md").read_text(encoding="utf-8")
    section = text.split("## What trains where")[1].split("\n## ")[0]
    name = section.split("../benchmarks/results/")[1].split(".md")[0]
    record = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text(encoding="utf-8"))
    lines = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    tables = (lines[:7], lines[7:])
    shown = {
        (moments, int(row[0].split()[0]), int(head.split()[2])): cell
        for moments, (heads, _, *rows) in zip(("bf16", "8bit"), tables, strict=True)
        for row in rows
        for head, cell in zip(heads[1:], row[1:], strict=True)
    }
    recorded = {(one["moments"], one["card"], one["host"]): one["model"] for one in record["largest"]}
    assert len(shown) == 40
    assert shown == recorded
