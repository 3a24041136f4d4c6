"""Time of `scrimp prepare` against that of an earlier version, in one process.

Subject  `prepare` of this working tree: passes for the held-out split, encoding, shards.
Peer     `prepare` of another source folder, such as a worktree of an earlier commit.
Fair     In turn in one process, the same source, a tokenizer that was trained once before. Wall time is what a user
         waits, processor time (of all threads) what the machine does for it.
         Each side runs with its own modules; the interpreter's table of modules is exchanged between turns.

    git worktree add ../before COMMIT
    python benchmarks/prepare_versions.py --before ../before/src --text FILE
"""

from __future__ import annotations

import argparse
import datetime
import importlib
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

from environment import RESULTS, cpu_name, facts, markdown_table, num_cores, write_pair

COLUMNS = ("source", "tokenizer", "MB", "clock", "before, s", "now, s", "now / before")
CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}


class Version:
    """One version of the package, with modules of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder)
        self.modules: dict[str, ModuleType] = {}

    def prepare(self, source: str, tokenizer: str, out: Path) -> dict[str, float]:
        """Seconds of preparing a source, by each clock."""
        for name in [name for name in sys.modules if name.partition(".")[0] == "scrimp"]:
            del sys.modules[name]
        sys.modules.update(self.modules)
        sys.path.insert(0, self.folder)
        try:
            data = importlib.import_module("scrimp.data")
            assert str(data.__file__).startswith(self.folder)
            began = {name: clock() for name, clock in CLOCKS.items()}
            data.prepare(data.CorpusSpec(source=source, tokenizer=tokenizer), out, progress=False)
            return {name: clock() - began[name] for name, clock in CLOCKS.items()}
        finally:
            sys.path.remove(self.folder)
            self.modules = {
                name: sys.modules[name] for name in sys.modules if name.partition(".")[0] == "scrimp"
            }


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def measure(
    versions: dict[str, Version], source: str, kind: str, repeats: int, scratch: Path
) -> dict[str, object]:
    """Both versions on one source, in turn; a first turn of each is not counted."""
    tokenizer = kind
    if kind == "bpe":
        versions["now"].prepare(source, "bpe", scratch / "trained")
        tokenizer = str(scratch / "trained" / "tokenizer")
    seconds: dict[str, dict[str, list[float]]] = {clock: {name: [] for name in versions} for clock in CLOCKS}
    for repeat in range(repeats + 1):
        for name, version in versions.items():
            taken = version.prepare(source, tokenizer, scratch / f"{name}-{repeat}")
            for clock in CLOCKS if repeat else ():
                seconds[clock][name].append(taken[clock])
    shards = (scratch / "now-1").glob("*.tokens")
    num_bytes = 0
    for shard in shards:
        num_bytes += int.from_bytes(shard.read_bytes()[32:40], "little")
    ratios = {
        clock: [now / before for now, before in zip(taken["now"], taken["before"], strict=True)]
        for clock, taken in seconds.items()
    }
    name = source if source == "stdlib" else Path(source).name
    return {"source": name, "tokenizer": kind, "text_bytes": num_bytes, "seconds": seconds, "ratios": ratios}


def table(report: dict) -> str:
    """The report in Markdown."""
    rows = [
        [
            result["source"], result["tokenizer"], f"{result['text_bytes'] / 1e6:.1f}", clock,
            spread(taken["before"]), spread(taken["now"]), spread(result["ratios"][clock]),
        ]
        for result in report["results"] for clock, taken in result["seconds"].items()
    ]  # fmt: skip
    return "\n".join(
        [
            "# Time of `scrimp prepare` with and without the comparison of 13-grams",
            "",
            f"Before: commit {report['before'][:12]}, a held-out split by hash alone. Wall time, and processor",
            "time of all threads, measured in turn in one process; median (least to most) of",
            f"{report['repeats']} repeats. The machine was shared: load {report['load_before']:.1f} before on",
            f"{report['cores']} cores. The BPE was trained before the clock started;",
            "with `bytes` there is nothing to encode, and what is left is reading, hashing and writing.",
            "",
            *markdown_table(COLUMNS, rows),
            "",
            f"- Command: `{report['command']}`",
            f"- Commit: {report['commit']}",
            f"- Hardware: {report['cpu']}, {report['cores']} cores",
            f"- Versions: {', '.join(f'{name} {version}' for name, version in report['versions'].items())}",
            "",
        ]
    )


def main(clock: Callable[[], datetime.date] = datetime.date.today) -> None:
    parser = argparse.ArgumentParser(description="time of scrimp prepare against an earlier version")
    parser.add_argument("--before", type=Path, required=True, help="src folder of the earlier version")
    parser.add_argument("--before-commit", required=True, help="its commit")
    parser.add_argument(
        "--text",
        type=Path,
        action="append",
        default=[],
        help="a text file to measure; the standard library without one",
    )
    parser.add_argument(
        "--bytes-text",
        type=Path,
        action="append",
        default=[],
        help="a text file, such as one of more than 64 MiB, to measure with the bytes tokenizer alone",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    arguments = parser.parse_args()
    found = facts("tokenizers", "numpy")
    report = {
        "benchmark": "prepare-split",
        "date": clock().isoformat(),
        "command": found["command"],
        "commit": found["commit"],
        "before": arguments.before_commit,
        "cpu": cpu_name(),
        "cores": num_cores(),
        "load_before": os.getloadavg()[0],
        "versions": found["versions"],
        "repeats": arguments.repeats,
        "results": [],
    }
    here = Path(__file__).resolve().parent.parent / "src"
    versions = {"before": Version(arguments.before.resolve()), "now": Version(here)}
    cases = [(source, kind) for source in arguments.text or ["stdlib"] for kind in ("bpe", "bytes")]
    for source, kind in [*cases, *((source, "bytes") for source in arguments.bytes_text)]:
        print(f"measuring {source}, {kind}", file=sys.stderr)
        with tempfile.TemporaryDirectory(prefix="scrimp-benchmark-") as scratch:
            report["results"].append(measure(versions, str(source), kind, arguments.repeats, Path(scratch)))
    write_pair(arguments.out, f"{report['date']}-prepare-split", report, table(report))
    print(table(report))


if __name__ == "__main__":
    main()
