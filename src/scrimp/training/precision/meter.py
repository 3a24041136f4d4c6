"""Takes statistics and probes of a run's model, on batches that its own data order has.

The model runs as in training: the same loss, the same rounding noise addresses, the optimizer's state before the step.

Ranks    Losses are divided by the targets of all ranks, so gradients are sums over ranks, and statistics are reduced as
         such (`ranks_of`). In a pipeline each rank measures its own layers, one micro-batch after another.
Losses   Those that a run shows: penalties (z-loss, the balance of experts) have gradients alone.
Checked  tests/training/precision/test_precision_cycle.py; on ranks test_precision_on_ranks.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from scrimp.cycle import CycleSettings
from scrimp.data import Batch
from scrimp.models.experts import Choices, keeping_choices
from scrimp.optim import Optimizer
from scrimp.planner.precision import PrecisionProfile
from scrimp.precision import is_router
from scrimp.runtime import Executable
from scrimp.runtime.pipeline import first_rows
from scrimp.statistics import Probe, Subject, collect, probe
from scrimp.training.precision.ranks_of_run import ranks_of

MOST_MICRO_BATCHES = 4
"""Most micro-batches of a step that a statistics batch takes."""

Batches = Callable[[int, int], Iterator[list[Batch]]]
"""From a step and a number of steps to their micro-batches."""


class PrecisionMeter:
    """Measures the model of a run; changes nothing of it."""

    def __init__(
        self,
        settings: CycleSettings,
        executable: Executable,
        optimizer: Optimizer,
        batches: Batches,
        *,
        device_name: str,
        first_row: int = 0,
    ) -> None:
        self._settings, self._executable = settings, executable
        self._optimizer, self._batches, self._device_name = optimizer, batches, device_name
        self._first_row = first_row
        """Address of the first token that this rank reads of a batch."""
        self._choices = Choices()

    def measure(self, step: int, formats: Sequence[str]) -> PrecisionProfile:
        """Statistics before a step, on its batch and those that follow."""
        settings = self._settings
        batches, subject = self._batches(step, settings.batches), self._subject(step)
        try:
            with keeping_choices(self._executable.model) as self._choices:
                return collect(
                    subject,
                    batches,
                    formats,
                    layers=[name for name in subject.planned.layers if not is_router(name)],
                    gains=settings.gains,
                    seed=settings.seed + step,
                    ranks=ranks_of(self._executable),
                )
        finally:
            self._choices = Choices()  # what was kept lies on the device

    def probe(self, step: int) -> Probe:
        """The current plan against the compute format, on a step's batch."""
        return probe(self._subject(step), next(self._batches(step, 1)), ranks=ranks_of(self._executable))

    def _subject(self, step: int) -> Subject:
        planned = self._executable.planned
        assert planned is not None
        return Subject(
            model=self._executable.model,
            planned=planned,
            optimizer=self._optimizer,
            losses=lambda batch: self._losses(step, batch),
            compute=self._executable.precision,
            device_name=self._device_name,
            step=step,
        )

    def _losses(self, step: int, micro_batches: list[Batch]) -> Iterator[Tensor]:
        taken = micro_batches[:MOST_MICRO_BATCHES]
        rows = first_rows(taken, self._first_row, self._executable.mesh.layout.cp)
        counts = self._executable.mesh.gathered_rows(sum(map(self._executable.objective.count, taken)))
        targets = max(1, sum(counts))
        for number, (batch, first_row) in enumerate(zip(taken, rows, strict=True), start=1):
            self._choices.batch, is_last = batch, number == len(taken)
            if self._executable.stages is not None and torch.is_grad_enabled():
                yield self._passed(batch, step, first_row, targets, is_last=is_last)
                continue
            self._executable.begin(step, first_row, is_last=is_last)
            sums = self._executable.loss(batch)
            # Penalties have gradients, and no value: ranks that share rows each have all of them.
            yield (sums.total - sums.penalty.detach()) / targets
        self._choices.batch = None
        if torch.is_grad_enabled():
            self._executable.add_up_copies(self._optimizer.gradients)

    def _passed(self, batch: Batch, step: int, first_row: int, targets: int, *, is_last: bool) -> Tensor:
        """The loss of a micro-batch that has been forward and backward through all stages, as a tensor without any
        further gradients: zero on ranks that have not the last stage."""
        executable = self._executable
        assert executable.stages is not None

        def begin(number: int, ends: bool) -> None:
            executable.begin(step, first_row, is_last=is_last and ends)

        sums = executable.stages.passes([batch], executable.run, begin, targets, is_probe=True)
        return (sums.loss / targets).requires_grad_()
