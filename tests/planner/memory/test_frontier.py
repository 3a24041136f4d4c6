"""Alternatives, and the binding constraint."""

from dataclasses import replace

import pytest
from made_up import MACHINE, QWEN_7B, llama_costs

from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.frontier import WORTH, Searches, binding, frontier, resident_bytes
from scrimp.planner.memory.machine import Setup
from scrimp.planner.memory.search import search
from scrimp.planner.memory.search_space import Split

SHAPE = QWEN_7B | {"blocks": 12, "vocabulary": 32000}


def small(micro_batch: int) -> StepCosts:
    return llama_costs(SHAPE, 2048 * micro_batch)


@pytest.mark.slow
def test_larger_devices_are_named_with_what_they_save() -> None:
    machine = replace(MACHINE, device_bytes=12 * 2**30, host_bytes=20 * 10**9)
    plan = search(small(2), machine, Setup(2))
    found = frontier(Searches(plan))
    assert found
    shares = [other.faster for other in found]
    assert shares == sorted(shares)
    for other in found:
        assert other.more_bytes == other.plan.account.peak - machine.device_bytes > 0
        assert other.plan.timeline.seconds == pytest.approx((1 - other.faster) * plan.timeline.seconds)
        assert other.faster > WORTH
    assert found[-1].plan.placement.states.is_resident


def test_nothing_is_offered_to_a_plan_that_has_everything() -> None:
    machine = replace(MACHINE, device_bytes=resident_bytes(small(2), Setup(2)))
    plan = search(small(2), machine, Setup(2))
    assert plan.placement.states.is_resident
    assert set(plan.placement.activations) == {"keep"}
    assert frontier(Searches(plan)) == []
    assert binding(Searches(plan)) == ("computing", 0.0)


@pytest.mark.parametrize(
    ("gib", "gigabytes", "link", "expected"),
    [(8, 20, 4e10, "device memory"), (6, 30, 2e10, "link"), (10, 16, 1e12, "host memory")],
)
@pytest.mark.every(3)
def test_what_binds_is_what_more_of_would_help_most(
    gib: int, gigabytes: int, link: float, expected: str
) -> None:
    rates = dict.fromkeys(("upload", "download", "upload_together", "download_together"), link)
    machine = replace(MACHINE, device_bytes=gib << 30, host_bytes=gigabytes * 10**9, **rates)
    name, gain = binding(Searches(search(small(2), machine, Setup(1))))
    assert gain > WORTH
    assert name == expected


@pytest.mark.slow
def test_states_that_the_user_placed_are_not_moved_by_what_is_offered() -> None:
    machine = replace(MACHINE, device_bytes=10 * 2**30)
    placed = Split(0, 12, 12)
    plan = search(small(2), machine, Setup(2), placed)
    found = frontier(Searches(plan, placed))
    assert found
    for other in found:
        assert other.plan.placement.states == plan.placement.states
        assert other.more_bytes > 0
    elsewhere = frontier(Searches(plan))
    assert elsewhere[-1].plan.placement.states.is_resident
    assert elsewhere[-1].faster > found[-1].faster
    assert binding(Searches(plan))[1] > binding(Searches(plan, placed))[1]


def test_what_needs_no_larger_device_is_no_offer_of_one() -> None:
    """All states on the host by setting, where they fit on the device."""
    machine = replace(MACHINE, device_bytes=80 * 2**30)
    plan = search(small(2), machine, Setup(2), Split(12, 12, 12))
    assert search(small(2), machine, Setup(2)).timeline.seconds < 0.9 * plan.timeline.seconds
    assert frontier(Searches(plan)) == []
