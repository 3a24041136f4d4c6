"""Guards of a run: non-finite steps, outliers, and signals.

Non-finite  A step whose loss or gradient norm is not finite is skipped: the optimizer does not
            move, the step is recorded, the data go on. After `patience` in a row the run stops,
            because the weights themselves are then the likely cause. Of several ranks one that is not finite
            makes all skip.
Outliers    The z-score of loss and gradient norm over a window of past steps::

                z = (x - mean) / max(deviation, 1e-3 |mean|)     over the last 64 finite values

            Above 6 it is recorded, not acted upon. Outliers enter the window too, so that a lasting
            change of level is reported once and then becomes the new normal. The window is not
            part of the checkpoint: it decides nothing.
Signals     SIGINT, SIGTERM, SIGHUP (the terminal or the ssh session is gone) and SIGUSR1 (Slurm's
            warning before its time limit) ask the loop to finish its step and write a checkpoint.
            A second SIGINT or SIGTERM ends the process at once, as if there had been no handler.
            The others do not: a terminal that goes away sends SIGHUP more than once, and after
            Slurm's SIGUSR1 comes its SIGTERM. A signal that was ignored when the run started
            (`nohup`, a job in the background of a script) stays ignored. One that any rank gets ends the run on
            all of them, after the same step.
"""

from __future__ import annotations

import math
import os
import signal
import statistics
from collections import deque
from collections.abc import Callable
from types import FrameType
from typing import Any

from scrimp.errors import TrainingError
from scrimp.world import ALONE, World

WINDOW = 64
MIN_VALUES = 16
Z_LIMIT = 6.0
INSISTENT_SIGNALS = (signal.SIGINT, signal.SIGTERM)
"""Sent again by who does not want to wait."""
QUIET_SIGNALS = (signal.SIGHUP, signal.SIGUSR1)
"""Sent again by systems, which mean nothing by it."""


class OutlierWatch:
    """z-score of one series against its recent past."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._recent: deque[float] = deque(maxlen=WINDOW)

    def check(self, value: float) -> str | None:
        """Take one finite value; a sentence if it is an outlier."""
        sentence = None
        if len(self._recent) >= MIN_VALUES:
            mean = statistics.fmean(self._recent)
            deviation = max(statistics.pstdev(self._recent), 1e-3 * abs(mean), 1e-12)
            score = (value - mean) / deviation
            if score > Z_LIMIT:
                sentence = (
                    f"{self.name} {value:.4g} is {score:.1f} deviations above its recent mean {mean:.4g}"
                )
        self._recent.append(value)
        return sentence


class NonFiniteGuard:
    """Counts skipped steps in a row."""

    def __init__(self, patience: int, world: World = ALONE) -> None:
        self.patience, self._world = patience, world
        self.in_a_row = 0

    def check(self, loss: float, grad_norm: float) -> str | None:
        """Reason to skip this step on all ranks, each of which asks; or None."""
        is_finite = math.isfinite(loss) and math.isfinite(grad_norm)
        found = self._world.gathered(None if is_finite else f"loss {loss}, gradient norm {grad_norm}")
        reasons = {rank: reason for rank, reason in enumerate(found) if reason is not None}
        if not reasons:
            self.in_a_row = 0
            return None
        self.in_a_row += 1
        rank, reason = next(iter(reasons.items()))
        return reason if self._world.size == 1 else f"rank {rank}: {reason}"

    def stop_if_exhausted(self, step: int) -> None:
        """End the run after too many skipped steps.

        Raises:
            TrainingError: the last `patience` steps were not finite.
        """
        if self.in_a_row >= self.patience:
            raise TrainingError(
                f"{self.in_a_row} steps in a row up to step {step} were not finite",
                expected="finite loss and gradients",
                do="start a new run from the newest finite checkpoint (--model.weights) with a lower "
                "--optimizer.lr, or look at the data of these steps; events.jsonl lists every skipped step",
            )


class StopSignals:
    """Turns the first signal that ends a run into a request, and lets a second SIGINT or SIGTERM through."""

    def __init__(self, notify: Callable[[str], None], world: World = ALONE) -> None:
        self.received: signal.Signals | None = None
        """The signal that ends the run, on all ranks; `should_stop` finds out."""
        self._notify, self._world = notify, world
        self._sent: signal.Signals | None = None
        """To this process."""
        self._insisted = False
        self._previous: dict[signal.Signals, Any] = {}

    def should_stop(self) -> bool:
        """Whether a signal ends the run; all ranks ask, between the same two steps."""
        if self.received is not None:
            return True
        found = self._world.gathered(None if self._sent is None else self._sent.value)
        sent = {rank: number for rank, number in enumerate(found) if number is not None}
        if not sent:
            return False
        rank, number = next(iter(sent.items()))
        self.received = signal.Signals(number)
        if self._sent is None:
            self._notify(f"{self.received.name} on rank {rank}: writing a checkpoint")
        return True

    @property
    def exit_code(self) -> int:
        """128 and the signal's number: 129 SIGHUP, 130 SIGINT, 138 SIGUSR1, 143 SIGTERM; 0 without a signal."""
        return 0 if self.received is None else 128 + self.received.value

    def __enter__(self) -> StopSignals:
        for number in (*INSISTENT_SIGNALS, *QUIET_SIGNALS):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        received = signal.Signals(number)
        insists = received in INSISTENT_SIGNALS
        if insists and self._insisted:
            os._exit(128 + number)  # not sys.exit: it would wait for the thread that writes a checkpoint
        self._insisted |= insists
        if self._sent is not None:
            return
        self._sent = received
        again = "; once more stops at once" if insists else ""
        self._notify(f"{received.name}: finishing this step and writing a checkpoint{again}")
