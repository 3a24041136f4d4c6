"""How far a run is: a live line on a terminal, a plain line now and then in a log.

Problem  A person wants to see the run move; a log file wants few lines, and every important
         one. Neither may cost the training anything.
Method   `update` stores one record of Python floats and returns; on a terminal a thread of
         rich draws the last one `REFRESH_PER_SECOND` times a second, in a log a line is printed
         at most every `LOG_SECONDS`, and always for the first step, the last and an evaluation.
         Messages stand above the live line and stay. The time left is the remaining steps times
         the wall time of a step, averaged over about the last `MEMORY` steps; the share of
         waiting for data is averaged in the same way.
Limits   What cannot be shown (a closed pipe, a terminal that went away) is given up quietly:
         a run does not end because nobody looks. Text of a corpus is shown without its
         control characters, so that it cannot write to the terminal.
Checked  tests/training/test_progress.py
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from scrimp.report.units import (
    format_bytes,
    format_duration,
    format_number,
    format_percent,
    format_rate,
    is_number,
)
from scrimp.world import ALONE, World

LOG_SECONDS: Final = 5.0
REFRESH_PER_SECOND: Final = 4
MEMORY: Final = 20


class StepLine:
    """The line of one run; a context manager.

    Args:
        total_steps: steps of the whole run.
        first_step: where this process begins: the step of the checkpoint, or 0.
        console: where to write; standard output if None.
        world: the ranks of the run; all but the writer show nothing.
    """

    peak_origin: str = ""
    """What the MFU is a share of, as `Peaks.origin` says it: 'measured …' or 'spec sheet …'."""

    def __init__(
        self,
        *,
        total_steps: int,
        first_step: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
        world: World = ALONE,
    ) -> None:
        self._total, self._step = total_steps, first_step
        self._console = console or Console()
        self._console.quiet |= not world.is_writer
        self._clock = clock
        self._record: Mapping[str, Any] = {}
        self._phase = ""
        self._last_update: float | None = None
        self._last_line = float("-inf")
        self._line_is_due = False
        self._seconds, self._waiting = _Average(), _Average()
        self._is_live = world.is_writer and self._console.is_terminal and not self._console.is_dumb_terminal
        self._is_printing = False
        self._postponed: list[str] = []
        self._live: Live | None = None

    def __enter__(self) -> StepLine:
        if self._is_live:
            self._live = Live(
                console=self._console,
                get_renderable=self._render,
                refresh_per_second=REFRESH_PER_SECOND,
            )
            self._quietly(self._live.start)
        return self

    def __exit__(self, *exception: object) -> None:
        self._phase = ""
        live, self._live = self._live, None
        if live is not None:
            self._quietly(live.stop)
        elif self._line_is_due:
            self._print_line()
        self._print_postponed()

    def update(self, record: Mapping[str, Any]) -> None:
        """Show the figures of one step (the record of ``metrics.jsonl``)."""
        now = self._clock()
        step = int(record["step"])
        done = step - self._step
        # The first interval holds compiling and warming up: it says nothing about the next ones.
        if self._last_update is not None and done > 0:
            self._seconds.add((now - self._last_update) / done)
        waited, took = record.get("data_wait_s"), record.get("step_s")
        if is_number(waited) and is_number(took) and took > 0:
            self._waiting.add(waited / took)
        is_first = self._last_update is None
        self._record, self._step, self._last_update, self._phase = record, step, now, ""
        if self._is_live:
            return
        self._line_is_due = True
        is_special = is_first or step >= self._total or record.get("eval_loss") is not None
        if is_special or now - self._last_line >= LOG_SECONDS:
            self._print_line()
        self._print_postponed()

    def message(self, text: str) -> None:
        """Show a sentence that stays. May be called from a signal handler."""
        if self._is_printing:
            self._postponed.append(text)
            return
        self._print(text)
        self._print_postponed()

    def phase(self, text: str) -> None:
        """Say what goes on between steps (compiling, evaluating, ...), until the next update."""
        if text == self._phase:
            return
        self._phase = text
        if text and not self._is_live:
            self._print(f"{text} ...")

    # -- drawing -------------------------------------------------------------------------------

    def _render(self) -> RenderableType:
        head = Table.grid(padding=(0, 1))
        percent = f"{self._step / self._total:.0%}" if self._total else ""
        bar = ProgressBar(total=max(1, self._total), completed=self._step, width=self._bar_width())
        head.add_row(Text(f"step {self._step:,}/{self._total:,}", "bold"), bar, percent, self._phase_or_eta())
        return Group(head, self._text(self._fitting(self._figures(), self._console.width)))

    def _bar_width(self) -> int:
        return max(5, min(40, self._console.width - 60))

    def _phase_or_eta(self) -> Text:
        return (
            self._text(self._phase, "yellow") if self._phase else self._text(self._time_left() or "", "cyan")
        )

    def _time_left(self) -> str | None:
        remaining = self._total - self._step
        if self._seconds.value is None or remaining <= 0:
            return None
        return f"{format_duration(self._seconds.value * remaining)} left"

    def _figures(self) -> list[str]:
        """What the last record says, the most important first."""
        record = self._record
        if not record:
            return []
        loss = record.get("loss")
        figures = [f"loss {format_number(loss)}" if is_number(loss) else f"loss {loss} (not finite)"]
        if record.get("skipped"):
            figures.append("skipped")
        if is_number(record.get("tokens_per_s")):
            figures.append(format_rate(record["tokens_per_s"]))
        if is_number(record.get("tensor_peak_bytes")):
            figures.append(f"tensors {format_bytes(record['tensor_peak_bytes'])}")
        elif is_number(record.get("process_growth_bytes")):
            figures.append(f"process +{format_bytes(record['process_growth_bytes'])}")
        if is_number(record.get("mfu_bf16")):
            figures.append(f"MFU {format_percent(record['mfu_bf16'])}{self._of_peak()}")
        if is_number(record.get("sol")):
            figures.append(f"SOL {format_percent(record['sol'])}")
        if self._waiting.value is not None:
            figures.append(f"data wait {format_percent(self._waiting.value)}")
        if is_number(record.get("eval_loss")):
            figures.append(f"held-out loss {format_number(record['eval_loss'])}")
        return figures

    def _of_peak(self) -> str:
        if not self.peak_origin:
            return ""
        return " of measured BF16 peak" if self.peak_origin.startswith("measured") else " of spec BF16 peak"

    def _fitting(self, figures: list[str], width: int) -> str:
        """The first figures, as many as one row holds: a wrapped live line would leave pieces behind."""
        while len(figures) > 1 and len(" · ".join(figures)) > width:
            figures = figures[:-1]
        return " · ".join(figures)

    # -- printing ------------------------------------------------------------------------------

    def _print_line(self) -> None:
        self._last_line, self._line_is_due = self._clock(), False
        figures = self._figures()
        left = self._time_left()
        if left:
            figures.insert(2, left)
        self._print(f"step {self._step:,}/{self._total:,} · " + " · ".join(figures))

    def _text(self, text: str, style: str = "") -> Text:
        return Text(_plain(text, self._console.encoding), style)

    def _print_postponed(self) -> None:
        while self._postponed and not self._is_printing:
            self._print(self._postponed.pop(0))

    def _print(self, text: str) -> None:
        self._quietly(
            lambda: self._console.print(
                self._text(text), soft_wrap=not self._is_live, highlight=False, markup=False, emoji=False
            )
        )

    def _quietly(self, act: Callable[[], None]) -> None:
        self._is_printing = True
        try:
            act()
        except (OSError, ValueError, SystemExit):
            # ValueError: the stream was closed. SystemExit: rich's answer to a closed pipe.
            self._console.quiet = True
        finally:
            self._is_printing = False


class _Average:
    """Mean over about the last `MEMORY` values; the plain mean until there are that many."""

    def __init__(self) -> None:
        self.value: float | None = None
        self._count = 0

    def add(self, value: float) -> None:
        self._count = min(MEMORY, self._count + 1)
        self.value = value if self.value is None else self.value + (value - self.value) / self._count


def _plain(text: str, encoding: str) -> str:
    """`text` without what a terminal would obey or the stream's encoding lacks."""
    kept = (c if c in "\n\t" or c.isprintable() else " " if c.isspace() else "\ufffd" for c in text)
    return "".join(kept).encode(encoding, "replace").decode(encoding, "replace")
