"""What formats would spoil, as statistics of a training model say it, for the search over layouts.

Method   A product in a format costs what SNIP's program adds up (`planner.precision.divergence`), over what
         everything in the lowest format would: the unit of `budget.divergence`. Equal blocks differ in it.
         Where a share of FLOPs in 4 bits is asked for instead, SNIP's own plan with that share says how much harm is
         allowed: the search may spend as much where it saves more.
Limits   Statistics are of one moment of one model, at its own batch.
Checked  tests/planner/layout/test_measured_harm.py
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from scrimp.errors import PlanError
from scrimp.models import full_name
from scrimp.models.shapes import ModelSizes
from scrimp.planner.layout.block_menus import Quality
from scrimp.planner.precision.budget import Budget
from scrimp.planner.precision.choose import Question, choose
from scrimp.planner.precision.divergence import Weights
from scrimp.planner.precision.policies import costs_of, harm_of_lowest
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.precision import GEMMS

_POLICY = "snip"


def measured_quality(
    profile: PrecisionProfile, formats: Sequence[str], budget: Budget, model: ModelSizes
) -> Quality:
    """The formats of a model under a budget of harm, or of FLOPs in 4 bits.

    Args:
        formats: recipes to choose from, that were measured.

    Raises:
        PlanError: statistics of another model, or without one of the formats, or a budget that cannot be kept.
    """
    wanted = [
        full_name(number, linear.name)
        for number, block in enumerate(model.blocks)
        for linear in block.linears
    ]
    missing = sorted(set(wanted) - set(profile.layers))
    if missing:
        raise PlanError(
            "the statistics are of another model",
            got=f"no {missing[0]} among {len(profile.layers):,} layers",
            expected=f"{len(wanted):,} layers of the model that is planned",
            do="give statistics of this model, or leave them out",
        )
    profile = profile.select(formats)
    rows = costs_of(_POLICY, profile).reshape(len(profile.layers), len(GEMMS), -1)
    costs = rows / harm_of_lowest(_POLICY, profile, Weights())
    place = {layer: at for at, layer in enumerate(profile.layers)}
    gemm_of, format_of = ({name: at for at, name in enumerate(names)} for names in (map(str, GEMMS), formats))

    def harm(block: int, linear: str, gemm: str, recipe: str) -> float:
        return float(costs[place[full_name(block, linear)], gemm_of[gemm], format_of[recipe]])

    limit = budget.divergence
    if limit is None:
        chosen = choose(Question(profile, budget)).formats
        limit = float(np.take_along_axis(costs, chosen[:, :, None], axis=2).sum()) * (1.0 + 1e-9)
    return Quality(formats=tuple(formats), harm=harm, limit=limit)
