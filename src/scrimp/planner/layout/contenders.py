"""The best of all candidates that a search looks at, and the best of each family of them.

Problem  Who asks for a plan asks next why not another one: with tp 8, with four stages.
Method   A family is one degree with one value, as (tp, 8); a candidate belongs to one of each degree. Of every family
         is kept the fastest that fits or, where none does, the one that needs the fewest bytes.
Limits   Families are those of layouts that the search looks at: degrees that nothing divides have none
         (`divisibility`).
Checked  tests/planner/layout/test_contenders.py: brute force over all candidates
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING

from scrimp.config.resolved import ResolvedLayout
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.stage_memory import RankBytes

if TYPE_CHECKING:
    from scrimp.planner.layout.search import Candidate

DEGREES = ("tp", "pp", "cp", "ep", "zero", "virtual")
"""Those that families are told apart by; copies and shards follow from them."""

Family = tuple[str, int]
"""A degree and its value."""


@dataclass(frozen=True)
class Misfit:
    """A setting that no device holds."""

    setting: Setting
    memory: tuple[RankBytes, ...]

    @property
    def bytes(self) -> float:
        """That the fullest rank needs."""
        return max(one.total for one in self.memory)

    @property
    def bytes_over(self) -> float:
        """By which the devices of some rank are too small."""
        return max(one.total - self.setting.at(rank).memory_bytes for rank, one in enumerate(self.memory))


def families_of(layout: ResolvedLayout) -> list[Family]:
    """The families of a layout, one for each degree."""
    return [(name, getattr(layout, name) or 1) for name in DEGREES]


class Contenders:
    """Those that are in the lead while a search goes on.

    Args:
        keep: how many of the best are wanted.
        has_families: whether the best of each family is wanted too, which takes about as long again.
    """

    def __init__(self, keep: int, *, has_families: bool = True) -> None:
        self.best: list[Candidate] = []
        self.families: dict[Family, Candidate | Misfit] = {}
        self._keep, self._has_families = keep, has_families

    def fits(self, one: Candidate | None) -> None:
        """Take in a candidate that fits, if it is one; of one layout and micro-batch the fastest stays."""
        if one is None:
            return
        place = _place(one)
        same = [each for each in self.best if _place(each) == place]
        if not same or one.seconds < same[0].seconds:
            self.best = sorted(
                [*(each for each in self.best if each not in same), one], key=lambda each: each.seconds
            )
            del self.best[self._keep :]
        for family in self._families_of(one.setting.layout):
            other = self.families.get(family)
            if other is None or isinstance(other, Misfit) or one.seconds < other.seconds:
                self.families[family] = one

    def does_not_fit(self, setting: Setting, memory: tuple[RankBytes, ...]) -> None:
        """Take in a setting that does not fit, at its leanest."""
        one = Misfit(setting, memory)
        for family in self._families_of(setting.layout):
            other = self.families.get(family)
            if other is None or (isinstance(other, Misfit) and one.bytes < other.bytes):
                self.families[family] = one

    def may_take(self, layout: ResolvedLayout, seconds: float) -> bool:
        """Whether a candidate that takes so many seconds or more, or does not fit, may still change anything."""
        return self._may_take(seconds, self._families_of(layout))

    def may_lead(self, layout: ResolvedLayout, seconds: float) -> bool:
        """Whether one that takes so many seconds or more may be among the best, or the best of as many stages."""
        return self._may_take(seconds, [one for one in self._families_of(layout) if one[0] == "pp"])

    def _may_take(self, seconds: float, families: list[Family]) -> bool:
        if len(self.best) < self._keep or seconds < self.best[-1].seconds:
            return True
        others = [self.families.get(family) for family in families]
        return any(other is None or isinstance(other, Misfit) or seconds < other.seconds for other in others)

    def _families_of(self, layout: ResolvedLayout) -> list[Family]:
        return families_of(layout) if self._has_families else []


def _place(one: Candidate) -> tuple[ResolvedLayout, int]:
    """Its layout, whatever the sizes of stages, and its micro-batch."""
    return dataclasses.replace(one.setting.layout, stages=None), one.setting.micro_batch
