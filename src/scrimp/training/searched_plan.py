"""A plan that `scrimp plan --hardware ... --save` wrote, as the settings of a run on this machine.

Problem  The search decides layout, formats and what each block makes again, keeps gathered or sends away, together. A
         run that is to do exactly this needs all of it, on the hardware that it was predicted for.
Method   Each choice has its setting, and the run's own config.toml keeps it; there is no other form of it::

             degrees, stage, stages      layout.*            gathered of blocks      layout.gathered
             micro-batch, batch          train.*             recompute, offload      memory.activations
             formats                     precision           states on the host      memory.optimizer, ...
             formats of states           train.parameters, optimizer.master_weights, optimizer.moments
             torch's kernel of attention train.deterministic, data.mask_documents

         full recomputation is the level `block`, selective `norms` (what Scrimp's file counts).
Refused  What has no setting, all of it by name, and hardware that is not this machine: another number of devices, on
         all nodes or on each, other devices, or other memory.
Limits   A device is known by words of its name and by its memory, within `MEMORY_TOLERANCE`; on a CPU, whose memory
         ranks share, more than the host has is refused. Links and rates are not compared: the first steps say what they
         are worth (`scrimp.training.layout_proof`). Of `train.deterministic` false beside masked documents, which
         leaves the kernel of attention as it is, a plan has no trace: the run must be given it too.
Checked  tests/training/test_searched_plan.py
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from scrimp.config import Config, flatten, replace_values
from scrimp.config.gathered import gathered_text
from scrimp.errors import ConfigError, PlanError
from scrimp.models import full_name
from scrimp.models.shapes import ModelShape
from scrimp.planner.hardware import Cluster
from scrimp.planner.layout.execution import Execution
from scrimp.planner.layout.kernels import TORCH
from scrimp.planner.layout.lines import Line, setting_of
from scrimp.planner.layout.setting import BlockPlan, Setting
from scrimp.planner.layout.stages import block_plans
from scrimp.profiler import Device
from scrimp.profiler.this_device import MEMORY_TOLERANCE, is_same_name, memory_bytes
from scrimp.report.units import format_bytes
from scrimp.training.memory.simulated import LEVELS, UNCOMPILED

_DO = "plan for this machine, or change the plan's line"


def with_plan(
    config: Config, line: Line, given: Collection[str], origin: Path
) -> tuple[Config, frozenset[str]]:
    """A configuration with all that a plan decides, and the keys that are given now.

    Args:
        given: dotted keys that the user wrote.
        origin: the plan's file.

    Raises:
        ConfigError: the user gave something else for what the plan decides.
        PlanError: Scrimp cannot carry it out.
    """
    setting = setting_of(line)
    refused = list(_not_carried_out(line, setting))
    if refused:
        raise PlanError(
            f"{origin} decides what scrimp train cannot carry out",
            got="; ".join(refused),
            expected="choices that have a setting",
            do="search with these left out, or change the plan's line",
        )
    settings = settings_of(line, setting)
    values = flatten(config)
    for key in sorted(settings.keys() & set(given)):
        if values[key] != settings[key]:
            raise ConfigError(
                f"{key} is given, and {origin} decides it otherwise",
                got=f"{values[key]} beside {settings[key]} of the plan",
                expected="one of the two",
                do=f"leave {key} out, or search with it given",
            )
    return replace_values(config, settings), frozenset(given) | settings.keys()


def settings_of(line: Line, setting: Setting) -> dict[str, Any]:
    """What a plan decides, by dotted key."""
    return {
        "model.preset": line.model,
        "train.sequence": setting.sequence,
        "train.batch_tokens": setting.sequence * setting.global_batch,
        "precision": _rules(setting.precision, block_plans(setting)),
        **_states(setting),
        **choices_of(setting),
        **({"train.compile": "off"} if setting.software.name == UNCOMPILED else {}),
        **_unordered(setting),
    }


def _states(setting: Setting) -> dict[str, Any]:
    """Formats of weights and moments, where they are not the usual ones."""
    states = setting.software.states
    if states.are_usual:
        return {}
    chosen = {"optimizer.master_weights": states.masters, "optimizer.moments": states.moments}
    return {"train.parameters": "bf16"} | chosen


def _unordered(setting: Setting) -> dict[str, Any]:
    """What allows torch's own choice of a kernel of attention, where the plan has that."""
    if setting.software.attention_kernel != TORCH:
        return {}
    return {"train.deterministic": False, "data.mask_documents": False}


def choices_of(setting: Setting) -> dict[str, Any]:
    """What a search decides of a run whose model, batch and formats are given, by dotted key."""
    layout, plans = setting.layout, block_plans(setting)
    found: dict[str, Any] = {
        "train.micro_batch": setting.micro_batch,
        "memory.activations": _activations(plans),
    }
    names = ["pp", "dp", "fsdp", "cp", "tp", "ep", "etp"]
    names += ["cp_method"] * (layout.cp > 1) + ["virtual", "schedule", "stages"] * (layout.pp > 1)
    found |= {f"layout.{name}": getattr(layout, name) for name in names}
    if layout.shards > 1:
        found["layout.zero"] = layout.zero
        stay = frozenset(number for number, plan in enumerate(plans) if plan.gathered)
        found["layout.gathered"] = gathered_text(stay) if layout.zero == 3 else None
    on_host = {name: getattr(setting.offload, name) for name in ("weights", "gradients", "optimizer")}
    return found | {f"memory.{name}": "host" for name, is_there in on_host.items() if is_there}


def _activations(plans: tuple[BlockPlan, ...]) -> str:
    names = [LEVELS[one.recompute] + "+offload" * one.offload for one in plans]
    most = max(names, key=names.count)
    rules = []
    for name in dict.fromkeys(names):
        blocks = gathered_text(frozenset(i for i, one in enumerate(names) if one == name)) or ""
        rules += [f"{run}={name}" for run in blocks.split(",")] if name != most else []
    return ",".join([most, *rules])


def _rules(precision: str, plans: tuple[BlockPlan, ...]) -> str:
    """Rules of precision that give each product its recipe: of all blocks where they agree, else block by block."""
    rules = []
    for product in dict.fromkeys(product for one in plans for product, _ in one.formats):
        recipes = [dict(one.formats).get(product, precision) for one in plans]
        if len(set(recipes)) == 1:
            rules.append(f"blocks.*.{product}={recipes[0]}")
            continue
        rules += [
            f"{full_name(number, product)}={recipe}"
            for number, recipe in enumerate(recipes)
            if recipe != precision
        ]
    return ",".join([precision, *rules])


def _not_carried_out(line: Line, setting: Setting) -> Iterator[str]:
    layout = setting.layout
    if isinstance(line.model, ModelShape) or line.model.endswith(".toml"):
        yield "a model that is a shape alone (scrimp train takes presets and weights)"
    if line.software not in ("scrimp", UNCOMPILED):
        yield f"the step of {line.software}"
    if setting.precision == "fp16":
        yield "precision fp16"
    if setting.recompute_parts:
        yield "recompute_parts"
    if setting.execution != Execution():
        yield "execution"
    if layout.tp > 1 and not setting.sequence_parallel:
        yield "tp without sequence parallelism"
    if layout.shards > 1 and layout.zero == 0:
        yield "zero 0 on ranks that share weights"
    yield from _not_on_the_host(setting)


def _not_on_the_host(setting: Setting) -> Iterator[str]:
    offload = setting.offload
    if offload.residuals:
        yield "offload.residuals without activations"
    if offload.optimizer != offload.master and setting.software.states.masters:
        yield "offload.optimizer without offload.master, or the reverse: masters live with the optimizer's states"


def refuse_other_hardware(cluster: Cluster, device: Device, origin: Path) -> None:
    """Refuse a plan whose hardware, named or described in a file of the user's, is not this machine.

    Raises:
        PlanError: with what the plan says and what is here.
    """
    what = f"{origin} is a plan for other hardware than this"
    ranks = device.world.size
    if cluster.devices != ranks:
        raise PlanError(
            what,
            got=f"{cluster.name}: {cluster.devices:,} devices",
            expected=f"{ranks:,}, as many as ranks were started",
            do=f"start {cluster.devices:,} ranks (scrimp launch --ranks, torchrun or srun); else {_DO}",
        )
    each = {group.used for group in cluster.groups}
    if device.ranks_here not in each:
        raise PlanError(
            what,
            got=f"{cluster.name}: {' or '.join(f'{one:,}' for one in sorted(each))} devices of each node",
            expected=f"{device.ranks_here:,}, as many as share a host here",
            do=_DO,
        )
    known = [group.node.device for group in cluster.groups]
    same = [one for one in known if is_same_name(one.name, device.name)]
    if not same:
        raise PlanError(
            what,
            got=f"{cluster.name}: {' or '.join(one.name for one in known)}",
            expected=device.name,
            do=_DO,
        )
    here = memory_bytes(device)
    if not any(_fits_memory(one.memory_bytes, here, is_host=device.is_host) for one in same):
        raise PlanError(
            what,
            got=f"{cluster.name}: {format_bytes(same[0].memory_bytes)} of memory on each device",
            expected=f"{format_bytes(here)}, as {device.name} has here",
            do=f"correct memory_bytes of the hardware file and search again; else {_DO}",
        )


def _fits_memory(planned: float, here: int, *, is_host: bool) -> bool:
    return planned <= here if is_host else abs(planned / here - 1.0) <= MEMORY_TOLERANCE
