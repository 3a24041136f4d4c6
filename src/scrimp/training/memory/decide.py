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
from scrimp.data import held_bytes
from scrimp.errors import PlanError
from scrimp.models import spec_of
from scrimp.models.flash import gpu_of
from scrimp.optim import memory_of
from scrimp.optim.rate import cpu_update_rate
from scrimp.planner import Plan
from scrimp.planner.memory.account import account_step
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.machine import Machine, Setup, Update
from scrimp.planner.memory.placement import Split
from scrimp.planner.memory.room import NoRoomError
from scrimp.planner.memory.search import MemoryPlan, find
from scrimp.planner.memory.states import States, device_peak, host_bytes
from scrimp.planner.memory.timeline import step_timeline
from scrimp.precision import LinearPrecision, PrecisionRules, parse_rules
from scrimp.profiler import Device
from scrimp.profiler.bandwidth import LinkRates
from scrimp.profiler.memory_trace import KnownBlocks, batch_bytes, trace_costs
from scrimp.runtime.memory import uses_host
from scrimp.training.memory.block_seconds import linears_of, links_of, with_seconds
from scrimp.training.memory.limits import (
    OneMemoryError,
    arena_on_cpu,
    compiled_share,
    copy_is_on_device,
    device_limit,
    host_limit,
    one_memory,
    refuse_beyond_one_memory,
)
from scrimp.training.memory.notice import said_if_slow

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
    if not must_predict and (resident := _resident(config, architecture, device)) is not None:
        return resident
    problem = problem_of(config, architecture, device)
    found = _decide(problem, config, architecture, device, may_measure=may_measure)
    if not found.fits:
        return found
    try:
        refuse_beyond_one_memory(found, config, device, problem.costs.checkpoint_copy)
    except OneMemoryError:
        if config.memory.activations != "auto" or (shared := _shared(problem, config, device)) is None:
            raise
        found = _decide(shared, config, architecture, device, may_measure=may_measure)
    return found


def _shared(problem: Problem, config: ResolvedConfig, device: Device) -> Problem | None:
    """The same with a CPU's one memory divided between step and host, of eight ways the fastest; None: nothing fits."""
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
            ways.append((plan.seconds, eighths, way))
    return min(ways)[2] if ways else None


def _resident(config: ResolvedConfig, architecture: Architecture, device: Device) -> MemoryDecision | None:
    """Everything on the device, where it takes a small share of it; None where it does not, or the user has said
    something else. Where the optimizer updates on the device alone, that states are there says nothing."""
    blocks, may_place = architecture.num_layers, facts_of(config.optimizer.name).on_host
    if config.memory.activations not in ("auto", "keep"):
        return None
    if may_place and split_of(config, blocks) is not None:
        return None
    costs = traced(config, architecture, device.torch_device, ("keep",))
    limit = device_limit(config, device, costs.checkpoint_copy)
    machine = _machine(config, device, NO_LINKS, limit, host_limit(config, device), with_cpu=False)
    problem = Problem(costs, machine, _setup_of(config), split=None)
    found = problem.decision(("keep",) * blocks, States.split(blocks), "", origin=None)
    if found.account.peak > SMALL_SHARE * limit:
        return None
    return dataclasses.replace(
        found, reason=f"everything resident takes {found.account.peak:,} bytes at its peak"
    )


def _decide(
    problem: Problem, config: ResolvedConfig, architecture: Architecture, device: Device, *, may_measure: bool
) -> MemoryDecision:
    """The user's own choice, which may not fit, or the fastest plan."""
    setting = config.memory.activations
    if setting == "auto":
        if problem.fastest() is None:  # what does not fit is refused before anything is timed
            raise NoRoomError(f"nothing fits at a micro-batch of {config.train.micro_batch}")
    elif not (found := problem.decided(setting)).fits:
        return found
    costs, origin = with_seconds(
        problem.costs, config, architecture, device, _rates(device), may_measure=may_measure
    )
    problem = dataclasses.replace(problem, costs=costs)
    if setting != "auto":
        return dataclasses.replace(problem.decided(setting), seconds_origin=origin)
    plan = problem.fastest()
    if plan is None:
        raise NoRoomError(f"nothing fits at a micro-batch of {config.train.micro_batch}")
    reason = f"the fastest that was found within {problem.machine.device_bytes:,} bytes"
    return problem.decision(plan.activations, plan.states, reason, plan, origin)


@dataclass(frozen=True)
class Problem:
    """What the planner is asked about one configuration; seconds are predicted from the work."""

    costs: StepCosts
    machine: Machine
    setup: Setup
    split: Split | None
    """Where the user wants states; None: nothing is said of them."""

    def fastest(self) -> MemoryPlan | None:
        """The fastest plan, with the fastest of the updaters that may be, or the one that keeps everything where it is
        not clearly slower; None where nothing fits."""
        if self.split is None:
            plan = find(self.costs, self.machine, self.setup)
        else:
            plan = self._fastest_of(self.costs, self.split)
        if plan is None or (set(plan.activations) == {"keep"} and plan.states.is_resident):
            return plan
        kinds = tuple(
            dataclasses.replace(kind, choices={"keep": kind.choices["keep"]}) for kind in self.costs.classes
        )
        kept = self._fastest_of(dataclasses.replace(self.costs, classes=kinds), self.split or Split())
        return plan if kept is None or plan.seconds < (1 - CLEARLY) * kept.seconds else kept

    def _fastest_of(self, costs: StepCosts, split: Split) -> MemoryPlan | None:
        """The fastest plan with states in these places."""
        plans = [find(costs, self.machine, self.setup, one) for one in self.by_updater(split)]
        return min((plan for plan in plans if plan is not None), key=lambda plan: plan.seconds, default=None)

    def decided(self, setting: str) -> MemoryDecision:
        """The user's own activations, and the fastest updater of states that fits; the first where none does."""
        blocks = len(self.costs.blocks)
        activations = tuple(map(str, assign_activations(setting, blocks)))

        def rank(states: States) -> tuple[bool, float]:
            seconds = step_timeline(self.costs, states, activations, self.setup, self.machine).seconds
            fits = (
                device_peak(self.costs, states, activations, self.setup.accumulates)
                <= self.machine.device_bytes
            )
            fits &= host_bytes(self.costs, states, activations)[0] <= self.machine.host_bytes
            return not fits, seconds

        states = min((split.states(blocks) for split in self.by_updater(self.split or Split())), key=rank)
        return self.decision(activations, states, f"memory.activations {setting}")

    def decision(
        self,
        activations: tuple[str, ...],
        states: States,
        reason: str,
        plan: MemoryPlan | None = None,
        origin: str | None = "predicted",
    ) -> MemoryDecision:
        """A choice with its account."""
        account = account_step(self.costs, states, activations, accumulates=self.setup.accumulates)
        return MemoryDecision(
            self.costs, self.machine, self.setup, activations, states, account, reason, plan, origin
        )

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
    host = host_limit(config, device, is_asked_for=asks)
    may_offload = host > 0 and not config.is_planned and not copy_is_on_device(config, device)
    choices = _choices(architecture, assigned, may_offload=may_offload)
    costs = traced(config, architecture, device.torch_device, choices)
    rates = _rates(device)
    costs, _ = with_seconds(costs, config, architecture, device, rates, may_measure=False)
    limit = device_limit(config, device, costs.checkpoint_copy)
    machine = _machine(config, device, rates, limit, host, with_cpu=config.memory.update != "device")
    return Problem(costs, machine, _setup_of(config), split)


def _rates(device: Device) -> LinkRates:
    return links_of(device)


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
    activations = tuple(plan.blocks[str(i)].activations for i in range(architecture.num_layers))
    choices = tuple(dict.fromkeys((*_choices(architecture, None, may_offload=uses_host(plan)), *activations)))
    # Where nothing moves, their rates decide nothing; measuring takes memory that there may be none of.
    rates = links_of(device) if uses_host(plan) else NO_LINKS
    costs = traced(config, architecture, device.torch_device, choices)
    costs, _ = with_seconds(costs, config, architecture, device, rates, may_measure=False)
    states = states_of(plan, architecture.num_layers)
    setup = dataclasses.replace(_setup_of(config), updaters=(states.update,))
    account = account_step(costs, states, activations, accumulates=setup.accumulates)
    with_cpu = states.update != "device"
    machine = _machine(config, device, rates, account.peak, account.host_peak, with_cpu=with_cpu)
    return MemoryDecision(costs, machine, setup, activations, states, account, "the plan of the run", None)


def _setup_of(config: ResolvedConfig) -> Setup:
    train = config.train
    sequences = train.sequences_per_step
    updaters: dict[str, tuple[Update, ...]] = {
        "device": ("device",),
        "cpu": ("cpu",),
        "fastest": ("device", "cpu"),
    }
    return Setup(-(-sequences // train.micro_batch), updaters=updaters[config.memory.update])


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


def host_bytes_of(plan: Plan, config: ResolvedConfig, architecture: Architecture, device: Device) -> int:
    """Host memory that a step of a plan takes; its choices may be a user's own."""
    if not uses_host(plan):
        return 0
    activations = [plan.blocks[str(i)].activations for i in range(architecture.num_layers)]
    costs = traced(config, architecture, device.torch_device, tuple(dict.fromkeys(activations)))
    states = states_of(plan, architecture.num_layers)
    account = account_step(costs, states, activations, accumulates=True)
    return int(account.host_peak * compiled_share(config))


def states_of(plan: Plan, num_blocks: int) -> States:
    """Where a plan's states live, and who updates them."""
    rows = [plan.states[str(i)] for i in range(num_blocks)]
    return States(
        tuple(row.weights == "host" for row in rows),
        tuple(row.gradients == "host" for row in rows),
        tuple(row.optimizer != "device" for row in rows),
        "cpu" if any(row.optimizer == "cpu" for row in rows) else "device",
    )


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
    config: ResolvedConfig, architecture: Architecture, device: torch.device, choices: tuple[str, ...]
) -> StepCosts:
    """Costs of a step; where formats are planned while training, the largest: of a candidate, of the start, or of the
    high-precision passes that measure. What takes seconds is said on stderr."""
    rules = parse_rules(config.precision)
    bases = [config.precision_rules]
    if rules.is_planned:
        start = rules.with_base(config.snip.start)
        names = dict.fromkeys([*config.candidates, config.snip.start, start.compute])
        bases = [rules.with_base(name) for name in names]
    with said_if_slow("tracing the model ..."):
        found = [_traced_base(config, architecture, device, choices, base) for base in bases]
    return _with_batches(max(found, key=_most), config, device)


def _with_batches(costs: StepCosts, config: ResolvedConfig, device: torch.device) -> StepCosts:
    """With all batches that the loader holds, on a CPU; a GPU has those of one micro-batch, which the trace counts."""
    if device.type == "cuda":
        return costs
    train = config.train
    held = held_bytes(train.batch_tokens, mask_documents=config.data.mask_documents)
    counted = batch_bytes(train.micro_batch, train.sequence)
    return dataclasses.replace(costs, resident=costs.resident + held - counted)


def _most(costs: StepCosts) -> int:
    """Peak of a step whose blocks keep as much as any of their choices."""
    names = [max(kind.choices, key=lambda name: kind.choices[name].kept) for kind in costs.classes]
    blocks = len(costs.blocks)
    return device_peak(costs, States.split(blocks), [names[number] for number in costs.blocks], True)


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
        sequence=train.sequence,
        loss_chunk=train.loss_chunk,
        objective=objectives.build(config.objective),
        linears=tuple(linears_of(rules, architecture).items()),
        activations=choices,
        device_functions="cuda" if device.type == "cuda" else "cpu",
        gpu=gpu_of(device),
        documents=config.data.mask_documents,
        compiled=train.compile == "on",
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
    """`trace_costs`, once: a configuration is asked for while its micro-batch is looked for, when it is refused, and
    when its data are open. Kernels of a CPU take memory by the number of threads, which the trace reads from torch.
    Blocks know no vocabulary, and a choice of activations nothing of the others: each is traced for all of them."""
    alike = {key: value for key, value in settings.items() if key not in ("activations", "loss_chunk")}
    key = dataclasses.replace(architecture, vocab_size=1), num_threads, tuple(alike.items())
    known = _BLOCKS.setdefault(key, {})
    return trace_costs(architecture, linears=dict(linears), known=known, **settings)
