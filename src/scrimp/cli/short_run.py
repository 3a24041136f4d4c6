"""The first steps of a run, in a folder that is thrown away: how many seconds one takes.

Method   Ranks are started as by `scrimp launch`, on the settings of a file, and killed once enough steps stand in the
         run's log: no checkpoint, evaluation or sample is paid for. The median counts, without the first step. What
         ends before is a failure, of memory where it says so, was killed by the system, or went on with another plan
         because of memory.
Limits   Ranks of one machine. Corpora are prepared where the run would prepare them.
Checked  tests/cli/test_plan_tune.py
"""

from __future__ import annotations

import contextlib
import json
import signal
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final

from scrimp.cli.launch import run_once
from scrimp.planner.layout.tuning import Failure, Outcome

LONGEST_S: Final = 600.0
"""From the time that the run has its folder; then a trial is a failure."""
_LOOK_S: Final = 0.1
_MEMORY_WORDS: Final = (
    "out of memory",
    "OutOfMemory",
    "can't allocate memory",
    "not enough memory",
    "fits in memory",
    "fit in memory",
)


def short_run(words: Sequence[str], ranks: int, steps: int, folder: Path) -> tuple[Outcome, str]:
    """Seconds of a step, or why there are none, and the last line that the ranks said.

    Args:
        words: `scrimp` with these, to which the folder of the run is added.
        folder: new; whoever made it removes it.
    """
    run, log = folder / "run", folder / "log.txt"
    signals: list[int] = []
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(run, steps, signals, ended))
    with log.open("w", encoding="utf-8") as output:
        watcher.start()
        try:
            with contextlib.redirect_stderr(output):  # that its ranks are killed is no news
                end = run_once(
                    [*words, f"--run.dir={run}"], list(range(ranks)), {}, 1.0, signals, "", output.fileno()
                )
        finally:
            ended.set()
            watcher.join()
    found = _seconds(run)
    text = log.read_text(encoding="utf-8", errors="replace")
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "")
    if any(one.get("kind") in ("memory-replan", "weight-operands") for one in _lines(run / "events.jsonl")):
        return Failure.MEMORY, "the run went on with a plan that takes less memory"
    if len(found) >= steps:
        return statistics.median(found[1:] or found), last
    error = next((line for line in text.splitlines() if "error:" in line or "Error" in line), last)
    killed = end.code == 128 + signal.SIGKILL and not signals
    if killed or any(one in text for one in _MEMORY_WORDS):
        return Failure.MEMORY, "killed by the system" if killed else error
    return Failure.OTHER, f"{LONGEST_S:.0f} s were not enough" if signals else error


def _watch(run: Path, steps: int, signals: list[int], ended: threading.Event) -> None:
    """Have the ranks killed after so many steps, or seconds."""
    begun = None
    while not ended.wait(_LOOK_S):
        if begun is None and run.exists():
            begun = time.monotonic()
        is_late = begun is not None and time.monotonic() > begun + LONGEST_S
        if is_late or len(_seconds(run)) >= steps:
            signals.append(signal.SIGKILL)
            return


def _seconds(run: Path) -> list[float]:
    return [float(one["step_s"]) for one in _lines(run / "metrics.jsonl") if "step_s" in one]


def _lines(file: Path) -> Iterator[dict[str, Any]]:
    """Those of a log that are whole."""
    with contextlib.suppress(OSError):
        for line in file.read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                yield json.loads(line)
