"""How far a plan's predicted divergences may be off, from how they differ between the batches that were measured.

Problem  A prediction from two batches looks as exact as one from twenty.
Method   A divergence D is the root of a ratio of means over n batches, D^2 = mean(U) / mean(S), of squares of all
         chosen formats together (S is 1 for the loss, and the clean update for the weights). With the standard error
         of a ratio, relative to it, and Student's t for 95 %::

             e = std(U - D^2 S) / (sqrt(n) mean(U)),    the interval is from D exp(-t e / 2) to D exp(t e / 2)

         It is taken on the logarithm: what is positive and skewed cannot go below zero. The loss divergence of all
         batches together is another than the mean of each one's (`divergence`); the interval is laid around it.
Why not  Batches drawn with replacement, as for `certainty`: of two batches they give no more than the two values,
         between which the truth lies half the time.
Limits   One batch has no interval. Where gains are measured on one of the batches alone, as training does, how they
         differ between batches is not in it; nor is what happens after the statistics were taken.
Checked  tests/planner/precision/test_interval.py: how often it holds the truth of drawn batches
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.precision.choose import Question
from scrimp.planner.precision.divergence import divergence, mean_divergence

Array = NDArray[np.float64]
LEVEL = 0.95
_STUDENT = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120,
    2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
"""Quantiles of Student's t for a two-sided interval of `LEVEL`, by degrees of freedom from 1."""


def intervals(question: Question, formats: NDArray[np.int64]) -> dict[str, list[float]]:
    """Divergence of a plan to (low, high); none where fewer than two batches were measured.

    Args:
        formats: [L, 3], indices of the profile's formats.
    """
    profile = question.profile
    if len(profile.batches) < 2:
        return {}
    rows, loss, update = np.arange(len(profile.layers)), [], []
    for batch in profile.batches:
        found = divergence(profile, batch, question.method)
        loss.append(np.nansum(found.loss[rows, formats[:, 0]] ** 2))
        update.append(np.nansum(np.take_along_axis(found.update, formats[:, :, None], axis=2) ** 2))
    sizes = np.array([(batch.update**2).sum() for batch in profile.batches])
    of_all = mean_divergence(profile, question.method).loss[rows, formats[:, 0]]
    down = math.sqrt(np.nansum(of_all**2) / mean) if (mean := float(np.mean(loss))) > 0 else 1.0
    low, high = root_interval(np.array(loss), np.ones(len(loss)))
    bounds = {
        "loss_divergence": (low * down, high * down),
        "weight_divergence": root_interval(np.array(update), sizes),
    }
    return {name: list(pair) for name, pair in bounds.items() if all(map(math.isfinite, pair))}


def root_interval(squares: Array, sizes: Array) -> tuple[float, float]:
    """The interval of the root of mean(squares) / mean(sizes), both [n] of independent batches; see the module."""
    number, mean, size = len(squares), float(squares.mean()), float(sizes.mean())
    if not mean > 0 or not size > 0:
        return (0.0, 0.0) if mean == 0 else (math.nan, math.nan)
    error = float((squares - mean / size * sizes).std(ddof=1)) / (math.sqrt(number) * mean)
    half = student(number - 1) * error / 2
    root = math.sqrt(mean / size)
    return root * math.exp(-half), root * math.exp(half)


def student(freedom: int) -> float:
    """Student's t, two-sided for `LEVEL`; beyond the table by its expansion around the normal's quantile."""
    return _STUDENT[freedom - 1] if freedom <= len(_STUDENT) else 1.960 + 2.372 / freedom
