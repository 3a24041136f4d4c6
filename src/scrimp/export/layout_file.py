"""A plan of a layout as a file for another trainer: what `scrimp export-layout` calls, and what its exporters share.

Problem  Trainers name degrees alike and mean different steps: one has no stages of unequal size, another reduces
         gradients when it likes. A file that says nearly the plan trains something that was never predicted.
Method   An exporter writes what its trainer can say, and lists what it cannot, with what runs instead. Where anything
         stands in that list, nothing is exported unless the nearest is asked for; then the file names all of it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

from scrimp.errors import PlanError
from scrimp.models.shapes import ModelShape
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Setting
from scrimp.planner.layout.stages import block_plans, blocks_of_stages

LayoutTarget = Literal["torchtitan", "megatron-bridge"]
MIXED = "mixed"


@dataclass(frozen=True)
class LayoutExport:
    """A file for another trainer, and what of the plan it does not say."""

    text: str
    how: str
    """The command that reads it."""
    not_as_planned: tuple[str, ...] = ()
    """What the trainer cannot be told, each with what it does instead."""
    notes: tuple[str, ...] = ()
    """What it does otherwise, whatever it is told."""


def export_layout(
    setting: Setting, model: str | ModelShape, target: LayoutTarget, *, approximate: bool = False
) -> LayoutExport:
    """A plan in the terms of a trainer.

    Args:
        setting: the plan.
        model: as its line names it.
        approximate: what cannot be said is left to what is nearest, and listed.

    Raises:
        PlanError: an unknown target, a model or a device that it has not, or a plan that it cannot be told.
    """
    if target not in get_args(LayoutTarget):
        raise PlanError(
            "there is no such target", got=repr(target), expected=", ".join(get_args(LayoutTarget))
        )
    if not isinstance(model, str) or model.endswith(".toml"):
        raise PlanError(
            "a shape cannot be exported",
            got="a model that has no name",
            expected="a preset",
            do="plan for a preset that the trainer has, too",
        )
    found = _exporters()[target](setting, model)
    if found.not_as_planned and not approximate:
        raise PlanError(
            f"{target} cannot be told all of this plan",
            got="; ".join(found.not_as_planned),
            do="write the nearest with --approximate, or plan with what it can",
        )
    return found


def _exporters() -> dict[str, Callable[[Setting, str], LayoutExport]]:
    from scrimp.export.megatron_bridge import to_megatron_bridge
    from scrimp.export.torchtitan import to_torchtitan

    return {"torchtitan": to_torchtitan, "megatron-bridge": to_megatron_bridge}


# -- what exporters ask of a plan --------------------------------------------------------------


def recomputation(setting: Setting) -> str | int:
    """none, selective, full, how many of each stage's first blocks are made again, or `MIXED`."""
    plans = [one.recompute for one in block_plans(setting)]
    kinds = set(plans)
    if len(kinds) == 1:
        return plans[0]
    counts = set()
    for blocks in blocks_of_stages(setting):
        own = [plans[index] for index in blocks]
        count = own.count(FULL)
        if own != [FULL] * count + [NONE] * (len(own) - count):
            return MIXED
        counts.add(count)
    return counts.pop() if len(counts) == 1 and SELECTIVE not in kinds else MIXED


def zero_stage(setting: Setting) -> int | str:
    """What ranks of fsdp share, by what happens: weights that all stay gathered are those of stage 2; `MIXED` where
    those of some blocks do."""
    stays = {one.gathered for one in block_plans(setting)}
    if setting.layout.zero < 3 or stays == {False}:
        return setting.layout.zero
    return 2 if stays == {True} else MIXED


def offloaded(setting: Setting) -> tuple[str, ...]:
    """What lives on the host, by name."""
    offload = setting.offload
    names = ("optimizer", "master", "gradients", "weights", "residuals")
    found = [name for name in names if getattr(offload, name)]
    leaving = sum(one.offload for one in block_plans(setting))
    return (*found, f"activations of {leaving} blocks") if leaving else tuple(found)


def states_in_other_formats(setting: Setting) -> tuple[str, ...]:
    """What a trainer that keeps masters and moments in fp32 cannot be told."""
    states = setting.software.states
    if states.are_usual:
        return ()
    words = f"moments in {states.name.removesuffix('-alone')}" + ", no masters" * (not states.masters)
    return (f"{words}: masters and moments are fp32",)


def uses_formats(setting: Setting) -> bool:
    """Whether single products have formats of their own."""
    return bool(setting.formats) or any(one.formats for one in block_plans(setting))


def has_equal_stages(setting: Setting) -> bool:
    """Whether all stages of the pipeline have as many blocks."""
    return len({len(blocks) for blocks in blocks_of_stages(setting)}) == 1


def comments(found: tuple[str, ...], notes: tuple[str, ...], opening: tuple[str, ...]) -> list[str]:
    """The first lines of a file."""
    lines = [*opening, *(f"Not as planned: {one}." for one in found), *(f"Note: {one}." for one in notes)]
    return [f"# {line}" for line in lines]
