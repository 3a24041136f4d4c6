"""What a run that fits nowhere is told: sizes that are enough when they are typed, and settings that take less.

Method   What would fit is asked of the planner (`scrimp.planner.memory.room`) three times::

             this host      the problem as it was refused
             two budgets    on a CPU, where device and host are one memory as long as not both have budgets: the same
                            with both, so that blocks may offload, and a checkpoint's copy lies with the host
             numbers        with settings that change the run's numbers: moments in fewer bits, the loss in
                            smaller chunks; head and optimizer are traced anew, blocks are as they were

Limits   Such settings are named one at a time. A size is enough for the plan, not for what else lies in the memory.
Checked  tests/training/memory/test_memory_refusal.py: every printed figure is fed back
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from scrimp.config import Architecture, ResolvedConfig, replace_values
from scrimp.config.optimizers import facts_of
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.room import (
    NoRoomError,
    Room,
    enough_text,
    no_room,
    nothing_fits_for_sure,
    room_of,
    smallest_device,
)
from scrimp.profiler import Device
from scrimp.training.memory.decide import (
    Problem,
    asks_for_host,
    problem_of,
    traced,
)
from scrimp.training.memory.limits import budgets_of, copy_is_on_device, host_free, usable_of_cpu

SMALL_CHUNK = 512
"""Tokens: with fewer a GPU's head would wait for its memory (`scrimp.config.resolve`)."""
_MOMENTS = ("fp32", "bf16", "8bit")
STATES = ("weights", "gradients", "optimizer")


def refusal_of(config: ResolvedConfig, architecture: Architecture, device: Device) -> NoRoomError:
    """What would fit instead; for the caller to raise.

    Args:
        config: resolved; nothing fits with it, nor with any other micro-batch that may be taken.
    """
    problem, asks = problem_of(config, architecture, device), asks_for_host(config, architecture.num_layers)
    budgets = budgets_of(config, device, problem.costs.checkpoint_copy, asks_for_host=asks)
    room = room_of(problem.costs, problem.machine, problem.setup, problem.split)
    placed = None
    if problem.split is not None:
        placed = str(problem.by_updater(problem.split)[0].states(architecture.num_layers))
    return no_room(
        room,
        budgets,
        beside_host=_beside_host(config, architecture, device, room),
        states=placed,
        advice=[*_numbers(config, architecture, device, problem, room), *_advice(config)],
        is_certain=nothing_fits_for_sure(problem.costs, problem.machine, problem.setup, problem.split),
    )


def _beside_host(
    config: ResolvedConfig, architecture: Architecture, device: Device, room: Room
) -> Room | None:
    """What would fit with a budget for the host; None: nothing may live there."""
    if config.is_planned:
        return None
    if not copy_is_on_device(config, device):
        return room
    given = config.budget.device_memory
    both = {
        "budget.device_memory": given or f"{device.available_bytes}B",
        "budget.host_memory": f"{usable_of_cpu(host_free(device))}B",
    }
    problem = problem_of(replace_values(config, both), architecture, device)
    found = room_of(problem.costs, problem.machine, problem.setup, problem.split)
    # Beside a budget of the host alone there is still one memory.
    return found if given else Room(found.device, found.its_host, found.device_with_this_host, None)


def _numbers(
    config: ResolvedConfig, architecture: Architecture, device: Device, problem: Problem, room: Room
) -> Iterator[str]:
    """Settings that change numbers, with the device that each needs beside this host."""
    now = room.device_with_this_host
    if now is None:
        return
    ways = []
    for key, value in _changes(config):
        changed = replace_values(config, {key: value})
        costs = _with_other_numbers(problem.costs, changed, architecture, device)
        least = smallest_device(costs, problem.machine, problem.setup, problem.split)
        if least is not None and least < now:
            budgets = budgets_of(changed, device, costs.checkpoint_copy)
            flag = key.replace("_", "-")
            ways.append(f"--{flag} {value} ({enough_text(budgets.device_for(least, alone=True))})")
    if ways:
        yield f"with other numbers in the run, on a smaller device, {', '.join(ways)}"


def _changes(config: ResolvedConfig) -> Iterator[tuple[str, str | int]]:
    train = config.train
    for moments in _MOMENTS[_MOMENTS.index(config.optimizer.moments) + 1 :]:
        if moments in facts_of(config.optimizer.name).moments:
            yield "optimizer.moments", moments
    all_tokens = train.micro_batch * train.sequence
    if (train.loss_chunk or all_tokens) > SMALL_CHUNK:
        yield "train.loss_chunk", SMALL_CHUNK


def _with_other_numbers(
    costs: StepCosts, changed: ResolvedConfig, architecture: Architecture, device: Device
) -> StepCosts:
    """Costs at another format of moments or chunk of the loss; what blocks do with their activations is untouched."""
    now = traced(changed, architecture, device, ("keep",))
    pairs = zip(costs.classes, now.classes, strict=True)
    classes = tuple(replace(kind, optimizer=other.optimizer) for kind, other in pairs)
    return replace(now, classes=classes)


def _advice(config: ResolvedConfig) -> Iterator[str]:
    size = config.train.micro_batch
    shorter = f"shorter sequences (--train.sequence, now {config.train.sequence})"
    yield shorter if size == 1 else f"a smaller --train.micro-batch (now {size}), or {shorter}"
    names = [f"memory.{name}" for name in STATES if getattr(config.memory, name) != "auto"]
    if names:
        yield f"leave {', '.join(names)} to the plan"
