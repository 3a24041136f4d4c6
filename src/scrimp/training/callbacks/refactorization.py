"""Low-rank layers factored anew every so many steps (`scrimp.optim.refactorization`)."""

from __future__ import annotations

import time

from scrimp.models import full_name
from scrimp.optim.refactorization import refactor
from scrimp.training.callbacks.base import Callback, Record
from scrimp.training.run import Run
from scrimp.training.step import StepResult


class Refactorization(Callback):
    """Balances the factors of all layers, and clears their averages."""

    def __init__(self, run: Run) -> None:
        self._run = run
        model, mesh = run.executable.model, run.executable.mesh
        self._layers = [
            full_name(block, linear.name)
            for block in model.part.blocks
            for linear in model.spec.block(block).linears
        ]
        self._group = None if mesh.is_trivial else mesh.of_layers.get_group()

    def after_step(self, result: StepResult, record: Record) -> None:
        """Refactor where it is time: by steps, so that a resumed run does as it would have."""
        run = self._run
        if not run.is_due(run.config.optimizer.refactor_every):
            return
        begun = time.perf_counter()
        refactor(self._layers, dict(run.executable.parameters()), dict(run.optimizer.parts()), self._group)
        # Weights and states are others now, as after loading them.
        run.optimizer.restore_updates(run.optimizer.num_updates)
        seconds = time.perf_counter() - begun
        run.event(
            "refactorization",
            f"{len(self._layers)} layers factored anew in {seconds:.2f} s; averages of their factors begin at 0",
        )
