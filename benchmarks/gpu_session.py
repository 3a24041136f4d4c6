"""One part of `gpu.py` on a lent device: commands with a limit, their full logs, runs that later checks build on.

Limit    A check has seconds of its own, and a part has seconds for all of its checks. A command that is still running
         when either is used up is killed with all that it started: a worker that outlived it would hold the
         device's memory and time.
Logs     Everything that a command writes goes to files under ``DATE-gpu-PART-logs/``, as it comes: what a killed one
         said is there.
Skipped  A check that builds on a run which failed raises `SkippedError`, and says so; it counts as not held.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from environment import ROOT

Outcome = tuple[str, bool, str]
"""What was checked, whether it held, and the figure that shows it."""


class SkippedError(Exception):
    """A check that cannot be made, with the reason."""


class OverLimitError(Exception):
    """A command that was killed because its check's or its part's time was up."""


@dataclass
class Session:
    """One part: where its files go, and how much time is left."""

    scratch: Path
    out: Path
    part: str
    date: str
    budget_s: float
    began: float = field(default_factory=time.perf_counter)
    runs: dict[str, Path] = field(default_factory=dict)
    """Finished training runs by name."""
    failed: set[str] = field(default_factory=set)
    """Runs that were begun and did not finish."""
    check: str = "check"
    """Name of the running check, for its logs."""
    check_ends: float = float("inf")
    """On the clock of `began`."""
    _numbers: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def left_s(self) -> float:
        """Seconds until the running check must have ended."""
        return min(self.began + self.budget_s, self.check_ends) - time.perf_counter()

    @property
    def part_left_s(self) -> float:
        """Seconds until the part must have ended."""
        return self.began + self.budget_s - time.perf_counter()

    @property
    def logs(self) -> Path:
        """Folder of everything that commands wrote."""
        return self.out / f"{self.date}-gpu-{self.part}-logs"

    def begin(self, check: str, limit_s: float) -> None:
        """A check begins; it has so many seconds."""
        self.check, self.check_ends = check, time.perf_counter() + limit_s

    def command(self, *words: str) -> subprocess.CompletedProcess[str]:
        """Run a command in this checkout with the package on the path.

        Raises:
            OverLimitError: the time was up; the command is dead, and so is all that it started.
        """
        self.logs.mkdir(parents=True, exist_ok=True)
        log = self.logs / f"{next(self._numbers):02d}-{self.check.replace(' ', '-').replace('/', '-')[:60]}"
        out, err = log.with_name(f"{log.name}.out"), log.with_name(f"{log.name}.err")
        limit = max(1.0, self.left_s)
        try:
            status = run(words, out, err, limit)
        except subprocess.TimeoutExpired:
            raise OverLimitError(f"killed after {limit:.0f} s; its log: {err.name}") from None
        text = out.read_text(errors="replace"), err.read_text(errors="replace")
        return subprocess.CompletedProcess(words, status, *text)

    def run_of(self, name: str, make: Callable[[Path], object]) -> Path:
        """The folder of a training run, made at the first call.

        Raises:
            SkippedError: making it failed before.
        """
        if name in self.failed:
            raise SkippedError(f"skipped: the {name} run failed")
        if name not in self.runs:
            self.failed.add(name)
            make(self.scratch / name)
            self.failed.discard(name)
            self.runs[name] = self.scratch / name
        return self.runs[name]

    def finished(self, name: str) -> Path:
        """The folder of a run that an earlier check made.

        Raises:
            SkippedError: it failed, or was never begun.
        """
        if name not in self.runs:
            raise SkippedError(
                f"skipped: the {name} run {'failed' if name in self.failed else 'was not made'}"
            )
        return self.runs[name]


def run(words: Sequence[str], out: Path, err: Path, limit_s: float) -> int:
    """Run a command in this checkout with the package on the path, its output in files; its exit status.

    Raises:
        subprocess.TimeoutExpired: the time was up; the command and all that it started are dead.
    """
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    with out.open("w") as stdout, err.open("w") as stderr:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=os.environ | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"},  # what a killed one said is kept
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            start_new_session=True,
        )
    try:
        return process.wait(limit_s)
    finally:
        kill_all(process)  # also after its end, or an interrupt here: what it started may live on


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """End the process group that a process leads, and the groups of all that descend from it: a benchmark that is
    started here starts commands in groups of their own. One in such a group whose starter has ended before is not
    found."""
    groups = {process.pid}
    for descendant in descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            groups.add(os.getpgid(descendant))
    for group in groups - {os.getpgrp()}:
        with contextlib.suppress(ProcessLookupError):  # all of them have ended
            os.killpg(group, signal.SIGKILL)
    process.wait()


def descendants(process: int) -> list[int]:
    """Processes that a process started, and those that they started, as long as the ones between them live."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(") ")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    found, waiting = [], [process]
    while waiting:
        waiting += (new := children.get(waiting.pop(), []))
        found += new
    return found


def python(*words: str) -> tuple[str, ...]:
    """A command of this interpreter."""
    return (sys.executable, *words)
