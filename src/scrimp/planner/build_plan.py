"""Makes the plan of a run from its resolved configuration.

Every GEMM by the rules of the run's precision; activations and states of every block as was decided so that
the step fits (`scrimp.training.memory.decide`). Settings of the user's own that cannot fit are refused before the run
starts, with the budget that would be enough.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping

from scrimp.config import Architecture, Config, ResolvedConfig, parse_bytes
from scrimp.config.pipeline import pipeline_of
from scrimp.config.snip import BUDGETS
from scrimp.errors import PlanError
from scrimp.models import HEAD, ModelSpec, spec_of
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.placement import Placement
from scrimp.planner.memory.room import Budgets, enough_text, size_text
from scrimp.planner.plan import Figures, Fingerprint, Layout, Plan, rows_of
from scrimp.precision import (
    HIGH_PRECISION,
    InputOrigin,
    LinearPrecision,
    PrecisionRules,
    check_cut,
    parse_rules,
)


def model_fingerprint(architecture: Architecture) -> str:
    """Twelve hex digits that name an architecture."""
    # A kind of the user's own is its class here, wherever its file lies.
    name = architecture.family.rpartition(":")[2]
    text = json.dumps({**architecture.to_json(), "family": name}, sort_keys=True)
    return f"{name}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def with_precisions(plan: Plan, rules: PrecisionRules, layers: Mapping[str, InputOrigin]) -> Plan:
    """A plan whose GEMMs are as these rules say.

    Args:
        layers: of its model (`ModelSpec.origins`).
    """
    return dataclasses.replace(plan, gemms=rules.assign(layers))


def build_plan(
    config: ResolvedConfig,
    architecture: Architecture,
    *,
    device_name: str,
    device_is_host: bool,
    torch_version: str,
    reasons: Mapping[str, str],
    placement: Placement,
    why: str,
    predicted: Figures,
) -> Plan:
    """The plan of one run; `refuse_misfit` says whether it fits.

    Args:
        device_is_host: the device computes in host memory (a CPU).
        reasons: why settings were decided, from `scrimp.config.resolve`.
        placement: what blocks do so that the step fits, and where their states live.
        why: the reason for it.
        predicted: of a step (`MemoryDecision.predicted`).

    Raises:
        ConfigError: a rule of the precision that matches no layer, or cannot be carried out there.
        PlanError: formats that ranks which share a layer cannot carry out.
    """
    blocks, states = rows_of(placement, why)
    gemms = _gemms(config, architecture, reasons)
    _refuse_cuts(gemms, config, spec_of(architecture))
    return Plan(
        fingerprint=Fingerprint(
            model=model_fingerprint(architecture),
            device=device_name,
            torch=torch_version,
            world_size=config.layout.ranks,
        ),
        budget=_budget(config, device_is_host),
        gemms=gemms,
        blocks=blocks,
        states=states,
        layout=Layout(
            stages=_stages(config, architecture.num_layers),
            pp=config.layout.pp,
            schedule=config.layout.schedule if config.layout.pp > 1 else "",
            dp=config.layout.dp,
            fsdp=config.layout.fsdp,
            cp=config.layout.cp,
            cp_method=config.layout.cp_method,
            zero=config.layout.zero,
            tp=config.layout.tp,
            ep=config.layout.ep,
            etp=config.layout.etp,
            gathered=config.layout.gathered,
        ),
        predicted=predicted,
    )


def _stages(config: ResolvedConfig, num_blocks: int) -> list[list[int]]:
    if config.layout.pp == 1:
        return [[0, num_blocks - 1]]
    return [[blocks[0], blocks[-1]] for blocks in pipeline_of(config.layout, num_blocks).stages]


def _gemms(
    config: Config, architecture: Architecture, reasons: Mapping[str, str]
) -> dict[str, LinearPrecision]:
    rules, layers = config.precision_rules, spec_of(architecture).origins
    # Where one high precision is all there is, its own reason says more than its name.
    is_plain = rules.base in HIGH_PRECISION and not rules.rules
    only = reasons.get("precision", "set by the user") if is_plain else None
    if config.is_planned:
        pinned = parse_rules(config.precision).pinned(list(layers))
        start = f"until the first plan: {reasons.get('snip.start', 'set by the user')}"
        return {
            layer: choice if layer in pinned or layer == HEAD else dataclasses.replace(choice, reason=start)
            for layer, choice in rules.assign(layers).items()
        }
    return {
        layer: dataclasses.replace(choice, reason=only or choice.reason)
        for layer, choice in rules.assign(layers).items()
    }


def _refuse_cuts(gemms: Mapping[str, LinearPrecision], config: ResolvedConfig, spec: ModelSpec) -> None:
    """Refuse formats that ranks which share layers cannot run, and of planned ones every such candidate."""
    if not config.is_planned:
        _refuse_cut(gemms, config, spec)
        return
    rules = parse_rules(config.precision)
    try:
        for name in (*config.candidates, config.snip.start):
            _refuse_cut(rules.with_base(name).assign(spec.origins), config, spec)
    except PlanError as error:
        do = "plan among others (--snip.formats fp8_row,nvfp4), name this layer's in a rule, or use fewer ranks"
        raise PlanError(error.what, got=error.got, expected=error.expected, do=do) from None


def _refuse_cut(gemms: Mapping[str, LinearPrecision], config: ResolvedConfig, spec: ModelSpec) -> None:
    """Refuse formats whose scales are not those of the whole layer where ranks share it, or its tokens."""
    for layer, choice in gemms.items():
        linear = spec.linear(layer)
        key = "layout.tp" if linear.experts == 1 else "layout.etp"
        ranks = config.layout.tp if linear.experts == 1 else config.layout.etp
        if ranks == 1 or set(choice.recipes) <= {*HIGH_PRECISION}:
            continue
        begins = [features.start for piece in linear.pieces(ranks) for features in piece]
        features = linear.outputs if linear.cut == "outputs" else linear.inputs
        if linear.cut is None or any(features % ranks for features in (linear.rows or (features,))):
            raise PlanError(
                f"{layer} cannot be quantized on ranks that share layers",
                got="a layer of which its LinearSpec names no cut (routers run whole, on each rank's own tokens)"
                if linear.cut is None
                else f"pieces of unequal size: {features:,} {linear.cut} on {ranks:,} ranks",
                do=f"leave it in high precision ({layer}=bf16), change {key}, or set cut in a kind of your own",
            )
        check_cut(layer, choice, linear.cut, begins, features)


def refuse_misfit(memory: MemoryDecision, config: Config, budgets: Budgets) -> None:
    """Refuse settings of the user's own that do not fit; a plan that was searched for does.

    Where the host has memory of its own, too little of it for a checkpoint's copy makes training wait while one is
    written; it does not refuse the run.

    Args:
        budgets: what a user types for the bytes of a step.

    Raises:
        PlanError: with what would be enough.
    """
    if memory.fits:
        return
    account, machine = memory.account, memory.machine
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
    do = f"leave {' and '.join(given)} out: the plan then finds what fits, or says what would"
    if not given:  # of a pipeline, which nothing else is found for
        do = "give it that much, shorten --train.sequence, or raise --layout.pp"
    raise PlanError(
        f"the run does not fit in {what} with {settings or 'the blocks and states of its plan'}",
        got=f"a predicted peak of {peak:,} bytes{moment}, for which {enough_text(enough)} are enough",
        expected=f"at most {there_is}",
        do=do,
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
