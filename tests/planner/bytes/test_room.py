"""What is said to fit does fit, and less does not."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from made_up import MACHINE, QWEN_7B, llama_costs, machines, step_costs

from scrimp.planner.bytes.costs import StepCosts
from scrimp.planner.bytes.machine import Machine, Setup
from scrimp.planner.bytes.room import NoRoomError, smallest
from scrimp.planner.bytes.search import find, search


def test_a_budget_below_the_smallest_possible_says_what_would_fit() -> None:
    costs = llama_costs(QWEN_7B, 4096)
    machine = replace(MACHINE, device_bytes=8 * 2**30, host_bytes=32 * 10**9)
    with pytest.raises(
        NoRoomError, match=r"does not fit in memory.*got 8\.6 GB of device memory.*these would fit: .* GB"
    ) as caught:
        search(costs, machine, Setup(4))
    error = caught.value
    assert error.device_with_this_host is not None
    assert error.smallest_device <= error.device_with_this_host
    assert error.host_with_this_device is None  # the ends alone are larger
    for fitting in (
        replace(machine, device_bytes=error.device_with_this_host),
        replace(machine, device_bytes=error.smallest_device, host_bytes=error.its_host),
    ):
        assert find(costs, fitting, Setup(4)) is not None
    assert (
        find(
            costs,
            replace(machine, device_bytes=int(error.smallest_device * 0.98), host_bytes=10**12),
            Setup(4),
        )
        is None
    )


def test_a_host_too_small_is_told_how_much_it_needs() -> None:
    costs = llama_costs(QWEN_7B, 4096)
    machine = replace(MACHINE, host_bytes=64 * 10**9, pinned_bytes=16 * 10**9)
    with pytest.raises(NoRoomError, match="pinnable") as caught:
        search(costs, machine, Setup(4))
    enough = caught.value.host_with_this_device
    assert enough is not None
    assert search(costs, replace(machine, pinned_bytes=enough), Setup(4)).pinned_bytes <= enough


@settings(max_examples=80, deadline=None)
@given(costs=step_costs(), machine=machines())
def test_figures_of_any_problem_fit(costs: StepCosts, machine: Machine) -> None:
    error = smallest(costs, machine, Setup())
    roomy = replace(machine, device_bytes=error.smallest_device, host_bytes=error.its_host, pinned_bytes=None)
    assert find(costs, roomy, Setup()) is not None
    if error.host_with_this_device is not None:
        host = error.host_with_this_device
        assert find(costs, replace(machine, host_bytes=host, pinned_bytes=None), Setup()) is not None
    if error.device_with_this_host is not None:
        assert find(costs, replace(machine, device_bytes=error.device_with_this_host), Setup()) is not None
