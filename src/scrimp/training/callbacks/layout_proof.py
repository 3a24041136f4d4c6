"""After the first steps of several ranks: their layout proven, and another one advised where it is better.

Method   Collectives are counted in the passes of the first step. Seconds are the median of `STEPS` steps after it, in
         which libraries choose kernels and memory is laid out; then the table is shown, once a start, and logged as the
         event `layout-proof` with all figures.
Checked  tests/training/test_layout_proof.py
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace

import torch

from scrimp.errors import typed
from scrimp.planner.layout.at_hand import text_of
from scrimp.profiler.collectives import Collectives, counting_collectives
from scrimp.report.units import format_duration
from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.chosen_layout import RanksHere
from scrimp.training.layout_proof import (
    TOLERANCE,
    FirstSteps,
    better_layout,
    corrected,
    correction_of,
    is_worth,
    prediction_of,
    rows_of,
    saved_seconds,
    table_of,
)
from scrimp.training.run import Run
from scrimp.training.searched_plan import choices_of
from scrimp.training.step import StepResult

STEPS = 4


class ProveLayout(Callback):
    """Compares once per start of a run on several ranks.

    Args:
        run: the run.
        began: when its process began to work on it (`time.monotonic`).
    """

    def __init__(self, run: Run, began: float) -> None:
        self._run, self._began = run, began
        self._is_done = run.decisions.world.size == 1
        self._starting = 0.0
        self._counts: list[Collectives] = []
        self._seconds: list[float] = []

    def before_step(self) -> None:
        """Everything before the first step is what a start takes."""
        self._starting = self._starting or time.monotonic() - self._began

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Around the passes of a step and the sums over copies."""
        if self._is_done:
            yield
            return
        with counting_collectives() as found:
            yield
        self._counts.append(found)

    def after_step(self, result: StepResult, record: Record) -> None:
        """Compare as soon as enough steps were made."""
        run = self._run
        if self._is_done:
            return
        self._seconds.append(result.seconds)
        if len(self._seconds) <= STEPS and run.step < run.train.steps:
            return
        self._is_done = True
        measured = self._measured()
        here = run.decisions.here
        prediction = None if here is None else prediction_of(run.decisions, here)
        rows = rows_of(run.decisions, prediction, measured)
        title = f"predicted and measured on {run.decisions.plan.layout.text}:"
        figures = {row.name: [row.predicted, row.measured] for row in rows}
        run.event("layout-proof", title.rstrip(":"), figures=figures)
        run.line.message(table_of(rows, title))
        if here is not None and rows[0].is_off:
            self._look_again(here, measured)

    def _measured(self) -> FirstSteps:
        run, world, device = self._run, self._run.decisions.world, self._run.executable.device
        is_cuda = device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(device) if is_cuda else run.meter.peak_device_bytes()
        waits = statistics.median([one.seconds for one in self._counts[1:] or self._counts])
        waits = statistics.fmean(world.gathered(waits))
        seconds = world.largest(statistics.median(self._seconds[1:] or self._seconds))
        return FirstSteps(seconds, None if is_cuda else waits, world.gathered(peak), self._counts[0].calls)

    def _look_again(self, here: RanksHere, measured: FirstSteps) -> None:
        """Correct the model, and predict the open layouts again."""
        run = self._run
        correction = correction_of(run.decisions, here, measured)
        found = better_layout(run.decisions, replace(here, rates=corrected(here.rates, correction)))
        factors = f"computing {correction.computing:.2f} and exchanges {correction.exchanging:.2f} times"
        words = f"a step is off by more than {100 * TOLERANCE:.0f} %: the model is corrected, {factors}"
        restart = run.decisions.world.largest(self._starting + self._seconds[0])
        left = run.train.steps - run.step
        if found is None or not is_worth(found, left, restart):
            run.tell("layout-check", f"{words} as long; {text_of(run.config.layout)} stays")
            return
        settings = [
            f"--{key.replace('_', '-')}={value}"
            for key, value in choices_of(found.best.setting).items()
            if value is not None
        ]
        command = typed("launch", "--ranks", here.ranks, "train", "--run.dir", run.dir, "--resume", *settings)
        saved, now = left * saved_seconds(found), found.best.seconds
        run.tell(
            "layout-check",
            f"{words} as long. {text_of(found.best.setting.layout)} is now predicted to take "
            f"{format_duration(now)} a step, not {format_duration(now + saved_seconds(found))}: "
            f"{format_duration(saved)} less for the {left:,} steps that are left, and a restart takes about "
            f"{format_duration(restart)}: {command}",
        )
        if run.config.layout.switch:
            run.go_on_with = command
