"""Carries memory decisions out: what leaves the device, to where in host memory, and when it is back."""

from scrimp.runtime.memory.arena import (
    ArenaTooSmallError,
    HostArena,
    HostBudgetError,
    PinningRefusedError,
    Place,
)
from scrimp.runtime.memory.cache import CudaCache, PhaseEdges
from scrimp.runtime.memory.carry import (
    HostMemory,
    HostRoom,
    arena_bytes,
    carry_out,
    largest_step,
    take_room,
)
from scrimp.runtime.memory.gradients import HeldGradient, HostGradients, OwnGradient
from scrimp.runtime.memory.link import CudaLink, HostLink, Link, Ticket
from scrimp.runtime.memory.offload import ActivationOffload
from scrimp.runtime.memory.streamed_blocks import BlockMemory
from scrimp.runtime.memory.weights import HostWeights

__all__ = [
    "ActivationOffload",
    "ArenaTooSmallError",
    "BlockMemory",
    "CudaCache",
    "CudaLink",
    "HeldGradient",
    "HostArena",
    "HostBudgetError",
    "HostGradients",
    "HostLink",
    "HostMemory",
    "HostRoom",
    "HostWeights",
    "Link",
    "OwnGradient",
    "PhaseEdges",
    "PinningRefusedError",
    "Place",
    "Ticket",
    "arena_bytes",
    "carry_out",
    "largest_step",
    "take_room",
]
