"""Evaluations on the held-out split while a run trains."""

from __future__ import annotations

import contextlib
from typing import Any

from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.evaluation import Evaluation, evaluate_held_out
from scrimp.training.memory.between_phases import EVALUATION
from scrimp.training.run import Run
from scrimp.training.step import StepResult


class Evaluations(Callback):
    """Evaluates every `evaluation.every` steps, and whenever it is asked."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._last: tuple[int, Evaluation] | None = None

    def after_step(self, result: StepResult, record: Record) -> None:
        """Evaluate if it is due."""
        if not self._run.is_due(self._run.config.evaluation.every):
            return
        found = self.evaluate()
        if found is not None:
            record |= {"eval_loss": found.loss, "eval_bits_per_byte": found.bits_per_byte}
            record |= {f"eval_loss/{label}": one.loss for label, one in found.sources.items()}

    def evaluate(self) -> Evaluation | None:
        """Evaluate, record and show it; once per step at most. None where no document is held out."""
        run = self._run
        if not run.corpus.held_out.num_tokens:
            return None
        if self._last is not None and self._last[0] == run.step:
            return self._last[1]
        if run.outer is not None:
            run.outer.meet()
        run.line.phase("evaluating")
        run.phases.switch(EVALUATION)
        is_working = run.config.evaluation.precision == "working"
        in_format = run.executable.in_working_format() if is_working else contextlib.nullcontext()
        with run.evaluating(), in_format:
            found = evaluate_held_out(run.executable, run.corpus, run.config)
        sentence = f"held-out loss {found.loss:.4f}, {found.bits_per_byte:.4f} bits per byte"
        fields: dict[str, Any] = {"loss": found.loss, "bits_per_byte": found.bits_per_byte}
        if found.sources:
            losses = {label: one.loss for label, one in found.sources.items()}
            fields["sources"] = losses
            sentence += f"; {', '.join(f'{label} {loss:.4f}' for label, loss in losses.items())}"
        run.tell("evaluation", sentence, **fields)
        self._last = (run.step, found)
        return found
