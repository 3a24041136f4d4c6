"""Takes statistics and probes of a run's model, on batches that its own data order has.

The model runs as in training: the same loss, the same rounding noise addresses, the optimizer's state before the step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from scrimp.cycle import CycleSettings
from scrimp.data import Batch
from scrimp.optim import Optimizer
from scrimp.planner.precision import PrecisionProfile
from scrimp.runtime import Executable
from scrimp.statistics import Probe, Subject, collect, probe

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
    ) -> None:
        self._settings, self._executable = settings, executable
        self._optimizer, self._batches, self._device_name = optimizer, batches, device_name

    def measure(self, step: int, formats: Sequence[str]) -> PrecisionProfile:
        """Statistics before a step, on its batch and those that follow."""
        settings = self._settings
        batches = self._batches(step, settings.batches)
        return collect(self._subject(step), batches, formats, gains=settings.gains, seed=settings.seed + step)

    def probe(self, step: int) -> Probe:
        """The current plan against the compute format, on a step's batch."""
        return probe(self._subject(step), next(self._batches(step, 1)))

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
        taken, first_row = micro_batches[:MOST_MICRO_BATCHES], 0
        targets = max(1, sum(map(self._executable.objective.count, taken)))
        for batch in taken:
            self._executable.begin(step, first_row)
            sums = self._executable.loss(batch)
            first_row += batch.tokens_BT.numel()
            yield sums.total / targets
