"""`scrimp export-precision`: the file, and on the terminal what it does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from scrimp.errors import PlanError, typed
from scrimp.export import PrecisionExport, export_precision, whole_layer_recipes
from scrimp.files import read_bounded, refuse_taken, write_whole
from scrimp.planner import Plan
from scrimp.planner.plan import MAX_FILE_BYTES
from scrimp.planner.precision import PrecisionPlan

_GLOBS = 6
"""In a line of the terminal; the file has all."""


def export_to_file(
    source: Path,
    out: Path,
    target: Literal["torchao", "transformer-engine"],
    names: Literal["scrimp", "huggingface", "megatron"],
    *,
    approximate: bool,
) -> int:
    """Write the file; returns 0, also where something could not be said: it is listed."""
    refuse_taken(out)
    plan = read_any_plan(source)
    found = export_precision(plan, target, names, approximate=approximate)
    write_whole(out, found.text)
    print(f"written: {out}")
    for name, value in found.environment.items():
        print(f"its processes need {name}={value}")
    for note in found.notes:
        print(f"note: {note}")
    for line in found.not_as_planned(_GLOBS):
        print(f"not as planned: {line}")
    if found.inexpressible:
        print(_what_would_fit(plan, found, source, target))
    return 0


def _what_would_fit(
    plan: Plan | PrecisionPlan,
    found: PrecisionExport,
    source: Path,
    target: Literal["torchao", "transformer-engine"],
) -> str:
    """How to get a plan that the target runs as it stands."""
    layers = len({entry.layer for entry in found.inexpressible})
    recipes = whole_layer_recipes(plan, target)
    run = source if source.is_dir() else "RUN"
    words = (
        "--precision",
        "snip",
        "--model.weights",
        run,
        "--target",
        target,
        "--out",
        f"{target}-plan.json",
    )
    return (
        f"{layers} of {len(found.layers)} layers do not run as planned. To plan within what {target} runs: "
        f"{typed('plan', *words)}, and export that; "
        f"to train so: --snip.policy snip-layer --snip.formats with two or more of {', '.join(recipes)}"
    )


def read_any_plan(source: Path) -> Plan | PrecisionPlan:
    """The plan of a run folder or of a file of either kind.

    Raises:
        PlanError: neither.
    """
    path = source / "plan.json" if source.is_dir() else source
    content = read_bounded(path, error=PlanError, do="give a run folder or a plan", at_most=MAX_FILE_BYTES)
    kind = PrecisionPlan if b'"scrimp_precision"' in content[:4096] else Plan
    return kind.from_json(content, origin=str(path))
