"""What a run takes of the host: the arena of its steps, before anything else, and what that leaves for checkpoints.

Problem  A budget of host memory is a limit. The arena is within it by the plan; the copy that a checkpoint is written
         from comes on top.
Method   With A the arena's bytes::

             left = budget.host_memory - A
             the copy fits into left     training goes on while a checkpoint is written
             else                        training waits, and what it holds is written from where it lies

         Where no budget of the host's own is given there is no `left`: `snapshot` looks at what is free.
Limits   What is written from where it lies goes through pieces of a megabyte. These, the interpreter, libraries, the
         data loader and what was loaded to fill the weights are in no account, nor is the page cache, which the
         system takes back.
Checked  tests/training/memory/test_host_room.py, where the memory of a process that writes is measured
"""

from __future__ import annotations

from scrimp.config import ResolvedConfig, parse_bytes
from scrimp.host_memory import host_memory_available
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


def checkpoint_bytes(config: ResolvedConfig, device: Device, costs: StepCosts, host_peak: int) -> int:
    """Predicted host memory that writing a checkpoint takes: a copy, or nothing where training waits for it.

    Args:
        host_peak: of a step, by its account; 0: it takes nothing there.
    """
    arena = arena_bytes(int(host_peak * compiled_share(config))) if host_peak else 0
    left, copy = left_of_budget(config, device, arena), costs.checkpoint_copy
    return copy if left is None or copy <= left else 0
