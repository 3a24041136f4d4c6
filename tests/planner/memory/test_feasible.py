"""No false refusal at the edge of a budget, against all placements and activations of small problems."""

import random
from itertools import product

import pytest

from scrimp.planner.memory import feasible
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.planner.memory.feasible import any_that_fits
from scrimp.planner.memory.machine import Machine, Setup, Update
from scrimp.planner.memory.placement import Placement
from scrimp.planner.memory.room import NoRoomError
from scrimp.planner.memory.search import find, search
from scrimp.planner.memory.search_space import Split, everywhere
from scrimp.planner.memory.states import device_peak, host_bytes

UPDATERS: tuple[tuple[Update, ...], ...] = (("device",), ("cpu",), ("device", "cpu"))


def problem(draw: random.Random) -> tuple[StepCosts, Setup]:
    """Blocks whose choices keep, offload or make again what they please."""
    classes = []
    for _ in range(draw.choice((1, 1, 2))):
        choices = {}
        for k in range(draw.randint(2, 3)):
            kept, host = draw.randint(0, 60), draw.choice((0, 0, draw.randint(1, 40)))
            forward, backward = kept + draw.randint(0, 40), kept + host + draw.randint(0, 60)
            choices[f"choice{k}"] = BlockCost(
                kept, forward, backward, host=host, forward_seconds=draw.random()
            )
        weights, gradients, optimizer = (draw.randint(0, 60) for _ in range(3))
        norm = draw.choice((0, 5))
        classes.append(BlockClass(weights, gradients, optimizer, choices, parameters=9, norm_peak=norm))
    blocks = tuple(draw.randrange(len(classes)) for _ in range(draw.randint(1, 4)))
    weights, gradients, optimizer = (draw.randint(0, 40) for _ in range(3))
    ends = EndsCost(weights, gradients, optimizer, draw.randint(0, 90), 5, draw.randint(0, 60))
    costs = StepCosts(tuple(classes), blocks, ends, draw.randint(0, 9), draw.randint(0, 9), 7, 3)
    return costs, Setup(draw.choice((1, 2)), updaters=draw.choice(UPDATERS))


def machine(device: int, host: int, pinned: int | None) -> Machine:
    return Machine(device, host, 9.0, 9.0, 8.0, 8.0, 9.0, 90.0, pinned)


def edges(costs: StepCosts, setup: Setup, pinned: int | None) -> list[tuple[int, int]]:
    """Device and host bytes of plans of which none takes less of both."""
    found = set()
    for split in everywhere(len(costs.blocks), setup.updaters):
        states = split.states(len(costs.blocks))
        for names in product(*[costs.classes[number].choices for number in costs.blocks]):
            placement = Placement(names, states)
            host, pins = host_bytes(costs, placement)
            if pinned is None or pins <= pinned:
                found.add((host, device_peak(costs, placement, setup.accumulates)))
    best: list[tuple[int, int]] = []
    for host, device in sorted(found):
        if not best or device < best[-1][0]:
            best.append((device, host))
    return best


def refusals(seeds: range) -> tuple[int, int]:
    """Budgets at edges, and those of them that were refused; what is a byte too small is refused for certain."""
    budgets = refused = 0
    for seed in seeds:
        draw = random.Random(seed)
        costs, setup = problem(draw)
        pinned = draw.choice((None, None, draw.randint(0, 200)))
        before = None
        for device, host in edges(costs, setup, pinned):
            plan = find(costs, machine(device, host, pinned), setup)
            budgets, refused = budgets + 1, refused + (plan is None)
            if plan is not None:
                assert plan.account.peak <= device
                assert plan.account.host_peak <= host
                assert pinned is None or host_bytes(costs, plan.placement)[1] <= pinned
            if before is not None:
                answer = any_that_fits(costs, machine(before - 1, host - 1, pinned), setup)
                assert answer.split is None
                assert answer.is_certain
            before = device
    return budgets, refused


@pytest.mark.slow
def test_no_budget_at_an_edge_is_refused() -> None:
    budgets, refused = refusals(range(6))
    assert budgets > 30
    assert refused == 0


@pytest.mark.slow
def test_none_of_two_thousand_budgets_at_an_edge_is_refused() -> None:
    budgets, refused = refusals(range(1000, 1300))
    assert budgets >= 2000
    assert refused == 0


@pytest.mark.slow
def test_a_refusal_says_whether_every_plan_was_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    costs, setup = problem(random.Random(0))
    least = min(device for device, _ in edges(costs, setup, None))
    with pytest.raises(NoRoomError, match="the run does not fit in memory, whatever is"):
        search(costs, machine(least - 1, 10**6, None), setup)
    monkeypatch.setattr(feasible, "MOST", 0)
    with pytest.raises(NoRoomError, match="none of the plans that were tried fits in memory, and there are"):
        search(costs, machine(least - 1, 10**6, None), setup, Split(0, 0, 0))
