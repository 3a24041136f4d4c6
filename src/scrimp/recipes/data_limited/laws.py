"""Laws of loss: what a recipe would reach with ever larger models, or ever more members of an ensemble.

    L(N) = E + A / N^a          of models with N parameters
    L(K) = E + A / K            of ensembles of K members, the same with a = 1
    L(N, K): the first law of the limits E of the second, size by size

Problem  Two recipes are compared at the sizes that one can pay for; what matters is where each of them ends.
Method   For a given exponent the law is linear in E and A >= 0, which least squares give at once; of 2,000 exponents,
         0.23 % apart, the best is taken. The interval of E comes from the bootstrap: seeds are drawn with replacement,
         and the law is fitted to the means of each draw.
Limits   Three sizes fit three numbers exactly: the interval is then all that says how sure they are. An exponent at the
         end of its range (0.05, 5) means that the sizes do not show one.
Source   Kim et al., "Pre-training under infinite compute" (2025, arXiv 2509.14786)
Checked  tests/recipes/test_data_limited.py: planted laws are recovered

Shapes: X sizes, S seeds, D draws, A exponents.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from scrimp.errors import ConfigError

Floats = NDArray[np.float64]
RANGE: Final = (0.05, 5.0)
"""Exponents that are searched."""
_EXPONENTS: Final = np.geomspace(*RANGE, 2000)
_DRAWS: Final = 1000


@dataclass(frozen=True)
class Law:
    """E + A / x^a."""

    limit: float
    """E: the loss at infinity."""
    factor: float
    """A, in the unit of x."""
    exponent: float
    interval: tuple[float, float] | None = None
    """Interval of the limit; None: one seed says nothing of it."""

    def at(self, x: float) -> float:
        """The loss at x."""
        return self.limit + self.factor * math.pow(x, -self.exponent)

    @property
    def has_limit(self) -> bool:
        """Whether the losses show where they end: not where they fall by as much with each doubling."""
        return self.factor == 0 or self.exponent > RANGE[0]


def fit(
    xs: Sequence[float],
    losses: Sequence[Sequence[float]],
    *,
    exponent: float | None = None,
    confidence: float = 0.95,
) -> Law:
    """The law of losses.

    Args:
        xs: sizes, or numbers of members; three different ones or more, two where the exponent is given.
        losses: of each of them, the losses of all seeds, in one order.
        exponent: a; None: searched.

    Raises:
        ConfigError: there are too few, or seeds are missing.
    """
    least = 3 if exponent is None else 2
    table = [list(one) for one in losses]
    seeds = {len(one) for one in table}
    if len(set(xs)) < least or len(xs) != len(table) or len(seeds) != 1 or 0 in seeds:
        raise ConfigError(
            "a law cannot be fitted to these losses",
            got=f"{len(set(xs))} sizes with {', '.join(map(str, sorted(seeds))) or 'no'} seeds",
            expected=f"{least} sizes or more, with the same seeds each",
        )
    x, y_XS = np.asarray(xs, dtype=np.float64), np.asarray(table, dtype=np.float64)
    limit, factor, found = (float(one[0]) for one in _fit(x, y_XS.mean(1)[None], exponent))
    if y_XS.shape[1] < 2:
        return Law(limit, factor, found)
    draws = np.random.default_rng(0).integers(0, y_XS.shape[1], size=(_DRAWS, y_XS.shape[1]))
    limits = _fit(x, y_XS[:, draws].mean(2).T, exponent)[0]
    low, high = np.quantile(limits, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Law(limit, factor, found, (float(low), float(high)))


def amount_of(amounts: Sequence[float], losses: Sequence[float], loss: float) -> float:
    """The amount that has a loss, between its neighbours by the logarithm of the amount; 0 where all have less,
    infinity where all have more.

    Between neighbours, and not by a law: over a few doublings of little text the loss falls by as much with each, so
    that a law's exponent is the end of its range.

    Args:
        amounts: growing.
        losses: of each amount.
    """
    logs = np.log(np.asarray(amounts, dtype=np.float64))
    falling = np.minimum.accumulate(np.asarray(losses, dtype=np.float64))
    if loss < falling[-1]:
        return math.inf
    if loss > falling[0]:
        return 0.0
    return float(np.exp(np.interp(-loss, -falling, logs)))


def limits_of_members(members: Sequence[int], losses: Sequence[Sequence[float]]) -> list[float]:
    """E of L(K) = E + A / K, of each seed alone: by size, where ever more of ever larger members would end."""
    return [
        fit(members, [[one[seed]] for one in losses], exponent=1.0).limit for seed in range(len(losses[0]))
    ]


def _fit(x: Floats, y_DX: Floats, exponent: float | None) -> tuple[Floats, Floats, Floats]:
    """E, A >= 0 and a by least squares, of each row."""
    tried = _EXPONENTS if exponent is None else np.array([exponent])
    scale = x.min()
    u_AX = (x / scale) ** -tried[:, None]
    centred_AX = u_AX - u_AX.mean(1, keepdims=True)
    spread_A = np.maximum((centred_AX**2).sum(1), np.finfo(np.float64).tiny)
    slope_DA = np.maximum(0.0, (y_DX - y_DX.mean(1, keepdims=True)) @ centred_AX.T / spread_A)
    # The error is that of a constant, less what the slope explains.
    gain_DA = slope_DA * (2 * (y_DX @ centred_AX.T) - slope_DA * spread_A)
    best_D, rows_D = gain_DA.argmax(1), np.arange(len(y_DX))
    slope_D, found_D = slope_DA[rows_D, best_D], tried[best_D]
    limit_D = y_DX.mean(1) - slope_D * u_AX.mean(1)[best_D]
    return limit_D, slope_D * scale**found_D, found_D
