"""Decides what is done so that a step fits: traces the model, knows the machine, and asks the planner.

Method   The model is traced in its shapes, first with everything resident. Where that takes a small share of the
         memory, nothing has to be decided and nothing is timed. Else it is traced for every choice that a block may
         have, seconds and rates come from short measurements (`scrimp.training.memory.block_seconds`);
         `scrimp.planner.memory.search` finds the fastest plan that fits. Where every block may keep everything
         (beside the states that the user has placed), that is taken unless the plan is faster by `CLEARLY`.
Limits   On a CPU "device" and host are one memory: nothing is offloaded, unless both budgets are given, which limit
         two parts of it. Statistics of `precision snip` need the states of all blocks at once: beside it nothing is
         offloaded.
Checked  tests/training/memory/test_decide.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec
import torch

from scrimp import objectives
from scrimp.config import Architecture, ResolvedConfig
from scrimp.config.activations import (
    ALL_ACTIVATIONS,
    LEVELS,
    Activations,
    assign_activations,
    blocks_on_host,
)
from scrimp.config.optimizers import facts_of
from scrimp.config.own_average import learns_from_average
from scrimp.data import held_bytes
from scrimp.errors import PlanError
from scrimp.models import spec_of
from scrimp.models.flash import gpu_of
from scrimp.optim import memory_of
from scrimp.optim.rate import cpu_update_rate
from scrimp.planner import Plan
from scrimp.planner.memory.account import account_step
from scrimp.planner.memory.average_costs import with_average
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.machine import Machine, Setup, Update
from scrimp.planner.memory.outer_costs import with_outer
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.room import NoRoomError
from scrimp.planner.memory.search import find
from scrimp.planner.memory.search_space import Split
from scrimp.planner.memory.states import device_peak
from scrimp.precision import LinearPrecision, PrecisionRules, parse_rules
from scrimp.profiler import Device
from scrimp.profiler.bandwidth import LinkRates
from scrimp.profiler.memory_trace import KnownBlocks, TracedStep, batch_bytes
from scrimp.training.memory.block_seconds import linears_of, links_of, with_seconds
from scrimp.training.memory.limits import (
    OneMemoryError,
    arena_on_cpu,
    copy_is_on_device,
    device_limit,
    host_limit,
    one_memory,
    refuse_beyond_one_memory,
)
from scrimp.training.memory.notice import said_if_slow
from scrimp.training.memory.stages import decide_stages, of_stages, shared

SMALL_SHARE = 0.5
"""Share of the memory: a run that takes less keeps everything, and nothing is timed."""
CLEARLY = 0.03
"""Share of the seconds of a step: as little as a run's own check calls worth a change (`check.GAIN`). Seconds are
measured, and noise of a percent must not decide between two runs."""
NO_LINKS = LinkRates(*[1e10] * 6)


def decide_memory(
    config: ResolvedConfig,
    architecture: Architecture,
    device: Device,
    *,
    must_predict: bool = False,
    may_measure: bool = True,
) -> MemoryDecision:
    """What a step does so that it fits.

    Args:
        config: resolved.
        must_predict: decide in any case, for the seconds of a step.
        may_measure: blocks may be timed.

    Raises:
        NoRoomError: nothing fits; what would, `scrimp.training.memory.refusal` says. OneMemoryError where only the sum
            of what fits part by part does not.
    """
    if config.layout.pp > 1:
        return _of_pipeline(config, architecture, device)
    if not must_predict and (resident := _resident(config, architecture, device)) is not None:
        return resident
    problem = problem_of(config, architecture, device)
    found = _timed(problem, _answer(problem, config), config, architecture, device, may_measure=may_measure)
    if not found.fits:
        return found
    try:
        refuse_beyond_one_memory(found, config, device, problem.costs.checkpoint_copy)
    except OneMemoryError:
        if config.memory.activations != "auto" or (shared := _shared(problem, config, device)) is None:
            raise
        found = _timed(*shared, config, architecture, device, may_measure=may_measure)
    return found


def _of_pipeline(
    config: ResolvedConfig, architecture: Architecture, device: Device, placement: Placement | None = None
) -> MemoryDecision:
    """The same of the ranks of a pipeline.

    Args:
        placement: what was decided; None: nothing was.
    """
    setting, spec = config.memory.activations, spec_of(architecture)
    given = None if setting == "auto" else assign_activations(setting, spec.num_blocks)
    choices = _choices(architecture, given, may_offload=False)
    if placement is not None:
        choices = tuple(dict.fromkeys((*choices, *placement.activations)))
    setup = _setup_of(config)
    # Where everything is kept and fits, nothing else is traced.
    for some in dict.fromkeys((choices[:1], choices)) if placement is None else (choices,):
        costs = traced(config, architecture, device, some)
        limit = device_limit(config, device, costs.checkpoint_copy)
        machine = _machine(config, device, NO_LINKS, limit, host_limit(config, device), with_cpu=False)
        if placement is not None:
            return of_stages(costs, machine, setup, placement, config, spec, "the plan of the run")
        if given is not None and some != choices:
            continue
        found = decide_stages(costs, machine, setup, some, config, spec)
        if found.fits:
            break
    return found


def _shared(
    problem: Problem, config: ResolvedConfig, device: Device
) -> tuple[Problem, MemoryDecision] | None:
    """The same with a CPU's one memory divided between step and host, of eight ways the fastest, and its plan; None:
    nothing fits."""
    limit, copy, _ = one_memory(config, device, problem.costs.checkpoint_copy)
    ways = []
    for eighths in range(9):
        host = problem.machine.host_bytes * eighths // 8
        left = limit - copy - arena_on_cpu(config, host)
        if left <= 0:
            break
        machine = dataclasses.replace(
            problem.machine, host_bytes=host, device_bytes=min(problem.machine.device_bytes, left)
        )
        way = dataclasses.replace(problem, machine=machine)
        plan = way.fastest()
        if plan is not None:
            ways.append((way, plan))
    return min(ways, key=lambda one: one[1].seconds, default=None)


def _resident(config: ResolvedConfig, architecture: Architecture, device: Device) -> MemoryDecision | None:
    """Everything on the device, where it takes a small share of it; None where it does not, or the user has said
    something else. Where the optimizer updates on the device alone, that states are there says nothing."""
    blocks = architecture.num_layers
    stays = config.outer.every or config.adapter.rank or learns_from_average(config.objective)
    may_place = facts_of(config.optimizer.name).on_host and not stays
    if config.memory.activations not in ("auto", "keep"):
        return None
    if may_place and split_of(config, blocks) is not None:
        return None
    costs = traced(config, architecture, device, ("keep",))
    limit = device_limit(config, device, costs.checkpoint_copy)
    machine = _machine(config, device, NO_LINKS, limit, host_limit(config, device), with_cpu=False)
    setup, placement = _setup_of(config), Placement.resident(blocks)
    account = account_step(costs, placement, accumulates=setup.accumulates)
    if account.peak > SMALL_SHARE * limit:
        return None
    reason = f"everything resident takes {account.peak:,} bytes at its peak"
    return MemoryDecision(costs, machine, setup, placement, account, reason)


def _timed(
    problem: Problem,
    found: MemoryDecision,
    config: ResolvedConfig,
    architecture: Architecture,
    device: Device,
    *,
    may_measure: bool,
) -> MemoryDecision:
    """What is decided by the seconds of blocks that were timed, where `found` is by those predicted from their work."""
    if not found.fits:  # refused before anything is timed
        return found
    costs = with_seconds(problem.costs, config, architecture, device, may_measure=may_measure)
    # Where nothing was timed, the question is the same.
    return found if costs == problem.costs else _answer(dataclasses.replace(problem, costs=costs), config)


def _answer(problem: Problem, config: ResolvedConfig) -> MemoryDecision:
    """The user's own choice, which may not fit, or the fastest plan."""
    setting = config.memory.activations
    found = problem.fastest() if setting == "auto" else problem.decided(setting)
    if found is None:
        raise NoRoomError(f"nothing fits at a micro-batch of {config.train.micro_batch}")
    return found


@dataclass(frozen=True)
class Problem:
    """What the planner is asked about one configuration; seconds are predicted from the work."""

    costs: StepCosts
    machine: Machine
    setup: Setup
    split: Split | None
    """Where the user wants states; None: nothing is said of them."""

    def fastest(self) -> MemoryDecision | None:
        """The fastest plan, with the fastest of the updaters that may be, or the one that keeps everything where it is
        not clearly slower; None where nothing fits."""
        if self.split is None:
            plan = find(self.costs, self.machine, self.setup)
        else:
            plan = self._fastest_of(self.costs, self.split)
        if plan is None or plan.placement.is_resident:
            return plan
        kinds = tuple(
            dataclasses.replace(kind, choices={"keep": kind.choices["keep"]}) for kind in self.costs.classes
        )
        kept = self._fastest_of(dataclasses.replace(self.costs, classes=kinds), self.split or Split())
        if kept is None or plan.seconds < (1 - CLEARLY) * kept.seconds:
            return plan
        return dataclasses.replace(kept, costs=self.costs)

    def _fastest_of(self, costs: StepCosts, split: Split) -> MemoryDecision | None:
        """The fastest plan with states in these places."""
        plans = [find(costs, self.machine, self.setup, one) for one in self.by_updater(split)]
        found = (plan for plan in plans if plan is not None)
        return min(found, key=lambda plan: plan.seconds, default=None)

    def decided(self, setting: str) -> MemoryDecision:
        """The user's own activations, and the fastest updater of states that fits; the first where none does."""
        blocks, reason = len(self.costs.blocks), f"memory.activations {setting}"
        activations = tuple(map(str, assign_activations(setting, blocks)))
        ways = []
        for split in self.by_updater(self.split or Split()):
            placement = Placement(activations, split.states(blocks))
            account = account_step(self.costs, placement, accumulates=self.setup.accumulates)
            ways.append(MemoryDecision(self.costs, self.machine, self.setup, placement, account, reason))
        return min(ways, key=lambda way: (not way.fits, way.seconds))

    def by_updater(self, split: Split) -> list[Split]:
        """A placement with each of the updaters that may be, the preferred one first."""
        blocks = len(self.costs.blocks)
        found = [dataclasses.replace(split, update=one).within(blocks) for one in self.setup.updaters]
        return list(dict.fromkeys(found))


def problem_of(config: ResolvedConfig, architecture: Architecture, device: Device) -> Problem:
    """Trace a configuration, and find out what there is for it.

    Raises:
        PlanError: something is to live on the host beside `precision snip`.
    """
    setting, split = config.memory.activations, split_of(config, architecture.num_layers)
    assigned = None if setting == "auto" else assign_activations(setting, architecture.num_layers)
    asks = asks_for_host(config, architecture.num_layers)
    _refuse_beside_snip(config, asks or config.memory.update == "cpu")
    # On several ranks nothing leaves the device unless its user says so: what that costs there is not known.
    may_leave = config.layout.ranks == 1 or asks
    host = host_limit(config, device, is_asked_for=asks) if may_leave else 0
    may_offload = host > 0 and not config.is_planned and not copy_is_on_device(config, device)
    may_offload = may_offload and (config.layout.ranks == 1 or assigned is not None)
    choices = _choices(architecture, assigned, may_offload=may_offload)
    costs = traced(config, architecture, device, choices)
    rates = links_of(device)
    costs = with_seconds(costs, config, architecture, device, may_measure=False)
    limit = device_limit(config, device, costs.checkpoint_copy)
    machine = _machine(config, device, rates, limit, host, with_cpu=config.memory.update != "device")
    return Problem(costs, machine, _setup_of(config), split)


def asks_for_host(config: ResolvedConfig, num_blocks: int) -> bool:
    """Whether settings send states or activations to the host."""
    setting = config.memory.activations
    assigned = () if setting == "auto" else assign_activations(setting, num_blocks)
    places_any = split_of(config, num_blocks) not in (None, Split())
    return places_any or any(one.is_offloaded for one in assigned)


def split_of(config: ResolvedConfig, num_blocks: int) -> Split | None:
    """Where the user wants states; None: nothing is said of them."""
    memory = config.memory
    found = {
        key: blocks_on_host(key, getattr(memory, key), num_blocks)
        for key in ("weights", "gradients", "optimizer")
    }
    if all(count is None for count in found.values()):
        return None
    return Split(found["weights"] or 0, found["gradients"] or 0, found["optimizer"] or 0)


def _refuse_beside_snip(config: ResolvedConfig, asks_for_host: bool) -> None:
    if config.is_planned and asks_for_host:
        raise PlanError(
            "nothing of a step can live on the host beside precision snip",
            got="a setting of memory.* that sends tensors there",
            expected="all of the model on the device: statistics read the states of all layers at once",
            do="leave it out; blocks may still recompute",
        )


def decision_of(
    plan: Plan, config: ResolvedConfig, architecture: Architecture, device: Device
) -> MemoryDecision:
    """A plan as a decision, with the costs of everything that its blocks could do instead."""
    placement = plan.placement
    if config.layout.pp > 1:
        return _of_pipeline(config, architecture, device, placement)
    choices = _choices(architecture, None, may_offload=placement.uses_host)
    # Where nothing moves, their rates decide nothing; measuring takes memory that there may be none of.
    rates = links_of(device) if placement.uses_host else NO_LINKS
    every = tuple(dict.fromkeys((*choices, *placement.activations)))
    costs = traced(config, architecture, device, every)
    costs = with_seconds(costs, config, architecture, device, may_measure=False)
    update = placement.states.update
    setup = dataclasses.replace(_setup_of(config), updaters=(update,))
    account = account_step(costs, placement, accumulates=setup.accumulates)
    machine = _machine(config, device, rates, account.peak, account.host_peak, with_cpu=update != "device")
    return MemoryDecision(costs, machine, setup, placement, account, "the plan of the run")


def _setup_of(config: ResolvedConfig) -> Setup:
    updaters: dict[str, tuple[Update, ...]] = {
        "device": ("device",),
        "cpu": ("cpu",),
        "fastest": ("device", "cpu"),
    }
    return Setup(config.micro_batches, updaters=updaters[config.memory.update])


def _machine(
    config: ResolvedConfig,
    device: Device,
    rates: LinkRates,
    device_bytes: int,
    host_bytes: int,
    *,
    with_cpu: bool,
) -> Machine:
    """With the CPU's rate for the formats of this run, where it may update anything."""
    machine = rates.machine(device_bytes=device_bytes, host_bytes=host_bytes)
    rate = None
    if with_cpu:
        rate = device.world.once(
            "timing updates on the CPU", lambda: cpu_update_rate(config.train.parameters, config.optimizer)
        )
    return dataclasses.replace(machine, cpu_adam=rate)


def _choices(
    architecture: Architecture, assigned: Sequence[Activations] | None, *, may_offload: bool
) -> tuple[str, ...]:
    """What blocks may do: what is assigned to them, or any level that they know."""
    if assigned is not None:
        return tuple(dict.fromkeys(map(str, assigned)))
    levels = spec_of(architecture).levels
    names = ALL_ACTIVATIONS if may_offload else LEVELS
    return tuple(name for name in names if Activations.parse(name).level in levels)


def traced(
    config: ResolvedConfig, architecture: Architecture, device: Device, choices: tuple[str, ...]
) -> StepCosts:
    """Costs of a step; where formats are planned while training, the largest: of a candidate, of the start, or of the
    high-precision passes that measure. What takes seconds is said on stderr. Of several ranks the first one traces, so
    that all plan by the same bytes."""
    found: StepCosts = device.world.once(
        "tracing the model",
        lambda: _traced(config, architecture, device.torch_device, choices),
        write=msgspec.to_builtins,
        read=lambda told: msgspec.convert(told, StepCosts),
    )
    return found


def _traced(
    config: ResolvedConfig, architecture: Architecture, device: torch.device, choices: tuple[str, ...]
) -> StepCosts:
    rules = parse_rules(config.precision)
    bases = [config.precision_rules]
    if rules.is_planned:
        start = rules.with_base(config.snip.start)
        names = dict.fromkeys([*config.candidates, config.snip.start, start.compute])
        bases = [rules.with_base(name) for name in names]
    with said_if_slow("tracing the model ..."):
        found = [_traced_base(config, architecture, device, choices, base) for base in bases]
    most = dataclasses.replace(max(found, key=_most), operands=max(one.operands for one in found))
    most = _with_objective(_with_batches(most, config, device), config)
    if config.layout.pp > 1:
        return most
    costs = with_outer(shared(most, config), config)
    return with_average(costs, config, width=architecture.width, ends=most.ends.weights)


def _with_batches(costs: StepCosts, config: ResolvedConfig, device: torch.device) -> StepCosts:
    """With all batches that the loader holds, on a CPU; a GPU has those of one micro-batch, which the trace counts."""
    if device.type == "cuda":
        return costs
    train = config.train
    held = held_bytes(config.rank_sequences * train.sequence, mask_documents=config.data.mask_documents)
    counted = batch_bytes(train.micro_batch, train.sequence)
    return dataclasses.replace(costs, resident=costs.resident + held - counted)


def _with_objective(costs: StepCosts, config: ResolvedConfig) -> StepCosts:
    """With what the loss has on the device all through a step."""
    train = config.train
    objective = objectives.build(config.objective)
    nbytes = objective.resident_bytes(train.parameters, train.micro_batch_tokens // config.layout.cp)
    return dataclasses.replace(costs, resident=costs.resident + nbytes)


def _most(costs: StepCosts) -> int:
    """Peak of a step whose blocks keep as much as any of their choices."""
    names = [max(kind.choices, key=lambda name: kind.choices[name].kept) for kind in costs.classes]
    activations = tuple(names[number] for number in costs.blocks)
    return device_peak(costs, Placement(activations, States.split(len(activations))), True)


def _traced_base(
    config: ResolvedConfig,
    architecture: Architecture,
    device: torch.device,
    choices: tuple[str, ...],
    rules: PrecisionRules,
) -> StepCosts:
    train = config.train
    return _costs(
        architecture,
        torch.get_num_threads(),
        precision=rules.compute,
        parameters=train.parameters,
        optimizer=memory_of(config, architecture),
        micro_batch=train.micro_batch,
        sequence=train.sequence // config.layout.cp,
        loss_chunk=train.loss_chunk,
        objective=objectives.build(config.objective),
        linears=tuple(linears_of(rules, architecture).items()),
        activations=choices,
        device_functions="cuda" if device.type == "cuda" else "cpu",
        gpu=dataclasses.replace(gpu_of(device), deterministic=train.deterministic),
        documents=config.data.mask_documents,
        compiled=train.compile == "on",
        by_reference=config.backend == "reference",
    )


_BLOCKS: dict[Hashable, KnownBlocks] = {}
"""Blocks that this process has traced, by all that they depend on."""


@cache
def _costs(
    architecture: Architecture,
    num_threads: int,
    *,
    linears: tuple[tuple[str, LinearPrecision], ...],
    **settings: Any,
) -> StepCosts:
    """Costs of a `TracedStep`, once: a configuration is asked for while its micro-batch is looked for, when it is
    refused, and when its data are open. Kernels of a CPU take memory by the number of threads, which the trace reads
    from torch. Blocks know no vocabulary, and a choice of activations nothing of the others: each is traced for all of
    them."""
    alike = {key: value for key, value in settings.items() if key not in ("activations", "loss_chunk")}
    key = dataclasses.replace(architecture, vocab_size=1), num_threads, tuple(alike.items())
    known = _BLOCKS.setdefault(key, {})
    return TracedStep(architecture, linears=dict(linears), known=known, **settings).costs()
