"""The costs of a rank: parts that add up, what is gathered on top, and nothing changed for one process."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.config.resolved import ResolvedLayout
from scrimp.planner.memory.account import account_step
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.planner.memory.placement import Placement
from scrimp.planner.memory.shared_costs import shared_costs

KEEP = BlockCost(kept=500, forward_peak=700, backward_peak=900, accumulating_peak=1000)
WHOLE = StepCosts(
    classes=(
        BlockClass(weights=4000, gradients=4000, optimizer=8000, choices={"keep": KEEP}, parameters=1000),
    ),
    blocks=(0, 0, 0),
    ends=EndsCost(
        weights=2000, gradients=2000, optimizer=4000, head_peak=300, head_gradients=1000, embedding_peak=400
    ),
    boundary=100,
    resident=50,
    tables=20,
)
"""fp32 weights: 1,000 numbers of a block, 500 of the ends."""


def layout(fsdp: int, *, dp: int = 1, cp: int = 1, zero: int = 3) -> ResolvedLayout:
    return ResolvedLayout(dp=dp, fsdp=fsdp, cp=cp, zero=zero)


def of_rank(where: ResolvedLayout, micro_batches: int = 1) -> StepCosts:
    return shared_costs(WHOLE, where, parameter_bytes=4, micro_batches=micro_batches)


def peak(costs: StepCosts, *, accumulates: bool) -> int:
    return account_step(costs, Placement.resident(3), accumulates=accumulates).peak


def test_one_process_costs_what_it_did() -> None:
    assert of_rank(layout(1)) is WHOLE


@given(fsdp=st.integers(1, 64), cp=st.integers(1, 8), dp=st.integers(1, 8), zero=st.integers(1, 3))
def test_parts_of_all_ranks_hold_the_whole_and_hardly_more(fsdp: int, cp: int, dp: int, zero: int) -> None:
    where = layout(fsdp, dp=dp, cp=cp, zero=zero)
    found = of_rank(where)
    for whole, part in ((WHOLE.classes[0], found.classes[0]), (WHOLE.ends, found.ends)):
        for name in ("weights", "gradients", "optimizer"):
            one, of_all = getattr(part, name), getattr(whole, name)
            assert of_all <= one * where.shards < of_all + where.shards


@pytest.mark.parametrize("accumulates", [False, True])
def test_more_ranks_never_take_more_of_each_and_higher_stages_less(accumulates: bool) -> None:
    micro_batches = 2 if accumulates else 1
    for zero in (1, 2, 3):
        peaks = [
            peak(of_rank(layout(n, zero=zero), micro_batches), accumulates=accumulates) for n in (2, 4, 8, 64)
        ]
        assert peaks == sorted(peaks, reverse=True)
    for ranks in (2, 8):
        peaks = [
            peak(of_rank(layout(ranks, zero=zero), micro_batches), accumulates=accumulates) for zero in (1, 2)
        ]
        assert peaks[1] <= peaks[0]


def test_a_copy_on_each_rank_takes_more_than_one_process() -> None:
    """What is gathered and reduced comes on top of all states."""
    assert peak(of_rank(layout(1, dp=2)), accumulates=False) > peak(WHOLE, accumulates=False)


def test_what_is_gathered_is_there_in_passes_alone() -> None:
    found = of_rank(layout(4))
    gathered = WHOLE.ends.weights
    assert (found.resident, found.tables) == (WHOLE.resident + gathered, WHOLE.tables + gathered)
    choice = found.classes[0].choices["keep"]
    assert choice.kept == KEEP.kept
    assert choice.forward_peak == KEEP.forward_peak + 2 * 4000
    stays = of_rank(layout(4, zero=2)).classes[0].choices["keep"]
    assert stays.kept == KEEP.kept + 4000


def test_whole_sums_of_gradients_are_kept_for_several_micro_batches_alone() -> None:
    half = dataclasses.replace(WHOLE, classes=(dataclasses.replace(WHOLE.classes[0], weights=2000),))
    one, several = (
        shared_costs(half, layout(4, zero=1), parameter_bytes=2, micro_batches=count) for count in (1, 2)
    )
    assert one.classes[0].gradients == 1000
    assert several.classes[0].gradients == 4000  # float32, whatever the weights are
