"""Which blocks of a rank are planned alike, where a number of them is given."""

from __future__ import annotations

import dataclasses

import pytest
from published_settings import LLAMA_8B, setting

from scrimp.planner.layout.setting import FULL, Offload
from scrimp.planner.layout.stages import block_plans, blocks_of_ranks


@pytest.mark.parametrize(
    ("schedule", "layout"),
    [
        ("1f1b", {"pp": 1, "virtual": 1}),
        ("1f1b", {"pp": 8, "virtual": 1}),
        ("interleaved", {"pp": 8, "virtual": 4}),
        ("interleaved", {"pp": 4, "virtual": 2, "stages": "3,4,5,4,5,4,3,4"}),
        ("zbv", {"pp": 4, "virtual": 2}),
    ],
)
@pytest.mark.parametrize("number", [0, 1, 2, 3, 7, 40])
def test_a_number_of_blocks_is_that_of_each_rank(schedule: str, layout: dict[str, int], number: int) -> None:
    one = setting(LLAMA_8B, schedule=schedule, recompute=number, **layout)
    plans = block_plans(dataclasses.replace(one, offload=Offload(activation_layers=number)))
    for own in blocks_of_ranks(one):
        expected = min(number, len(own))
        assert sum(plans[block].recompute == FULL for block in own) == expected
        assert sum(plans[block].offload for block in own) == expected


def test_stages_of_a_rank_share_a_number_of_blocks() -> None:
    plans = block_plans(setting(pp=4, virtual=2, schedule="interleaved", recompute=3))
    assert [block for block, plan in enumerate(plans) if plan.recompute == FULL] == [
        *(first + at for first in (0, 4, 8, 12) for at in (0, 1)),
        *(16, 20, 24, 28),
    ]
