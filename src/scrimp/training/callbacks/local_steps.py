"""Rounds of local steps, where copies of a model train alone for a while (`scrimp.optim.outer`)."""

from __future__ import annotations

import math

from scrimp.optim.outer import OuterOptimizer, Round
from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.run import Run
from scrimp.training.step import StepResult


class LocalSteps(Callback):
    """Begins and ends rounds, and says what the first ones took."""

    def __init__(self, run: Run, outer: OuterOptimizer) -> None:
        self._run, self._outer = run, outer
        self._told = False

    def before_step(self) -> None:
        """A round may begin."""
        self._outer.before_step()

    def after_step(self, result: StepResult, record: Record) -> None:
        """A round may be over."""
        found = self._outer.after_step()
        if found is None:
            return
        record["exchange_wait_s"] = found.waited
        if found.exchange is None:
            return
        note = self._run.event if self._told else self._run.tell
        figures = {"seconds": found.seconds, "exchange_s": found.exchange, "waited_s": found.waited}
        note("outer", exchange_text(found), round=figures)
        self._told = True


def exchange_text(found: Round) -> str:
    """What the exchange of a round took, and from how many local steps on it would be hidden."""
    assert found.exchange is not None
    text = f"{found.steps} local steps took {found.seconds:.2f} s, an exchange {found.exchange:.2f} s"
    if found.waited < 0.1 * found.exchange:
        return f"{text}, hidden behind them"
    if found.waited < found.exchange:
        enough = math.ceil(found.steps * found.exchange / found.seconds)
        return f"{text}, of which {found.waited:.2f} s were waited for: outer.every {enough:,} would hide it"
    share = found.exchange / (found.seconds + found.exchange)
    return f"{text}: {share:.0%} of the time"
