"""What a study tells while it runs, in a log and on a terminal."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

from fakes import row_for, study_of
from rich.console import Console

from scrimp.study.job import Job
from scrimp.study.progress import LINE_SECONDS, StudyProgress
from scrimp.study.variants import Combined

STUDY = study_of()


def job(variant: str, seed: int = 0) -> Job:
    return Job(
        variant=variant, seed=seed, digest="d", settings={}, steps=8, folder=Path(), figure="held_out_loss"
    )


def test_a_log_has_a_line_for_each_run_and_one_now_and_then() -> None:
    log, now = io.StringIO(), [0.0]
    lines = StudyProgress(3, 24, Console(file=log, width=200), clock=lambda: now[0])
    with lines.shown():
        lines.started(job("a"))
        lines.going({"a-seed0": 0})
        now[0] = LINE_SECONDS
        lines.going({"a-seed0": 4})
        lines.ended(job("a"), row_for(STUDY, "a", 0, 2.5, seconds=61.0))
        lines.started(job("b"))
        lines.ended(job("b"), row_for(STUDY, "b", 0, None))
        lines.dropped({"b": 8, "c": 2, "d": 8})
        lines.dropped({})
    assert log.getvalue().splitlines() == [
        "0/3 runs done; a-seed0 step 4/8; about 2m 30s left",
        "[1/3] a-seed0: held-out loss 2.5000, 1m 01s",
        "[2/3] b-seed0: failed: it broke",
        "dropped after step 2: c",
        "dropped after step 8: b, d",
    ]


def test_what_is_evaluated_together_is_no_run_of_the_total() -> None:
    log, now = io.StringIO(), [0.0]
    lines = StudyProgress(2, 16, Console(file=log, width=200), clock=lambda: now[0])
    both = dataclasses.replace(job("c"), combined=Combined("merge", ("a", "b"), (1.0, 1.0)))
    lines.ended(both, row_for(STUDY, "c", 0, 2.5))
    lines.started(job("b"))
    lines.going({"b-seed0": 0})
    now[0] = LINE_SECONDS
    lines.going({"b-seed0": 8})
    assert log.getvalue().splitlines() == [
        "c-seed0: held-out loss 2.5000",
        "0/2 runs done; b-seed0 step 8/8; about 30.0 s left",
    ]


def test_time_left_counts_steps_of_this_call_alone() -> None:
    log, now = io.StringIO(), [0.0]
    lines = StudyProgress(1, 8, Console(file=log, width=200), clock=lambda: now[0])
    lines.started(job("a"))
    lines.going({"a-seed0": 4})  # it goes on from step 4
    now[0] = LINE_SECONDS
    lines.going({"a-seed0": 6})
    assert "about 1m 30s left" in log.getvalue()  # two steps took 30 s; by the plan six of eight are left


def test_a_run_that_fails_has_made_the_steps_that_it_made() -> None:
    log, now = io.StringIO(), [0.0]
    lines = StudyProgress(3, 24, Console(file=log, width=200), clock=lambda: now[0])
    lines.started(job("a"))
    lines.going({"a-seed0": 0})
    lines.going({"a-seed0": 2})
    lines.ended(job("a"), row_for(STUDY, "a", 0, None))
    lines.started(job("b"))
    lines.going({"b-seed0": 0})
    now[0] = LINE_SECONDS
    lines.going({"b-seed0": 2})
    # Four steps took 30 s; of the 24 the failed run leaves out six, so that 14 are left.
    assert "about 1m 45s left" in log.getvalue()


def test_a_terminal_has_a_bar_for_each_run() -> None:
    screen = io.StringIO()
    console = Console(file=screen, width=100, force_terminal=True)
    lines = StudyProgress(2, 16, console)
    with lines.shown():
        lines.started(job("a"))
        lines.going({"a-seed0": 3})
        lines.ended(job("a"), row_for(STUDY, "a", 0, 2.5))
        lines.started(job("b"))
        lines.going({"b-seed0": 0})
    shown = screen.getvalue()
    assert "[1/2] a-seed0: held-out loss 2.5000" in shown
    assert "b-seed0" in shown
    lines.going({"b-seed0": 1})  # after the bars are gone nothing breaks
