"""What a run takes of the host: the arena of its steps, before anything else, and what that leaves for checkpoints.

Problem  A budget of host memory is a limit. The arena is within it by the plan; the copy that a checkpoint is written
         from, and the file of it that is being assembled, come on top.
Method   With A the arena's bytes::

             left = budget.host_memory - A
             copy and file fit into left     training goes on while a checkpoint is written
             else                            training waits; only the file is made, no larger than left

         Where no budget of the host's own is given there is no `left`: `snapshot` looks at what is free.
Limits   A file holds one tensor at least, so a left smaller than the largest tensor is exceeded while that is written.
         The interpreter, libraries, the data loader and what was loaded to fill the weights are in no account.
Checked  tests/training/memory/test_host_room.py
"""

from __future__ import annotations

from scrimp.config import Architecture, ResolvedConfig, parse_bytes
from scrimp.host_memory import host_memory_available
from scrimp.models import spec_of
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.profiler import Device
from scrimp.runtime.memory import HostRoom, arena_bytes, take_room
from scrimp.training.memory.limits import compiled_share, copy_is_on_device


def take_host_room(memory: MemoryDecision, config: ResolvedConfig, device: Device) -> HostRoom | None:
    """Take the host memory that a step needs, on all ranks or none; None where it needs none.

    Raises:
        HostBudgetError, PinningRefusedError: the host does not give so much.
    """
    with device.world.together("taking host memory"):
        return take_room(
            memory.placement,
            device.torch_device,
            host_bytes=int(memory.account.host_peak * compiled_share(config)),
            host_available=host_memory_available(),
        )


def left_of_budget(config: ResolvedConfig, device: Device, arena: int) -> int | None:
    """Bytes that budget.host_memory leaves beside the arena; None: it limits no memory of the host's own."""
    budget = config.budget.host_memory
    if budget is None or copy_is_on_device(config, device):
        return None
    return max(0, parse_bytes(budget) - arena)


def largest_tensor_bytes(architecture: Architecture, config: ResolvedConfig) -> int:
    """Bytes of the largest tensor of a checkpoint: of the weights, their masters or moments."""
    numbers = spec_of(architecture).largest_matrix
    optimizer = config.optimizer
    is_bf16 = (
        config.train.parameters == "bf16" and not optimizer.master_weights and optimizer.moments != "fp32"
    )
    return numbers * (2 if is_bf16 else 4)


def checkpoint_bytes(
    config: ResolvedConfig, device: Device, costs: StepCosts, host_peak: int, *, largest_tensor: int
) -> int:
    """Predicted host memory that writing a checkpoint takes: a copy and a file, or a file alone, for which training
    waits.

    Args:
        host_peak: of a step, by its account; 0: it takes nothing there.
        largest_tensor: bytes of the largest one in the checkpoint.
    """
    arena = arena_bytes(int(host_peak * compiled_share(config))) if host_peak else 0
    left, copy = left_of_budget(config, device, arena), costs.checkpoint_copy
    if left is None or copy <= left:
        return copy
    # A file holds one tensor at least.
    return min(copy - costs.checkpoint_state, max(left, largest_tensor))
