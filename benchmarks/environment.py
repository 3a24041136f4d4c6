"""What every benchmark records about itself, and how it writes its results.

A script reads `facts` before it measures anything: an edit or a commit made meanwhile must not
change what the results say about the code that ran. Imports neither torch nor scrimp.

    from environment import facts      # `python benchmarks/x.py` puts this folder on the path
"""

from __future__ import annotations

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FEATURES = ("avx2", "avx512f", "avx512_bf16", "amx_bf16")
"""Instruction sets that decide how fast a CPU is here."""


def facts(*packages: str) -> dict[str, Any]:
    """The command, the commit, and the versions of Python and of these packages."""
    return {"command": command_line(), "commit": commit(), "versions": versions(*packages)}


def command_line() -> str:
    """The line that repeats this run, from the repository's root.

    Paths in the repository are relative to it; others keep only their name, as what a path
    elsewhere says is about this machine.
    """
    return shlex.join(["python", *(_portable(word) for word in (Path(sys.argv[0]).resolve(), *sys.argv[1:]))])


def _portable(word: str | Path) -> str:
    option, equals, value = str(word).rpartition("=")
    path = Path(value)
    if not path.is_absolute():
        return str(word)
    shown = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path.name
    return f"{option}{equals}{shown}"


def commit() -> str:
    """The commit, and whether files differ from it (other results aside).

    A copy without git can be told it as SCRIMP_COMMIT.
    """
    stated = os.environ.get("SCRIMP_COMMIT")
    if stated:
        return f"{stated} (stated)"
    head = _git("rev-parse", "HEAD")
    if not head:
        return "no commit"
    changed = _git("status", "--porcelain", "--", ".", ":!benchmarks/results")
    return f"{head} (with changes)" if changed else head


def _git(*words: str) -> str:
    """What git prints, or nothing where it fails or is missing."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def versions(*packages: str) -> dict[str, str]:
    """Python's version and those of installed packages."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found


def num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """The processor as Linux names it."""
    return _cpu_field("model name") or platform.processor() or platform.machine()


def cpu() -> str:
    """The processor, its cores, and the features that matter here."""
    present = _cpu_field("flags").split()
    features = ", ".join(name for name in FEATURES if name in present)
    return f"{cpu_name()}, {num_cores()} cores ({features})"


def _cpu_field(name: str) -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """The lines of a table."""
    head = ["| " + " | ".join(columns) + " |", "|" + " --- |" * len(columns)]
    return [*head, *("| " + " | ".join(row) + " |" for row in rows)]


def write_pair(folder: Path, name: str, record: dict[str, Any], page: str | None = None) -> Path:
    """The record as `name`.json and, if there is one, the page as `name`.md; returns the former."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if page is not None:
        path.with_suffix(".md").write_text(page, encoding="utf-8")
    return path
