"""Does a variant differ from the control? Paired differences, intervals, what a study can see, and a verdict.

Problem  Two runs that differ by one rounding drift apart: the difference of one pair of runs says nothing. Seeds differ
         by more than most changes do, so that means over seeds, compared with each other, say little more.
Method   Runs of one seed have the same initial weights and the same batches in the same order. What counts is their
         difference, seed by seed: whatever the seed alone causes cancels. Of n differences d the interval is

             t           mean(d) ± t(1 - α/2, n - 1) · s/√n
             bootstrap   percentiles of the means of n differences drawn again and again, at levels α' that are wider
                         than α/2 so that, of normal differences, the interval is as wide as t's
                         (α' = Φ(-√(n/(n-1)) · t), Hesterberg 2015)

         A study *sees* a difference δ where the t-test finds it with probability `power`: with T noncentral t,
         P(|T| > t) = E[Φ(λ - t·u) + Φ(-λ - t·u)], λ = δ√n/s, u² = χ²/(n - 1), which is integrated over log u.
         How many pairs a difference takes follows by search.
         The verdict is `same` where all of the interval lies within the difference that matters, if one was named,
         else `lower` or `higher` where zero is outside it, and else `cannot tell`, with the pairs that probably would:
         at the confidence of the next look (`looks`).
Limits   t takes differences as normal; the mean of a few losses nearly is. The resampled mean of n differences never
         leaves their range, so bootstrap needs so many of them that this range is wide enough: 2^(1-n) ≤ α. Of small
         errors (later looks, many comparisons) too few of the samples lie beyond its ends, and t's is taken
         (`has_bootstrap`). Of few normal differences it is narrower than
         t's even so: 6 % of six, 4 % of ten at 99 %.
         How many more runs it takes is reckoned from the scatter of the runs that there are, which few say badly, and
         as if their mean difference were the true one.
         Each comparison is wrong with probability α by itself; `share_of_error` divides α by their number (Bonferroni).
Checked  tests/study/test_comparisons.py: against mpmath, tables, simulated power and coverage
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

IntervalName = Literal["t", "bootstrap"]
Verdict = Literal["lower", "higher", "same", "cannot tell"]

MOST_PAIRS: Final = 10_000
"""Beyond it nobody trains: the search for a number of pairs ends."""
_RESAMPLED: Final = 200_000
_LEAST_BEYOND: Final = 20
"""Means beyond each end of an interval, at least, so that it does not rest on a few of the samples."""
_EXHAUSTED: Final = 6
"""Up to so many differences all n^n samples are taken, instead of random ones."""
_NORMAL: Final = statistics.NormalDist()


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """A variant beside the control: variant less control, seed by seed."""

    differences: dict[int, float]
    """The difference of each pair, by seed."""
    mean: float | None
    """None of no differences, and where one is not finite: of a target that was never reached."""
    scatter: float | None
    """Standard deviation of the differences; None of fewer than two."""
    low: float | None
    high: float | None
    """The interval of the mean; None where there are too few differences for one."""
    verdict: Verdict
    more_pairs: int | None
    """Where it cannot tell: further pairs of runs that probably would. None: more than `MOST_PAIRS`, or of fewer than
    two pairs nobody knows."""
    visible: float | None
    """The smallest difference that so many pairs of this scatter see."""
    interval: IntervalName
    """The kind that was taken."""
    confidence: float
    """Probability that the interval holds the true mean difference."""


def compare(
    differences: dict[int, float],
    *,
    interval: IntervalName,
    confidence: float,
    power: float,
    matters: float | None = None,
    next_confidence: float | None = None,
) -> Comparison:
    """What the differences of a variant from the control say.

    Args:
        interval: of differences that are too few for a bootstrap, t's is taken.
        confidence: that the interval holds the true mean difference.
        power: with which a difference is to be seen.
        matters: smallest difference that matters; None names none.
        next_confidence: that of a comparison with more pairs; None: the same.
    """
    values, alpha = list(differences.values()), 1 - confidence
    if interval == "bootstrap" and not has_bootstrap(len(values), alpha):
        interval = "t"
    is_finite = all(map(math.isfinite, values))
    mean = statistics.fmean(values) if values and is_finite else None
    if mean is None or len(values) < 2:
        return Comparison(
            differences=differences,
            mean=mean,
            scatter=None,
            low=None,
            high=None,
            verdict="cannot tell",
            more_pairs=None,
            visible=None,
            interval=interval,
            confidence=confidence,
        )
    scatter = statistics.stdev(values)
    low, high = interval_of(values, interval, alpha)
    verdict = _verdict(low, high, matters)
    more = None
    if verdict == "cannot tell":
        wanted = max(abs(mean), matters or 0.0)
        later = alpha if next_confidence is None else 1 - next_confidence
        needed = pairs_needed(wanted, scatter, alpha=later, power=power)
        more = None if needed is None else max(1, needed - len(values))
    return Comparison(
        differences=differences,
        mean=mean,
        scatter=scatter,
        low=low,
        high=high,
        verdict=verdict,
        more_pairs=more,
        visible=visible_difference(len(values), scatter, alpha=alpha, power=power),
        interval=interval,
        confidence=confidence,
    )


def _verdict(low: float, high: float, matters: float | None) -> Verdict:
    if matters is not None and -matters < low and high < matters:
        return "same"
    if high < 0:
        return "lower"
    if low > 0:
        return "higher"
    # Differences that are all exactly zero: runs that are the same, bit for bit.
    return "same" if low == high == 0 else "cannot tell"


def share_of_error(confidence: float, comparisons: int) -> float:
    """The confidence of each of several comparisons, so that all of them together hold with `confidence`."""
    return 1 - (1 - confidence) / max(1, comparisons)


# -- intervals ---------------------------------------------------------------------------------


def interval_of(values: Sequence[float], interval: IntervalName, alpha: float) -> tuple[float, float]:
    """Both ends of the interval of the mean of two values or more."""
    return _t_interval(values, alpha) if interval == "t" else _bootstrap_interval(values, alpha)


def pairs_for_bootstrap(alpha: float) -> int:
    """Fewest differences of which a bootstrap interval can hold the mean with probability 1 - alpha."""
    return 1 + math.ceil(math.log2(1 / alpha) - 1e-9)


def has_bootstrap(count: int, alpha: float) -> bool:
    """Whether so many differences have a bootstrap interval with this probability of error."""
    if count < max(2, pairs_for_bootstrap(alpha)):
        return False
    samples = count**count if count <= _EXHAUSTED else _RESAMPLED
    return _error_of_each_end(count, alpha) * samples >= _LEAST_BEYOND


def _error_of_each_end(count: int, alpha: float) -> float:
    """Share of the resampled means that lies beyond each end: of normal ones as wide as t's."""
    return _NORMAL.cdf(-math.sqrt(count / (count - 1)) * t_quantile(1 - alpha / 2, count - 1))


def _t_interval(values: Sequence[float], alpha: float) -> tuple[float, float]:
    mean, count = statistics.fmean(values), len(values)
    half = t_quantile(1 - alpha / 2, count - 1) * statistics.stdev(values) / math.sqrt(count)
    return mean - half, mean + half


def _bootstrap_interval(values: Sequence[float], alpha: float) -> tuple[float, float]:
    beyond = _error_of_each_end(len(values), alpha)
    low, high = np.quantile(_resampled_means(np.sort(values)), [beyond, 1 - beyond])
    return float(low), float(high)


def _resampled_means(values: np.ndarray) -> np.ndarray:
    count = len(values)
    if count <= _EXHAUSTED:
        places = np.indices((count,) * count).reshape(count, -1)
    else:
        places = np.random.default_rng(0).integers(count, size=(count, _RESAMPLED))
    means: np.ndarray = values[places].mean(axis=0)
    return means


# -- what a study sees -------------------------------------------------------------------------


def visible_difference(pairs: int, scatter: float, *, alpha: float, power: float) -> float | None:
    """The smallest true difference that so many pairs see with this power; None of fewer than two.

    Args:
        scatter: standard deviation of a paired difference.
    """
    if pairs < 2:
        return None
    low, high = 0.0, 1.0
    while power_of(pairs, high, alpha=alpha) < power:
        high *= 2
    for _ in range(45):
        middle = (low + high) / 2
        low, high = (middle, high) if power_of(pairs, middle, alpha=alpha) < power else (low, middle)
    return high * scatter


def pairs_needed(difference: float, scatter: float, *, alpha: float, power: float) -> int | None:
    """Fewest pairs that see a true difference with this power; None where it takes more than `MOST_PAIRS`."""
    if scatter == 0:
        return 2 if difference else None
    effect = abs(difference) / scatter
    if power_of(MOST_PAIRS, effect, alpha=alpha) < power:
        return None
    low, high = 1, MOST_PAIRS
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if power_of(middle, effect, alpha=alpha) >= power else (middle, high)
    return high


def power_of(pairs: int, effect: float, *, alpha: float) -> float:
    """Probability that a t-test of so many pairs finds a true difference of `effect` times their scatter."""
    freedom, shift = pairs - 1, effect * math.sqrt(pairs)
    t = t_quantile(1 - alpha / 2, freedom)
    u, weight = _chi_nodes(freedom)
    found = _normal_cdf(shift - t * u) + _normal_cdf(-shift - t * u)
    return float((found * weight).sum())


def _chi_nodes(freedom: int) -> tuple[np.ndarray, np.ndarray]:
    """Places u and weights of the expectation over u = √(χ²/freedom), even in log u."""
    low = -(30 / freedom + 8 / math.sqrt(freedom))
    high = 0.5 * math.log(1 + 80 / freedom + 20 / math.sqrt(freedom))
    log_u = np.linspace(low, high, 1001)
    # The density of log u but for a constant: u^freedom · exp(-freedom u²/2), its largest value at u = 1.
    weight = np.exp(freedom * (log_u + (1 - np.exp(2 * log_u)) / 2))
    return np.exp(log_u), weight / weight.sum()


def _normal_cdf(x: np.ndarray) -> np.ndarray:
    return np.array([0.5 * math.erfc(one) for one in (-x / math.sqrt(2)).tolist()])


# -- Student's t -------------------------------------------------------------------------------


@functools.cache  # a search for a difference or a number of pairs asks for the same one dozens of times
def t_quantile(level: float, freedom: int) -> float:
    """The value below which Student's t lies with probability `level`, from a half to less than one."""
    low, high = 0.0, 1.0
    while t_cdf(high, freedom) < level:
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, freedom) < level else (low, middle)
    return (low + high) / 2


def t_cdf(t: float, freedom: int) -> float:
    """Probability that Student's t is at most `t`, of `t` not below zero."""
    return 1 - 0.5 * _incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def _incomplete_beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function, by its continued fraction (Lentz's method)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):  # where the fraction converges slowly its mirror image does not
        return 1 - _incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    tiny, above = 1e-300, 1.0
    below = 1 / (1 - (a + b) * x / (a + 1) or tiny)
    value = below
    for m in range(1, 10_000):
        for term in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            below = 1 / (1 + term * below or tiny)
            above = 1 + term / above or tiny
            value *= above * below
        if abs(above * below - 1) < 1e-15:
            break
    return front * value / a
