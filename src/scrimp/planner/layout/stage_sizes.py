"""How many blocks each stage of a pipeline has, where equal numbers are not the fastest.

Problem  Embedding and head take time on the first and the last rank; ranks have devices of several kinds; and a rank
         whose memory is short makes more again than others.
Method   At first each rank's blocks are in proportion to its devices' rate. Then, of a plan that may lead, blocks move
         from ranks that are busy longest to those that are busy least: as many at once as balance takes, then one by
         one, as long as the step gets faster; what blocks do is decided again each time.
Limits   A local search: blocks move between two ranks at a time.
Source   Uneven stages over unequal devices and links: Holmes, arXiv 2312.03549
Checked  tests/planner/layout/test_stage_sizes.py: all sizes of small models
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence

from scrimp.config.pipeline import check_sizes
from scrimp.config.resolved import ResolvedLayout
from scrimp.errors import ConfigError
from scrimp.planner.layout.predict import rank_seconds
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.stages import blocks_of_stages, rank_of_stage, stages_of_rank

TAKERS = 2
"""Ranks that a block is moved to for a try, before sizes are left as they are."""


def in_proportion(setting: Setting) -> ResolvedLayout:
    """The setting's layout with stages as large as their devices are fast; as it is where all are alike."""
    layout, number = setting.layout, len(setting.model.blocks)
    if layout.pp == 1 or len(setting.cluster.groups) == 1:
        return layout
    count = layout.pp * (layout.virtual or 1)
    rates = [setting.at(rank_of_stage(layout, stage)).device.rate("bf16") or 0.0 for stage in range(count)]
    sizes = [max(1, int(number * rate / sum(rates))) for rate in rates]
    # What rounding leaves goes where a block more is felt least.
    while sum(sizes) < number:
        sizes[min(range(count), key=lambda at: (sizes[at] + 1) / rates[at])] += 1
    while sum(sizes) > number:
        sizes[max(range(count), key=lambda at: (sizes[at] > 1, sizes[at] / rates[at]))] -= 1
    return _with_sizes(layout, sizes)


def improved(
    setting: Setting,
    seconds: float,
    solved: Callable[[Setting], tuple[Setting, float] | None],
) -> tuple[Setting, float]:
    """A plan whose stages have better sizes, and its step; the same where none are found.

    Args:
        setting: with its blocks decided.
        seconds: of its step.
        solved: decides the blocks of a setting, and says how long its step takes; None where it does not fit.
    """
    while setting.layout.pp > 1:
        for layout in dict.fromkeys((balanced(setting)[0], *_next_sizes(setting))):
            other = solved(dataclasses.replace(setting, layout=layout, blocks=())) if layout else None
            if other is not None and other[1] < seconds:
                setting, seconds = other
                break
        else:
            break
    return setting, seconds


def balanced(setting: Setting, busy: Sequence[float] | None = None) -> tuple[ResolvedLayout | None, float]:
    """The layout with blocks moved from the busiest rank to the least busy one while that stays below it, and the share
    of the busiest rank's seconds that is left; None and 1 where nothing moves.

    A block is taken to be as long everywhere as on the leanest rank.

    Args:
        busy: `rank_seconds`, where they are known.
    """
    layout = setting.layout
    sizes = [len(blocks) for blocks in blocks_of_stages(setting)]
    if layout.pp == 1 or max(sizes) == 1:
        return None, 1.0
    busy, own = list(busy or rank_seconds(setting)), [stages_of_rank(layout, one) for one in range(layout.pp)]
    block = min(time / sum(sizes[at] for at in stages) for time, stages in zip(busy, own, strict=True))
    before, most = list(sizes), max(busy)
    while True:
        slow, idle = busy.index(max(busy)), busy.index(min(busy))
        giver, taker = max(own[slow], key=lambda at: sizes[at]), min(own[idle], key=lambda at: sizes[at])
        if sizes[giver] == 1 or busy[idle] + block >= busy[slow]:
            return (None, 1.0) if sizes == before else (_with_sizes(layout, sizes), max(busy) / most)
        sizes[giver], sizes[taker] = sizes[giver] - 1, sizes[taker] + 1
        busy[slow], busy[idle] = busy[slow] - block, busy[idle] + block


def _next_sizes(setting: Setting) -> Iterator[ResolvedLayout]:
    """The layout with a block moved from the busiest rank to one of the least busy, the least busy first."""
    sizes, layout = [len(blocks) for blocks in blocks_of_stages(setting)], setting.layout
    slow, *others = sorted(range(layout.pp), key=rank_seconds(setting).__getitem__, reverse=True)
    giver = max(stages_of_rank(layout, slow), key=lambda at: sizes[at])
    for idle in reversed(others[-TAKERS:]):
        taker = min(stages_of_rank(layout, idle), key=lambda at: sizes[at])
        if sizes[giver] > 1:
            moved = list(sizes)
            moved[giver], moved[taker] = sizes[giver] - 1, sizes[taker] + 1
            yield _with_sizes(layout, moved)


def is_split(stages: str | None, layout: ResolvedLayout, blocks: int) -> bool:
    """Whether sizes that are given, as 3,4,4,3, are those of so many blocks in the layout's stages."""
    if stages is None:
        return True
    try:
        check_sizes(stages, layout.pp * (layout.virtual or 1), blocks)
    except ConfigError:
        return False
    return True


def _with_sizes(layout: ResolvedLayout, sizes: list[int]) -> ResolvedLayout:
    return dataclasses.replace(layout, stages=",".join(map(str, sizes)))
