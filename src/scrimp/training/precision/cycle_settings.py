"""From a run's configuration to the settings of its cycle of precision."""

from __future__ import annotations

from collections.abc import Iterable

from scrimp.config import ResolvedConfig
from scrimp.config.snip import BUDGETS, chosen_steps
from scrimp.cycle import CycleSettings
from scrimp.planner.precision import Budget, Weights
from scrimp.precision import parse_rules


def settings_of(config: ResolvedConfig, layers: Iterable[str]) -> CycleSettings:
    """The cycle that a run asks for.

    Args:
        layers: whose formats are planned.
    """
    snip = config.snip
    return CycleSettings(
        budget=Budget(**{name: getattr(config.budget, name) for name in BUDGETS}),
        candidates=config.candidates,
        cadence=config.cadence,
        policy=snip.policy,
        weights=Weights(snip.loss_weight, snip.update_weight, snip.curvature_weight),
        pinned=parse_rules(config.precision).pinned(list(layers)),
        steps=config.train.steps,
        at=chosen_steps(snip.at),
        final_share=snip.final_share,
        final_weight=snip.final_weight,
        compute=config.precision_rules.compute,
        batches=snip.batches,
        gains=snip.gains,
        start=snip.start,
        is_smoothed=True,
        counts_from=1,
    )
