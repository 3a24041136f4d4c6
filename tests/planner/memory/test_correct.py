"""What is known of a step after it was measured: its timeline takes the measured seconds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MACHINE, QWEN_7B, llama_costs
from property_tests import examples

from scrimp.planner.memory.correct import corrected, scaled_rates
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.search import search

COSTS = llama_costs(QWEN_7B | {"blocks": 8, "vocabulary": 32000}, 2048)


def decision(machine: Machine) -> MemoryDecision:
    return search(COSTS, machine, Setup(2))


ROOMY = decision(replace(MACHINE, device_bytes=80 * 2**30))
TIGHT = decision(replace(MACHINE, device_bytes=6 * 2**30))


@pytest.mark.parametrize("of", [ROOMY, TIGHT], ids=["resident", "offloaded"])
@examples(25)
@given(factor=st.floats(0.2, 8.0))
def test_the_corrected_timeline_takes_what_was_measured(of: MemoryDecision, factor: float) -> None:
    measured = factor * of.timeline.seconds
    found = corrected(of, seconds=measured, device_bytes=None)
    assert found.timeline.seconds == pytest.approx(measured, rel=1e-3)
    assert found.machine.device_bytes == of.machine.device_bytes


def test_where_copies_alone_take_longer_than_the_step_did_the_link_is_faster() -> None:
    slow = decision(scaled_rates(TIGHT.machine, 0.02))
    assert slow.placement.states.is_resident is False
    measured = 0.5 * (slow.timeline.seconds - slow.timeline.compute)
    found = corrected(slow, seconds=measured, device_bytes=None)
    assert found.machine.upload > slow.machine.upload
    assert found.timeline.seconds == pytest.approx(measured)


@given(extra=st.integers(-(2**30), 2**30))
def test_bytes_that_the_account_does_not_know_are_taken_from_the_limit(extra: int) -> None:
    found = corrected(TIGHT, seconds=None, device_bytes=TIGHT.account.peak + extra)
    assert found.machine.device_bytes == TIGHT.machine.device_bytes - max(0, extra)
    assert found.fits == (TIGHT.account.peak + max(0, extra) <= TIGHT.machine.device_bytes)
