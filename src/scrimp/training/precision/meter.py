"""Takes statistics and probes of a run's model, on batches that its own data order has.

The model runs as in training: the same loss, the same rounding noise addresses, the optimizer's state before the step.

Ranks    Losses are divided by the targets of all ranks, so gradients are sums over ranks, and statistics are reduced as
         such (`scrimp.statistics.ranks`).
Checked  tests/training/precision/test_precision_cycle.py; on ranks test_precision_on_ranks.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor

from scrimp.cycle import CycleSettings
from scrimp.data import Batch
from scrimp.models.experts import Choices, keeping_choices
from scrimp.optim import Optimizer
from scrimp.planner.precision import PrecisionProfile
from scrimp.precision import is_router
from scrimp.runtime import Executable
from scrimp.runtime.pipeline import first_rows
from scrimp.statistics import OptimizerView, Probe, Ranks, SharedRows, Subject, UpdateRule, collect, probe

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
        with keeping_choices(self._executable.model) as self._choices:
            return collect(
                subject,
                batches,
                formats,
                layers=[name for name in subject.planned.layers if not is_router(name)],
                gains=settings.gains,
                seed=settings.seed + step,
                ranks=self._ranks(),
            )

    def probe(self, step: int) -> Probe:
        """The current plan against the compute format, on a step's batch."""
        return probe(self._subject(step), next(self._batches(step, 1)), ranks=self._ranks())

    def _ranks(self) -> Ranks | None:
        """The ranks that train; None: there is one."""
        model, shared = self._executable.model, self._executable.model.context_parallel
        if self._executable.mesh.is_trivial:
            return None
        rows = None
        if shared is not None:
            rows = SharedRows(shared.size, lambda length: shared.division(length).positions(shared.rank))
        return Ranks.of(model, adds=True, rows=rows)

    def _subject(self, step: int) -> Subject:
        planned = self._executable.planned
        assert planned is not None
        return Subject(
            model=self._executable.model,
            planned=planned,
            optimizer=self._optimizer if self._executable.mesh.is_trivial else self._shared(),
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
        for batch, first_row in zip(taken, rows, strict=True):
            self._executable.begin(step, first_row)
            self._choices.batch = batch
            yield self._executable.loss(batch).total / targets

    def _shared(self) -> OptimizerView:
        return _SharedOptimizer(self._optimizer, dict(self._executable.model.named_parameters()))


class _SharedOptimizer:
    """An optimizer whose gradients say what part of a parameter they are of (an `OptimizerView`)."""

    def __init__(self, optimizer: Optimizer, parameters: Mapping[str, Tensor]) -> None:
        self._optimizer, self._parameters = optimizer, parameters

    @property
    def name(self) -> str:
        """Name of the optimizer's update rule."""
        return self._optimizer.name

    def gradients(self) -> dict[str, Tensor]:
        """As DTensors, like their parameters."""
        from torch.distributed.tensor import DTensor

        found: dict[str, Tensor] = {}
        for name, gradient in self._optimizer.gradients().items():
            like: Any = self._parameters[name]
            found[name] = DTensor.from_local(
                gradient,
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
        return found

    def rule(self, name: str) -> UpdateRule | None:
        """How the rows that lie here are updated."""
        return self._optimizer.rule(name)

    def clip_factor(self, norm: float) -> float:
        """As the optimizer's."""
        return self._optimizer.clip_factor(norm)

    def zero_grad(self) -> None:
        """Forget the gradients."""
        self._optimizer.zero_grad()
