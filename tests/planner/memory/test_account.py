"""The account of a step adds up to the peak that the planner plans with."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.planner.memory.account import account_step
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.states import device_peak, host_bytes

NAMES = ("keep", "block", "block+offload")
BYTES = st.integers(0, 1000)


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepCosts, Placement]:
    def block() -> BlockCost:
        kept, forward, backward, host = (draw(BYTES) for _ in range(4))
        return BlockCost(kept, kept + forward, backward, cast=draw(BYTES), host=host)

    kind = BlockClass(draw(BYTES), draw(BYTES), draw(BYTES), {name: block() for name in NAMES})
    ends = EndsCost(*(draw(BYTES) for _ in range(3)), 5000, draw(BYTES), draw(BYTES))
    count = draw(st.integers(1, 5))
    costs = StepCosts((kind,), (0,) * count, ends, draw(BYTES), draw(BYTES), draw(BYTES))
    flags = st.lists(st.booleans(), min_size=count, max_size=count).map(tuple)
    update = draw(st.sampled_from(("device", "cpu")))
    optimizer, gradients = draw(flags), draw(flags)
    if update != "device":
        gradients = tuple(g or o for g, o in zip(gradients, optimizer, strict=True))
    states = States(draw(flags), gradients, optimizer, update)
    names = draw(st.lists(st.sampled_from(NAMES), min_size=count, max_size=count))
    return costs, Placement(tuple(names), states)


@examples(200)
@given(step=steps(), accumulates=st.booleans())
def test_categories_add_up_to_the_peak(step: tuple[StepCosts, Placement], accumulates: bool) -> None:
    costs, placement = step
    account = account_step(costs, placement, accumulates=accumulates)
    assert account.peak == device_peak(costs, placement, accumulates)
    assert sum(nbytes for _, nbytes in account.device) == account.peak
    assert account.host_peak == host_bytes(costs, placement)[0]
    assert all(nbytes > 0 for _, nbytes in account.host)


def test_a_resident_step_in_numbers() -> None:
    keep = BlockCost(kept=10, forward_peak=15, backward_peak=30)
    kind = BlockClass(weights=100, gradients=100, optimizer=200, choices={"keep": keep})
    ends = EndsCost(50, 50, 100, head_peak=40, head_gradients=20, embedding_peak=5)
    costs = StepCosts((kind,), (0, 0), ends, boundary=4, resident=3)
    account = account_step(costs, Placement(("keep", "keep"), States.split(2)), accumulates=False)
    # The update: all gradients exist, activations are gone.
    assert account.moment.name == "optimizer step"
    assert dict(account.device) == {
        "weights": 250,
        "gradients": 250,
        "optimizer states": 500,
        "activations": 0,
        "tokens, tables and copies": 3,
        "optimizer step": 0,
    }
    assert account.host == ()
