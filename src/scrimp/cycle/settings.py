"""What a cycle of precision is asked for, whoever asks: a run's configuration, or the arguments of a plain loop.

Steps at which a cycle measures are a function of these alone, so that a run that is resumed measures at the same ones.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from scrimp.config import ResolvedConfig
from scrimp.config.pipeline import pipeline_of
from scrimp.config.schema import decided
from scrimp.config.snip import BUDGETS, chosen_steps
from scrimp.planner.precision import Budget, Weights
from scrimp.precision import InputOrigin, parse_rules


@dataclass(frozen=True, kw_only=True)
class CycleSettings:
    """One cycle; steps are updates that were made, so that what is due at step 3 comes before the fourth."""

    budget: Budget
    formats: tuple[str, ...]
    """Candidates."""
    first: int
    """Step before which the first plan is measured."""
    every: int
    """Steps between plans; 0 for only the first."""
    delay: int
    """Steps between measuring and switching."""
    probe_every: int = 0
    """Steps between comparisons with the compute format; 0 for none."""
    policy: str = "snip"
    weights: Weights = field(default_factory=Weights)
    pinned: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    """Layer to GEMM to the recipe that a rule fixes."""
    steps: int | None = None
    """Length of the whole run: nothing is measured for a plan that would begin after it. None: not known."""
    at: tuple[int, ...] = ()
    """More steps to measure at."""
    final_share: float = 0.0
    """Last share of the run that may have a plan of higher precision; `steps` must be known."""
    final_weight: float = 4.0
    compute: str = "bf16"
    """Format of GEMMs that are not quantized: what a speed-up is over."""
    batches: int = 2
    """Statistics batches of a measurement."""
    gains: str = "auto"
    sensitivity: str = "auto"
    """auto: by the optimizer's rule; gradient: of any optimizer."""
    seed: int = 0
    """Seed of the noise of statistics, with the step."""
    start: str | None = None
    """Recipe before the first plan; None: the model as it is."""
    layers: tuple[str, ...] | None = None
    """To plan; None: those that are planned already, else all trained ones but the head."""
    stages: Mapping[str, int] = field(default_factory=dict)
    """Layer to the rank of a pipeline that computes it: each keeps a budget of FLOPs or bytes by itself. Empty: one
    has all."""
    saved: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Layer to all that is kept of its input, where its recipes do not decide that."""
    is_compiled: bool = False
    """Whether layers run in compiled graphs."""
    is_smoothed: bool = False
    """Whether costs of the last statistics count half."""
    must_keep_budget: bool = True
    """Whether a first plan that cannot keep the budget is an error; else, as for later ones, the nearest is taken."""
    counts_from: int = 0
    """Number of the first step, as plans name the step that they begin with."""

    @classmethod
    def of_run(cls, config: ResolvedConfig, layers: Mapping[str, InputOrigin]) -> CycleSettings:
        """The cycle that a run asks for.

        Args:
            layers: whose formats are planned, and where their inputs come from.
        """
        snip, rules = config.snip, parse_rules(config.precision)
        return cls(
            budget=Budget(**{name: getattr(config.budget, name) for name in BUDGETS}),
            formats=config.candidates,
            **{name: decided(getattr(snip, name)) for name in ("first", "every", "delay", "probe_every")},
            **{name: getattr(snip, name) for name in ("policy", "batches", "gains", "start")},
            **{name: getattr(snip, name) for name in ("final_share", "final_weight")},
            weights=Weights(snip.loss_weight, snip.update_weight, snip.curvature_weight),
            pinned=rules.pinned(list(layers)),
            steps=config.train.steps,
            at=chosen_steps(snip.at),
            compute=config.precision_rules.compute,
            stages=stages_of(config, list(layers)),
            saved=rules.saved_whatever_runs(layers),
            is_compiled=config.train.compile == "on",
            is_smoothed=True,
            must_keep_budget=False,
            counts_from=1,
        )

    def measures_at(self, step: int) -> bool:
        """Whether a plan is measured before this step: the first, every so many after it, chosen ones, and where the
        final share begins."""
        first, every, last_part = self.first, self.every, self.final_share > 0
        is_regular = step == first or (step > first and every > 0 and (step - first) % every == 0)
        is_final = last_part and step > first and step + self.delay == self.final_steps.start
        return self.is_in_time(step) and (is_regular or is_final or step in self.at)

    def is_in_time(self, step: int) -> bool:
        """Whether a plan that is measured before this step begins before the run ends."""
        return self.steps is None or step + self.delay < self.steps

    @property
    def final_steps(self) -> range:
        """The steps of the final share."""
        assert self.steps is not None, "a run without an end has no final share"
        return range(self.steps - round(self.final_share * self.steps), self.steps)


def stages_of(config: ResolvedConfig, layers: Sequence[str]) -> dict[str, int]:
    """Which rank of a pipeline has each layer, by the number of its block."""
    if config.layout.pp == 1:
        return {}
    blocks = {layer: int(layer.split(".")[1]) for layer in layers}
    pipeline = pipeline_of(config.layout, max(blocks.values()) + 1)
    ranks = {block: rank for rank in range(pipeline.ranks) for block in pipeline.blocks_of(rank)}
    return {layer: ranks[block] for layer, block in blocks.items()}
