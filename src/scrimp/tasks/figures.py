"""Figures of a task: what is shown of scores, compared between models, and followed over checkpoints.

    accuracy   share of items whose right choice scores higher than each other
    margin     mean over items of the right choice's score less the mean of the others', in nats per byte: it moves
               where no item changes sides
    ±          standard error over items, s/√n, as lm-eval's; it says nothing of other seeds
    less       mean difference of two models on the same items, and its standard error: what both find hard cancels

Checked  tests/tasks/test_task_figures.py
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from scrimp.tasks.scoring import TaskScores


@dataclass(frozen=True)
class Figure:
    """One number that a model reaches in a task."""

    task: str
    name: str
    """accuracy, margin, or a metric of lm-eval."""
    value: float
    error: float | None
    """Standard error over items; None where it is not known."""
    chance: float | None = None
    items: int | None = None
    shortened: int = 0
    """Items whose context did not fit the model's."""
    of_items: tuple[float, ...] = ()
    """The figure of each item, where they are known."""

    def less(self, other: Figure) -> tuple[float, float | None] | None:
        """The mean difference to the same figure of another model, and its standard error; None where items are not
        known."""
        if not self.of_items:
            return None
        return mean_and_error([a - b for a, b in zip(self.of_items, other.of_items, strict=True)])


def figures_of(scores: TaskScores) -> list[Figure]:
    """Accuracy and margin of a task."""
    task, is_right = scores.task, tuple(map(float, scores.is_right))
    return [
        Figure(task.name, name, *mean_and_error(values), chance, len(values), scores.shortened, values)
        for name, values, chance in (("accuracy", is_right, task.chance), ("margin", scores.margins, 0.0))
    ]


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and its standard error; None of a single value."""
    return fmean(values), stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
