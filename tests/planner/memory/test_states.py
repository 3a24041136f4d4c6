"""Bytes of states and activations against an account of everything that is there."""

from dataclasses import replace

import pytest

from scrimp.errors import PlanError
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.states import device_peak, floor_of, host_bytes

ENDS = EndsCost(0, 0, 0, head_peak=0, head_gradients=0, embedding_peak=0)


def chain(
    blocks: int, cost: BlockCost, weights: int = 0, gradients: int = 0, optimizer: int = 0
) -> StepCosts:
    return StepCosts(
        (BlockClass(weights, gradients, optimizer, {"c": cost}),), (0,) * blocks, ENDS, boundary=0
    )


@pytest.mark.parametrize(("on_host", "expected"), [(0, 50), (1, 50), (2, 50), (3, 40), (5, 20)])
def test_of_weights_on_the_host_two_blocks_are_there(on_host: int, expected: int) -> None:
    costs = chain(5, BlockCost(0, 0, 0), weights=10)
    assert floor_of(costs, States.split(5, weights=on_host), False).forward.max() == expected


def test_gradients_that_leave_take_one_further_block_and_with_accumulation_three() -> None:
    costs = chain(6, BlockCost(kept=0, forward_peak=0, backward_peak=10, accumulating_peak=10), gradients=10)
    here, away = (Placement(("c",) * 6, States.split(6, gradients=count)) for count in (0, 6))
    assert device_peak(costs, here, False) == 60
    assert device_peak(costs, away, False) == 20  # the block's own and those on their way
    assert device_peak(costs, away, True) == 40  # the sum, the one that comes, the one that leaves


def test_gradients_of_the_last_blocks_leave_so_that_they_never_meet() -> None:
    costs = chain(4, BlockCost(kept=0, forward_peak=0, backward_peak=10), gradients=10)
    states = States.split(4, gradients=2)
    assert states.on_host("gradients") == {2, 3}
    assert list(floor_of(costs, states, False).backward) == [10, 10, 10, 0]


def test_offloaded_activations_are_in_flight_during_the_next_block_alone() -> None:
    away, here = BlockCost(0, 5, 9, host=30), BlockCost(20, 25, 29)
    kind = BlockClass(0, 0, 0, {"away": away, "here": here})
    costs = StepCosts((kind,), (0, 0, 0), replace(ENDS, head_peak=1), boundary=0)

    def peak(*names: str) -> int:
        return device_peak(costs, Placement(tuple(names), States.split(3)), False)

    assert peak("here", "here", "away") == 20 + 20 + 9  # all copies down are over before the head
    assert peak("here", "away", "here") == 20 + 30 + 29
    assert peak("away", "here", "here") == max(30 + 29, 20 + 29)


def test_a_streamed_update_has_two_buffers_and_cpu_adam_none() -> None:
    costs = chain(4, BlockCost(0, 0, 0), weights=2, gradients=3, optimizer=50)
    streamed = floor_of(costs, States.split(4, optimizer=3), False)
    on_cpu = floor_of(costs, States.split(4, optimizer=3, update="cpu"), False)
    assert streamed.rest == 4 * 2 + 4 * 3 + 50 + 2 * 50
    # gradients of one block are there; those of the others have left before the embedding runs
    assert on_cpu.rest == 4 * 2 + 50 + 3


def test_host_bytes_are_all_that_is_there_and_cpu_adams_states_need_no_pinning() -> None:
    costs = chain(3, BlockCost(0, 0, 0, host=7), weights=2, gradients=3, optimizer=10)
    names = ("c",) * 3
    visiting = States.split(3, weights=1, gradients=2, optimizer=3)
    assert host_bytes(costs, Placement(names, visiting)) == (59, 59)
    # CPU Adam keeps the weights that it updates, wherever the device has its own
    assert host_bytes(costs, Placement(names, States.split(3, optimizer=2, update="cpu"))) == (51, 31)


def test_states_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="gradients of its blocks"):
        States((False,), (False,), (True,), "cpu")
    with pytest.raises(PlanError, match="different numbers"):
        States((False,), (False, True), (True,))
    with pytest.raises(PlanError, match="another model"):
        floor_of(chain(2, BlockCost(0, 0, 0)), States.split(3), False)
