"""Does a task tell models apart early? Four figures of its scores over steps, seeds and models.

Problem  A task's score can be flat for most of a training, jump from checkpoint to checkpoint, or differ between seeds
         by more than between models. What it says of an early checkpoint then says nothing.
Method   With x_1 … x_n the scores of one run at its checkpoints, in order of their steps:

             monotony         Spearman's correlation of step and score: Pearson's of their ranks, equal scores sharing
                              the mean of theirs
             autocorrelation  at lag 1: Pearson's correlation of x_1 … x_(n-1) and x_2 … x_n

         and with m_j the mean over seeds of model j's scores x_js at one step:

             signal to noise  (max m_j - min m_j) / √(Σ_j Σ_s (x_js - m_j)² / Σ_j (S_j - 1)): how far models are apart,
                              over the standard deviation between seeds of one model, pooled over models
             consistency      Kendall's τ_b of the models' scores early and last: (pairs in the same order - pairs in
                              the other) / √(pairs that differ early · pairs that differ last)

Constant A curve that never changes shows no progress, and scores that are all equal no order: monotony,
         autocorrelation and consistency are then 0, not undefined. Signal to noise is 0 where models do not differ, and
         infinite where they do and seeds do not.
Limits   None where there is too little to tell from: fewer than three checkpoints, fewer than two models, no model with
         two seeds. Of n points without trend autocorrelation is not 0 on average, but about -1/n.
Source   The figures of E2LM, arXiv 2506.07731; that paper's exact formulas are not known here. Signal to noise after
         Heineman et al. 2025, arXiv 2508.13144, who take the noise over a run's last checkpoints instead of seeds; the
         mean score by which they divide both cancels.
Checked  tests/tasks/test_task_curves.py: planted curves, and brute force over pairs
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

LEAST_POINTS = 3
"""Checkpoints of a curve, below which it has no shape."""


@dataclass(frozen=True)
class EarlySignal:
    """The four figures of a task; None where there is too little to tell."""

    monotony: float | None
    """Mean over runs."""
    autocorrelation: float | None
    """Mean over runs."""
    signal_to_noise: float | None
    """At the last step that all runs have."""
    consistency: float | None
    """Mean over the steps that all runs have but the last, each against the last."""


def early_signal(runs: Sequence[Mapping[int, float]], models: Sequence[Hashable]) -> EarlySignal:
    """What a task's scores say of models early.

    Args:
        runs: of each run its step to its score.
        models: which model each run is of; runs of one differ in their seed.
    """
    curves = [sorted(run.items()) for run in runs]
    scores = [[score for _, score in curve] for curve in curves]
    steps = [[step for step, _ in curve] for curve in curves]
    common = sorted(set.intersection(*(set(run) for run in runs)))
    means = [_model_means(runs, models, step) for step in common]
    return EarlySignal(
        monotony=_mean(monotony(*one) for one in zip(steps, scores, strict=True)),
        autocorrelation=_mean(autocorrelation(one) for one in scores),
        signal_to_noise=signal_to_noise(_by_model(runs, models, common[-1])) if common else None,
        consistency=_mean(consistency(early, means[-1]) for early in means[:-1]),
    )


def _by_model(
    runs: Sequence[Mapping[int, float]], models: Sequence[Hashable], step: int
) -> list[list[float]]:
    """The scores of each model's seeds at a step."""
    return [
        [run[step] for run, model in zip(runs, models, strict=True) if model == one]
        for one in dict.fromkeys(models)
    ]


def _model_means(runs: Sequence[Mapping[int, float]], models: Sequence[Hashable], step: int) -> list[float]:
    return [fmean(seeds) for seeds in _by_model(runs, models, step)]


def _mean(found: Iterable[float | None]) -> float | None:
    known = [one for one in found if one is not None]
    return fmean(known) if known else None


def monotony(steps: Sequence[float], scores: Sequence[float]) -> float | None:
    """Spearman's correlation of step and score; 0 of a constant curve."""
    return spearman(steps, scores) if len(scores) >= LEAST_POINTS else None


def autocorrelation(scores: Sequence[float]) -> float | None:
    """Pearson's correlation of each score and the next; 0 where either side is constant."""
    return pearson(scores[:-1], scores[1:]) if len(scores) >= LEAST_POINTS else None


def signal_to_noise(models: Sequence[Sequence[float]]) -> float | None:
    """How far models are apart, over how far seeds are.

    Args:
        models: of each model the scores of its seeds.
    """
    freedom = sum(len(seeds) - 1 for seeds in models)
    if len(models) < 2 or freedom < 1:
        return None
    means = [fmean(seeds) for seeds in models]
    signal = max(means) - min(means)
    squares = ((score - mean) ** 2 for seeds, mean in zip(models, means, strict=True) for score in seeds)
    noise = math.sqrt(math.fsum(squares) / freedom)
    if signal == 0:
        return 0.0
    return signal / noise if noise else math.inf


def consistency(early: Sequence[float], last: Sequence[float]) -> float | None:
    """Kendall's τ_b of the order of models early and last; 0 where all are equal at either time."""
    if len(early) < 2:
        return None
    pairs = [
        (_sign(a - b), _sign(x - y))
        for (a, x), (b, y) in itertools.combinations(zip(early, last, strict=True), 2)
    ]
    differ = math.sqrt(sum(a * a for a, _ in pairs)) * math.sqrt(sum(b * b for _, b in pairs))
    return sum(a * b for a, b in pairs) / differ if differ else 0.0


def _sign(value: float) -> int:
    return (value > 0) - (value < 0)


def ranks(values: Sequence[float]) -> list[float]:
    """Ranks from 1; equal values share the mean of theirs."""
    ordered = sorted(values)
    shared = {
        value: fmean(rank for rank, _ in group)
        for value, group in itertools.groupby(enumerate(ordered, start=1), key=lambda one: one[1])
    }
    return [shared[value] for value in values]


def spearman(x: Sequence[float], y: Sequence[float]) -> float:
    """Spearman's correlation: Pearson's of ranks, equal values sharing theirs; 0 where either side is constant."""
    return pearson(ranks(x), ranks(y))


def pearson(x: Sequence[float], y: Sequence[float]) -> float:
    """Pearson's correlation; 0 where either side is constant."""
    if len(set(x)) == 1 or len(set(y)) == 1:
        return 0.0
    mean_x, mean_y = fmean(x), fmean(y)
    both = math.fsum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return both / math.sqrt(math.fsum((a - mean_x) ** 2 for a in x) * math.fsum((b - mean_y) ** 2 for b in y))
