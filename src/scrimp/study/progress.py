"""How far a study is: on a terminal a bar for all of it and one for each run, in a log a line for each run that ends,
and one every half minute.

The time left is the steps that are left at the pace of those that were made since the study began.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from rich.console import Console

from scrimp.report.units import format_duration, format_number
from scrimp.study.job import Job
from scrimp.study.results import FIGURES
from scrimp.study.rows import Row

LINE_SECONDS: Final = 30.0


class StudyProgress:
    """Tells a stream what happens.

    Args:
        total: runs that are to be made.
        steps: of all of them.
    """

    def __init__(
        self, total: int, steps: int, console: Console, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._total, self._steps, self._console, self._clock = total, steps, console, clock
        self._began = self._said = clock()
        self._ended = self._made = 0
        self._first: dict[str, int] = {}
        self._going: dict[str, tuple[int, int]] = {}
        self._bars: Any = None
        self._tasks: dict[str, Any] = {}

    def started(self, job: Job) -> None:
        """A run begins, or goes on. A descent makes more than those that were foreseen."""
        if self._ended + len(self._going) >= self._total:
            self._total, self._steps = self._total + 1, self._steps + job.steps
        self._going[job.name] = (0, job.steps)

    def going(self, steps: Mapping[str, int]) -> None:
        """The last steps of runs that go on."""
        for name, step in steps.items():
            self._first.setdefault(name, step)
            self._going[name] = (step, self._going.get(name, (0, step))[1])
        if self._bars is not None:
            self._draw()
        elif self._clock() >= self._said + LINE_SECONDS:
            self._said = self._clock()
            runs = ", ".join(f"{name} step {step:,}/{last:,}" for name, (step, last) in self._going.items())
            self._print(f"{self._ended}/{self._total} runs done; {runs}{self._left()}")

    def ended(self, job: Job, row: Row) -> None:
        """A run ended, well or with an error; or models were evaluated together, which is no run of the total."""
        count = ""
        if job.combined is None:
            self._count(job, row)
            count = f"[{self._ended}/{self._total}] "
        value = row.figures.get(job.figure)
        words = (
            f"{FIGURES[job.figure]} {format_number(value, 5)}"
            if row.error is None
            else f"failed: {row.error}"
        )
        took = f", {format_duration(row.seconds)}" if row.seconds else ""
        self._print(f"{count}{job.name}: {words}{took}")
        if self._bars is not None:
            self._draw()

    def _count(self, job: Job, row: Row) -> None:
        self._ended += 1
        first, (step, _) = self._first.pop(job.name, 0), self._going.pop(job.name, (0, job.steps))
        if row.error is None:
            self._made += job.steps - first
        else:  # what it did not make, nobody makes in this call
            self._made += max(0, step - first)
            self._steps -= job.steps - step

    def dropped(self, ends: Mapping[str, int]) -> None:
        """A round ended, and these variants do not go on from the steps that they have reached."""
        for step in sorted(set(ends.values())):
            names = [name for name, end in ends.items() if end == step]
            self._print(f"dropped after step {step:,}: {', '.join(names)}")

    @contextlib.contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, a terminal has bars."""
        if not self._console.is_terminal or self._console.is_dumb_terminal:
            yield
            return
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            TextColumn("{task.fields[words]}"),
        )
        with Progress(*columns, console=self._console, transient=True) as self._bars:
            self._tasks["all"] = self._bars.add_task("runs", total=self._total, words="")
            try:
                yield
            finally:
                self._bars = None

    def _draw(self) -> None:
        self._bars.update(
            self._tasks["all"],
            total=self._total,
            completed=self._ended,
            words=f"{self._ended}/{self._total}{self._left()}",
        )
        for name in [name for name in self._tasks if name != "all" and name not in self._going]:
            self._bars.remove_task(self._tasks.pop(name))
        for name, (step, last) in self._going.items():
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name, total=last, words="")
            words = f"step {step:,}/{last:,}" if step else "beginning"
            self._bars.update(self._tasks[name], completed=step, words=words)

    def _left(self) -> str:
        now = sum(step - self._first.get(name, 0) for name, (step, _) in self._going.items())
        made = self._made + now
        if made <= 0 or made >= self._steps:
            return ""
        seconds = (self._clock() - self._began) * (self._steps - made) / made
        return f"; about {format_duration(seconds)} left"

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)
