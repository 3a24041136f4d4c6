"""The best of a list of settings by a few short runs, where the model that ranks them is doubted.

Problem  A prediction ranks settings in milliseconds and may be wrong; a run is right and costs minutes. Which few
         settings should run?
Method   Successive halving. A trial runs a setting at a fidelity, a share of a full trial's steps: at first 1/4, then
         the better half of those at 1/2, then the better half of these at 1. Which settings are tried at first is
         decided one after the other: the next is the one whose step may be shortest by the corrected model::

             log seconds = log predicted + x w                     a Bayesian (ridge) regression, w ~ N(0, PRIOR^2)
             next        = argmin  mean - DOUBT standard deviation

         x are the factors (logarithms of numbers, 0 or 1 of words, from 0 to 1 over the list) and the shares of the
         predicted step by cause: where links are half as fast as believed, settings are slower by their share of
         communication. Failures are constraints: out of memory rules out all that is predicted to need at least as
         many bytes; any other failure rules out what is alike (the same degrees) and has not run.
         Importance of a factor: share of the variance of log seconds that lies between its values (a first-order
         Sobol index), over all settings that are not ruled out, measured or corrected::

             importance = Var(E[log seconds | factor]) / Var(log seconds)

Limits   Factors of a list that is no full grid go together, so that shares may add up to more than 1. The order of
         predicted bytes is believed, their size is not.
Source   Jamieson and Talwalkar, arXiv 1502.07943 (successive halving); Dash et al., arXiv 2312.12705 (failures,
         importance of each factor)
Checked  tests/planner/layout/test_setting_tuning.py: against brute force, with the model's constants moved
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

import numpy as np

PRIOR: Final = 0.4
"""Standard deviation of the logarithm by which a factor, from one end of the list to the other, may mislead."""
NOISE: Final = 0.02
"""That of a measured step, by which the regression does not go through all of them."""
OFFSET: Final = 10.0
"""The same of all settings at once: it changes no order."""
DOUBT: Final = 2.0
"""How many standard deviations faster than the corrected model says a setting is hoped to be."""


class Failure(Enum):
    """Why a trial has no seconds."""

    MEMORY = "out of memory"
    OTHER = "failed"


@dataclass(frozen=True, kw_only=True)
class Option:
    """A setting that may be tried, with its prediction."""

    factors: Mapping[str, int | str]
    """What makes it differ from others; numbers count by their logarithms, and are positive."""
    seconds: float
    """Predicted seconds of a step."""
    bytes: float
    """Predicted bytes on the device that needs most."""
    causes: Mapping[str, float] = field(default_factory=dict)
    """The seconds by cause."""
    alike: Hashable = None
    """What fails together, as the degrees; None: it fails alone."""


Outcome = float | Failure


@dataclass(frozen=True)
class Trial:
    """A setting that was tried."""

    number: int
    """In the list."""
    fidelity: float
    outcome: Outcome


@dataclass(frozen=True)
class Tuned:
    """What trials have shown."""

    best: int | None
    """Number of the fastest among those that were tried longest; None: all failed."""
    trials: tuple[Trial, ...]
    """In their order."""
    seconds: tuple[float, ...]
    """Seconds of a step in every setting of the list: measured, or by the corrected model."""
    importance: Mapping[str, float]
    """Each factor's share of the variance of log seconds, the largest first."""

    @property
    def cost(self) -> float:
        """Trials in full ones."""
        return sum(one.fidelity for one in self.trials)


def tune(options: Sequence[Option], trials: int, evaluate: Callable[[int, float], Outcome]) -> Tuned:
    """Try at most so many settings; none twice at a fidelity.

    Args:
        evaluate: runs the setting of a number at a fidelity, and returns its seconds.
    """
    tuning = _Tuning(options, trials, evaluate)
    tuning.explore()
    for fidelity in tuning.fidelities[1:]:
        tuning.halve(fidelity)
    seconds = tuning.corrected()[0]
    return Tuned(
        tuning.best(),
        tuple(tuning.tried),
        tuple(map(float, seconds)),
        _importance(options, seconds, tuning.out),
    )


class _Tuning:
    """The trials so far, and what they teach."""

    def __init__(
        self, options: Sequence[Option], trials: int, evaluate: Callable[[int, float], Outcome]
    ) -> None:
        self.options, self.most, self._evaluate = options, trials, evaluate
        rounds = 3 if trials >= 7 else 2 if trials >= 3 else 1
        self.fidelities = tuple(2.0**-power for power in reversed(range(rounds)))
        self.tried: list[Trial] = []
        self.measured: dict[int, float] = {}
        """At the highest fidelity of each that has not failed."""
        self.out: set[int] = set()
        self._x = _columns(options)
        self._predicted = np.log([one.seconds for one in options])

    def explore(self) -> None:
        """The first round: one after the other, as long as trials are left for the rounds that follow."""
        while len(self.tried) < self.most - self._needed(len(self.measured) + 1):
            mean, deviation = self.corrected()
            hoped = np.log(mean) - DOUBT * deviation
            left = [
                one for one in range(len(self.options)) if one not in self.measured and one not in self.out
            ]
            if not left:
                return
            self._try(min(left, key=lambda one: (hoped[one], one)), self.fidelities[0])

    def halve(self, fidelity: float) -> None:
        """The better half at twice the fidelity."""
        before = [one.number for one in self.tried if one.fidelity == fidelity / 2]
        alive = sorted(
            (one for one in before if one in self.measured), key=lambda one: (self.measured[one], one)
        )
        for number in alive[: max(1, len(alive) // 2)]:
            if len(self.tried) < self.most and number not in self.out:
                self._try(number, fidelity)

    def best(self) -> int | None:
        """The fastest of the last round in which any ran."""
        for fidelity in reversed(self.fidelities):
            ran = {one.number for one in self.tried if one.fidelity == fidelity} & self.measured.keys()
            if ran:
                return min(ran, key=lambda one: (self.measured[one], one))
        return None

    def corrected(self) -> tuple[Any, Any]:
        """Seconds of every setting, and the standard deviation of their logarithms (0 where measured)."""
        rows = sorted(self.measured)
        x, y = self._x[rows], np.log([self.measured[one] for one in rows]) - self._predicted[rows]
        prior = np.full(x.shape[1], PRIOR**-2)
        prior[0] = OFFSET**-2
        inverse = np.linalg.inv(x.T @ x / NOISE**2 + np.diag(prior))
        weights = inverse @ x.T @ y / NOISE**2
        seconds = np.exp(self._predicted + self._x @ weights)
        deviation = np.sqrt(np.einsum("ij,jk,ik->i", self._x, inverse, self._x))
        for number, value in self.measured.items():
            seconds[number], deviation[number] = value, 0.0
        return seconds, deviation

    def _needed(self, alive: int) -> int:
        """Trials of the later rounds, with so many alive after the first."""
        return sum(max(1, alive >> number) for number in range(1, len(self.fidelities)))

    def _try(self, number: int, fidelity: float) -> None:
        outcome = self._evaluate(number, fidelity)
        self.tried.append(Trial(number, fidelity, outcome))
        if not isinstance(outcome, Failure):
            self.measured[number] = outcome
            return
        self.measured.pop(number, None)
        self.out |= {number, *self._ruled_out(number, outcome)}

    def _ruled_out(self, failed: int, why: Failure) -> Iterator[int]:
        """What has not run and need not be tried after this failure."""
        like = self.options[failed]
        for number, one in enumerate(self.options):
            if number in self.measured:
                continue
            if why is Failure.MEMORY and one.bytes >= like.bytes:
                yield number
            if why is Failure.OTHER and like.alike is not None and one.alike == like.alike:
                yield number


def _columns(options: Sequence[Option]) -> Any:
    """A row of each setting: one, its factors and the shares of its causes."""
    columns = [np.ones(len(options))]
    for name in options[0].factors:
        values = [one.factors[name] for one in options]
        if all(isinstance(value, int) for value in values):
            found = np.log2(np.array(values, dtype=float))
            columns.append((found - found.min()) / max(float(np.ptp(found)), 1.0))
        else:
            columns += [
                np.array([value == word for value in values], float) for word in sorted(set(map(str, values)))
            ]
    for cause in options[0].causes:
        columns.append(np.array([one.causes[cause] / one.seconds for one in options]))
    return np.stack(columns, axis=1)


def _importance(options: Sequence[Option], seconds: Any, out: Collection[int]) -> dict[str, float]:
    """Share of the variance of log seconds that lies between each factor's values, the largest first."""
    kept = [number for number in range(len(options)) if number not in out]
    logs = {number: math.log(seconds[number]) for number in kept}
    whole = float(np.var(list(logs.values()))) if kept else 0.0
    found = {}
    for name in options[0].factors:
        groups: dict[int | str, list[float]] = {}
        for number in kept:
            groups.setdefault(options[number].factors[name], []).append(logs[number])
        means = [float(np.mean(group)) for group in groups.values() for _ in group]
        found[name] = float(np.var(means)) / whole if whole > 0.0 else 0.0
    return dict(sorted(found.items(), key=lambda one: (-one[1], one[0])))
