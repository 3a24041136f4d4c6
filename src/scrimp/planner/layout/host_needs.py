"""The host memory that a search would have needed.

Method   For a device: its states there, and the activations of blocks that are given to leave, at once; of all that a
         host has, a search takes nine tenths.
Checked  tests/cli/test_plan_elsewhere.py: what is said to be enough is
"""

from __future__ import annotations

import dataclasses

from scrimp.planner.layout.block_activations import kept_bytes
from scrimp.planner.layout.block_choices import HOST_SHARE
from scrimp.planner.layout.contenders import Misfit
from scrimp.planner.layout.held_states import host_bytes
from scrimp.planner.layout.in_flight import passes_in_flight
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.search import Found
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.stage_memory import peak_bytes
from scrimp.planner.layout.stages import blocks_of_stages, stages_of_rank


def least_host_memory(question: Question, found: Found) -> float:
    """Bytes for each device with which a plan would have fit that its devices hold.

    Args:
        found: no plan, for lack of host memory alone.
    """
    if not any(one.offload for one in question.memory.blocks(len(question.model.blocks))):
        return found.nearest_host_bytes / HOST_SHARE
    settings = (
        dataclasses.replace(one.setting, offload=offload)
        for one in found.families.values()
        if isinstance(one, Misfit)
        for offload in question.on_host(one.setting.layout)
    )
    held = [one for one in settings if max(rank.total for rank in peak_bytes(one)) <= one.memory_bytes]
    needs = (host_bytes(one) + _leaving(one) for one in held)
    return min(needs, default=found.nearest_host_bytes) / HOST_SHARE


def _leaving(setting: Setting) -> float:
    """Activations of the rank that sends most to the host, of all its passes in flight."""
    stages, plans, blocks = blocks_of_stages(setting), setting.blocks, setting.model.blocks
    return max(
        passes_in_flight(setting, rank)
        * sum(
            kept_bytes(blocks[block], setting.in_formats(plans[block].formats))
            for stage in stages_of_rank(setting.layout, rank)
            for block in stages[stage]
            if plans[block].offload
        )
        for rank in range(setting.layout.pp)
    )
