"""Rounds of local steps, where copies of a model train alone for a while (`scrimp.optim.outer`)."""

from __future__ import annotations

import dataclasses
import json
import math

import torch
from torch import Tensor

from scrimp.optim.outer import OuterOptimizer, Round
from scrimp.parts import TensorPart
from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.callbacks.checkpoints import RANDOM_STATE, Checkpoints
from scrimp.training.run import Run
from scrimp.training.run_state import Position
from scrimp.training.step import StepResult


class LocalSteps(Callback):
    """Begins and ends rounds, and says what the first ones took."""

    def __init__(self, run: Run, outer: OuterOptimizer, checkpoints: Checkpoints) -> None:
        self._run, self._outer, self._checkpoints = run, outer, checkpoints
        self._told = False
        self._taking_part = list(range(run.config.outer.copies))

    def before_step(self) -> None:
        """A round may begin."""
        self._outer.before_step()

    def after_step(self, result: StepResult, record: Record) -> None:
        """A round may be over."""
        run, copies = self._run, self._outer.copies
        if copies is not None:
            copies.step = run.step
        found = self._outer.after_step()
        if copies is not None and run.step == run.train.steps:
            self._outer.meet()  # a round that the end cuts short
        if copies is not None and not self._outer.in_round:
            self._after_exchange(record)
        if found is None:
            return
        record["exchange_wait_s"] = found.waited
        if found.exchange is None:
            return
        note = self._run.event if self._told else self._run.tell
        figures = {"seconds": found.seconds, "exchange_s": found.exchange, "waited_s": found.waited}
        note("outer", exchange_text(found), round=figures)
        self._told = True

    def _after_exchange(self, record: Record) -> None:
        """Record which copies came, and give the state to those that join."""
        run, copies = self._run, self._outer.copies
        assert copies is not None
        came = copies.taking_part
        record["copies"] = len(came)
        if came != self._taking_part:
            run.tell("copies", f"copies {', '.join(map(str, came))} of {run.config.outer.copies} exchanged")
        self._taking_part = came
        _send(run, self._checkpoints)


def join_copies(run: Run, checkpoints: Checkpoints) -> None:
    """Begin with the weights, the states and the step that the other copies have, where they are jobs of their own.

    Raises:
        TrainingError: it came too late.
    """
    if run.outer is None or run.outer.copies is None:
        return
    copies = run.outer.copies
    run.line.phase("waiting for the other copies")
    if not copies.join(run.step):
        _send(run, checkpoints)
        return
    position = Position(**json.loads(copies.receive_position()))
    run.optimizer.prepare(position.all_updates)
    parts = checkpoints.parts()
    copies.receive(_tensors(parts))
    torch.set_rng_state(parts[RANDOM_STATE].local)
    run.position = position
    run.optimizer.restore_updates(position.all_updates)
    run.optimizer.zero_grad()
    run.tell("joined", "goes on with weights and states of another copy")


def _send(run: Run, checkpoints: Checkpoints) -> None:
    assert run.outer is not None
    assert run.outer.copies is not None
    run.outer.copies.send(
        lambda: json.dumps(dataclasses.asdict(run.position)),
        lambda: _tensors(checkpoints.parts()),
    )


def _tensors(parts: dict[str, TensorPart]) -> list[Tensor]:
    return [parts[name].local for name in sorted(parts) if parts[name].local.numel()]


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
