"""The search against all plans of small problems, and on models of real size."""

import math
import random
from collections.abc import Iterable
from dataclasses import replace
from itertools import combinations_with_replacement, product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_up import MACHINE, QWEN_7B, QWEN_14B, llama_costs, machines, step_costs
from property_tests import examples

from scrimp.planner.memory.bound import Bound, least_seconds
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts, chosen_costs
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.search import find, search
from scrimp.planner.memory.search_space import Split, chain, corners, everywhere
from scrimp.planner.memory.states import device_peak, host_bytes
from scrimp.planner.memory.timeline import step_timeline

updaters = st.sampled_from((("device",), ("cpu",), ("device", "cpu")))
setups = st.builds(Setup, st.integers(1, 3), updaters)


def fits(plan: MemoryDecision, costs: StepCosts, machine: Machine) -> bool:
    accumulates = plan.setup.accumulates
    assert plan.account.peak == device_peak(costs, plan.placement, accumulates)
    total, pinned = host_bytes(costs, plan.placement)
    assert plan.account.host_peak == total
    room = plan.account.peak <= machine.device_bytes and total <= machine.host_bytes
    return room and pinned <= machine.pinnable


def all_states(blocks: int) -> list[States]:
    """Every placement of every class on any set of blocks, with both updaters."""
    flags = list(product((False, True), repeat=blocks))
    found = [States(w, g, o) for w in flags for g in flags for o in flags]
    return found + [
        replace(s, update="cpu")
        for s in found
        if any(s.optimizer) and all(g >= o for g, o in zip(s.gradients, s.optimizer, strict=True))
    ]


def fastest_of_all(
    costs: StepCosts, machine: Machine, setup: Setup, placements: Iterable[States]
) -> float | None:
    """By simulating every plan that fits."""
    best = None
    for states in placements:
        for names in product(*[costs.classes[number].choices for number in costs.blocks]):
            placement = Placement(names, states)
            total, pinned = host_bytes(costs, placement)
            if total > machine.host_bytes or pinned > machine.pinnable:
                continue
            if device_peak(costs, placement, setup.accumulates) <= machine.device_bytes:
                seconds = step_timeline(costs, placement, setup, machine).seconds
                best = seconds if best is None else min(best, seconds)
    return best


@examples(60)
@given(costs=step_costs(blocks=2, choices=3), machine=machines(), setup=setups)
def test_any_plan_fits_and_none_is_missed_where_a_placement_has_room(
    costs: StepCosts, machine: Machine, setup: Setup
) -> None:
    plan = find(costs, machine, setup)
    if plan is not None:
        assert fits(plan, costs, machine)
        assert not any(plan.placement.states.optimizer) or plan.placement.states.update in setup.updaters
        return
    blocks = len(costs.blocks)
    for split in (*corners(blocks, setup.updaters), *chain(blocks, setup.updaters[0])):
        states = split.within(len(costs.blocks)).states(len(costs.blocks))
        assert fastest_of_all(costs, machine, setup, [states]) is None


def uniform_problem(draw: random.Random, blocks: int = 2) -> tuple[StepCosts, Machine, Setup]:
    """Equal blocks, whose levels keep less and compute more."""
    size, forward, kept, again = draw.randint(5, 40), draw.uniform(1, 3), draw.randint(20, 60), 0.0
    sizes = {"forward_peak": kept, "backward_peak": kept + 20, "forward_seconds": forward}
    choices = {"keep+offload": BlockCost(0, host=kept, backward_seconds=2 * forward, **sizes)}
    for level in ("keep", "mlp", "block"):
        choices[level] = BlockCost(kept, backward_seconds=2 * forward + again, **sizes)
        kept, again = int(kept * draw.uniform(0.2, 0.7)), again + forward * draw.uniform(0.1, 0.6)
    kind = BlockClass(size, size, 2 * size, choices, parameters=size)
    costs = StepCosts((kind,), (0,) * blocks, EndsCost(10, 10, 20, 30, 5, 5, seconds=1.0), boundary=5)
    link, adam, memory = draw.choice((3.0, 10.0, 100.0)), draw.choice((3.0, 30.0, 100.0)), 300.0
    room = draw.randint(50, 175) * blocks, draw.choice((30 * blocks, 75 * blocks, 10**6))
    machine = Machine(*room, link, link, 0.8 * link, 0.8 * link, adam, memory)
    return costs, machine, Setup(draw.choice((1, 1, 3)))


@pytest.mark.parametrize("problems", [6, 20])
@pytest.mark.slow
def test_regret_against_all_plans_of_small_problems(problems: int) -> None:
    """Any set of blocks for every class, or only so many of them, and any activations, all simulated."""
    regrets = []
    as_many = [split.states(2) for split in everywhere(2)]
    draw = random.Random(0)
    while len(regrets) < problems:
        costs, machine, setup = uniform_problem(draw)
        best, plan = fastest_of_all(costs, machine, setup, all_states(2)), find(costs, machine, setup)
        counted = fastest_of_all(costs, machine, setup, as_many)
        assert (counted is None) == (plan is None)
        if best is not None and counted is not None and plan is not None:
            regrets.append(plan.timeline.seconds / best - 1)
            assert plan.timeline.seconds <= counted * (1 + 1e-9)
    assert min(regrets) > -1e-9
    # only what sets of blocks that are not counted from one end would gain
    assert sum(regrets) / len(regrets) < 0.03
    assert max(regrets) < 0.3


def fastest_of_protrains(costs: StepCosts, machine: Machine, setup: Setup) -> float:
    """By simulating every point that fits: states of n blocks on the host, the first s offload, up to c recompute."""
    best, blocks = math.inf, len(costs.blocks)
    for update, n in product(setup.updaters, range(blocks + 1)):
        states = States.split(blocks, weights=n, gradients=n, optimizer=n, update=update)
        for s, c in combinations_with_replacement(range(blocks + 1), 2):
            names = ("keep+offload",) * s + ("block",) * (c - s) + ("keep",) * (blocks - c)
            placement = Placement(names, states)
            total, pinned = host_bytes(costs, placement)
            if total > machine.host_bytes or pinned > machine.pinnable:
                continue
            if device_peak(costs, placement, setup.accumulates) <= machine.device_bytes:
                best = min(best, step_timeline(costs, placement, setup, machine).seconds)
    return best


@pytest.mark.parametrize(("blocks", "seed"), [(3, 1), (5, 0), (6, 0)])
@pytest.mark.slow
def test_no_point_of_protrains_space_is_faster_than_what_is_found(blocks: int, seed: int) -> None:
    draw = random.Random(seed)
    for _ in range(17):
        problem = uniform_problem(draw, blocks)
        plan, best = find(*problem), fastest_of_protrains(*problem)
        assert best == math.inf if plan is None else plan.timeline.seconds <= best * (1 + 1e-9)


def bound_of(costs: StepCosts, placement: Placement, setup: Setup, machine: Machine) -> float:
    chosen = chosen_costs(costs, placement.activations)
    passes = sum(cost.forward_seconds + cost.backward_seconds for cost in chosen)
    return Bound.of(costs, placement.states, setup, machine).seconds(
        passes, sum(cost.host for cost in chosen)
    )


@examples(300)
@given(data=st.data(), costs=step_costs(), machine=machines(), setup=setups)
@pytest.mark.slow
def test_the_bound_is_never_above_the_simulation(
    data: st.DataObject, costs: StepCosts, machine: Machine, setup: Setup
) -> None:
    blocks, counts = len(costs.blocks), st.integers(0, 4)
    update = data.draw(st.sampled_from(("device", "cpu")))
    drawn = {name: data.draw(counts) for name in ("weights", "gradients", "optimizer")}
    states = States.split(blocks, **drawn, update=update)
    names = (data.draw(st.sampled_from(list(costs.classes[number].choices))) for number in costs.blocks)
    placement = Placement(tuple(names), states)
    bound = bound_of(costs, placement, setup, machine)
    assert bound <= step_timeline(costs, placement, setup, machine).seconds * (1 + 1e-9)
    assert least_seconds(costs, setup) <= bound * (1 + 1e-9)


def test_a_placement_is_known_from_its_states() -> None:
    splits = everywhere(3, ("device", "cpu"))
    assert len(splits) == len(set(splits)) > 4**3
    assert [Split.of(split.states(3)) for split in splits] == splits


def test_everything_resident_wins_where_it_fits() -> None:
    costs = llama_costs(QWEN_7B, 4096)
    plan = search(costs, replace(MACHINE, device_bytes=100 * 2**30))
    assert plan.placement.states.is_resident
    assert set(plan.placement.activations) == {"keep"}
    assert plan.account.host_peak == 0
    assert plan.is_exact


@pytest.mark.slow
def test_memory_that_is_missing_costs_least_first() -> None:
    costs = llama_costs(QWEN_7B, 4096)
    setup, seconds = Setup(8), []
    for gib in (100, 70, 40, 24, 16, 12):
        machine = replace(MACHINE, device_bytes=gib << 30, host_bytes=10**11)
        plan = search(costs, machine, setup)
        assert fits(plan, costs, machine)
        seconds.append(plan.timeline.seconds)
    assert seconds == sorted(seconds)
    assert (
        seconds[-2] < 1.15 * seconds[0]
    )  # of the 12 GB card little is left beside three blocks of gradients


@pytest.mark.slow
def test_cpu_adam_is_taken_where_it_is_faster_than_the_link() -> None:
    costs = llama_costs(QWEN_7B, 8192)
    machine = replace(MACHINE, device_bytes=30 * 2**30, host_bytes=10**11, cpu_adam=4e10)
    assert search(costs, machine, Setup(1)).placement.states.update == "cpu"
    assert search(costs, replace(machine, cpu_adam=5e8), Setup(1)).placement.states.update == "device"


def test_a_7b_trains_on_16_gb_with_57_gb_of_host_memory() -> None:
    """bf16, m and v in bf16, 8 x 1024 tokens: LLMQ lists 65 GB of host memory, with embedding and head there too."""
    costs = llama_costs(QWEN_7B, 8192)
    machine = replace(MACHINE, device_bytes=int(15.2 * 2**30), host_bytes=57 * 10**9)
    plan = search(costs, machine, Setup(4))
    assert fits(plan, costs, machine)
    # weights, gradients and states of the blocks at 8 bytes each are most of what is on the host
    assert plan.account.host_peak > 0.6 * 57e9


@pytest.mark.slow
def test_a_14b_on_24_gb_needs_8_bit_states_for_an_80_gb_host() -> None:
    machine = replace(MACHINE, device_bytes=23 * 2**30, host_bytes=80 * 10**9)
    assert find(llama_costs(QWEN_14B, 8192), machine, Setup(4)) is None
    eight = llama_costs(QWEN_14B, 8192, optimizer=2)
    assert fits(search(eight, machine, Setup(4)), eight, machine)


@pytest.mark.slow
@pytest.mark.parametrize(("gib", "setup"), [(80, Setup(1)), (60, Setup(8)), (40, Setup(8))])
def test_80_blocks_of_14_choices_are_solved(gib: int, setup: Setup) -> None:
    """How fast: benchmarks/memory_search.py."""
    costs = llama_costs(QWEN_7B | {"blocks": 80}, 8192)
    machine = replace(MACHINE, device_bytes=gib << 30, host_bytes=400 * 10**9)
    plan = search(costs, machine, setup)
    assert fits(plan, costs, machine)
    assert bound_of(costs, plan.placement, setup, machine) <= plan.timeline.seconds
