"""A placement: what it says of its blocks, and that a plan's file says the same."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st
from test_plan import LAYERS, make_plan

from scrimp.config.activations import ALL_ACTIVATIONS
from scrimp.planner import Plan
from scrimp.planner.memory.placement import CLASSES, Placement, States
from scrimp.planner.plan import StateChoice, rows_of

PLAN = make_plan()
BLOCKS = len(PLAN.blocks)


def plan_with(placement: Placement) -> Plan:
    blocks, states = rows_of(placement, "because")
    return replace(PLAN, blocks=blocks, states=states)


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    names = draw(st.tuples(*[st.sampled_from(ALL_ACTIVATIONS)] * BLOCKS))
    weights, gradients, optimizer = (draw(st.tuples(*[st.booleans()] * BLOCKS)) for _ in CLASSES)
    if not any(optimizer) or draw(st.booleans()):
        return Placement(names, States(weights, gradients, optimizer))
    gradients = tuple(g or o for g, o in zip(gradients, optimizer, strict=True))
    return Placement(names, States(weights, gradients, optimizer, "cpu"))


@given(placement=placements())
def test_a_plans_file_says_the_placement_and_can_be_carried_out(placement: Placement) -> None:
    read = Plan.from_json(plan_with(placement).to_json())
    assert read.placement == placement
    read.check_runnable(plan_with(Placement.resident(BLOCKS)), "plan.json", LAYERS)


@given(placement=placements())
def test_what_is_on_the_host_is_named_by_block(placement: Placement) -> None:
    plan = plan_with(placement)
    for name in CLASSES:
        there = {int(row) for row, state in plan.states.items() if getattr(state, name) != "device"}
        assert placement.states.on_host(name) == there
    assert placement.offloaded == {i for i, name in enumerate(placement.activations) if "+offload" in name}
    at_home = set(plan.states.values()) == {StateChoice("device", "device", "device", "because")}
    assert placement.is_resident == (at_home and set(placement.activations) == {"keep"})
    assert placement.uses_host == bool(
        placement.offloaded or any(map(any, (getattr(placement.states, name) for name in CLASSES)))
    )


def test_rows_of_ends_say_why_they_stay() -> None:
    resident = Placement.resident(BLOCKS)
    assert {row.reason for row in plan_with(resident).states.values()} == {"because"}
    states = plan_with(replace(resident, states=States.split(BLOCKS, weights=1))).states
    assert states["1"].reason == "because"
    assert {states[name].reason for name in ("embedding", "head")} == {"what is no block stays on the device"}
