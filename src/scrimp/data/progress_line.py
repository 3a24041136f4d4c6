"""A progress line for work that takes longer than two seconds.

On a terminal a live bar (rich, imported only then); elsewhere a plain line every five
seconds, so that a log tells what is going on. Nothing for short work.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any

QUIET_SECONDS = 2.0
LINE_SECONDS = 5.0


class Progress:
    """Shows how far a piece of work is; a context manager.

    Args:
        label: what is being done.
        total: bytes to go through, or None where that is not known.
        enabled: False shows nothing.
    """

    def __init__(self, label: str, total: int | None, *, enabled: bool = True) -> None:
        self.label, self.total, self.enabled = label, total, enabled
        self._began = time.monotonic()
        self._next = self._began + QUIET_SECONDS
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def update(self, done: int, detail: str = "") -> None:
        """Say how many bytes are done; cheap enough for every document."""
        now = time.monotonic()
        if not self.enabled or now < self._next:
            return
        if sys.stderr.isatty():
            self._next = now + 0.2
            self._show_bar(done, detail)
        else:
            self._next = now + LINE_SECONDS
            print(self._line(done, detail, now - self._began), file=sys.stderr, flush=True)

    def _line(self, done: int, detail: str, seconds: float) -> str:
        rate = done / max(seconds, 1e-9)
        parts = [f"{self.label}: {done / 1e6:,.1f} MB"]
        if self.total:
            share = min(done / self.total, 1.0)
            left = (self.total - done) / max(rate, 1e-9)
            parts = [f"{self.label}: {share:.0%} of {self.total / 1e6:,.1f} MB, {max(left, 0.0):.0f} s left"]
        return ", ".join([*parts, f"{rate / 1e6:.1f} MB/s", *([detail] if detail else [])])

    def _show_bar(self, done: int, detail: str) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                DownloadColumn,
                TextColumn,
                TimeRemainingColumn,
                TransferSpeedColumn,
            )
            from rich.progress import Progress as Bar

            columns = (
                DownloadColumn(),
                TransferSpeedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[detail]}", markup=False),
            )
            self._bar = Bar(
                TextColumn("{task.description}", markup=False),
                BarColumn(),
                *columns,
                console=Console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task(self.label, total=self.total, detail=detail)
            self._bar.start()
        self._bar.update(self._task, completed=done, detail=detail)


def note(text: str, *, enabled: bool = True) -> None:
    """One line on standard error."""
    if enabled:
        print(text, file=sys.stderr, flush=True)
