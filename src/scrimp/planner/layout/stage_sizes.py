"""How many blocks each stage of a pipeline has, where equal numbers are not the fastest.

Problem  Embedding and head take time on the first and the last rank; ranks have devices of several kinds; and a rank
         whose memory is short makes more again than others.
Method   At first each rank's blocks are in proportion to its devices' rate. Then, of a plan that is among the best, one
         block at a time goes from the rank that is busy longest to the one that is busy least, as long as the step gets
         faster; what blocks do is decided again each time.
Limits   A local search: blocks move between two ranks at a time.
Source   Uneven stages over unequal devices and links: Holmes, arXiv 2312.03549
Checked  tests/planner/layout/test_stage_sizes.py: all sizes of small models
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from scrimp.config.resolved import ResolvedLayout
from scrimp.planner.layout.predict import rank_seconds
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.stages import blocks_of_stages, rank_of_stage, stages_of_rank


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
        sizes = [len(blocks) for blocks in blocks_of_stages(setting)]
        busy, layout = rank_seconds(setting), setting.layout
        slow, idle = busy.index(max(busy)), busy.index(min(busy))
        giver = max(stages_of_rank(layout, slow), key=lambda at: sizes[at])
        taker = min(stages_of_rank(layout, idle), key=lambda at: sizes[at])
        if sizes[giver] == 1 or giver == taker:
            break
        sizes[giver], sizes[taker] = sizes[giver] - 1, sizes[taker] + 1
        layout = _with_sizes(layout, sizes)
        other = solved(dataclasses.replace(setting, layout=layout, blocks=()))
        if other is None or other[1] >= seconds:
            break
        setting, seconds = other
    return setting, seconds


def _with_sizes(layout: ResolvedLayout, sizes: list[int]) -> ResolvedLayout:
    return dataclasses.replace(layout, stages=",".join(map(str, sizes)))
