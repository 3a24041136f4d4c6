"""From a plan to a model whose blocks keep part of their memory on the host.

Checked  tests/train/test_memory_training.py: whole runs; tests/runtime/memory/test_blocks.py
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from scrimp.config.activations import Activations
from scrimp.model import Decoder
from scrimp.planner import Plan
from scrimp.runtime.memory.arena import HostArena
from scrimp.runtime.memory.blocks import BlockMemory
from scrimp.runtime.memory.link import CudaLink, HostLink, Link
from scrimp.runtime.memory.offload import ActivationOffload
from scrimp.runtime.memory.weights import HostWeights

SPARE_SHARE = 0.03
SPARE_BYTES = 8 << 20
"""Beyond what is planned: places are aligned, and gaps between them stay."""


@dataclass(frozen=True)
class HostMemory:
    """The host's part of a run's memory."""

    arena: HostArena
    link: Link
    weights: HostWeights
    blocks: BlockMemory
    gradients_on_host: frozenset[int]
    optimizer_on_host: frozenset[int]


def uses_host(plan: Plan) -> bool:
    """Whether a plan keeps anything of a step in host memory."""
    return any(Activations.parse(block.activations).is_offloaded for block in plan.blocks.values()) or any(
        "host" in (state.weights, state.gradients, state.optimizer) for state in plan.states.values()
    )


def carry_out(
    plan: Plan, model: Decoder, device: torch.device, *, host_bytes: int, host_available: int | None = None
) -> HostMemory | None:
    """Take the host memory and move there what a plan says; None where it says nothing.

    Args:
        model: its weights are filled; those that live on the host may be there already.
        host_bytes: that the step takes by the plan's account.
        host_available: free host memory; None: not checked.

    Raises:
        HostBudgetError, PinningRefusedError: the host does not give so much.
    """
    if not uses_host(plan):
        return None
    nbytes = int(host_bytes * (1 + SPARE_SHARE)) + SPARE_BYTES
    arena = HostArena(nbytes, device, available=host_available)
    link: Link = CudaLink(device) if device.type == "cuda" else HostLink(device)
    leaving = frozenset(
        int(number)
        for number, block in plan.blocks.items()
        if Activations.parse(block.activations).is_offloaded
    )
    weights = HostWeights(
        {i: list(model.blocks[i].parameters()) for i in _on_host(plan, "weights")}, arena, link
    )
    num_blocks = len(model.blocks)
    # Also where nothing leaves yet: a step that runs out of memory may change that.
    offload = ActivationOffload(arena, link, num_blocks=num_blocks, keep_last=False)
    blocks = BlockMemory(num_blocks, offload=offload, leaving=leaving, weights=weights)
    model.run_block = blocks
    return HostMemory(arena, link, weights, blocks, _on_host(plan, "gradients"), _on_host(plan, "optimizer"))


def weights_on_host(plan: Plan) -> frozenset[int]:
    """Blocks whose weights live on the host."""
    return _on_host(plan, "weights")


def largest_step(host_bytes: int) -> int:
    """Bytes that a step may take by its account so that its arena is within so many."""
    return max(0, int((host_bytes - SPARE_BYTES) / (1 + SPARE_SHARE)))


def _on_host(plan: Plan, name: str) -> frozenset[int]:
    return frozenset(
        int(number)
        for number, state in plan.states.items()
        if number.isdecimal() and getattr(state, name) == "host"
    )
