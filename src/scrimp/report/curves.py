"""Long curves for a chart: thinned to what pixels can show, smoothed, with a range that a spike does not flatten.

Problem  A run of a million steps has more points than a page should carry, and one spike can flatten everything
         else.
Method   The steps are cut into `BUCKETS` of equal width on the axis. Each keeps the steps of its smallest and its
         largest value, so that no spike gets lost, and there is something left to zoom into. The range covers
         all values unless they span several times what is usual: the central 98% of every bucket, and of these
         ends the central 99%. Counted by buckets, because over logarithmic steps the first few steps fill half
         the chart.
         Smoothing is a centred mean, so that it does not lag: over ±k neighbours, fewer near the start, where
         the loss falls fastest.
Limits   A single missing value inside a bucket with others leaves no gap.
Checked  tests/report/test_curves.py, against brute force
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

BUCKETS: Final = 800
_CENTRAL: Final = (0.5, 99.5)
_CENTRAL_IN_BUCKET: Final = (1, 99)
"""Percentiles of what is usual."""
_SPIKE: Final = 3.0
"""The whole range may be this many times the usual range before it is cut."""
_SPIKE_LOG: Final = 10.0
"""The same over a logarithmic axis, where a spike flattens the rest less."""
_FEW: Final = 20
"""So few values are all shown."""
_HUGE: Final = 1e290
"""Values beyond it are drawn as it, so that sums and margins stay finite."""


def bounded(values: Array) -> Array:
    """Values of at most 1e290 in size; NaN for what is not finite."""
    return np.where(np.isfinite(values), np.clip(values, -_HUGE, _HUGE), np.nan)


def buckets(steps: Array, *, log: bool = False, count: int = BUCKETS) -> list[slice]:
    """Slices of ascending `steps` that share one of `count` equal parts of a linear or logarithmic axis."""
    if not len(steps):
        return []
    places = np.log(np.maximum(steps, 1)) if log else steps
    edges = np.searchsorted(places, np.linspace(places[0], places[-1], count + 1)[1:-1])
    return [slice(*pair) for pair in pairwise([0, *edges.tolist(), len(steps)]) if pair[0] < pair[1]]


def thinned(steps: Array, columns: Sequence[Array], *, log: bool = False, count: int = BUCKETS) -> list[int]:
    """Which steps a chart keeps: of every bucket those of each column's smallest and largest value.

    A bucket in which a column has no finite value keeps its first step, as a gap.
    """
    if len(steps) <= 2 * count:
        return list(range(len(steps)))
    kept = {0, len(steps) - 1}
    for part in buckets(steps, log=log, count=count):
        for values in columns:
            finite = np.flatnonzero(np.isfinite(values[part]))
            found = values[part][finite]
            ends = (finite[found.argmin()], finite[found.argmax()]) if finite.size else (0,)
            kept.update(part.start + int(end) for end in ends)
    return sorted(kept)


def usual_range(
    curves: Sequence[tuple[Array, Array]],
    *,
    log: bool = False,
    log_steps: bool = False,
    always: Sequence[Array] = (),
) -> tuple[float, float] | None:
    """The range in which nearly all values lie, where a few lie far outside; None where all can be shown.

    Args:
        curves: steps and values of each.
        log: the range is drawn logarithmically.
        log_steps: the steps are.
        always: values that must be inside however far out they lie.
    """
    values = _levels([values for _, values in curves], log)
    usual = _levels([_usual(*curve, log=log_steps) for curve in curves], log)
    if values.size < _FEW or not usual.size:
        return None
    inside = [*np.percentile(usual, _CENTRAL), *_levels(always, log)]
    low, high = min(inside), max(inside)
    span = high - low
    lowest, highest = min(low, values.min()), max(high, values.max())
    if not span > 0 or highest - lowest <= (_SPIKE_LOG if log else _SPIKE) * span:
        return None
    low, high = max(low - 0.1 * span, lowest), min(high + 0.1 * span, highest)
    return (float(np.exp(low)), float(np.exp(high))) if log else (float(low), float(high))


def _levels(columns: Sequence[Array], log: bool) -> Array:
    """All finite values as they are drawn: their logarithms on a logarithmic axis."""
    values = bounded(np.concatenate([np.empty(0), *columns]))
    finite = values[np.isfinite(values)]
    return np.log(finite[finite > 0]) if log else finite


def _usual(steps: Array, values: Array, *, log: bool) -> Array:
    """Both ends of the central part of every bucket."""
    parts = [bounded(values[part]) for part in buckets(steps, log=log)]
    found = [np.nanpercentile(part, _CENTRAL_IN_BUCKET) for part in parts if np.isfinite(part).any()]
    return np.concatenate([np.empty(0), *found])


def smooth(values: Array, radius: int) -> Array:
    """Mean over the finite values within `radius` neighbours; missing where the value is missing."""
    count = len(values)
    finite = np.isfinite(values)
    numbers = np.nan_to_num(bounded(values))
    index = np.arange(count)
    reach = np.minimum(index, radius)
    start, stop = index - reach, np.minimum(count, index + reach + 1)
    # Running sums per order of magnitude: in a single one, a spike of 1e20 would swallow the
    # digits of every value after it.
    with np.errstate(divide="ignore"):
        sizes = np.floor(np.log10(np.abs(numbers)) / 3)
    sums = np.zeros(count)
    for size in np.unique(sizes[np.isfinite(sizes)]):
        running = np.concatenate([[0.0], np.cumsum(np.where(sizes == size, numbers, 0.0))])
        sums += running[stop] - running[start]
    running_count = np.concatenate([[0], np.cumsum(finite)])
    counts = running_count[stop] - running_count[start]
    return np.where(finite, sums / np.maximum(counts, 1), np.nan)
