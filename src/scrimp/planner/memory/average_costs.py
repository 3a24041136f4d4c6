"""What the average of a model's weights takes that teaches it (`scrimp.runtime.averaged_weights`).

Bytes    4 per number of this rank's weights, which checkpoints hold too. While a loss is made, the hidden states that
         it has given, 4 S D of S tokens and width D, and on ranks with shards its embedding, final norm and head, which
         are gathered until the loss has read them.
Limits   These are counted all through a step. It runs before the model does, when nothing is kept yet: what its forward
         pass takes for a moment, and a block of it that is gathered, are not counted. Its logits the loss's trace has
         (`scrimp.training.distillation`).
Checked  tests/training/test_own_average_runs.py
"""

from __future__ import annotations

import dataclasses

from scrimp.config.own_average import learns_from_average
from scrimp.config.resolved import ResolvedConfig
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.outer_costs import PARAMETER_BYTES

_BYTES = 4


def with_average(costs: StepCosts, config: ResolvedConfig, *, width: int, ends: int) -> StepCosts:
    """The costs of a step on a rank, with the average of its weights.

    Args:
        width: of the model.
        ends: bytes of all weights of embedding, final norm and head.
    """
    if not learns_from_average(config.objective):
        return costs
    size = PARAMETER_BYTES[config.train.parameters]
    layout, has_experts = config.layout, any(kind.routed for kind in costs.classes)
    is_gathered = layout.shards > 1 or (layout.ranks > 1 and has_experts)
    beside = config.train.micro_batch_tokens * width + is_gathered * (ends // size)
    return dataclasses.replace(
        costs,
        classes=tuple(
            dataclasses.replace(one, optimizer=one.optimizer + _BYTES * (one.weights // size))
            for one in costs.classes
        ),
        ends=dataclasses.replace(
            costs.ends, optimizer=costs.ends.optimizer + _BYTES * (costs.ends.weights // size)
        ),
        resident=costs.resident + _BYTES * beside,
    )
