"""What is said to fit does fit, and less does not."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MACHINE, QWEN_7B, llama_costs, machines, step_costs
from property_tests import examples

from scrimp.config import parse_bytes
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.room import (
    Budgets,
    NoRoomError,
    Room,
    enough_text,
    no_room,
    room_of,
    smallest_device,
)
from scrimp.planner.memory.search import find, search
from scrimp.planner.memory.states import host_bytes


@pytest.mark.slow
def test_a_budget_below_the_smallest_possible_says_what_would_fit() -> None:
    costs = llama_costs(QWEN_7B, 4096)
    machine = replace(MACHINE, device_bytes=8 * 2**30, host_bytes=32 * 10**9)
    with pytest.raises(
        NoRoomError,
        match=r"does not fit.*got 32\.0 GB of the host's and 8\.59 GB of device memory.*these would fit: .* GB",
    ) as caught:
        search(costs, machine, Setup(4))
    room = caught.value.room
    assert room is not None
    assert room.device_with_this_host is not None
    assert room.device <= room.device_with_this_host
    assert room.host_with_this_device is None  # the ends alone are larger
    for fitting in (
        replace(machine, device_bytes=room.device_with_this_host),
        replace(machine, device_bytes=room.device, host_bytes=room.its_host),
    ):
        assert find(costs, fitting, Setup(4)) is not None
    assert (
        find(
            costs,
            replace(machine, device_bytes=int(room.device * 0.98), host_bytes=10**12),
            Setup(4),
        )
        is None
    )


@pytest.mark.slow
def test_a_host_too_small_is_told_how_much_it_needs() -> None:
    costs = llama_costs(QWEN_7B, 4096)
    machine = replace(MACHINE, host_bytes=64 * 10**9, pinned_bytes=16 * 10**9)
    with pytest.raises(NoRoomError, match="pinnable") as caught:
        search(costs, machine, Setup(4))
    assert caught.value.room is not None
    enough = caught.value.room.host_with_this_device
    assert enough is not None
    found = search(costs, replace(machine, pinned_bytes=enough), Setup(4))
    assert host_bytes(costs, found.placement)[1] <= enough


@pytest.mark.slow
@examples(80)
@given(costs=step_costs(), machine=machines())
def test_figures_of_any_problem_fit(costs: StepCosts, machine: Machine) -> None:
    room = room_of(costs, machine, Setup())
    roomy = replace(machine, device_bytes=room.device, host_bytes=room.its_host, pinned_bytes=None)
    assert find(costs, roomy, Setup()) is not None
    if room.host_with_this_device is not None:
        host = room.host_with_this_device
        assert find(costs, replace(machine, host_bytes=host, pinned_bytes=None), Setup()) is not None
    least = smallest_device(costs, machine, Setup())
    assert least == room.device_with_this_host
    if least is not None:
        assert find(costs, replace(machine, device_bytes=least), Setup()) is not None


@given(nbytes=st.integers(1, 10**13))
def test_a_size_is_shown_rounded_up_and_can_be_typed(nbytes: int) -> None:
    assert nbytes <= parse_bytes(enough_text(nbytes)) <= 1.011 * nbytes + 10_000


def test_only_what_may_be_pinned_is_called_pinnable() -> None:
    assert Budgets(16 * 10**9, 10**9).words == "1.00 GB of the host's and 16.0 GB of device memory"
    assert Budgets(10**9, 10**9, pinned=10**8).words.startswith(
        "1.00 GB of the host's (100.0 MB pinnable) and"
    )
    assert "host" not in Budgets(10**9, 0).words


def test_a_checkpoints_copy_is_added_where_the_host_has_no_budget_of_its_own() -> None:
    room = Room(device=300_000_000, its_host=0, device_with_this_host=500_000_000, host_with_this_device=None)
    budgets = Budgets(10**8, 0, copy=40_000_000)
    text = str(no_room(room, budgets, beside_host=room, states=None, advice=[], is_certain=True))
    assert "these would fit: 540.0 MB of device memory; 300.0 MB of device memory, the smallest" in text
