"""The choices of blocks, beside all choices that there are."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from scrimp.planner.layout.knapsack import GAP, Choices, Frontier, Stage
from scrimp.planner.layout.shared_harm import spread

WHOLE = st.integers(0, 6)


@st.composite
def blocks(draw: st.DrawFn, most: int = 3) -> list[Choices]:
    found = []
    for _ in range(draw(st.integers(1, most))):
        number = draw(st.integers(1, 4))
        rows = [[draw(WHOLE) for _ in range(3)] for _ in range(number)]
        rows[0][2] = 0
        found.append(Choices(*np.array(rows, dtype=float).T))
    return found


def brute_force(parts: list[Choices], room: float, harm: float) -> float:
    best = np.inf
    for taken in itertools.product(*(range(len(one.seconds)) for one in parts)):
        pairs = list(zip(parts, taken, strict=True))
        if sum(one.bytes[k] for one, k in pairs) <= room and sum(one.harm[k] for one, k in pairs) <= harm:
            best = min(best, sum(one.seconds[k] for one, k in pairs))
    return float(best)


@given(blocks(), st.integers(0, 20), st.sampled_from([0.0, 0.3, 1.0, 2.5]))
def test_a_stage_is_as_cheap_as_the_best_of_all_choices(
    parts: list[Choices], room: int, price: float
) -> None:
    priced = [Choices(one.seconds + price * one.harm, one.bytes, one.harm) for one in parts]
    best = brute_force(priced, room, np.inf)
    stage = Stage(parts, room)
    if stage.spare < 0:
        assert np.isinf(best)
        return
    pairs = list(zip(priced, stage.cheapest(price), strict=True))
    assert sum(one.seconds[k] for one, k in pairs) == pytest.approx(best)
    assert sum(one.bytes[k] for one, k in pairs) <= room


@example([Choices(np.array([0.0, 0.0, 1.0]), np.array([1.0, 0.0, 0.0]), np.array([0.0, 3.0, 2.0]))], 0, 0.0)
@given(blocks(4), st.integers(0, 20), st.floats(0, 20))
def test_plans_of_a_stage_have_room_and_come_near_the_best(
    parts: list[Choices], room: int, target: float
) -> None:
    found = Stage(parts, room).frontier(target)
    if found is None:
        assert np.isinf(brute_force(parts, room, np.inf))
        return
    step = max(float(one.seconds.max() - one.seconds.min()) for one in parts)
    for seconds, harm, choices in zip(found.seconds, found.harm, found.choices, strict=True):
        pairs = list(zip(parts, choices.tolist(), strict=True))
        assert sum(one.seconds[k] for one, k in pairs) == seconds
        assert sum(one.harm[k] for one, k in pairs) == harm
        assert sum(one.bytes[k] for one, k in pairs) <= room
        if abs(harm - target) <= max(float(one.harm.max()) for one in parts) / 2:
            assert seconds <= brute_force(parts, room, harm) + step
    assert found.seconds.min() == brute_force(parts, room, np.inf)
    assert found.harm.min() == min(harm for harm in range(30) if np.isfinite(brute_force(parts, room, harm)))


Rows = list[list[tuple[int, int]]]
STAGES = st.lists(st.lists(st.tuples(WHOLE, WHOLE), min_size=1, max_size=5), min_size=1, max_size=4)
FIXED = st.lists(st.integers(0, 4), min_size=4, max_size=4)


def plans_of(rows: list[tuple[int, int]], unit: float = 1.0) -> Frontier:
    """Plans of a stage, from their seconds and harm."""
    seconds, harm = np.array(rows, dtype=float).T
    return Frontier(seconds, unit * harm, np.zeros((len(rows), 0), dtype=np.int64))


def check_shares(
    own: list[Frontier], bases: list[int], micro_batches: int, limit: float, cells: int, spared: float = 0.0
) -> None:
    """Stages take plans within the limit that are as good as the best of those that leave so much of it."""
    taken = spread(own, [float(one) for one in bases], micro_batches, limit, cells)

    def harm(plans: Sequence[int]) -> float:
        return float(sum(one.harm[at] for one, at in zip(own, plans, strict=True)))

    def step(plans: Sequence[int]) -> float:
        seconds = [one.seconds[at] + base for one, at, base in zip(own, plans, bases, strict=True)]
        return float((micro_batches - 1) * max(seconds) + sum(seconds))

    every = list(itertools.product(*(range(len(one.seconds)) for one in own)))
    most = limit * (1 + 1e-9)
    if taken is None:
        assert all(harm(plans) > most for plans in every)
        return
    assert harm(taken) <= most
    best = [step(plans) for plans in every if harm(plans) <= most - spared]
    assert step(taken) <= min(best, default=np.inf)


@given(STAGES, st.integers(1, 12), st.integers(1, 5), FIXED)
def test_stages_share_harm_as_the_best_of_all_plans(
    stages: Rows, limit: int, micro_batches: int, fixed: list[int]
) -> None:
    own = [plans_of(rows) for rows in stages]
    check_shares(own, fixed[: len(own)], micro_batches, limit, limit)


@example(
    [[(4, 0), (1, 2)], [(4, 0), (2, 1)]], 3, 2, 2, [0, 0, 0, 0]
)  # all the harm there is, and no whole cells
@given(STAGES, st.integers(1, 12), st.integers(1, 12), st.integers(1, 5), FIXED)
def test_what_cells_of_harm_round_up_is_not_lost(
    stages: Rows, limit: int, cells: int, micro_batches: int, fixed: list[int]
) -> None:
    """Harm in parts that are no whole cells: of two stages the best of all plans, of more the best of those that leave
    a cell for each."""
    own = [plans_of(rows, 0.1) for rows in stages]
    spared = len(own) * 0.1 * limit / cells if len(own) > 2 else 0.0
    check_shares(own, fixed[: len(own)], micro_batches, 0.1 * limit, cells, spared)


@given(blocks(6), st.floats(0.0, 1.0), st.floats(0.0, 2.0), st.integers(0, 2**32))
def test_blocks_that_all_differ_are_within_the_gap_of_the_best(
    parts: list[Choices], share: float, price: float, seed: int
) -> None:
    """Figures that no two choices share, so that few ways cost the same."""
    noise = np.random.default_rng(seed)
    parts = [
        Choices(*(figure + noise.random(len(figure)) for figure in (one.seconds, one.bytes, one.harm)))
        for one in parts
    ]
    low, high = (sum(float(pick(one.bytes)) for one in parts) for pick in (np.min, np.max))
    stage = Stage(parts, low + share * (high - low) * 1.001)
    found = stage.cheapest(price)
    taken = [(one, int(k)) for one, k in zip(parts, found, strict=True)]
    assert sum(one.bytes[k] for one, k in taken) <= low + share * (high - low) * 1.001 * (1 + 1e-9)
    priced = [Choices(one.seconds + price * one.harm, one.bytes, one.harm) for one in parts]
    best = brute_force(priced, low + share * (high - low) * 1.001, np.inf)
    allowed = GAP * sum(float(one.seconds.min()) for one in parts)
    assert sum(one.seconds[k] for one, (_, k) in zip(priced, taken, strict=True)) <= best + allowed + 1e-9


def test_as_many_blocks_keep_all_as_there_is_room_for() -> None:
    """32 equal blocks that keep 3.7 or 0.1 bytes, and 32 of which each differs from the others a little."""
    one = Choices(np.array([1.0, 1.3]), np.array([3.7, 0.1]), np.zeros(2))
    room = 32 * 0.1 + 19 * 3.6 + 0.01
    others = [Choices(one.seconds * (1 + 1e-3 * at), one.bytes, one.harm) for at in range(32)]
    for blocks in ([one] * 32, others):
        assert sum(Stage(blocks, room).cheapest(0.0) == 0) == 19
    # What saves most is kept: the slowest ones.
    assert (Stage(others, room).cheapest(0.0)[-19:] == 0).all()
