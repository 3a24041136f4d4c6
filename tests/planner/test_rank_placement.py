"""Orders of ranks: the cheapest of all of them, and what real messages over delayed links take."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import pytest

from scrimp.planner.rank_placement import (
    MOST_TRIED,
    AxisTraffic,
    Order,
    _nested,
    place_ranks,
    places_of_groups,
    seconds_on_links,
)

FAST, SLOW = 100.0, 1.0
HEAVY_TP = [AxisTraffic(("fsdp",), 10.0), AxisTraffic(("tp",), 50.0)]


def clusters(*groups: Sequence[int], slow: float = SLOW) -> list[list[float]]:
    """Rates of ranks in groups that slow links join."""
    found = {rank: number for number, group in enumerate(groups) for rank in group}
    ranks = range(len(found))
    return [[FAST if found[one] == found[other] else slow for other in ranks] for one in ranks]


def by_hand(
    order: Order, degrees: Mapping[str, int], traffic: Sequence[AxisTraffic], rates: Sequence[Sequence[float]]
) -> float:
    """The cost, by coordinates and not by groups: two ranks share one where all other coordinates are equal."""
    axes = list(degrees)
    where = dict(zip(order, itertools.product(*map(range, degrees.values())), strict=True))
    total = 0.0
    for one in traffic:
        worst = 0.0
        for a, b in itertools.combinations(order, 2):
            differ = {axis for axis, x, y in zip(axes, where[a], where[b], strict=True) if x != y}
            if not differ <= set(one.axes):
                continue
            if one.is_chain and abs(sum(where[a]) - sum(where[b])) != 1:
                continue
            worst = max(worst, one.num_bytes / rates[a][b])
        total += worst
    return total


def random_rates(ranks: int, seed: int) -> list[list[float]]:
    """Random links that have nothing in common."""
    generator = random.Random(seed)
    found = [[0.0] * ranks for _ in range(ranks)]
    for one, other in itertools.combinations(range(ranks), 2):
        found[one][other] = found[other][one] = generator.choice((1.0, 3.0, 10.0)) * generator.uniform(1, 1.2)
    return found


def test_the_heavy_axis_stays_within_the_fast_links() -> None:
    # Ranks were started in turns on two nodes.
    found = place_ranks({"dp": 1, "fsdp": 2, "tp": 2}, HEAVY_TP, clusters((0, 2), (1, 3)))
    assert found.order == (0, 2, 1, 3)
    assert found.seconds == pytest.approx(10 / SLOW + 50 / FAST)
    assert found.seconds_given == pytest.approx(10 / FAST + 50 / SLOW)


def test_an_order_that_is_as_good_as_any_stays() -> None:
    degrees = {"dp": 2, "fsdp": 2, "cp": 1, "tp": 2}
    traffic = [AxisTraffic((axis,), 5.0) for axis in ("dp", "fsdp", "tp")]
    for rates in (clusters(range(8)), clusters(range(4), range(4, 8))):
        assert place_ranks(degrees, traffic, rates).order == tuple(range(8))


def test_groups_are_those_of_the_mesh() -> None:
    degrees = {"dp": 2, "fsdp": 2, "tp": 2}
    assert places_of_groups(degrees, ["tp"]) == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert places_of_groups(degrees, ["dp"]) == [(0, 4), (1, 5), (2, 6), (3, 7)]
    assert places_of_groups(degrees, ["dp", "tp"]) == [(0, 1, 4, 5), (2, 3, 6, 7)]


@pytest.mark.parametrize("seed", range(4))
def test_no_order_of_six_ranks_is_cheaper(seed: int) -> None:
    degrees = {"fsdp": 3, "tp": 2}
    traffic = [AxisTraffic(("fsdp", "tp"), 3.0), AxisTraffic(("fsdp",), 10.0), AxisTraffic(("tp",), 25.0)]
    rates = random_rates(6, seed)
    found = place_ranks(degrees, traffic, rates)
    # All orders, rank 0 in any place.
    best = min(by_hand(order, degrees, traffic, rates) for order in itertools.permutations(range(6)))
    assert found.seconds == pytest.approx(best)
    assert by_hand(found.order, degrees, traffic, rates) == pytest.approx(best)
    assert found.order[0] == 0


def test_a_chain_has_links_between_neighbours_alone() -> None:
    degrees, rates = {"pp": 4}, clusters((0, 2), (1, 3))
    traffic = [AxisTraffic(("pp",), 8.0, is_chain=True)]
    for order in itertools.permutations(range(4)):
        expected = by_hand(order, degrees, traffic, rates)
        assert seconds_on_links(order, degrees, traffic, rates) == pytest.approx(expected)
    # Both slow links are in the way of any order, but a ring over all waits for them as long as the chain.
    rates[1][2] = rates[2][1] = FAST
    assert place_ranks(degrees, traffic, rates).seconds == pytest.approx(8 / FAST)


@pytest.mark.parametrize("seed", range(6))
def test_grouping_finds_what_trying_all_finds(seed: int) -> None:
    """Nodes of equal sizes, whose ranks were numbered in any order."""
    generator = random.Random(seed)
    ranks = list(range(MOST_TRIED))
    generator.shuffle(ranks)
    rates = clusters(*(ranks[at : at + 2] for at in range(0, 8, 2)), slow=generator.choice((1.0, 10.0)))
    for one, other in itertools.product(ranks[:4], ranks[4:]):
        rates[one][other] = rates[other][one] = 0.5
    degrees = {"dp": 2, "fsdp": 2, "tp": 2}
    traffic = [AxisTraffic((axis,), generator.uniform(1, 40)) for axis in degrees]
    best = place_ranks(degrees, traffic, rates)
    grouped = min(seconds_on_links(order, degrees, traffic, rates) for order in _nested(degrees, rates))
    assert grouped == pytest.approx(best.seconds)
    assert all(order[0] == 0 and sorted(order) == list(range(8)) for order in _nested(degrees, rates))


def test_many_ranks_are_grouped() -> None:
    # Eight nodes of four, which the launcher numbered in turns; two of them form a pod each.
    nodes = [tuple(range(node, 32, 8)) for node in range(8)]
    rates = clusters(*nodes)
    for pod in range(0, 8, 2):
        for one, other in itertools.product(nodes[pod], nodes[pod + 1]):
            rates[one][other] = rates[other][one] = 10.0
    degrees = {"dp": 4, "fsdp": 2, "tp": 4}
    traffic = [AxisTraffic(("dp",), 1.0), AxisTraffic(("fsdp",), 8.0), AxisTraffic(("tp",), 60.0)]
    found = place_ranks(degrees, traffic, rates)
    assert found.seconds == pytest.approx(1 / SLOW + 8 / 10 + 60 / FAST)
    assert found.seconds_given == pytest.approx(by_hand(tuple(range(32)), degrees, traffic, rates))
    assert found.seconds_given > 50
    assert sorted(found.order) == list(range(32))
