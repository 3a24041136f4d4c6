"""The live line and its plain twin: what they show, how often, and what they must not do."""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from scrimp.training.progress import LOG_SECONDS, StepLine

RECORD: dict[str, Any] = {
    "step": 1,
    "loss": 3.04173,
    "tokens_per_s": 19150.0,
    "mfu_bf16": 0.418,
    "sol": 0.39,
    "tensor_peak_bytes": 2**30,
    "process_growth_bytes": 2**31,
    "data_wait_s": 0.01,
    "step_s": 0.5,
    "skipped": False,
}


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Plain:
    """A step line in a log, with a clock of its own."""

    def __init__(self, total: int = 1000, first: int = 0) -> None:
        self.clock, self.file = Clock(), io.StringIO()
        self.line = StepLine(
            total_steps=total,
            first_step=first,
            console=Console(file=self.file, width=60, force_terminal=False),
            clock=self.clock,
        )

    def step(self, number: int, seconds: float = 0.5, **fields: Any) -> None:
        self.clock.now += seconds
        self.line.update({**RECORD, "step": number, **fields})

    @property
    def lines(self) -> list[str]:
        return self.file.getvalue().splitlines()

    @property
    def steps(self) -> list[int]:
        return [int(found[1]) for line in self.lines if (found := re.match(r"step (\d+)/", line))]


def test_a_line_in_a_log_shows_every_figure_and_is_never_wrapped() -> None:
    plain = Plain()
    plain.line.peak_origin = "measured here by a matrix product"
    with plain.line:
        plain.step(1)
        for number in range(2, 21):
            plain.step(number)
    assert plain.lines[-1] == (
        "step 20/1,000 · loss 3.042 · 19.1k tok/s · 8m 10s left · tensors 1.00 GiB · "
        "MFU 41.8% of measured BF16 peak · SOL 39.0% · data wait 2.0%"
    )


def test_a_log_gets_the_first_and_the_last_line_and_few_between() -> None:
    plain = Plain()
    with plain.line:
        for number in range(1, 104):
            plain.step(number)
    every = round(LOG_SECONDS / 0.5)
    assert plain.steps == [*range(1, 103, every), 103]


def test_the_last_line_is_not_printed_twice() -> None:
    plain = Plain(total=3)
    with plain.line:
        for number in (1, 2, 3):
            plain.step(number, seconds=0.001)
    assert plain.steps == [1, 3]


def test_every_evaluation_and_message_is_printed_in_its_place() -> None:
    plain = Plain()
    with plain.line:
        for number in (1, 2, 3, 4):
            if number == 3:
                plain.line.phase("evaluating")
                plain.line.message("step 3: held-out loss 2.5")
            plain.step(number, seconds=0.01, **({"eval_loss": 2.5} if number == 3 else {}))
        plain.line.message("checkpoint of step 4 written")
    assert [line[:24].rstrip() for line in plain.lines] == [
        "step 1/1,000 · loss 3.04",
        "evaluating ...",
        "step 3: held-out loss 2.",
        "step 3/1,000 · loss 3.04",
        "checkpoint of step 4 wri",
        "step 4/1,000 · loss 3.04",
    ]
    assert "held-out loss 2.500" in plain.lines[3]


def test_the_time_left_leaves_out_the_first_step_and_follows_a_change() -> None:
    plain = Plain(total=1000)
    with plain.line:
        plain.step(1, seconds=300.0)  # compiling
        for number in range(2, 101):
            plain.step(number, seconds=1.0)
        assert "15m 00s left" in plain.lines[-1] or "15m 0" in plain.lines[-1]
        for number in range(101, 501):
            plain.step(number, seconds=2.0)
    assert "16m 40s left" in plain.lines[-1]


def test_a_resumed_run_counts_from_its_checkpoint() -> None:
    plain = Plain(total=100, first=90)
    with plain.line:
        for number in range(91, 96):
            plain.step(number, seconds=10.0)
    assert "50.0 s left" in plain.lines[-1]


def test_a_skipped_step_and_a_loss_that_is_not_finite_are_said() -> None:
    plain = Plain()
    with plain.line:
        plain.step(1, loss=math.nan, skipped=True, mfu_bf16=None, sol=None)
    assert "loss nan (not finite) · skipped" in plain.lines[0]
    assert "MFU" not in plain.lines[0]


def test_the_spec_peak_is_not_called_measured() -> None:
    plain = Plain()
    plain.line.peak_origin = "spec sheet of NVIDIA H100"
    with plain.line:
        plain.step(1)
    assert "MFU 41.8% of spec BF16 peak" in plain.lines[0]


def test_text_of_a_corpus_cannot_write_to_the_terminal_or_in_markup() -> None:
    plain = Plain()
    with plain.line:
        plain.line.message("[bold]x[/bold] :smile: \x1b[2J\x07\r\x9b31m \u202eend\nnext\tline \ud800")
    assert plain.file.getvalue() == (
        "[bold]x[/bold] :smile: \ufffd[2J\ufffd \ufffd31m \ufffdend\nnext    line \ufffd\n"
    )


def test_a_stream_that_is_not_utf8_gets_what_it_can_show() -> None:
    raw = io.BytesIO()
    file = io.TextIOWrapper(raw, encoding="ascii")
    with StepLine(total_steps=5, console=Console(file=file, width=80)) as line:
        line.message("größer")
        line.update(RECORD)
    file.flush()
    assert raw.getvalue().startswith(b"gr??er\nstep 1/5 ? loss 3.042 ? ")


def test_a_closed_pipe_does_not_end_the_run() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    file = os.fdopen(writer, "w")
    console = Console(file=file)
    line = StepLine(total_steps=5, console=console)
    saved = os.dup(1)  # rich sends standard output to nowhere when a pipe is closed
    try:
        with line:
            for number in range(1, 6):
                line.update({**RECORD, "step": number})
                line.message("still here")
    finally:
        os.dup2(saved, 1)
        os.close(saved)
    assert console.quiet  # the pipe did break, and nothing more is tried
    with contextlib.suppress(BrokenPipeError):
        file.close()


def test_a_closed_stream_does_not_end_the_run() -> None:
    file = io.StringIO()
    console = Console(file=file)
    with StepLine(total_steps=5, console=console) as line:
        file.close()
        line.update(RECORD)
        line.message("still here")
    assert console.quiet  # the stream did refuse, and nothing more is tried


def test_a_message_of_a_signal_handler_in_the_middle_of_printing_is_shown_after_it() -> None:
    class Interrupted(io.StringIO):
        line: StepLine | None = None

        def write(self, text: str) -> int:
            line, self.line = self.line, None
            if line is not None:
                line.message("SIGINT: finishing this step")
            return super().write(text)

    file = Interrupted()
    with StepLine(total_steps=5, console=Console(file=file)) as line:
        file.line = line
        line.message("first")
    assert file.getvalue() == "first\nSIGINT: finishing this step\n"


# -- a terminal ----------------------------------------------------------------------------------


def shown_on_a_terminal(width: int, *, phase: str = "") -> list[str]:
    """The last state of the live line, as rows of text."""
    screen: dict[str, Any]
    clock, screen = Clock(), {"file": io.StringIO(), "force_terminal": True, "width": width}
    line = StepLine(total_steps=300, console=Console(**screen), clock=clock)
    line.peak_origin = "measured here"
    with line:
        for number in range(1, 101):
            clock.now += 0.5
            line.update({**RECORD, "step": number})
        line.phase(phase)
        console = Console(**screen, record=True)
        console.print(line._render())
    return [row.rstrip() for row in console.export_text().splitlines()]


def test_a_terminal_shows_a_bar_and_the_figures_in_two_rows() -> None:
    rows = shown_on_a_terminal(130)
    assert len(rows) == 2
    assert re.fullmatch(r"step 100/300 ━+[╸╺]?━* 33% 1m 40s left", rows[0])
    assert rows[1] == (
        "loss 3.042 · 19.1k tok/s · tensors 1.00 GiB · MFU 41.8% of measured BF16 peak · SOL 39.0% · "
        "data wait 2.0%"
    )


@pytest.mark.parametrize("width", [40, 50, 80, 100])
def test_a_narrow_terminal_shows_fewer_figures_in_two_rows(width: int) -> None:
    rows = shown_on_a_terminal(width)
    assert len(rows) == 2
    assert rows[1].startswith("loss 3.042 · 19.1k tok/s")
    assert all(len(row) <= width for row in rows)


def test_a_phase_takes_the_place_of_the_time_left() -> None:
    assert shown_on_a_terminal(100, phase="evaluating")[0].endswith("33% evaluating")


def test_the_cursor_comes_back_and_no_thread_stays_after_an_interrupt() -> None:
    file = io.StringIO()
    before = threading.active_count()
    line = StepLine(total_steps=5, console=Console(file=file, force_terminal=True, width=80))
    with pytest.raises(KeyboardInterrupt):
        interrupt_in(line)
    assert file.getvalue().rstrip("\n").endswith("\x1b[?25h")
    deadline = time.monotonic() + 5
    while threading.active_count() > before and time.monotonic() < deadline:
        time.sleep(0.01)  # rich tells its thread to end and does not wait for it
    assert threading.active_count() == before


def interrupt_in(line: StepLine) -> None:
    with line:
        line.message("kept above the line")
        line.update(RECORD)
        raise KeyboardInterrupt


def test_a_dumb_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "dumb")
    file = io.StringIO()
    with StepLine(total_steps=5, console=Console(file=file, force_terminal=True, width=80)) as line:
        line.update(RECORD)
    assert "\x1b" not in re.sub(r"\x1b\[\d*m", "", file.getvalue())
    assert file.getvalue().startswith("step 1/5")


def test_an_update_on_a_terminal_does_not_draw(tmp_path: Path) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with StepLine(total_steps=10**6, console=console) as line:
        start = time.thread_time()
        for number in range(1, 1001):
            line.update({**RECORD, "step": number})
        assert (time.thread_time() - start) / 1000 < 1e-4
