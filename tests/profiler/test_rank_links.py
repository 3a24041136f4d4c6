"""Links between real ranks: slow ones are found, and orders of ranks take the time that is predicted from them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from delayed_links import delayed, of_pairs
from distributed import spawn

from scrimp.planner.rank_placement import AxisTraffic, Order, place_ranks, places_of_groups, seconds_on_links
from scrimp.profiler import resolve_device
from scrimp.profiler.links_report import RankLinks, slow_links_text
from scrimp.profiler.rank_links import OPERATIONS, measure_rank_links, rounds_of
from scrimp.world import World

RATES = of_pairs(4, {(0, 1): 8e6, (2, 3): 6e6, (0, 2): 1e6, (1, 3): 1.2e6, (0, 3): 2.2e6, (1, 2): 2e6})
"""Two clusters of two ranks."""
DEGREES = {"dp": 1, "fsdp": 2, "cp": 1, "tp": 2}
TRAFFIC = [AxisTraffic(("fsdp",), 1e5), AxisTraffic(("tp",), 4e5)]
STEPS = 2


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 8, 17, 64])
def test_a_tournament_has_every_pair_once(ranks: int) -> None:
    rounds = rounds_of(ranks)
    assert len(rounds) == ranks - 1 + ranks % 2
    assert sorted(itertools.chain.from_iterable(rounds)) == list(itertools.combinations(range(ranks), 2))
    for one in rounds:
        busy = list(itertools.chain.from_iterable(one))
        assert len(busy) == len(set(busy)) == ranks - ranks % 2


def measured(rank: int, ranks: int, slow: float, at_once: bool) -> tuple[RankLinks, list[float]]:
    """Ranks of which the last is far away."""
    shares: list[float] = []
    device = resolve_device("cpu", World(rank, ranks))
    with delayed(of_pairs(ranks, {(other, ranks - 1): slow for other in range(ranks - 1)})):
        found = measure_rank_links(device, at_once=at_once, progress=shares.append)
    return found, shares


@pytest.mark.parametrize("at_once", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.slow
def test_a_rank_that_is_far_away_is_named(at_once: bool, tmp_path: Path) -> None:
    ranks, slow = 3, 2e6
    found = spawn(ranks, measured, tmp_path, ranks, slow, at_once)
    links, shares = found[0]
    assert all(one == links for one, _ in found)
    assert shares == sorted(shares)
    assert shares[-1] == 1.0
    assert links.at_once is at_once
    assert "gloo" in links.backend
    assert [place.local_rank for place in links.places] == [0, 1, 2]
    for one, other in itertools.permutations(range(ranks), 2):
        assert links.bandwidth[one][other] == links.bandwidth[other][one]
        assert 0 < links.latency[one][other] == links.latency[other][one]
        if ranks - 1 in (one, other):
            assert 0.3 * slow < links.bandwidth[one][other] <= slow
    assert links.bandwidth[0][1] > 3 * slow
    (sentence,) = slow_links_text(links.bandwidth)
    assert sentence.startswith("between ranks 0 and 1; rank 2: ")
    assert [one.operation for one in links.collectives] == list(OPERATIONS)
    assert all(one.latency > 0 and one.bandwidth > 0 for one in links.collectives)
    assert RankLinks.from_json(links.to_json()) == links


def clock_after(rank: int, order: Order) -> float:
    """Seconds of two steps in which the ranks of every group send their bytes on to the next one.

    By clocks of their own, which messages carry: one leaves when its sender's clock says so, its bytes take their time
    on the link, and its receiver's clock is not behind from then on. So other work on this machine changes nothing.
    """
    place, clock = order.index(rank), 0.0
    for _, one in itertools.product(range(STEPS), TRAFFIC):
        group = next(group for group in places_of_groups(DEGREES, one.axes) if place in group)
        at = group.index(place)
        after, before = order[group[(at + 1) % len(group)]], order[group[at - 1]]
        left = clock + one.num_bytes / RATES[rank][after]
        message, arrives = torch.tensor([left], dtype=torch.float64), torch.empty(1, dtype=torch.float64)
        works = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, message, after), dist.P2POp(dist.irecv, arrives, before)]
        )
        for work in works:
            work.wait()
        clock = max(left, float(arrives))
    return clock


def all_orders(rank: int) -> dict[Order, float]:
    orders = [(0, *rest) for rest in itertools.permutations((1, 2, 3))]
    return {order: clock_after(rank, order) for order in orders}


@pytest.mark.slow
def test_orders_of_ranks_take_the_time_that_is_predicted(tmp_path: Path) -> None:
    """Two clusters: all six placements of two axes come in the order that is predicted."""
    found = spawn(4, all_orders, tmp_path)
    took = {order: max(rank[order] for rank in found) for order in found[0]}
    predicted = {order: STEPS * seconds_on_links(order, DEGREES, TRAFFIC, RATES) for order in took}
    assert len(set(took.values())) == 6
    assert sorted(took, key=took.__getitem__) == sorted(predicted, key=predicted.__getitem__)
    best = place_ranks(DEGREES, TRAFFIC, RATES)
    assert best.order == min(took, key=took.__getitem__) == (0, 1, 3, 2)
    for order, seconds in took.items():  # a group need not wait for another one's link
        assert 0.8 * predicted[order] < seconds <= predicted[order] * (1 + 1e-9)
