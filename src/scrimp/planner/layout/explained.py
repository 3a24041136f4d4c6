"""What spoke against the plans that a search did not choose.

Method   The best plan of a family (`contenders`) beside the best of all. Where it fits nowhere, memory killed it: by
         the bytes that are over, and the category that grew most against the best plan. Else the cause whose seconds
         grew most: `compute` where products are smaller, `recompute` where more than half of it is made again to save
         memory, `link` for exchanges that nothing hides, `bubble`, `optimizer`, or `other` (all wait for the slowest).
Limits   A plan may lose by several causes; the table names the largest, the full comparison all.
Checked  tests/planner/layout/test_explained.py
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scrimp.planner.layout.contenders import Family, Misfit, families_of
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.search import Candidate, Found
from scrimp.planner.layout.setting import NONE
from scrimp.planner.layout.stage_memory import RankBytes
from scrimp.planner.layout.stages import block_plans

CAUSES = {
    "compute": "compute",
    "communication_exposed": "link",
    "bubble": "bubble",
    "optimizer": "optimizer",
    "other": "other",
}
"""Parts of a step, and what they are called where they kill a plan."""


@dataclass(frozen=True)
class Loser:
    """The best of a family, and what made it lose."""

    family: Family
    best: Candidate | Misfit
    killed_by: str
    """memory, recompute, or one of `CAUSES`."""
    part: str
    """The category of bytes, or the part of a step, that grew most against the best plan."""
    amount: float
    """Bytes that are over, or seconds that this part is longer."""
    slower: float | None
    """Share of the best plan's step that it takes longer; None: it does not fit."""


@dataclass(frozen=True)
class Beside:
    """One number of two plans."""

    name: str
    best: float
    other: float

    @property
    def more(self) -> float:
        """By how much the other plan's number exceeds the best plan's."""
        return self.other - self.best


def losers(found: Found) -> list[Loser]:
    """The best of each family that the best plan is not of, by degree and value."""
    if not found.best:
        return []
    best = found.best[0]
    own = set(families_of(best.setting.layout))
    return [loser(family, one, best) for family, one in found.families.items() if family not in own]


def loser(family: Family, one: Candidate | Misfit, best: Candidate) -> Loser:
    """What made one plan lose against the best."""
    if isinstance(one, Misfit):
        category = max(bytes_beside(best, one), key=lambda each: each.more).name
        over = one.bytes_over
        return Loser(family, one, "memory", category, over, None)
    part = max(seconds_beside(best, one), key=lambda each: each.more)
    killed_by = CAUSES[part.name]
    if part.name == "compute" and again_seconds(one) - again_seconds(best) > part.more / 2:
        killed_by = "recompute"
    return Loser(family, one, killed_by, part.name, part.more, one.seconds / best.seconds - 1.0)


def seconds_beside(best: Candidate, other: Candidate) -> list[Beside]:
    """Parts of both steps."""
    ours, theirs = best.prediction.seconds, other.prediction.seconds
    return [Beside(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in _names(ours, theirs)]


def bytes_beside(best: Candidate | Misfit, other: Candidate | Misfit) -> list[Beside]:
    """Categories of the fullest rank of each."""
    ours, theirs = fullest(best.memory).categories, fullest(other.memory).categories
    return [Beside(name, ours.get(name, 0.0), theirs.get(name, 0.0)) for name in _names(ours, theirs)]


def fullest(memory: Sequence[RankBytes]) -> RankBytes:
    """The rank with the highest peak."""
    return max(memory, key=lambda one: one.total)


def reason_text(one: Loser, best: Candidate) -> str:
    """What killed a plan, in words."""
    if one.killed_by == "memory" and one.amount <= 0:
        return "the host has no room for what leaves"
    if one.killed_by == "memory":
        return f"{one.amount / 2**30:,.1f} GiB over, most by {one.part}"
    stages, wanted = one.best.setting.layout.pp, best.setting.layout.pp
    compute = "smaller products or uneven stages" if stages > wanted else "smaller products"
    if len(best.setting.cluster.groups) > 1 and stages < wanted:
        compute = "waiting for the slower devices"
    words = {
        "compute": compute,
        "recompute": "what is made again to save memory",
        "link": "exchanges that nothing hides",
        "bubble": "waiting for other stages",
        "optimizer": "updates",
        "other": "waiting for the slowest device",
    }
    return f"{one.amount:.2g} s of {words[one.killed_by]}"


def again_seconds(one: Candidate) -> float:
    """Seconds of a step in which a plan computes again what it did not keep."""
    plans = block_plans(one.setting)
    if all(plan.recompute == NONE for plan in plans):
        return 0.0
    keeps_all = tuple(dataclasses.replace(plan, recompute=NONE) for plan in plans)
    free = predict(dataclasses.replace(one.setting, blocks=keeps_all))
    return one.prediction.seconds["compute"] - free.seconds["compute"]


def _names(ours: Mapping[str, float], theirs: Mapping[str, float]) -> list[str]:
    return [*ours, *(name for name in theirs if name not in ours)]
