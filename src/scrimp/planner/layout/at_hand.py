"""What a run asks the search on the ranks at hand, and its own step as the search predicts it.

Method   The run's configuration, decided without a search, says model, batch and format. What its user gave of the
         layout (what was written, and all that differs from the defaults), the micro-batch and `memory.*` stays; the
         rest is searched (`scrimp.planner.layout.search`). Where formats are planned while training, the budget of
         FLOPs in 4 bits counts, so that layout and memory are chosen for the formats to come; the formats
         themselves are planned later, from statistics.
Limits   Rules of precision for single layers are not counted, nor a budget of formats that is no share of FLOPs: then
         blocks run in the format that the run starts in. Levels of recomputation between those that the search knows
         count as the lighter one, and states of some blocks on the host as those of all. Whole copies, and all stages
         of ZeRO, up to `MANY` ranks.
Checked  tests/planner/layout/test_at_hand.py
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from scrimp.config.activations import LEVELS as ALL_LEVELS
from scrimp.config.activations import Activations, assign_activations
from scrimp.config.gathered import gathered_blocks
from scrimp.config.layout import AXES
from scrimp.config.resolved import ResolvedConfig, ResolvedLayout
from scrimp.config.schema import Config, LayoutConfig, MemoryConfig
from scrimp.errors import PlanError
from scrimp.models.shapes import ModelSizes
from scrimp.planner.hardware import Cluster
from scrimp.planner.layout.format_budget import FormatBudget
from scrimp.planner.layout.given_memory import AUTO, DEVICE, LEVELS, GivenMemory
from scrimp.planner.layout.search import Question
from scrimp.planner.layout.setting import BlockPlan, Offload, Setting
from scrimp.planner.layout.software import Software
from scrimp.precision import HIGH_PRECISION

MANY = 16
_SEARCHED = (*AXES, "cp_method", "ep", "etp", "virtual", "schedule", "stages", "zero")


def question_of(
    asked: Config,
    decided: ResolvedConfig,
    model: ModelSizes,
    cluster: Cluster,
    software: Software,
    given: Collection[str] = frozenset(),
) -> Question:
    """What is searched for a run.

    Args:
        asked: the settings as the user left them.
        decided: the same without a search.
        given: dotted keys that the user wrote: degrees among them stay, though they are the usual ones.
    """
    return Question(
        model=model,
        cluster=cluster,
        sequence=decided.train.sequence,
        global_batch=decided.train.sequences_per_step,
        software=software,
        precision=_precision(decided),
        formats=_formats(decided),
        given=_given(asked, given),
        memory=_memory(asked.memory, len(model.blocks)),
        shares_all=cluster.devices <= MANY,
    )


def as_decided(layout: ResolvedLayout) -> dict[str, Any]:
    """A layout as what is given of it, so that a search decides all else."""
    names = (*AXES, "ep", "etp", "zero", *(("virtual", "schedule", "stages") if layout.pp > 1 else ()))
    names += ("cp_method",) if layout.cp > 1 else ()
    return {name: value for name in names if (value := getattr(layout, name)) is not None}


def setting_of_run(
    config: ResolvedConfig,
    model: ModelSizes,
    cluster: Cluster,
    software: Software,
    activations: Sequence[str] | None = None,
) -> Setting | None:
    """A run as the search knows it; None where degrees, batch and devices do not fit one another.

    Args:
        activations: of each block; None: as `memory.activations` says, which keeps all where it is open.
    """
    count = len(model.blocks)
    text = "keep" if config.memory.activations == AUTO else config.memory.activations
    names = assign_activations(text, count) if activations is None else map(Activations.parse, activations)
    stay = gathered_blocks(config.layout, count) if config.layout.zero == 3 else frozenset()
    blocks = tuple(
        BlockPlan(recompute=LEVELS[_known(one.level)], offload=one.is_offloaded, gathered=number in stay)
        for number, one in enumerate(names)
    )
    if config.layout.pp > count:
        return None
    try:
        return Setting(
            model=model,
            cluster=cluster,
            sequence=config.train.sequence,
            global_batch=config.train.sequences_per_step,
            micro_batch=config.train.micro_batch,
            layout=config.layout,
            software=software,
            precision=_precision(config),
            blocks=blocks,
            offload=_offload(config.memory) or Offload(),
        )
    except PlanError:
        return None


def text_of(layout: LayoutConfig) -> str:
    """A layout in words: fsdp 2, zero 1."""
    names = [*AXES, "ep", "etp"]
    words = [f"{axis} {degree}" for axis in names if (degree := getattr(layout, axis) or 1) > 1]
    words += [f"zero {layout.zero}"] * ((layout.fsdp or 1) * layout.cp > 1)
    words += [layout.schedule, f"{layout.virtual} stages a rank"] * ((layout.virtual or 1) > 1)
    words += [layout.cp_method] * (layout.cp > 1)
    return ", ".join(words) or "one rank"


def _given(asked: Config, written: Collection[str]) -> dict[str, Any]:
    usual = vars(LayoutConfig())
    found = {name: value for name in _SEARCHED if (value := getattr(asked.layout, name)) not in (None, AUTO)}
    found = {
        name: value for name, value in found.items() if value != usual[name] or f"layout.{name}" in written
    }
    size = asked.train.micro_batch
    return found if size is None else found | {"micro_batch": size}


def _precision(config: ResolvedConfig) -> str:
    """The working format has the rate of bf16 in a measured cluster."""
    base = config.precision_rules.base
    return "bf16" if base is None or base in HIGH_PRECISION else base


def _formats(decided: ResolvedConfig) -> FormatBudget | None:
    share = decided.budget.fp4_flops
    if not decided.is_planned or share is None:
        return None
    return FormatBudget(names=decided.candidates, share=share)


def _memory(memory: MemoryConfig, count: int) -> GivenMemory:
    """What the user gave of memory, in levels that the search knows."""
    if memory.activations == AUTO:
        return GivenMemory(None, _offload(memory))
    known = [
        Activations(_known(one.level), one.is_offloaded)
        for one in assign_activations(memory.activations, count)
    ]
    rules = (f"{number}={one}" for number, one in enumerate(known))
    return GivenMemory(",".join([str(known[0]), *rules]), _offload(memory))


def _known(level: str) -> str:
    """The most of what the search knows that a level of recomputation makes again, too."""
    lighter = ALL_LEVELS[: ALL_LEVELS.index(level) + 1]
    return [one for one in lighter if one in LEVELS][-1]


def _offload(memory: MemoryConfig) -> Offload | None:
    """States that are said to live on the host; None: nothing is said."""
    states = {name: getattr(memory, name) for name in ("optimizer", "gradients", "weights")}
    if all(value == AUTO for value in states.values()):
        return None
    away = {name: value not in (AUTO, DEVICE, "0") for name, value in states.items()}
    return Offload(**away, master=away["optimizer"])
