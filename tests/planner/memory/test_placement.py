"""A placement: what it says of its blocks, and that a plan's file says the same."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from scrimp.config import Config, base_architecture, resolve
from scrimp.config.activations import ALL_ACTIVATIONS
from scrimp.models import spec_of
from scrimp.planner import Figures, Plan, build_plan
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.plan import StateChoice, rows_of

RESOLUTION = resolve(Config(), base_architecture(Config(), None), device_type="cpu")
BLOCKS = RESOLUTION.architecture.num_layers


def plan_with(placement: Placement, why: str = "because") -> Plan:
    return build_plan(
        RESOLUTION.config,
        RESOLUTION.architecture,
        device_name="test CPU",
        device_is_host=True,
        torch_version="2.13.0",
        reasons={},
        placement=placement,
        why=why,
        predicted=Figures(),
    )


@st.composite
def placements(draw: st.DrawFn) -> Placement:
    names = st.lists(st.sampled_from(ALL_ACTIVATIONS), min_size=BLOCKS, max_size=BLOCKS).map(tuple)
    flags = st.lists(st.booleans(), min_size=BLOCKS, max_size=BLOCKS).map(tuple)
    weights, gradients, optimizer = draw(flags), draw(flags), draw(flags)
    if not any(optimizer) or draw(st.booleans()):
        return Placement(draw(names), States(weights, gradients, optimizer))
    gradients = tuple(g or o for g, o in zip(gradients, optimizer, strict=True))
    return Placement(draw(names), States(weights, gradients, optimizer, "cpu"))


@given(placement=placements())
def test_a_plans_file_says_the_placement_and_can_be_carried_out(placement: Placement) -> None:
    plan = plan_with(placement)
    read = Plan.from_json(plan.to_json())
    assert read.placement == placement
    layers = spec_of(RESOLUTION.architecture).origins
    read.check_runnable(plan_with(Placement.resident(BLOCKS)), "plan.json", layers)


@given(placement=placements())
def test_what_is_on_the_host_is_named_by_block(placement: Placement) -> None:
    _, rows = rows_of(placement, "")
    states = placement.states
    for name in ("weights", "gradients", "optimizer"):
        assert states.on_host(name) == {
            i for i in range(BLOCKS) if getattr(rows[str(i)], name) in ("host", "cpu")
        }
    assert placement.offloaded == {i for i, name in enumerate(placement.activations) if "+offload" in name}
    at_home = all(row == StateChoice("device", "device", "device", row.reason) for row in rows.values())
    assert placement.uses_host == (not at_home or bool(placement.offloaded))
    assert placement.is_resident == (placement == Placement.resident(BLOCKS))


def test_rows_of_ends_say_why_they_stay() -> None:
    resident = Placement.resident(BLOCKS)
    assert {row.reason for row in plan_with(resident, "there is room").states.values()} == {"there is room"}
    states = plan_with(replace(resident, states=States.split(BLOCKS, weights=1)), "no room").states
    assert [states[name].reason for name in ("0", "1", "head")] == [
        "no room",
        "no room",
        "what is no block stays on the device",
    ]
