"""Seconds of a step against ProTrain's formulas and bounds that hold for any costs."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MACHINE, machines, step_costs

from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.timeline import Timeline, step_seconds, step_timeline

ENDS = EndsCost(0, 0, 0, head_peak=0, head_gradients=0, embedding_peak=0)
FAST = replace(
    MACHINE,
    upload=1.0,
    download=1.0,
    upload_together=1.0,
    download_together=1.0,
    cpu_adam=1.0,
    device_memory=1e12,
)
"""A byte or a parameter takes one second on the link and on the CPU."""
small = st.integers(1, 9)


def chain(blocks: int, forward: float, backward: float, **sizes: int) -> StepCosts:
    host = sizes.pop("host", 0)
    cost = BlockCost(0, 0, 0, host=host, forward_seconds=forward, backward_seconds=backward)
    kind = BlockClass(**({"weights": 0, "gradients": 0, "optimizer": 0} | sizes), choices={"c": cost})
    return StepCosts((kind,), (0,) * blocks, ENDS, boundary=0)


def timeline(costs: StepCosts, states: States, setup: Setup, machine: Machine = FAST) -> Timeline:
    return step_timeline(costs, Placement(("c",) * len(costs.blocks), states), setup, machine)


@given(blocks=st.integers(3, 12), forward=small, backward=small, copy=small)
def test_uploads_of_uniform_blocks_take_protrains_maxima_and_one_block_more(
    blocks: int, forward: int, backward: int, copy: int
) -> None:
    costs = chain(blocks, forward, backward, weights=copy, gradients=0, parameters=1)
    found = timeline(costs, States.split(blocks, weights=blocks), Setup())
    upward = copy + (blocks - 1) * max(forward, copy) + forward
    # backward: the weights of two blocks are there; the third's come when the first is done
    third = max(2 * backward, backward + copy)
    downward = third + (blocks - 3) * max(backward, copy) + backward
    update = (blocks + 1) * copy  # up and down at once, one block after the other
    assert found.compute + found.exposed["weights"] == pytest.approx(upward + downward)
    assert found.seconds <= upward + downward + 2 * update


@given(blocks=st.integers(1, 10), backward=small, adam=small)
def test_cpu_adam_comes_after_the_backward_pass(blocks: int, backward: int, adam: int) -> None:
    costs = chain(blocks, 1, backward, parameters=adam)
    states = States.split(blocks, optimizer=blocks, update="cpu")
    assert timeline(costs, states, Setup()).seconds == pytest.approx(blocks * (1 + backward + adam))


@given(blocks=st.integers(1, 8), weight=small)
def test_new_weights_of_cpu_adam_come_after_the_backward_pass(blocks: int, weight: int) -> None:
    costs = chain(blocks, 1, 1, weights=weight, parameters=1)
    states = States.split(blocks, optimizer=blocks, update="cpu")
    found = timeline(costs, states, Setup(), replace(FAST, cpu_adam=1e9))
    assert found.seconds == pytest.approx(2 * blocks + blocks * weight)


@given(blocks=st.integers(1, 8), state=small, weight=small)
def test_a_streamed_update_comes_and_goes_at_once(blocks: int, state: int, weight: int) -> None:
    costs = chain(blocks, 1, 1, optimizer=state, weights=weight)
    found = timeline(costs, States.split(blocks, optimizer=blocks), Setup())
    assert found.seconds == pytest.approx(2 * blocks + (blocks + 1) * state)
    assert found.exposed["update"] == pytest.approx((blocks + 1) * state)


def test_the_first_two_blocks_come_while_the_device_updates_what_lives_there() -> None:
    costs = replace(chain(2, 1, 1, optimizer=5), ends=replace(ENDS, weights=20))
    found = timeline(costs, States.split(2, optimizer=2), Setup(), replace(FAST, device_memory=1.0))
    # both blocks come under the resident update; then each is updated, and leaves before the next
    assert found.seconds == pytest.approx(4 + 40 + 2 * (2 * 5 + 5))


def test_streamed_updates_go_first_block_first_once_the_gradients_have_left() -> None:
    kind = chain(2, 1, 1, gradients=10).classes[0]
    other = replace(kind, gradients=0, optimizer=10)
    costs = replace(chain(2, 1, 1), classes=(kind, other), blocks=(0, 1))
    found = timeline(costs, States((False,) * 2, (True, False), (False, True)), Setup())
    assert found.seconds == pytest.approx(4 + 10 + 10 + 10 + 10)  # down, up again, the other up, and down


@given(blocks=st.integers(1, 8), count=st.integers(1, 6), forward=small, backward=small)
def test_without_copies_a_step_is_its_computing(blocks: int, count: int, forward: int, backward: int) -> None:
    costs = chain(blocks, forward, backward)
    found = timeline(costs, States.split(blocks), Setup(count))
    assert found.seconds == found.compute == count * blocks * (forward + backward)


@given(blocks=st.integers(4, 12), size=small)
def test_offloaded_activations_cost_nothing_while_the_next_block_computes_longer(
    blocks: int, size: int
) -> None:
    costs = chain(blocks, size + 1, size + 1, host=size)
    found = timeline(costs, States.split(blocks), Setup())
    # but the last block's: they go and come back while nothing computes
    assert found.exposed["activations"] == pytest.approx(2 * size)
    assert found.hidden["activations"] == pytest.approx(2 * size * (blocks - 1))


def test_a_block_waits_until_the_one_before_the_last_has_sent_its_activations() -> None:
    kind = chain(3, 1, 1).classes[0]
    away = replace(kind, choices={"c": replace(kind.choices["c"], host=10)})
    costs = replace(chain(3, 1, 1), classes=(kind, away), blocks=(1, 0, 0))
    found = timeline(costs, States.split(3), Setup())
    # one block, the copy, the third block, backward passes; it comes back as soon as the second one's begins
    assert found.seconds == pytest.approx(1 + 10 + 1 + 1 + 10 + 1)


def test_gradient_sums_come_back_from_the_second_micro_batch_on() -> None:
    costs = chain(4, 1, 1, gradients=10)
    states = States.split(4, gradients=4)
    one = timeline(costs, states, Setup(1))
    three = timeline(costs, states, Setup(3))
    assert one.lanes["upload"] == pytest.approx(40)  # the update's
    assert three.lanes["upload"] == pytest.approx(40 + 2 * 40)
    assert three.lanes["download"] == pytest.approx(3 * 40)


@given(data=st.data(), costs=step_costs(), machine=machines(), count=st.integers(1, 4))
def test_any_step_lies_between_its_longest_lane_and_the_sum_of_lanes(
    data: st.DataObject, costs: StepCosts, machine: Machine, count: int
) -> None:
    blocks = len(costs.blocks)
    flags = st.tuples(*[st.booleans()] * blocks)
    weights, gradients, optimizer = data.draw(flags), data.draw(flags), data.draw(flags)
    update = data.draw(st.sampled_from(("device", "cpu")))
    if update != "device":
        gradients = tuple(g or o for g, o in zip(gradients, optimizer, strict=True))
    names = [data.draw(st.sampled_from(list(costs.classes[number].choices))) for number in costs.blocks]
    states = States(weights, gradients, optimizer, update)
    found = step_timeline(costs, Placement(tuple(names), states), Setup(count), machine)
    assert step_seconds(costs, Placement(tuple(names), states), Setup(count), machine) == found.seconds
    assert max(found.lanes.values()) <= found.seconds * (1 + 1e-9)
    assert found.seconds <= math.fsum(found.lanes.values()) * (1 + 1e-9)
    assert found.compute + math.fsum(found.exposed.values()) == pytest.approx(found.seconds)
