"""Memory-efficient pretraining: less than weights, gradients and two averages of full rank, and what it costs in loss.

Problem  Plain training with AdamW keeps 16 bytes of each weight in fp32: the weight, its gradient, two averages.
         Several methods keep less. Which of them is worth it, only runs can say in which each has its own best rate.
Method   GaLore      Adam's averages of a projection of each gradient on its leading directions: states shrink.
         Fira        the same, and what the projection leaves out moves weights, too.
         Low rank    each linear layer of a block is trained as W = B A of rank r: weights, gradients and states shrink.
         Refactored  every T steps B and A are balanced by the SVD of their product, their averages are cleared, and the
                     rate rises anew: low rank, without factors of unequal size and without averages of old ones.
         Sparse      W = B A + S, where S has numbers at 3 % of its places, which stay: any rank, by few numbers more.
         The paper's finding is that full rank is best where its rate is tuned as well, that low rank alone comes near
         it in small models, and that refactorization and reset narrow the gap in larger ones.
Study    `scrimp study recipe:memory-efficient`: a million parameters, six methods at three rates each. Each method's
         rate is chosen by the first seed's loss, and what is shown is the mean of the other seeds: the lowest of three
         losses is low by luck as well. Beside it stand the bytes of weights, gradients and optimizer states as
         the planner counts them.
Limits   So small a model is not the paper's: give a larger one and more steps with --set before believing an order.
         One rank, one share of places, one T, no decay; three rates a method, of which the findings say where the best
         one is the first or the last. Activations are not counted: they are the same for full rank, GaLore, Fira and
         sparse, and a little more for low rank.
Source   Glentis et al., "Scalable Parameter and Memory Efficient Pretraining for LLM" (2025, arXiv 2505.22922);
         GaLore arXiv 2403.03507, Fira arXiv 2410.01623, SLTrain arXiv 2406.02214
Checked  tests/recipes/test_memory_efficient.py
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from scrimp.config import Config, OptimizerConfig, base_architecture, replace_values, resolve
from scrimp.config.optimizers import facts_of
from scrimp.gemm.problem import DTYPES
from scrimp.models.model import build_model
from scrimp.optim import memory_of
from scrimp.report.units import format_bytes
from scrimp.study.results import of_seeds

if TYPE_CHECKING:
    from scrimp.study.results import Outcome, Results

METHODS: Final = {
    "full": "full rank",
    "galore": "GaLore",
    "fira": "Fira",
    "low-rank": "low rank",
    "refactored": "low rank, refactored",
    "sparse": "low rank and sparse",
}
"""What a variant's name begins with, to its method; its rate follows."""


@dataclass(frozen=True)
class Best:
    """A method at its best rate."""

    method: str
    variant: str
    rate: float
    """That of the blocks' matrices."""
    losses: tuple[float, ...]
    """Those of the seeds that the rate was not chosen by; where there is one seed, its."""
    state_bytes: int
    is_end: bool
    """The rate is the lowest or the highest of those tried."""

    @property
    def loss(self) -> float:
        """Their mean."""
        return statistics.fmean(self.losses)


def findings(results: Results) -> list[str]:
    """What the study's results say, a sentence each; of methods whose runs are missing nothing."""
    seeds = _seeds(results)
    found = [best for method in METHODS if (best := _best(results, method, seeds)) is not None]
    if not found:
        return []
    others = len(seeds) - 1
    of = f"{others} other seed{'s' * (others > 1)}" if others else "the same seed, and so a little too low"
    said = [f"Each method at the best of its matrices' rates by seed {seeds[0]}; losses are of {of}."]
    said += [_row(one, found[0]) for one in found]
    said += _lowest(found) + _refactored(found)
    ends = [f"{METHODS[one.method]} ({one.rate:g})" for one in found if one.is_end]
    if ends:
        said.append(f"The best rate is an end of those tried, and may lie beyond: {', '.join(ends)}.")
    return said


def _seeds(results: Results) -> list[int]:
    """Those of all variants that have run."""
    found = [one.values.keys() for one in results.outcomes if one.values]
    return [seed for seed in results.seeds if found and all(seed in one for one in found)]


def _best(results: Results, method: str, seeds: Sequence[int]) -> Best | None:
    """A method at its best rate, chosen by the first seed; None where a rate has not run, or is left to Scrimp."""
    variants = [one for one in results.outcomes if _method_of(one) == method]
    settings = {one.name: results.study.named(one.name).settings for one in variants}
    if not all("optimizer.lr" in one for one in settings.values()):
        return None
    if not seeds or not variants or not all(one.values for one in variants):
        return None
    best = min(variants, key=lambda one: one.values[seeds[0]])
    rates = {name: _rate(one) for name, one in settings.items()}
    shown = seeds[1:] or seeds
    return Best(
        method,
        best.name,
        rates[best.name],
        tuple(best.values[seed] for seed in shown),
        state_bytes(settings[best.name]),
        rates[best.name] in (min(rates.values()), max(rates.values())),
    )


def _rate(settings: Mapping[str, Any]) -> float:
    """The learning rate of the blocks' matrices."""
    name, lr = settings.get("optimizer.name", "adamw"), float(settings["optimizer.lr"])
    if not facts_of(name).low_rank:
        return lr
    return lr * float(settings.get("optimizer.low_rank_scale", OptimizerConfig().low_rank_scale))


def _method_of(outcome: Outcome) -> str | None:
    return next((method for method in METHODS if outcome.name.startswith(f"{method}-")), None)


def state_bytes(settings: Any) -> int:
    """Weights, gradients and optimizer states of a run, as the planner's account of it counts them."""
    asked = replace_values(Config(), dict(settings))
    found = resolve(asked, base_architecture(asked, None), device_type="cpu")
    config, architecture = found.config, found.architecture
    own, memory = DTYPES[config.train.parameters], memory_of(config, architecture)
    named = dict(build_model(architecture, device="meta", dtype=own).named_parameters())
    each = own.itemsize + (memory.sums("cpu").dtype or own).itemsize
    return each * sum(parameter.numel() for parameter in named.values()) + memory.state_bytes(named)


def _row(one: Best, full: Best) -> str:
    """A row of the table."""
    share = (
        ""
        if one.method == full.method
        else f", {one.state_bytes / full.state_bytes:.0%} of {METHODS[full.method]}'s"
    )
    rate, held = f"a rate of {one.rate:g}", format_bytes(one.state_bytes)
    return f"{METHODS[one.method]}: {one.loss:.4f} at {rate}, in {held}{share}."


def _lowest(found: Sequence[Best]) -> list[str]:
    """Which method has the lowest loss, and whether seeds agree."""
    if len(found) < 2:
        return []
    first, second = sorted(found, key=lambda one: one.loss)[:2]
    wins = sum(a < b for a, b in zip(first.losses, second.losses, strict=True))
    return [
        f"The lowest loss is that of {METHODS[first.method]}, {second.loss - first.loss:.4f} below "
        f"{METHODS[second.method]}; lower on {of_seeds(wins, len(first.losses))}."
    ]


def _refactored(found: Sequence[Best]) -> list[str]:
    """What refactorization and reset change, seed by seed."""
    by_method = {one.method: one for one in found}
    if not {"low-rank", "refactored"} <= by_method.keys():
        return []
    plain, again = by_method["low-rank"], by_method["refactored"]
    gains = [a - b for a, b in zip(plain.losses, again.losses, strict=True)]
    mean, wins = statistics.fmean(gains), sum(gain > 0 for gain in gains)
    return [
        f"Refactorization and reset change the loss of low rank by {-mean:+.4f}; "
        f"lower on {of_seeds(wins, len(gains))}."
    ]
