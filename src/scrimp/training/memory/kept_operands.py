"""Whether products keep the operands that they make of weights over the micro-batches of a step.

Method   That changes no number (`scrimp.gemm.weight_operands`) and costs nothing but memory, so whatever is planned
         comes first: operands are kept where all of them fit beside it. A step that runs out of memory nevertheless is
         taken again without them. A resumed run asks again.
Limits   Not where ranks share weights, whose parts are gathered in each pass, nor where weights visit from the host.
Checked  tests/training/memory/test_kept_operands.py
"""

from __future__ import annotations

import dataclasses

from scrimp.config import ResolvedConfig
from scrimp.planner.memory.account import account_step
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.states import class_of


def with_kept_operands(memory: MemoryDecision, config: ResolvedConfig) -> MemoryDecision:
    """A decision, with operands that are kept where they fit beside it."""
    has_copies_alone = config.layout.ranks == config.layout.dp
    visits = any(memory.placement.states.weights)
    if not memory.fits or config.micro_batches == 1 or not has_copies_alone or visits:
        return memory
    costs = memory.costs
    nbytes = sum(class_of(costs, block).operands for block in range(len(costs.blocks)))
    costs = dataclasses.replace(costs, resident=costs.resident + nbytes)
    account = account_step(costs, memory.placement, accumulates=memory.setup.accumulates)
    kept = dataclasses.replace(memory, costs=costs, account=account, keeps_operands=nbytes > 0)
    return kept if kept.fits else memory
