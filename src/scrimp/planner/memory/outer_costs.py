"""What an outer optimizer takes beside the inner one (`scrimp.optim.outer`).

Bytes    Per number of this rank's weights: its copy of what the round began with (the format of what is updated, which
         is fp32) and the momentum, 4 each. An exchange makes the displacement of all weights at once, and in fp8 its
         codes and what they are made of; with overlap that is there beside the next round::

             fp32    4 + 4 (one operand of the difference)
             fp8     4 + 4 padded, 4 + 1 scaled and coded, 1 received, 4 added up

Limits   Counted as if gradients were still there, which are freed by then.
Checked  tests/training/test_local_steps.py
"""

from __future__ import annotations

import dataclasses

from scrimp.config.resolved import ResolvedConfig
from scrimp.planner.memory.costs import StepCosts

_EXCHANGED = {"fp32": 8, "fp8": 18}
"""Bytes per number while an exchange is made."""
_MOMENTUM, _ROUND_START = 4, 4
"""Bytes per number that checkpoints hold, and that they do not."""
PARAMETER_BYTES = {"fp32": 4, "bf16": 2}
"""Bytes of a number of the weights, by `train.parameters`."""


def with_outer(costs: StepCosts, config: ResolvedConfig) -> StepCosts:
    """The costs of a step, with what stays between steps and what the end of a round takes."""
    outer = config.outer
    if outer.every == 0:
        return costs
    size = PARAMETER_BYTES[config.train.parameters]
    ends, classes = costs.ends, costs.classes
    numbers = ends.weights // size + sum(classes[number].weights // size for number in costs.blocks)
    beside = _ROUND_START + (_EXCHANGED[outer.exchange] if outer.overlap else 0)
    return dataclasses.replace(
        costs,
        classes=tuple(
            dataclasses.replace(one, optimizer=one.optimizer + _MOMENTUM * (one.weights // size))
            for one in classes
        ),
        ends=dataclasses.replace(ends, optimizer=ends.optimizer + _MOMENTUM * (ends.weights // size)),
        resident=costs.resident + beside * numbers,
        optimizer_peak=max(costs.optimizer_peak, _EXCHANGED[outer.exchange] * numbers),
    )
