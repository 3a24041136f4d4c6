"""Decides what is done so that a step fits: traces the model, knows the machine, and asks the planner.

Method   Where everything resident takes a small share of the memory by its formula (`scrimp.planner.memory`),
         nothing has to be decided and nothing is traced. Else the model is traced in its shapes for every
         choice that a block may have, seconds and rates come from short measurements
         (`scrimp.train.memory_times`); `scrimp.planner.bytes.search` finds the fastest plan that fits,
         with everything resident as its first candidate.
Limits   On a CPU "device" and host are one memory: nothing is offloaded, unless both budgets are given, which limit
         two parts of it. Statistics of `precision snip` need the states of all blocks at once: beside it nothing is
         offloaded.
Checked  tests/train/test_memory_plan.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from scrimp.config import Architecture, Config, decided, parse_bytes
from scrimp.config.activations import (
    ALL_ACTIVATIONS,
    LEVELS,
    Activations,
    assign_activations,
    blocks_on_host,
)
from scrimp.errors import PlanError
from scrimp.planner import Plan
from scrimp.planner.bytes.account import account_step
from scrimp.planner.bytes.costs import StepCosts
from scrimp.planner.bytes.decision import MemoryDecision
from scrimp.planner.bytes.machine import Machine, Setup, Update
from scrimp.planner.bytes.room import NoRoomError
from scrimp.planner.bytes.search import MemoryPlan, find, search
from scrimp.planner.bytes.splits import Split
from scrimp.planner.bytes.states import States, host_bytes
from scrimp.planner.bytes.timeline import step_timeline
from scrimp.precision import PrecisionRules, parse_rules
from scrimp.profiler import Device, host_memory_available
from scrimp.profiler.links import LinkRates
from scrimp.profiler.memory_trace import trace_costs
from scrimp.runtime.memory import largest_step, uses_host
from scrimp.train.memory_times import linears_of, links_of, with_seconds
from scrimp.train.optimizer.rate import cpu_update_rate

SMALL_SHARE = 0.5
"""Of the memory: a run whose formula says less keeps everything, without a trace."""
NO_LINKS = LinkRates(*[1e10] * 6)
CACHE_SHARE = 0.96
"""Of a GPU's free memory: the caching allocator keeps gaps that the account does not know."""
HOST_SHARE = 0.9
"""Of the free host memory: the page cache and the data loader need the rest."""


def decide_memory(
    config: Config,
    architecture: Architecture,
    device: Device,
    *,
    resident_bytes: int,
    copy_bytes: int,
    must_predict: bool = False,
    may_measure: bool = True,
) -> MemoryDecision | None:
    """What a step does so that it fits; None: everything resident fits easily, by its formula.

    Args:
        config: resolved.
        resident_bytes: peak of a step that keeps everything, by formula.
        copy_bytes: of the host copy that a checkpoint is written from.
        must_predict: decide in any case, for the seconds of a step.
        may_measure: blocks may be timed.

    Raises:
        NoRoomError: nothing fits; it says what would.
    """
    setting, split = config.memory.activations, _split_of(config, architecture.num_layers)
    limit = device_limit(config, device, copy_bytes)
    is_small = resident_bytes <= SMALL_SHARE * limit and not must_predict
    if setting in ("auto", "keep") and split is None and is_small:
        return None
    assigned = None if setting == "auto" else assign_activations(setting, architecture.num_layers)
    asks = split is not None or any(one.is_offloaded for one in assigned or ())
    _refuse_beside_snip(config, asks or config.memory.update == "cpu")
    host = host_limit(config, device, is_asked_for=asks)
    choices = _choices(assigned, may_offload=host > 0 and not config.is_planned)
    costs = _traced(config, architecture, device.torch_device.type, choices)
    rates = links_of(device.torch_device.type)
    machine = _machine(config, rates, limit, host, with_cpu=config.memory.update != "device")
    setup = _setup_of(config)
    costs, _ = with_seconds(costs, config, architecture, device, rates, may_measure=False)
    if assigned is None:
        try:
            _fastest(costs, machine, setup, split)  # what does not fit is refused before anything is timed
        except NoRoomError as error:
            raise error.beside(copy_bytes if _copy_is_on_device(config, device) else 0) from None
    costs, origin = with_seconds(costs, config, architecture, device, rates, may_measure=may_measure)
    if assigned is None:
        plan = _fastest(costs, machine, setup, split)
        activations, states = plan.activations, plan.states
        reason = f"the fastest that was found within {limit:,} bytes"
    else:
        activations = tuple(map(str, assigned))
        states = _fastest_states(costs, machine, setup, split or Split(), activations)
        plan, reason = None, f"memory.activations {setting}"
    account = account_step(costs, states, activations, accumulates=setup.accumulates)
    return MemoryDecision(costs, machine, setup, activations, states, account, reason, plan, origin)


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


def _fastest(costs: StepCosts, machine: Machine, setup: Setup, split: Split | None) -> MemoryPlan:
    """The fastest plan, with the fastest of the updaters that may be; errors as of `search`."""
    if split is None:
        return search(costs, machine, setup)
    splits = _by_updater(split, setup, len(costs.blocks))
    plans = [plan for one in splits if (plan := find(costs, machine, setup, one)) is not None]
    return min(plans, key=lambda plan: plan.seconds) if plans else search(costs, machine, setup, splits[0])


def _fastest_states(
    costs: StepCosts, machine: Machine, setup: Setup, split: Split, activations: tuple[str, ...]
) -> States:
    """A placement with the fastest updater that fits; the first where none does."""

    def rank(states: States) -> tuple[bool, float]:
        seconds = step_timeline(costs, states, activations, setup, machine).seconds
        return host_bytes(costs, states, activations)[0] > machine.host_bytes, seconds

    blocks = len(costs.blocks)
    return min((one.states(blocks) for one in _by_updater(split, setup, blocks)), key=rank)


def _by_updater(split: Split, setup: Setup, num_blocks: int) -> list[Split]:
    found = [dataclasses.replace(split, update=one).within(num_blocks) for one in setup.updaters]
    return list(dict.fromkeys(found))


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
    rates = links_of(device.torch_device.type) if uses_host(plan) else NO_LINKS
    costs = _traced(config, architecture, device.torch_device.type, choices)
    costs, _ = with_seconds(costs, config, architecture, device, rates, may_measure=False)
    states = states_of(plan, architecture.num_layers, speculates=config.memory.speculate)
    setup = dataclasses.replace(_setup_of(config), updaters=(states.update,))
    account = account_step(costs, states, activations, accumulates=setup.accumulates)
    machine = _machine(config, rates, account.peak, account.host_peak, with_cpu=states.update != "device")
    return MemoryDecision(costs, machine, setup, activations, states, account, "the plan of the run", None)


def _setup_of(config: Config) -> Setup:
    train = config.train
    sequences = decided(train.batch_tokens) // decided(train.sequence)
    early: Update = "cpu early" if config.memory.speculate else "cpu"
    updaters: dict[str, tuple[Update, ...]] = {
        "device": ("device",),
        "cpu": (early,),
        "fastest": ("device", early),
    }
    # Without clipping too, an update waits for the norm: a step whose norm is not finite is skipped.
    return Setup(-(-sequences // decided(train.micro_batch)), updaters=updaters[config.memory.update])


def _machine(
    config: Config, rates: LinkRates, device_bytes: int, host_bytes: int, *, with_cpu: bool
) -> Machine:
    """With the CPU's rate for the formats of this run, where it may update anything."""
    machine = rates.machine(device_bytes=device_bytes, host_bytes=host_bytes)
    return dataclasses.replace(machine, cpu_adam=cpu_update_rate(config.train) if with_cpu else None)


def host_bytes_of(plan: Plan, config: Config, architecture: Architecture, device: Device) -> int:
    """Host memory that a step of a plan takes; its choices may be a user's own."""
    if not uses_host(plan):
        return 0
    activations = [plan.blocks[str(i)].activations for i in range(architecture.num_layers)]
    costs = _traced(config, architecture, device.torch_device.type, tuple(dict.fromkeys(activations)))
    states = states_of(plan, architecture.num_layers, speculates=config.memory.speculate)
    account = account_step(costs, states, activations, accumulates=True)
    return int(account.host_peak * _compiled_share(config))


def changed_peak(plan: Plan, before: int, after: int) -> int:
    """The predicted peak of a plan whose account was changed; where device and host are one memory it holds a
    checkpoint's copy too, which no plan changes."""
    return (plan.predicted.peak_device_bytes or before) + after - before


def states_of(plan: Plan, num_blocks: int, *, speculates: bool = False) -> States:
    """Where a plan's states live, and who updates them.

    Args:
        speculates: updates on the CPU, where there are any, begin under the backward pass.
    """
    rows = [plan.states[str(i)] for i in range(num_blocks)]
    on_cpu: Update = "cpu early" if speculates else "cpu"
    return States(
        tuple(row.weights == "host" for row in rows),
        tuple(row.gradients == "host" for row in rows),
        tuple(row.optimizer != "device" for row in rows),
        on_cpu if any(row.optimizer == "cpu" for row in rows) else "device",
    )


def device_limit(config: Config, device: Device, copy_bytes: int) -> int:
    """Bytes of the device that a step may take: what is free, and what the budget leaves."""
    limit = device.available_bytes
    if not device.is_host:
        limit = int(CACHE_SHARE * limit)
    budgets = config.budget
    if device.is_host and budgets.device_memory is None and budgets.host_memory is not None:
        limit = min(limit, parse_bytes(budgets.host_memory) - copy_bytes)
    if budgets.device_memory is not None:
        budget = parse_bytes(budgets.device_memory)
        limit = min(limit, budget - (copy_bytes if _copy_is_on_device(config, device) else 0))
    return max(0, limit)


def refuse_beyond_memory(decision: MemoryDecision, config: Config, device: Device, copy_bytes: int) -> None:
    """Refuse a plan that was written by hand or elsewhere, and takes more than there now is.

    Raises:
        PlanError: with the bytes.
    """
    host = host_limit(config, device, is_asked_for=decision.account.host_peak > 0)
    for what, takes, limit in (
        ("device", decision.account.peak, device_limit(config, device, copy_bytes)),
        ("host", decision.account.host_peak, host),
    ):
        if takes > limit:
            raise PlanError(
                f"plan.json asks for more {what} memory than there is now",
                got=f"a predicted peak of {takes:,} bytes",
                expected=f"at most {limit:,} bytes: what is free, and within the budget",
                do="free memory, choose less in blocks and states, or restore plan.json from a checkpoint",
            )


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
        linears=linears_of(rules, architecture),
        activations=choices,
        device_functions="cuda" if device_type == "cuda" else "cpu",
    )
