"""Supervised fine-tuning of small models: which batch and rate, whom to stop early, and in how many phases.

Problem  Most of what is known of fine-tuning is known of large models and by habit: batches of 128 samples, warm-up, a
         decay of the rate, one phase for each kind of data. A sweep over all of it is too much.
Method   What the guide found of models of 3 to 7 billion parameters, and `train.toml` sets:

             batch      some thousand samples, with a lower rate, end better than 128
             schedule   a constant rate without warm-up costs nothing
             loss       of all answer tokens of the whole batch alike, whatever micro-batches and packing are
             phases     one run on all data ("stacked") is as good as one kind of it after the other ("phased")
             early      low gradient norm and high loss early point to the better runs of a sweep: the others can be
                        stopped, with `[halving]` and `by = "early-signal"` (`scrimp.study.early`)

Study    `scrimp study recipe:fine-tuning`: a small model of Python source learns two kinds of conversations about it.
         Six pairs of batch and rate with the same samples, all to their end; and the same samples in two phases. Said
         of it: whether larger batches with lower rates end lower; Spearman's correlation of the early score, after a
         quarter of each run's steps, and the final loss; what phases change.
Limits   0.2 million parameters, a byte a token, less than one pass over the data, a rate chosen by the seeds that it is
         shown on: too little to say anything against a guide for models ten thousand times as large. Of so few steps a
         low rate may be far too low, and the signal then takes for the best who has learnt nothing: copy the study's
         file for your own model and conversations. The guide judges by benchmarks, the study by held-out loss. Base
         and conversations come from the same files, so that the base has read some of the answers.
Source   Pareja et al., "Unveiling the Secret Recipe: A Guide For Supervised Fine-Tuning Small LLMs" (2024, arXiv
         2412.13337)
Checked  tests/recipes/test_fine_tuning.py
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from scrimp.study.early import Signal, early_scores, signal_of
from scrimp.study.job import SOURCE
from scrimp.study.results import of_seeds, shared_seeds
from scrimp.tasks.curves import spearman

if TYPE_CHECKING:
    from scrimp.study.definition import Study
    from scrimp.study.results import Results
    from scrimp.study.variants import Variant

_SHARE: Final = 0.25
"""Share of a run's steps after which it is ranked."""
_LEAST: Final = 3
"""Runs of which a correlation says something."""


@dataclass(frozen=True)
class Pair:
    """A batch with a rate."""

    name: str
    batch: int
    rate: float
    losses: Mapping[int, float]
    """By seed."""

    @property
    def loss(self) -> float:
        """Their mean."""
        return statistics.fmean(self.losses.values())


def findings(results: Results) -> list[str]:
    """What the study's results say, a sentence each; of runs that are missing nothing."""
    pairs = _pairs(results)
    return [*_batches(pairs), *_early(results, pairs), *_phases(results)]


def _pairs(results: Results) -> list[Pair]:
    """The sweep, of the seeds that all of it has: the variants that train on the control's mixture from the trunk."""
    study = results.study
    mix = study.named(study.control).settings.get("data.mix")
    swept = [one for one in study.runs if one.settings.get("data.mix") == mix and not one.needs]
    if any(key not in one.settings for one in swept for key in ("train.batch_tokens", "optimizer.lr")):
        return []  # a study of one's own that leaves one of them to Scrimp is no sweep of both
    losses = {one.name: results.figure_by_seed(one.name, study.figure) for one in swept}
    seeds = shared_seeds(losses.values())
    return [
        Pair(
            one.name,
            int(one.settings["train.batch_tokens"]),
            float(one.settings["optimizer.lr"]),
            {seed: losses[one.name][seed] for seed in seeds},
        )
        for one in swept
        if seeds
    ]


def _batches(pairs: Sequence[Pair]) -> list[str]:
    """Each batch at its best rate, and whether larger ones with lower rates end lower."""
    best = [
        min((one for one in pairs if one.batch == batch), key=lambda one: one.loss)
        for batch in sorted({one.batch for one in pairs})
    ]
    said = [f"Batch of {one.batch:,} tokens: {one.loss:.4f} at its best rate, {one.rate:g}." for one in best]
    beside = [
        (one, other) for one in pairs for other in pairs if one.batch > other.batch and one.rate < other.rate
    ]
    if beside:
        better = sum(one.loss < other.loss for one, other in beside)
        said.append(
            f"Of {len(beside)} comparisons of a larger batch and lower rate with a smaller batch and higher rate, "
            f"the larger batch ends lower in {better}."
        )
    return said


def _early(results: Results, pairs: Sequence[Pair]) -> list[str]:
    """Whether the early score orders the final losses."""
    signals = {one.name: _signals(results, one) for one in pairs}
    if len(pairs) < _LEAST or not all(signals.values()):
        return []
    scores, losses = early_scores(signals), [one.loss for one in pairs]
    norms, early_losses = (
        [statistics.fmean(getattr(one, name) for one in signals[pair.name].values()) for pair in pairs]
        for name in ("gradient_norm", "loss")
    )
    alone = spearman(norms, losses), spearman([-one for one in early_losses], losses)
    order = sorted(pairs, key=lambda one: scores[one.name])
    best = min(pairs, key=lambda one: one.loss)
    kept = order[: -(-len(order) // 2)]
    return [
        f"After a quarter of the steps, Spearman's correlation of the early score and the final loss is "
        f"{spearman([scores[one.name] for one in pairs], losses):+.2f} over {len(pairs)} runs' means (+1: as the guide "
        f"has it); by low gradient norm alone {alone[0]:+.2f}, by high loss alone {alone[1]:+.2f}.",
        f"The better half by that score is {', '.join(one.name for one in kept)}; the best at the end, {best.name}, "
        f"is {'' if best in kept else 'not '}among them.",
    ]


def _signals(results: Results, pair: Pair) -> dict[int, Signal]:
    """By seed; none of rows that earlier versions wrote without norms."""
    rows = [row for row in results.whole_runs(pair.name) if row.seed in pair.losses]
    found = {row.seed: signal_of(row, _SHARE) for row in rows if row.gradient_norm is not None}
    return {seed: one for seed, one in found.items() if one is not None}


def _phases(results: Results) -> list[str]:
    """What two phases change beside one run on the same samples, seed by seed."""
    phased = _phased(results.study)
    if phased is None:
        return []
    stacked = results.study.control
    of_sources = {
        name for row in results.whole_runs(stacked) for name in row.figures if name.startswith(SOURCE)
    }
    names = [results.study.figure, *sorted(of_sources)]
    changes = {name: _changes(results, stacked, phased.name, name) for name in names}
    whole = changes[results.study.figure]
    if not whole:
        return []
    each = ", ".join(
        f"{name.removeprefix(SOURCE)} {statistics.fmean(found):+.4f}"
        for name, found in changes.items()
        if found and name.startswith(SOURCE)
    )
    return [
        f"Two phases in the place of one mixture of the same samples change the loss by {statistics.fmean(whole):+.4f} "
        f"({each}); lower on {of_seeds(sum(one < 0 for one in whole), len(whole))}."
    ]


def _phased(study: Study) -> Variant | None:
    return next((one for one in study.runs if "model.weights" in one.naming), None)


def _changes(results: Results, before: str, after: str, figure: str) -> list[float]:
    """A figure of one variant less that of another, seed by seed."""
    old, new = (results.figure_by_seed(one, figure) for one in (before, after))
    return [new[seed] - old[seed] for seed in shared_seeds([old, new])]
