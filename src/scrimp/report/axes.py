"""From data to places on an axis: scales, round ticks, and series cut to what pixels can show.

Problem  A run of a million steps has more points than a chart has pixels, and one spike can
         flatten everything else.
Method   Ticks are multiples of 1, 2, 2.5 or 5 times a power of ten. A long series is cut into
         buckets of equal width on the axis; each keeps its smallest and its largest value in
         the order they came, so that no spike gets lost. An axis covers all values unless a
         few lie far outside the central 99%; then it covers those, and `num_beyond` counts the
         others so that the chart can say so.
         Smoothing is a centred mean, so that it does not lag: over ±k neighbours, fewer near
         the start, where the loss falls fastest.
Limits   A single missing value inside a bucket with others leaves no gap at that zoom.
Checked  tests/report/test_scales.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
Point = tuple[float, float]

_CENTRAL: Final = (0.5, 99.5)
"""Percentiles that an axis always covers."""
_HUGE: Final = 1e290
"""Values beyond it are drawn as it, so that sums and margins stay finite."""
_SPIKE: Final = 3.0
"""The whole range may be this many times the central range before it is cut."""
_SPIKE_LOG: Final = 10.0
"""The same over a logarithmic axis, where a spike flattens the rest less."""


@dataclass(frozen=True)
class Scale:
    """Values from `low` to `high` onto 0 to 1, linear or logarithmic."""

    low: float
    high: float
    log: bool = False

    def place(self, values: Array | float) -> Array:
        """Fractions of the axis; not clipped; what a log scale cannot show is NaN."""
        numbers = np.asarray(values, dtype=np.float64)
        if self.log:
            with np.errstate(divide="ignore", invalid="ignore"):
                numbers = np.where(numbers > 0, np.log(numbers), np.nan)
            return (numbers - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        return (numbers - self.low) / (self.high - self.low)

    def num_beyond(self, values: Array) -> int:
        """How many finite values lie outside (a log scale has no place for 0 and below)."""
        slack = (self.high - self.low) * 1e-9
        finite = values[np.isfinite(values)]
        return int(np.count_nonzero((finite < self.low - slack) | (finite > self.high + slack)))

    def ticks(self, count: int = 5, unit: float = 1.0) -> list[float]:
        """About `count` values inside the scale that are round in `unit`."""
        if self.log:
            return log_ticks(self.low, self.high, count)
        return [tick * unit for tick in nice_ticks(self.low / unit, self.high / unit, count)]


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Multiples of 1, 2, 2.5 or 5 times a power of ten within [low, high]: about `count`."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low] if math.isfinite(low) else []
    step = nice_step(high - low, count)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    # Through a decimal string: 3 * 0.1 is to be 0.3, not 0.30000000000000004.
    return [float(f"{index * step:.12g}") for index in range(first, last + 1)]


def nice_step(span: float, count: int) -> float:
    """The round number nearest, as a ratio, to a `count`-th of `span`."""
    rough = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(rough))
    return min(
        (power * factor for factor in (1, 2, 2.5, 5, 10)), key=lambda step: abs(math.log(step / rough))
    )


def log_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Powers of ten within [low, high]; also 2 and 5 times them where there is room for it."""
    if not (0 < low < high and math.isfinite(high)):
        return []
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    inside = [
        [
            value
            for exponent in range(first, last + 1)
            for factor in factors
            if low * (1 - 1e-9) <= (value := float(f"{factor}e{exponent}")) <= high * (1 + 1e-9)
        ]
        for factors in ((1,), (1, 3), (1, 2, 5))
    ]
    fitting = [ticks for ticks in inside if 2 <= len(ticks) <= count + 1]
    if fitting:
        return max(fitting, key=len)
    decades = inside[0]
    if len(decades) > count:
        return decades[:: math.ceil(len(decades) / count)]
    return nice_ticks(low, high, count)


def axis(
    values: Array,
    *,
    log: bool = False,
    zero: bool = False,
    always: Array | None = None,
    typical: Array | None = None,
) -> Scale:
    """A scale for `values` with a little air; spikes may lie beyond it.

    Args:
        zero: start at 0.
        always: values that must be inside however far out they lie.
        typical: values that say what is no spike, where `values` themselves are not to.
    """
    numbers = _usable(values, log)
    if not numbers.size:
        return Scale(0.1, 10.0, log=True) if log else Scale(0.0, 1.0)
    usual = numbers if typical is None else _usable(typical, log)
    kept = np.empty(0) if always is None else _usable(always, log)
    low, high = _range(numbers, usual, kept, _SPIKE_LOG if log else _SPIKE)
    if log:
        low, high = _wide(low, high, 0.05, 0.7)
        return Scale(math.exp(max(low, -700.0)), math.exp(high), log=True)
    if zero and low >= 0:
        return Scale(0.0, high * 1.08 if high > 0 else 1.0)
    return Scale(*_wide(low, high, 0.05, max(abs(high) * 0.01, 1e-12)))


def _usable(values: Array, log: bool) -> Array:
    finite = np.clip(values[np.isfinite(values)], -_HUGE, _HUGE)
    return np.log(finite[finite > 0]) if log else finite


def _range(numbers: Array, usual: Array, keep: Array, spike: float) -> Point:
    low, high = float(numbers.min()), float(numbers.max())
    central = np.percentile(usual if usual.size else numbers, _CENTRAL)
    if keep.size:
        central = np.array([min(central[0], keep.min()), max(central[1], keep.max())])
    span = float(central[1] - central[0])
    if numbers.size >= 20 and span > 0 and high - low > spike * span:
        low, high = float(max(low, central[0] - span * 0.1)), float(min(high, central[1] + span * 0.1))
    return low, high


def _wide(low: float, high: float, air: float, least: float) -> Point:
    span = high - low
    margin = span * air if span > least * 1e-3 else least
    return low - margin, high + margin


def downsample(places: Array, values: Array, buckets: int) -> list[list[Point]]:
    """Lines without gaps that draw `values` over ascending `places` in [0, 1].

    At most two points a bucket: its smallest and largest finite value, in the order they came.
    A bucket with only missing values ends a line.
    """
    if len(values) <= 2 * buckets:
        return _split(places, values)
    lines: list[list[Point]] = [[]]
    for start, stop in bucket_slices(places, buckets):
        part = values[start:stop]
        if not np.isfinite(part).any():
            lines.append([])
            continue
        finite = np.where(np.isfinite(part), part, np.nan)
        for offset in sorted({int(np.nanargmin(finite)), int(np.nanargmax(finite))}):
            lines[-1].append((float(places[start + offset]), float(part[offset])))
    return [line for line in lines if line]


def bucket_slices(places: Array, buckets: int) -> list[tuple[int, int]]:
    """First and last-plus-one index of every bucket that holds a place."""
    edges = np.searchsorted(places, np.linspace(0, 1, buckets + 1)[1:-1])
    return [pair for pair in pairwise([0, *edges.tolist(), len(places)]) if pair[0] < pair[1]]


def bucket_medians(places: Array, values: Array, buckets: int) -> Array:
    """The median finite value of every bucket; a short series as it is."""
    if len(values) <= buckets:
        return values
    parts = [values[start:stop] for start, stop in bucket_slices(places, buckets)]
    return np.array([np.median(part[np.isfinite(part)]) for part in parts if np.isfinite(part).any()])


def _split(places: Array, values: Array) -> list[list[Point]]:
    lines: list[list[Point]] = [[]]
    for place, value in zip(places.tolist(), values.tolist(), strict=True):
        if math.isfinite(value) and math.isfinite(place):
            lines[-1].append((place, value))
        elif lines[-1]:
            lines.append([])
    return [line for line in lines if line]


def smooth(values: Array, radius: int) -> Array:
    """Mean over the finite values within `radius` neighbours; missing where the value is missing."""
    count = len(values)
    finite = np.isfinite(values)
    numbers = np.clip(np.where(finite, values, 0.0), -_HUGE, _HUGE)
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
