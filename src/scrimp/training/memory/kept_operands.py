"""Whether products keep the operands that they make of weights over the micro-batches of a step.

Method   That changes no number (`scrimp.gemm.weight_operands`) and costs nothing but memory, so whatever is planned
         comes first: operands are kept where all of them fit beside it. They are given up as soon as they are in the
         way: where a step runs out of memory, or what blocks do changes. A resumed run asks again.
Limits   Not where ranks share weights, whose parts are gathered in each pass, nor where weights visit from the host.
Checked  tests/training/memory/test_kept_operands.py
"""

from __future__ import annotations

import dataclasses

from scrimp.config import ResolvedConfig
from scrimp.planner.memory.account import account_step
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.profiler import Device
from scrimp.training.memory.limits import OneMemoryError, refuse_beyond_one_memory


def with_kept_operands(memory: MemoryDecision, config: ResolvedConfig, device: Device) -> MemoryDecision:
    """A decision, with operands that are kept where they fit beside it."""
    has_copies_alone = config.layout.ranks == config.layout.dp
    visits = any(memory.placement.states.weights)
    if not memory.fits or config.micro_batches == 1 or not has_copies_alone or visits:
        return memory
    kept = _keeping(memory, memory.costs.operands)
    try:
        refuse_beyond_one_memory(kept, config, device, kept.costs.checkpoint_copy)
    except OneMemoryError:
        return memory
    return kept if kept.fits else memory


def without_operands(memory: MemoryDecision) -> MemoryDecision:
    """The same decision with nothing kept."""
    return _keeping(memory, 0) if memory.operands else memory


def _keeping(memory: MemoryDecision, nbytes: int) -> MemoryDecision:
    costs = memory.costs
    # As tables do, they end with the last backward pass.
    beside = dataclasses.replace(costs, resident=costs.resident + nbytes, tables=costs.tables + nbytes)
    account = account_step(beside, memory.placement, accumulates=memory.setup.accumulates)
    return dataclasses.replace(memory, account=account, operands=nbytes)
