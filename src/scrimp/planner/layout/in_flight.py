"""How many micro-batches each stage of a rank holds between their passes.

Problem  What a rank keeps of activations is that of the micro-batches whose forward pass is over and whose backward
         pass is not; a schedule that lets gradients of weights wait keeps what these are made of besides.
Method   Closed formulas where there are some, of p ranks, v stages on each and m micro-batches, in passes of all of a
         rank's blocks::

             gpipe         m
             1f1b          min(m, p - r)
             interleaved   min(2 (p - 1 - r) + (v - 1) p + 1, m v) / v

         Of zbv and dualpipev the order of passes (`pass_orders`) is gone through. At each moment stage s has f[s]
         micro-batches whose pass for inputs (I, or B) is still to be over, and n[s] whose gradients of weights are
         still to be made. W comes at the end of a B, so that one more waits for a moment. Only moments that no other
         exceeds in all of f and n are told. Of many micro-batches `_ROUNDS` for each rank are gone through: later ones
         take the same.
Source   PTD-P, arXiv 2104.04473, section 2.2; zero bubble, arXiv 2401.10241, section 6
Checked  tests/planner/layout/test_in_flight.py: what ranks that run hold (`scrimp.runtime.pipeline.held_by`)
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from scrimp.planner.layout.pass_orders import order_of, stages_of
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.stages import blocks_of_stages, splits_backward

_ROUNDS = 4


@dataclass(frozen=True)
class Held:
    """What the two stages of a rank hold at a moment, the one of the way there first."""

    flying: tuple[int, int]
    """Micro-batches between their forward and the end of their backward pass for inputs."""
    waiting: tuple[int, int]
    """Those whose gradients of weights are still to be made."""


def passes_in_flight(setting: Setting, rank: int) -> float:
    """How many passes of all its blocks a rank holds when they are most."""
    layout, m = setting.layout, setting.micro_batches
    virtual = layout.virtual or 1
    if splits_backward(layout):
        stages = blocks_of_stages(setting)
        there, back = (len(stages[one]) for one in stages_of(rank, layout.pp, 2, layout.schedule))
        most = max(one.flying[0] * there + one.flying[1] * back for one in held_by(setting, rank))
        return most / (there + back)
    if virtual == 1:
        return m if layout.schedule == "gpipe" else min(m, layout.pp - rank)
    return min(2 * (layout.pp - 1 - rank) + (virtual - 1) * layout.pp + 1, m * virtual) / virtual


def held_by(setting: Setting, rank: int) -> tuple[Held, ...]:
    """What a rank of a schedule that splits backward passes holds, at the moments that count."""
    layout = setting.layout
    return held_in(rank, layout.pp, min(setting.micro_batches, _ROUNDS * layout.pp), layout.schedule)


@lru_cache(maxsize=1024)
def held_in(rank: int, ranks: int, micro_batches: int, schedule: str) -> tuple[Held, ...]:
    """The same of so many micro-batches."""
    there, _ = stages_of(rank, ranks, 2, schedule)
    flying, waiting = [0, 0], [0, 0]
    moments: set[tuple[int, ...]] = set()
    for kind, stage, _ in order_of(rank, ranks, 2, micro_batches, schedule):
        at = int(stage != there)
        flying[at] += {"F": 1, "I": -1, "B": -1, "W": 0}[kind]
        waiting[at] += {"F": 0, "I": 1, "B": 1, "W": -1}[kind]
        moments.add((*flying, *waiting))
        waiting[at] -= kind == "B"
    most = [one for one in moments if not any(_exceeds(other, one) for other in moments)]
    return tuple(Held((one[0], one[1]), (one[2], one[3])) for one in sorted(most))


def _exceeds(other: tuple[int, ...], one: tuple[int, ...]) -> bool:
    return other != one and all(more >= less for more, less in zip(other, one, strict=True))
