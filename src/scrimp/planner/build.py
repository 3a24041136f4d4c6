"""Makes the plan of a run from its resolved configuration.

Every GEMM by the rules of the run's precision; activations and states of every block as was decided so that
the step fits (`scrimp.train.memory.plan`), all resident where nothing had to be. A run that cannot fit
is refused before it starts, with the change that would help most.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from scrimp.config import Architecture, Config, decided, parse_bytes
from scrimp.config.snip import BUDGETS
from scrimp.errors import PlanError
from scrimp.planner.bytes.decision import MemoryDecision
from scrimp.planner.bytes.room import Budgets, enough_text, size_text
from scrimp.planner.flops import linear_layers
from scrimp.planner.memory import MemoryAccount, account_memory
from scrimp.planner.schema import BlockChoice, Figures, Fingerprint, GemmChoice, Layout, Plan, StateChoice
from scrimp.precision import GEMMS, HIGH_PRECISION, PrecisionRules, parse_rules


def model_fingerprint(architecture: Architecture) -> str:
    """Twelve hex digits that name an architecture."""
    text = json.dumps(dataclasses.asdict(architecture), sort_keys=True)
    return f"{architecture.family}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def gemm_formats(plan: Plan) -> dict[str, dict[str, str]]:
    """Layer to recipe per GEMM, as `ideal_seconds_per_token` takes it."""
    return {layer: {gemm: getattr(choice, gemm) for gemm in GEMMS} for layer, choice in plan.gemms.items()}


def with_precisions(plan: Plan, rules: PrecisionRules) -> Plan:
    """A plan whose GEMMs are as these rules say."""
    assigned = rules.assign(list(plan.gemms))
    gemms = {
        layer: GemmChoice(**dataclasses.asdict(choice), reason=reason)
        for layer, (choice, reason) in assigned.items()
    }
    return dataclasses.replace(plan, gemms=gemms)


def account_of(config: Config, architecture: Architecture) -> MemoryAccount:
    """The memory account of a resolved configuration; of formats that are planned while training, the largest of
    what they may become, and of the bf16 passes that measure."""
    if not config.is_planned:
        return _account(config, architecture, config.precision_rules)
    rules = parse_rules(config.precision)
    bases = (*config.candidates, rules.with_base(config.snip.start).compute)
    accounts = [_account(config, architecture, rules.with_base(base)) for base in bases]
    return max(accounts, key=lambda account: account.peak)


def _account(config: Config, architecture: Architecture, rules: PrecisionRules) -> MemoryAccount:
    train = config.train
    assigned = rules.assign(linear_layers(architecture))
    return account_memory(
        architecture,
        precision=rules.compute,
        parameters=train.parameters,
        master_weights=bool(train.master_weights),
        moments=train.moments,
        micro_batch=decided(train.micro_batch),
        sequence=decided(train.sequence),
        loss_chunk=decided(train.loss_chunk),
        linears={layer: choice for layer, (choice, _) in assigned.items()},
    )


def build_plan(
    config: Config,
    architecture: Architecture,
    *,
    device_name: str,
    device_is_host: bool,
    torch_version: str,
    reasons: Mapping[str, str],
    memory: MemoryDecision | None = None,
    copy_bytes: int | None = None,
) -> Plan:
    """The plan of one run on one device; `refuse_misfit` says whether it fits.

    Args:
        config: resolved: no field of `train` is None, and the precision has a base.
        device_is_host: the device computes in host memory (a CPU).
        reasons: why settings were decided, from `scrimp.config.resolve`.
        memory: what blocks do so that the step fits; None: everything resident.
        copy_bytes: host memory that writing a checkpoint takes; None: the account's copy of the whole state.

    Raises:
        ConfigError: a rule of the precision that matches no layer, or cannot be carried out there.
    """
    account = account_of(config, architecture)
    copy = account.checkpoint_copy if copy_bytes is None else copy_bytes
    peak = account.peak if memory is None else memory.account.peak
    host = 0 if memory is None else memory.account.host_peak
    is_one_memory = device_is_host and None in (config.budget.device_memory, config.budget.host_memory)
    return Plan(
        fingerprint=Fingerprint(
            model=model_fingerprint(architecture), device=device_name, torch=torch_version, world_size=1
        ),
        budget=_budget(config, device_is_host),
        gemms=_gemms(config, architecture, reasons),
        blocks=_blocks(architecture, memory, account),
        states=_states(architecture, memory, account),
        layout=Layout(stages=[[0, architecture.num_layers - 1]]),
        # On a CPU the copy that a checkpoint is written from lies in the device's memory; the whole process,
        # the interpreter and its libraries included, is predicted by nothing.
        predicted=Figures(
            peak_device_bytes=peak + (copy if is_one_memory else 0),
            peak_host_bytes=(host or None) if is_one_memory else host + copy,
            step_seconds=None if memory is None else memory.timeline.seconds,
        ),
    )


def _blocks(
    architecture: Architecture, memory: MemoryDecision | None, account: MemoryAccount
) -> dict[str, BlockChoice]:
    numbers = range(architecture.num_layers)
    if memory is None:
        return {str(i): BlockChoice("keep", _resident(account)) for i in numbers}
    return {str(i): BlockChoice(memory.activations[i], memory.reason) for i in numbers}


def _states(
    architecture: Architecture, memory: MemoryDecision | None, account: MemoryAccount
) -> dict[str, StateChoice]:
    names = [*map(str, range(architecture.num_layers)), "embedding", "head"]
    resident = StateChoice("device", "device", "device", _resident(account))
    if memory is None:
        return dict.fromkeys(names, resident)
    ends = StateChoice("device", "device", "device", "what is no block stays on the device")
    blocks = {
        str(i): StateChoice(**memory.states.of(i), reason=memory.reason)
        for i in range(architecture.num_layers)
    }
    return {name: blocks.get(name, ends) for name in names}


def _resident(account: MemoryAccount) -> str:
    return f"everything resident takes {account.peak:,} bytes at its peak"


def _gemms(config: Config, architecture: Architecture, reasons: Mapping[str, str]) -> dict[str, GemmChoice]:
    rules = config.precision_rules
    # Where one high precision is all there is, its own reason says more than its name.
    is_plain = rules.base in HIGH_PRECISION and not rules.rules
    only = reasons.get("precision", "set by the user") if is_plain else None
    if config.is_planned:
        pinned = parse_rules(config.precision).pinned(linear_layers(architecture))
        start = f"until the first plan: {reasons.get('snip.start', 'set by the user')}"
        return {
            layer: GemmChoice(
                **dataclasses.asdict(choice), reason=reason if layer in pinned or layer == "head" else start
            )
            for layer, (choice, reason) in rules.assign(linear_layers(architecture)).items()
        }
    return {
        layer: GemmChoice(**dataclasses.asdict(choice), reason=only or reason)
        for layer, (choice, reason) in rules.assign(linear_layers(architecture)).items()
    }


def refuse_misfit(
    config: Config,
    architecture: Architecture,
    plan: Plan,
    *,
    available_bytes: int,
    device_is_host: bool,
    memory: MemoryDecision | None = None,
    budgets: Budgets | None = None,
) -> None:
    """Refuse a run whose predicted peak exceeds its budget or the memory that is free now.

    Where the host has memory of its own, too little of it for a checkpoint's copy makes training wait while one is
    written; it does not refuse the run.

    Args:
        available_bytes: free device memory.
        memory: what the plan was made by; None: everything resident.
        budgets: what a user types for the bytes of a step; None: as many.

    Raises:
        PlanError: with the change that would help most.
    """
    account = account_of(config, architecture)
    copy = account.checkpoint_copy
    if memory is not None:
        _refuse_decision(memory, config, budgets)
        return
    limit = available_bytes
    if "device_memory" in plan.budget:
        is_one_memory = device_is_host and None in (config.budget.device_memory, config.budget.host_memory)
        limit = min(limit, int(plan.budget["device_memory"]) - (copy if is_one_memory else 0))
    if account.peak > limit:
        raise PlanError(
            "the run does not fit in memory",
            got=f"a predicted peak of {account.peak:,} bytes",
            expected=f"at most {max(0, limit):,} bytes"
            + (f" beside the {copy:,} of a checkpoint's copy" if device_is_host else ""),
            do=_advice(account, limit, config),
        )


def _refuse_decision(memory: MemoryDecision, config: Config, budgets: Budgets | None) -> None:
    """Refuse settings of the user's own that do not fit; a plan that was searched for does."""
    if memory.fits:
        return
    account, machine = memory.account, memory.machine
    budgets = budgets or Budgets(machine.device_bytes, machine.host_bytes)
    what, peak, moment = "memory", account.peak, f", {account.moment.name}"
    enough, there_is = budgets.device_for(account.peak, alone=True), budgets.device_words
    if peak <= machine.device_bytes:
        what, peak, moment = "host memory", account.host_peak, ""
        enough, there_is = budgets.host_for(account.host_peak), f"{size_text(budgets.host)} of host memory"
    names = ("activations", "weights", "gradients", "optimizer")
    given = {f"memory.{name}": getattr(config.memory, name) for name in names}
    given = {name: value for name, value in given.items() if value != "auto"}
    if config.memory.update != "device":
        given["memory.update"] = config.memory.update
    settings = " and ".join(f"{name} {value}" for name, value in given.items())
    raise PlanError(
        f"the run does not fit in {what} with {settings or 'the blocks and states of its plan'}",
        got=f"a predicted peak of {peak:,} bytes{moment}, for which {enough_text(enough)} are enough",
        expected=f"at most {there_is}",
        do=f"leave {' and '.join(given) or 'them'} out: the plan then finds what fits, or says what would",
    )


def _advice(account: MemoryAccount, limit: int, config: Config) -> str:
    if account.states > limit:
        return f"weights, gradients and optimizer states alone take {account.states:,} bytes: choose a smaller model"
    return (
        f"lower --train.micro-batch (now {config.train.micro_batch}) or --train.sequence "
        f"(now {config.train.sequence}): activations take {account.activations:,} bytes"
    )


def _budget(config: Config, device_is_host: bool) -> dict[str, float | int]:
    given = {"device_memory": config.budget.device_memory, "host_memory": config.budget.host_memory}
    budget: dict[str, float | int] = {
        name: parse_bytes(text, key=f"budget.{name}") for name, text in given.items() if text is not None
    }
    for name in BUDGETS:
        value = getattr(config.budget, name)
        if value is not None:
            budget[name] = value
    if device_is_host and "host_memory" in budget and "device_memory" not in budget:
        budget["device_memory"] = budget["host_memory"]
    return budget
