"""From a placement to a model whose blocks keep part of their memory on the host.

Checked  tests/training/memory/test_memory_training.py: whole runs; tests/runtime/memory/test_blocks.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from scrimp.models.model import Model
from scrimp.planner.memory.placement import Placement
from scrimp.runtime.memory.arena import HostArena, Place
from scrimp.runtime.memory.link import CudaLink, HostLink, Link
from scrimp.runtime.memory.offload import ActivationOffload
from scrimp.runtime.memory.streamed_blocks import BlockMemory
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
    """Whose states visit the device for their update."""
    optimizer_on_cpu: frozenset[int]
    """Whose states stay there: the CPU updates them."""
    masters_on_host: bool = True
    """Whether master weights live with the states that visit; False: only in a count (`simulated`)."""


@dataclass(frozen=True)
class HostRoom:
    """Host memory that a run has taken, before anything lies in it."""

    arena: HostArena
    link: Link
    places: dict[int, Place] = field(default_factory=dict)
    """Places of the weights that were made in it, by their address."""

    def make_weights(self, block: nn.Module) -> None:
        """Give a block without memory its weights here, so that they never lie anywhere else on the host."""

        def made(weights: Tensor) -> Tensor:
            place = self.arena.take(weights.nbytes)
            # `data`: views of a slab share one version counter, and a saved weight must notice its own changes alone.
            view = place.view(weights.shape, weights.dtype).data
            self.places[view.data_ptr()] = place
            return view

        block._apply(made)


def take_room(
    placement: Placement, device: torch.device, *, host_bytes: int, host_available: int | None = None
) -> HostRoom | None:
    """Take the host memory of a step; None where it needs none.

    Args:
        host_bytes: that the step takes by its account.
        host_available: free host memory; None: not checked.

    Raises:
        HostBudgetError, PinningRefusedError: the host does not give so much.
    """
    if not placement.uses_host:
        return None
    arena = HostArena(arena_bytes(host_bytes), device, available=host_available)
    return HostRoom(arena, CudaLink(device) if device.type == "cuda" else HostLink(device))


def carry_out(placement: Placement, model: Model, room: HostRoom) -> HostMemory:
    """Move to the host what lives there.

    Args:
        model: its weights are filled; those that live on the host lie in the room.
    """
    arena, link = room.arena, room.link
    states = placement.states
    parameters = {i: list(model.blocks[i].parameters()) for i in states.on_host("weights")}
    weights = HostWeights(parameters, arena, link, room.places)
    num_blocks = len(model.blocks)
    # Also where nothing leaves yet: a step that runs out of memory may change that.
    offload = ActivationOffload(arena, link, num_blocks=num_blocks, keep_last=False)
    blocks = BlockMemory(num_blocks, offload=offload, leaving=placement.offloaded, weights=weights)
    model.run_block = blocks
    return HostMemory(
        arena,
        link,
        weights,
        blocks,
        gradients_on_host=states.on_host("gradients"),
        optimizer_on_host=states.on_host("optimizer") if states.update == "device" else frozenset(),
        optimizer_on_cpu=states.on_host("optimizer") if states.update == "cpu" else frozenset(),
    )


def arena_bytes(step_bytes: int) -> int:
    """Bytes of the arena of a step that takes so many by its account."""
    return int(step_bytes * (1 + SPARE_SHARE)) + SPARE_BYTES


def largest_step(host_bytes: int) -> int:
    """Bytes that a step may take by its account so that its arena is within so many."""
    return max(0, int((host_bytes - SPARE_BYTES) / (1 + SPARE_SHARE)))


def least_host(step_bytes: int) -> int:
    """Host memory of which `largest_step` leaves so many bytes, or one more."""
    return math.ceil((step_bytes + 1) * (1 + SPARE_SHARE)) + SPARE_BYTES
