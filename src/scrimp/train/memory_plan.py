"""Decides what is done so that a step fits: traces the model, knows the machine, and asks the planner.

Method   Where everything resident takes a small share of the memory by its formula (`scrimp.planner.memory`),
         nothing has to be decided and nothing is traced. Else the model is traced in its shapes for every
         choice that a block may have, seconds come from its work, rates of memory from a short
         measurement; `scrimp.planner.bytes.search` finds the fastest plan that fits, with everything
         resident as its first candidate.
Limits   Seconds of computing are predicted from the device's peak rates. On a CPU "device" and host are one memory:
         nothing is offloaded, unless both budgets are given, which then limit two parts of it. Statistics of
         `precision snip` need the states of all blocks at once: beside it nothing is offloaded.
Checked  tests/train/test_memory_plan.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from functools import cache

import torch

from scrimp.config import Architecture, Config, decided, parse_bytes
from scrimp.config.activations import (
    ALL_ACTIVATIONS,
    LEVELS,
    Activations,
    assign_activations,
    blocks_on_host,
)
from scrimp.errors import PlanError
from scrimp.planner import Peaks, Plan, linear_layers
from scrimp.planner.bytes.account import account_step
from scrimp.planner.bytes.costs import BlockClass, BlockCost, StepCosts
from scrimp.planner.bytes.decision import MemoryDecision
from scrimp.planner.bytes.machine import Setup
from scrimp.planner.bytes.room import NoRoomError
from scrimp.planner.bytes.search import search
from scrimp.planner.bytes.splits import Split
from scrimp.planner.bytes.states import States
from scrimp.planner.bytes.work import Rates, block_seconds
from scrimp.planner.flops import GEMM_NAMES
from scrimp.precision import LinearPrecision, PrecisionRules, parse_rules
from scrimp.profiler import Device, device_peaks, host_memory_available
from scrimp.profiler.links import LinkRates, measure_links
from scrimp.profiler.memory_trace import trace_costs
from scrimp.runtime.memory import largest_step, uses_host

SMALL_SHARE = 0.5
"""Of the memory: a run whose formula says less keeps everything, without a trace."""
NO_LINKS = LinkRates(*[1e10] * 6)
HOST_SHARE = 0.9
"""Of the free host memory: the page cache and the data loader need the rest."""


def decide_memory(
    config: Config, architecture: Architecture, device: Device, *, resident_bytes: int, copy_bytes: int
) -> MemoryDecision | None:
    """What a step does so that it fits; None: everything resident fits easily, by its formula.

    Args:
        config: resolved.
        resident_bytes: peak of a step that keeps everything, by formula.
        copy_bytes: of the host copy that a checkpoint is written from.

    Raises:
        NoRoomError: nothing fits; it says what would.
    """
    setting, split = config.memory.activations, _split_of(config, architecture.num_layers)
    limit = device_limit(config, device, copy_bytes)
    if setting in ("auto", "keep") and split is None and resident_bytes <= SMALL_SHARE * limit:
        return None
    assigned = None if setting == "auto" else assign_activations(setting, architecture.num_layers)
    asks = split is not None or any(one.is_offloaded for one in assigned or ())
    _refuse_beside_snip(config, asks)
    host = host_limit(config, device, is_asked_for=asks)
    choices = _choices(assigned, may_offload=host > 0 and not config.is_planned)
    costs = _traced(config, architecture, device.torch_device.type, choices)
    rates = _links(device.torch_device.type)
    machine = rates.machine(device_bytes=limit, host_bytes=host)
    machine, setup = dataclasses.replace(machine, cpu_adam=None), _setup_of(config)
    costs = _timed(costs, config, architecture, device, rates)
    if assigned is not None:
        activations, states = tuple(map(str, assigned)), (split or Split()).states(architecture.num_layers)
        plan, reason = None, f"memory.activations {setting}"
    else:
        try:
            plan = search(costs, machine, setup, split)
        except NoRoomError as error:
            raise error.beside(copy_bytes if _copy_is_on_device(config, device) else 0) from None
        activations, states = plan.activations, plan.states
        reason = f"the fastest that was found within {limit:,} bytes"
    account = account_step(costs, states, activations, accumulates=setup.accumulates)
    return MemoryDecision(costs, machine, setup, activations, states, account, reason, plan)


def _split_of(config: Config, num_blocks: int) -> Split | None:
    """Where the user wants states; None: nothing is said of them."""
    memory = config.memory
    found = {
        key: blocks_on_host(key, getattr(memory, key), num_blocks)
        for key in ("weights", "gradients", "optimizer")
    }
    if all(count is None for count in found.values()):
        return None
    return Split(found["weights"] or 0, found["gradients"] or 0, found["optimizer"] or 0)


def _refuse_beside_snip(config: Config, asks_for_host: bool) -> None:
    if config.is_planned and asks_for_host:
        raise PlanError(
            "nothing of a step can live on the host beside precision snip",
            got="a setting of memory.* that sends tensors there",
            expected="all of the model on the device: statistics read the states of all layers at once",
            do="leave it out; blocks may still recompute",
        )


def decision_of(plan: Plan, config: Config, architecture: Architecture, device: Device) -> MemoryDecision:
    """A plan as a decision, with the costs of everything that its blocks could do instead."""
    activations = tuple(plan.blocks[str(i)].activations for i in range(architecture.num_layers))
    choices = ALL_ACTIVATIONS if uses_host(plan) else LEVELS
    # Where nothing moves, their rates decide nothing; measuring takes memory that there may be none of.
    rates = _links(device.torch_device.type) if uses_host(plan) else NO_LINKS
    costs = _timed(
        _traced(config, architecture, device.torch_device.type, choices), config, architecture, device, rates
    )
    states, setup = states_of(plan, architecture.num_layers), _setup_of(config)
    account = account_step(costs, states, activations, accumulates=setup.accumulates)
    machine = rates.machine(device_bytes=account.peak, host_bytes=account.host_peak)
    machine = dataclasses.replace(machine, cpu_adam=None)
    return MemoryDecision(costs, machine, setup, activations, states, account, "the plan of the run", None)


def _setup_of(config: Config) -> Setup:
    train = config.train
    sequences = decided(train.batch_tokens) // decided(train.sequence)
    return Setup(-(-sequences // decided(train.micro_batch)), clips=train.clip > 0)


def host_bytes_of(plan: Plan, config: Config, architecture: Architecture, device: Device) -> int:
    """Host memory that a step of a plan takes; its choices may be a user's own."""
    if not uses_host(plan):
        return 0
    activations = [plan.blocks[str(i)].activations for i in range(architecture.num_layers)]
    costs = _traced(config, architecture, device.torch_device.type, tuple(dict.fromkeys(activations)))
    states = states_of(plan, architecture.num_layers)
    account = account_step(costs, states, activations, accumulates=True)
    return int(account.host_peak * _compiled_share(config))


def states_of(plan: Plan, num_blocks: int) -> States:
    """Where a plan's states live."""
    rows = [plan.states[str(i)] for i in range(num_blocks)]
    return States(
        tuple(row.weights == "host" for row in rows),
        tuple(row.gradients == "host" for row in rows),
        tuple(row.optimizer == "host" for row in rows),
    )


def device_limit(config: Config, device: Device, copy_bytes: int) -> int:
    """Bytes of the device that a step may take: what is free, and what the budget leaves."""
    limit = device.available_bytes
    budgets = config.budget
    if device.is_host and budgets.device_memory is None and budgets.host_memory is not None:
        limit = min(limit, parse_bytes(budgets.host_memory) - copy_bytes)
    if budgets.device_memory is not None:
        budget = parse_bytes(budgets.device_memory)
        limit = min(limit, budget - (copy_bytes if _copy_is_on_device(config, device) else 0))
    return max(0, limit)


def _copy_is_on_device(config: Config, device: Device) -> bool:
    """On a CPU a checkpoint's copy lies in the same memory, unless both have budgets of their own."""
    return device.is_host and None in (config.budget.device_memory, config.budget.host_memory)


def host_limit(config: Config, device: Device, *, is_asked_for: bool = False) -> int:
    """Bytes of host memory that a step may take beside the device's.

    Args:
        is_asked_for: the user wants tensors there, whatever it gains.
    """
    budgets = config.budget
    if not is_asked_for and (config.is_planned or _copy_is_on_device(config, device)):
        return 0
    free = int(HOST_SHARE * host_memory_available())
    # The arena takes a little more than the account says.
    limit = largest_step(free if budgets.host_memory is None else min(free, parse_bytes(budgets.host_memory)))
    return int(limit / _compiled_share(config))


def _compiled_share(config: Config) -> float:
    """Of what eager blocks send to the host: compiled ones save other tensors, measured up to 8 % more of them."""
    return 1.1 if config.train.compile == "on" else 1.0


def _choices(assigned: Sequence[Activations] | None, *, may_offload: bool) -> tuple[str, ...]:
    if assigned is not None:
        return tuple(dict.fromkeys(map(str, assigned)))
    return ALL_ACTIVATIONS if may_offload else LEVELS


def _traced(
    config: Config, architecture: Architecture, device_type: str, choices: tuple[str, ...]
) -> StepCosts:
    """Of formats that are planned while training, those of the candidate that takes most."""
    rules = parse_rules(config.precision)
    bases = [config.precision_rules]
    if rules.is_planned:
        bases = [rules.with_base(base) for base in dict.fromkeys([*config.candidates, config.snip.start])]
    return max(
        (_traced_base(config, architecture, device_type, choices, base) for base in bases),
        key=lambda costs: sum(
            max(choice.kept for choice in costs.classes[number].choices.values()) for number in costs.blocks
        ),
    )


def _traced_base(
    config: Config,
    architecture: Architecture,
    device_type: str,
    choices: tuple[str, ...],
    rules: PrecisionRules,
) -> StepCosts:
    train = config.train
    return trace_costs(
        architecture,
        precision=rules.compute,
        parameters=train.parameters,
        master_weights=bool(train.master_weights),
        moments=train.moments,
        micro_batch=decided(train.micro_batch),
        sequence=decided(train.sequence),
        loss_chunk=decided(train.loss_chunk),
        linears=_linears(rules, architecture),
        activations=choices,
        device_functions="cuda" if device_type == "cuda" else "cpu",
    )


def _linears(rules: PrecisionRules, architecture: Architecture) -> dict[str, LinearPrecision]:
    return {layer: choice for layer, (choice, _) in rules.assign(linear_layers(architecture)).items()}


def _timed(
    costs: StepCosts, config: Config, architecture: Architecture, device: Device, rates: LinkRates
) -> StepCosts:
    """With predicted seconds of every block and choice."""
    rules = config.precision_rules
    linears = _linears(rules, architecture)
    peaks: Peaks = device_peaks(device.torch_device, device.name)
    work = Rates(peaks, rates.device_memory)
    tokens = decided(config.train.micro_batch) * decided(config.train.sequence)
    classes = []
    for number, kind in enumerate(costs.classes):
        block = costs.blocks.index(number)
        of_block = {name: linears[f"blocks.{block}.{name}"] for name in GEMM_NAMES}
        timed: Mapping[str, BlockCost] = {
            name: _with_seconds(cost, name, architecture, of_block, work, config, tokens)
            for name, cost in kind.choices.items()
        }
        classes.append(dataclasses.replace(kind, choices=timed))
    return dataclasses.replace(costs, classes=tuple[BlockClass, ...](classes))


def _with_seconds(
    cost: BlockCost,
    name: str,
    architecture: Architecture,
    linears: Mapping[str, LinearPrecision],
    work: Rates,
    config: Config,
    tokens: int,
) -> BlockCost:
    seconds = block_seconds(
        architecture,
        linears,
        Activations.parse(name),
        work,
        tokens=tokens,
        sequence=decided(config.train.sequence),
        compute=config.precision_rules.compute,
    )
    return dataclasses.replace(
        cost, forward_seconds=seconds.forward, backward_seconds=seconds.backward + seconds.again
    )


@cache
def _links(device_type: str) -> LinkRates:
    return measure_links(torch.device(device_type))
