"""The dynamic program against all combinations of small problems."""

from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MACHINE, QWEN_7B, llama_costs, step_costs
from property_tests import examples

from scrimp.planner.memory.activation_dp import Front, fastest
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts, chosen_costs
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.states import device_peak, floor_of


def solve(costs: StepCosts, states: States, device: int, host: int, accumulates: bool, effort: int) -> Front:
    floor = floor_of(costs, states, accumulates)
    return fastest(costs, floor, accumulates=accumulates, device_bytes=device, host_bytes=host, effort=effort)


def sums(costs: StepCosts, names: tuple[str, ...]) -> tuple[int, float]:
    blocks = chosen_costs(costs, names)
    return sum(c.host for c in blocks), sum(c.forward_seconds + c.backward_seconds for c in blocks)


def all_fronts(
    costs: StepCosts, states: States, device: int, host: int, accumulates: bool
) -> set[tuple[int, float]]:
    """Every combination that fits and that none beats, by trying them all."""
    names = product(*[costs.classes[number].choices for number in costs.blocks])
    peaks = {n: device_peak(costs, Placement(n, states), accumulates) for n in names}
    found = {sums(costs, n) for n, peak in peaks.items() if peak <= device}
    found = {point for point in found if point[0] <= host}
    return {p for p in found if not any(q != p and q[0] <= p[0] and q[1] <= p[1] for q in found)}


@examples(300)
@given(
    costs=step_costs(blocks=5),
    device=st.integers(20, 900),
    host=st.sampled_from((0, 25, 60, 10**6)),
    accumulates=st.booleans(),
    away=st.integers(0, 5),
)
@pytest.mark.slow
def test_small_problems_are_solved_exactly(
    costs: StepCosts, device: int, host: int, accumulates: bool, away: int
) -> None:
    states = States.split(len(costs.blocks), gradients=away, optimizer=away)
    expected = all_fronts(costs, states, device, host, accumulates)
    front = solve(costs, states, device, host, accumulates, effort=10_000)
    assert front.is_exact
    found = {(int(h), round(s, 6)) for h, s in zip(front.host, front.seconds, strict=True)}
    # without offload at the least seconds there is nothing to weigh
    least = min((s for _, s in expected), default=0.0)
    assert found == ({(0, least)} if (0, least) in expected else expected)
    for names, point in zip(front.choices, front.host, strict=True):
        assert sums(costs, tuple(names))[0] == point
        assert device_peak(costs, Placement(names, states), accumulates) <= device


def test_few_labels_lose_little_and_always_fit() -> None:
    costs = llama_costs(QWEN_7B, 4096)
    blocks = len(costs.blocks)
    states = States.split(blocks, weights=blocks, gradients=blocks, optimizer=blocks)
    for gib in (16, 18, 20, 22):
        few = solve(costs, states, gib << 30, 0, True, effort=64)
        many = solve(costs, states, gib << 30, 0, True, effort=4000)
        assert many.is_exact
        assert few.seconds.min() <= 1.01 * many.seconds.min()
        assert all(device_peak(costs, Placement(names, states), True) <= gib << 30 for names in few.choices)


def test_where_peaks_depend_on_placement_the_best_one_is_found() -> None:
    costs = llama_costs(QWEN_7B | {"vocabulary": 1024, "blocks": 8}, 4096)
    kind = costs.classes[0]
    kind = replace(kind, choices={name: kind.choices[name] for name in ("keep", "block")})
    costs, states = replace(costs, classes=(kind,)), States.split(8)
    half = [names for names in product(("keep", "block"), repeat=8) if names.count("keep") == 4]
    peaks = {names: device_peak(costs, Placement(names, states), False) for names in half}
    least = min(peaks.values())
    assert peaks[("block",) * 4 + ("keep",) * 4] == least < 0.96 * max(peaks.values())
    assert solve(costs, states, least, 0, False, effort=4000).choices[0].count("keep") >= 4
    tighter = solve(costs, states, least - 1, 0, False, effort=4000)
    assert all(names.count("keep") < 4 for names in tighter.choices)


def test_what_a_block_offloads_is_in_flight_during_the_next_alone() -> None:
    away = BlockClass(0, 0, 0, {"away": BlockCost(0, 5, 9, host=30)})
    rest = BlockClass(
        0, 0, 0, {"here": BlockCost(20, 25, 29, forward_seconds=1), "large": BlockCost(20, 50, 50)}
    )
    costs = StepCosts((away, rest), (0, 1, 1), EndsCost(0, 0, 0, 0, 0, 0), boundary=0)
    front = solve(costs, States.split(3), 30 + 29, 30, False, effort=64)
    assert front.choices == [("away", "here", "here")]
    assert not solve(costs, States.split(3), 30 + 28, 30, False, effort=64).choices


def test_nothing_fits_a_device_below_the_floor() -> None:
    costs = llama_costs(QWEN_7B, 1024)
    front = solve(costs, States.split(28), MACHINE.device_bytes, 10**12, False, effort=64)
    assert len(front.host) == 0 == len(front.choices)


@pytest.mark.parametrize("limit", [1.0, 0.999])
def test_what_is_slower_than_asked_for_is_not_found(limit: float) -> None:
    costs = llama_costs(QWEN_7B, 1024)
    floor = floor_of(costs, States.split(28), False)
    keep = costs.classes[0].choices["keep"]
    least = 28 * (keep.forward_seconds + keep.backward_seconds)
    front = fastest(costs, floor, accumulates=False, device_bytes=1 << 40, host_bytes=0, within=limit * least)
    assert len(front.host) == (limit == 1.0)
