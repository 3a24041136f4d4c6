"""`scrimp export-precision`: the file, and on the terminal what it does not say."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from scrimp.adapters import export_precision
from scrimp.errors import PlanError, StorageError
from scrimp.files import write_whole
from scrimp.planner import Plan
from scrimp.planner.bits import PrecisionPlan

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
    if out.exists():
        raise StorageError(f"{out} exists already", do="choose another name; nothing is overwritten")
    found = export_precision(read_any_plan(source), target, names, approximate=approximate)
    write_whole(out, found.text)
    print(f"written: {out}")
    for name, value in found.environment.items():
        print(f"its processes need {name}={value}")
    for note in found.notes:
        print(f"note: {note}")
    for line in found.not_as_planned(_GLOBS):
        print(f"not as planned: {line}")
    return 0


def read_any_plan(source: Path) -> Plan | PrecisionPlan:
    """The plan of a run folder or of a file of either kind.

    Raises:
        PlanError: neither.
    """
    path = source / "plan.json" if source.is_dir() else source
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path} cannot be read", got=error, do="give a run folder or a plan") from None
    if '"scrimp_precision"' in text[:4096]:
        return PrecisionPlan.from_json(text, origin=str(path))
    return Plan.from_json(text, origin=str(path))
