"""What there is for a step, on the device and on the host, as bytes and as budgets that a user types.

Problem  A budget is more than the bytes of a step: a GPU's allocator keeps gaps, the host's arena a spare share, and on
         a CPU device and host are one memory, in which a checkpoint's copy lies too as long as not both have budgets.
Method   Limits are bytes that a step may take by its account; `Budgets` is their inverse, for messages. What fits part
         by part is checked once more as a sum where both parts are one memory. `usable_of_card`, `usable_of_cpu`
         and `usable_of_host` are the one definition of how much of a memory a plan may fill, for runs, documents and
         benchmarks. Of several ranks the one with the least free memory decides for all.
Checked  tests/training/memory/test_decide.py, test_memory_refusal.py
"""

from __future__ import annotations

import math

from scrimp.config import Config, parse_bytes
from scrimp.errors import PlanError
from scrimp.host_memory import host_memory_available
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.room import Budgets, NoRoomError, enough_text, size_text
from scrimp.profiler import Device
from scrimp.runtime.memory import arena_bytes, largest_step
from scrimp.runtime.memory.carry import least_host

CACHE_SHARE = 0.96
"""Share of a GPU's memory, free or in a budget: the caching allocator keeps gaps that the account does not know, and
libraries take workspaces from it."""
HOST_SHARE = 0.9
"""Share of the free host memory: the page cache, the data loader and gaps of the allocator need the rest."""
PROCESS_BYTES = 192 * 2**20
"""What is left of the free host memory where the step computes there: what a process loads after its plan is made.
Measured: 132 MB beside a step of 61 MB, 155 beside 375, 219 beside 1,230, by the peaks of control groups."""


def usable_of_card(free: int) -> int:
    """Bytes of a GPU's memory, free or in a budget, that a step may take by its account."""
    return int(CACHE_SHARE * free)


def usable_of_host(free: int) -> int:
    """Bytes of free host memory that a step may take by its account, the arena's spare share left out."""
    return largest_step(int(HOST_SHARE * free))


def usable_of_cpu(free: int) -> int:
    """Bytes of free host memory that a step which computes there may take by its account."""
    return max(0, int(HOST_SHARE * (free - PROCESS_BYTES)))


def device_limit(config: Config, device: Device, copy_bytes: int) -> int:
    """Bytes of the device that a step may take: what is free, and what the budget leaves.

    A GPU's budget is of all that the process's allocator takes there, so that a full plan leaves `CACHE_SHARE`'s rest
    of it to gaps and workspaces, as of free memory.
    """
    budget = _device_budget(config, device)
    copy = copy_bytes if copy_is_on_device(config, device) else 0
    free = _free(device)
    limit = free if budget is None else min(free, budget - copy)
    return max(0, limit if device.is_host else usable_of_card(limit))


def budgets_of(config: Config, device: Device, copy_bytes: int, *, asks_for_host: bool = False) -> Budgets:
    """What there is as a user knows it, and what budgets are enough for bytes of a step; arguments as of the limits."""
    budget, free = _device_budget(config, device), _free(device)
    copy = copy_bytes if copy_is_on_device(config, device) else 0
    # Memory that is merely scarce makes training wait while a checkpoint is written: its copy needs none.
    there_is, copy = (free, 0) if budget is None or budget - copy > free else (budget, copy)
    is_free = device.is_host and there_is == free
    return Budgets(
        there_is,
        _host_budget(config, device, asks_for_host),
        copy=copy,
        share=_device_share(device),
        free=device.available_bytes if is_free else None,
        host_for=lambda step: least_host(math.ceil((step + 1) * compiled_share(config))),
    )


def _free(device: Device) -> int:
    """Bytes of the device that are free; on a CPU what a step may take of them."""
    return usable_of_cpu(device.available_bytes) if device.is_host else device.available_bytes


def host_free(device: Device) -> int:
    """Bytes of host memory that are free now for each rank, on the host that has the least."""
    return int(device.world.smallest(host_memory_available())) // device.ranks_here


def _device_share(device: Device) -> float:
    return 1.0 if device.is_host else CACHE_SHARE


def _device_budget(config: Config, device: Device) -> int | None:
    """On a CPU whichever is given: device and host are one memory there, unless both are."""
    given = config.budget.device_memory
    if given is None and device.is_host:
        given = config.budget.host_memory
    return None if given is None else parse_bytes(given)


def refuse_beyond_memory(decision: MemoryDecision, config: Config, device: Device, copy_bytes: int) -> None:
    """Refuse a plan that was written by hand or elsewhere, and takes more than there now is.

    Raises:
        PlanError: with the budgets that it needs.
    """
    asks = decision.account.host_peak > 0
    budgets = budgets_of(config, device, copy_bytes, asks_for_host=asks)
    device_needs = budgets.device_for(decision.account.peak, alone=True)
    host_needs = budgets.host_for(decision.account.host_peak)
    for what, takes, limit, needs, there_is in (
        (
            "device",
            decision.account.peak,
            device_limit(config, device, copy_bytes),
            device_needs,
            budgets.device_words,
        ),
        (
            "host",
            decision.account.host_peak,
            host_limit(config, device, is_asked_for=asks),
            host_needs,
            f"{size_text(budgets.host)} of host memory: what is free, and within the budget",
        ),
    ):
        if takes > limit:
            raise PlanError(
                f"plan.json asks for more {what} memory than there is now",
                got=f"a predicted peak of {takes:,} bytes, for which {enough_text(needs)} are enough",
                expected=f"at most {there_is}",
                do="free memory, choose less in blocks and states, or restore plan.json from a checkpoint",
            )
    refuse_beyond_one_memory(decision, config, device, copy_bytes)


def refuse_beyond_one_memory(
    decision: MemoryDecision, config: Config, device: Device, copy_bytes: int
) -> None:
    """Refuse what takes more of a CPU's one memory than there is, though its parts fit one by one.

    Raises:
        OneMemoryError: with the sum.
    """
    account = decision.account
    if not device.is_host or not account.host_peak:
        return
    arena = arena_on_cpu(config, account.host_peak)
    limit, copy, more = one_memory(config, device, copy_bytes)
    if account.peak + arena + copy > limit:
        beside = f", {enough_text(copy)} for a checkpoint's copy" if copy else ""
        raise OneMemoryError(
            "a step and what it sends to the host take more than the one memory that a CPU has",
            got=f"{enough_text(account.peak)} of a step and {enough_text(arena)} on the host{beside}",
            expected=f"at most {size_text(limit)} in all",
            do=f"{more}, or send less to the host: memory.*, or a lower budget of the host beside one of the device",
        )


class OneMemoryError(NoRoomError):
    """The parts of a step fit one by one, and not together into a CPU's one memory."""

    def __init__(self, what: str, *, got: str, expected: str, do: str) -> None:
        PlanError.__init__(self, what, got=got, expected=expected, do=do)
        self.room = self.device_budget = None


def arena_on_cpu(config: Config, host_bytes: int) -> int:
    """Bytes that the arena takes of a CPU's memory for so many bytes of a step on the host."""
    return arena_bytes(int(host_bytes * compiled_share(config))) if host_bytes else 0


def one_memory(config: Config, device: Device, copy_bytes: int) -> tuple[int, int, str]:
    """What a CPU has for a step, its arena and a checkpoint's copy together; the copy, where it counts; and what would
    give more."""
    budgets = {"device_memory": config.budget.device_memory, "host_memory": config.budget.host_memory}
    given = {name: parse_bytes(text) for name, text in budgets.items() if text is not None}
    limit, copy, more = _free(device), 0, "free memory"
    if len(given) == 1:
        (name, budget), *_ = given.items()
        if budget - copy_bytes < limit:  # it is of all that the process takes
            limit, copy, more = budget, copy_bytes, f"raise budget.{name}"
    return limit, copy, more


def copy_is_on_device(config: Config, device: Device) -> bool:
    """On a CPU a checkpoint's copy lies in the same memory, unless both have budgets of their own."""
    return device.is_host and None in (config.budget.device_memory, config.budget.host_memory)


def host_limit(config: Config, device: Device, *, is_asked_for: bool = False) -> int:
    """Bytes of host memory that a step may take beside the device's.

    Args:
        is_asked_for: the user wants tensors there, whatever it gains.
    """
    if _may_not_use_host(config, device, is_asked_for):
        return 0
    free, given = host_free(device), config.budget.host_memory
    usable = largest_step(usable_of_cpu(free)) if device.is_host else usable_of_host(free)
    if given is not None:
        usable = min(usable, largest_step(parse_bytes(given)))
    return int(usable / compiled_share(config))


def _host_budget(config: Config, device: Device, is_asked_for: bool) -> int:
    """What there is of the host: free, and within the budget; 0: nothing may live there."""
    if _may_not_use_host(config, device, is_asked_for):
        return 0
    free, given = host_free(device), config.budget.host_memory
    free = usable_of_cpu(free) if device.is_host else int(HOST_SHARE * free)
    return free if given is None else min(free, parse_bytes(given))


def _may_not_use_host(config: Config, device: Device, is_asked_for: bool) -> bool:
    return not is_asked_for and (config.is_planned or copy_is_on_device(config, device))


def compiled_share(config: Config) -> float:
    """What blocks send to the host, as a multiple of what eager ones do: compiled ones save other tensors,
    measured up to 8 % more of them."""
    return 1.1 if config.train.compile == "on" else 1.0
