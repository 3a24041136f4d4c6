"""Which runs look best early, by their gradients and their training loss: before the figure of any of them says it.

Problem  Most runs of a sweep go to their end only to be thrown away. Their losses early need not say which these are:
         who is ahead after a tenth of the steps, by a high rate or a small batch, may be behind at the end.
Method   Of runs that fine-tune one model, those with a low gradient norm and a *high* training loss early end best.
         With x_1 … x_n the means of n equal parts of a run so far (at most 200, in each row), of the gradient's norm
         before it is clipped and of the training loss,

             EMA(x) = Σ_i β^(n-i) x_i / Σ_i β^(n-i),   β = 0.9

             score of a variant = mean over seeds of ½ (rank of EMA(norm) from the lowest + rank of EMA(loss) from the
                                  highest), among the variants that have a run of the seed; equal values share the mean
                                  of their ranks

         The lowest score is best. Ranks, not values, since norms and losses have no common unit; seed by seed, since a
         seed moves all variants alike.
Limits   A run that learns nothing has a high loss, and a small gradient where it is dead: the signal is one among runs
         that all learn, so that a sweep with rates that are far too low, or that diverge, is misread. Norms compare
         runs of one model and objective alone; a larger batch has a smaller one because it has less noise, which is
         part of the finding. Steps without a finite number are left out. Of more than 200 steps, parts of a whole run
         are wider than those of its beginning, and the EMA reaches back further. In the one sweep that has been run to
         its end here it kept the wrong half (docs/recipes.md).
Source   Pareja et al., "Unveiling the Secret Recipe: A Guide For Supervised Fine-Tuning Small LLMs" (2024, arXiv
         2412.13337), whose claim it is. The score and its β are a choice made here.
Checked  tests/study/test_early.py; whether it holds, `scrimp study recipe:fine-tuning`
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from scrimp.errors import CheckpointError
from scrimp.study.rows import Curve, Row

_DECAY: Final = 0.9


@dataclass(frozen=True)
class Signal:
    """What a run shows early."""

    gradient_norm: float
    loss: float


def signal_of(row: Row, share: float = 1.0) -> Signal | None:
    """The signal of a run in the first `share` of its row's steps; None of one that failed, or has no finite number.

    Raises:
        CheckpointError: the row has no gradient norms.
    """
    if row.error is not None:
        return None
    if row.gradient_norm is None or row.training is None:
        raise CheckpointError(
            f"the row of {row.variant} seed {row.seed} at step {row.steps:,} has no gradient norms",
            got="a row of an earlier version, or of runs that were evaluated together",
            expected="the norms that an early signal is made of",
            do="remove that line from rows.jsonl: its run is read again, or repeated",
        )
    norm, loss = (moving_average(one, share * row.steps) for one in (row.gradient_norm, row.training))
    return None if norm is None or loss is None else Signal(norm, loss)


def moving_average(curve: Curve, until: float) -> float | None:
    """The exponential moving average at step `until`; None where there is no value."""
    found = [
        one for step, one in zip(curve.steps, curve.values, strict=True) if one is not None and step <= until
    ]
    if not found:
        return None
    weights = [_DECAY**age for age in range(len(found) - 1, -1, -1)]
    return sum(weight * one for weight, one in zip(weights, found, strict=True)) / sum(weights)


def early_scores(signals: Mapping[str, Mapping[int, Signal]]) -> dict[str, float]:
    """The score of each variant, the lowest the best; of variants without a run none.

    Args:
        signals: by variant and seed.
    """
    found: dict[str, list[float]] = {}
    for seed in {seed: None for one in signals.values() for seed in one}:
        names = [name for name, one in signals.items() if seed in one]
        for name, score in zip(names, _of_seed([signals[name][seed] for name in names]), strict=True):
            found.setdefault(name, []).append(score)
    return {name: statistics.fmean(scores) for name, scores in found.items()}


def _of_seed(signals: Sequence[Signal]) -> list[float]:
    from scrimp.tasks.curves import ranks  # whose package needs torch

    norms = ranks([one.gradient_norm for one in signals])
    losses = ranks([-one.loss for one in signals])
    return [(norm + loss) / 2 for norm, loss in zip(norms, losses, strict=True)]
