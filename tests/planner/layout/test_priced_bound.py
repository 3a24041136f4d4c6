"""Bounds of ranks, beside all choices of small cases and the bound's own formula at many prices."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.planner.layout.knapsack import Choices
from scrimp.planner.layout.pipeline_times import StageSeconds, least_weights, pipeline_seconds
from scrimp.planner.layout.priced_bound import RankKinds, least_at_prices, weighted

PRICES = np.array([0.0, 0.3, 1.0, 2.5])


@st.composite
def ranks(draw: st.DrawFn) -> list[RankKinds]:
    found = []
    for _ in range(draw(st.integers(1, 2))):
        kinds = []
        for _ in range(draw(st.integers(1, 2))):
            rows = [[draw(st.integers(0, 6)) for _ in range(3)] for _ in range(draw(st.integers(1, 3)))]
            kinds.append((Choices(*np.array(rows, dtype=float).T), draw(st.integers(1, 2))))
        found.append(RankKinds(kinds, draw(st.integers(0, 12))))
    return found


def ways(one: RankKinds) -> list[tuple[float, float, float]]:
    """Seconds, bytes and harm of all that a rank's blocks can do within its room."""
    blocks = [choices for choices, count in one.kinds for _ in range(count)]
    found = []
    for taken in itertools.product(*(range(len(block.seconds)) for block in blocks)):
        sums = [
            sum(getattr(block, name)[k] for block, k in zip(blocks, taken, strict=True))
            for name in ("seconds", "bytes", "harm")
        ]
        if sums[1] <= one.room:
            found.append((sums[0], sums[1], sums[2]))
    return found


def at_price(one: RankKinds, price: float, mu: float) -> float:
    return float(
        sum(
            count * (choices.seconds + price * choices.harm + mu * choices.bytes).min()
            for choices, count in one.kinds
        )
        - mu * one.room
    )


@given(ranks())
def test_the_bound_is_the_best_of_all_prices_and_below_all_choices(parts: list[RankKinds]) -> None:
    found = least_at_prices(parts, PRICES)
    for one, row in zip(parts, found, strict=True):
        every = ways(one)
        if not every:
            assert np.isinf(row).all()
            continue
        for price, bound in zip(PRICES, row, strict=True):
            assert bound <= min(seconds + price * harm for seconds, _, harm in every) + 1e-9
            assert bound >= max(at_price(one, price, mu) for mu in np.linspace(0, 10, 101)) - 1e-9


@given(ranks(), st.floats(0, 20), st.floats(0.1, 3), st.floats(0, 3))
def test_ranks_that_count_differently_much_share_harm(
    parts: list[RankKinds], limit: float, first: float, last: float
) -> None:
    weights = np.array([last, first][-len(parts) :])
    rows = [ways(one) for one in parts]
    bound = weighted(least_at_prices(parts, PRICES), PRICES, limit, weights)
    if not all(rows):
        assert np.isinf(bound)
        return
    for taken in itertools.product(*rows):
        if sum(harm for _, _, harm in taken) <= limit:
            assert bound <= sum(c * one[0] for c, one in zip(weights, taken, strict=True)) + 1e-9


@given(st.data(), st.integers(1, 5), st.integers(1, 3), st.integers(1, 12))
def test_no_step_is_shorter_than_any_of_its_weighted_sums(
    data: st.DataObject, number: int, virtual: int, rounds: int
) -> None:
    rounds = rounds if virtual == 1 else rounds * number
    seconds = st.floats(0, 3)
    stages = [StageSeconds(data.draw(seconds), data.draw(seconds)) for _ in range(number * virtual)]
    schedule = "1f1b" if virtual == 1 else "interleaved"
    step = pipeline_seconds(stages, ranks=number, micro_batches=rounds, schedule=schedule).total
    each = [sum(one.forward + one.backward for one in stages[rank::number]) for rank in range(number)]
    assert (least_weights(number, virtual, rounds) @ each <= step * (1 + 1e-9)).all()


def test_equal_stages_of_one_rank_each_take_what_the_bound_says() -> None:
    for ranks_, rounds in ((2, 3), (4, 5), (4, 16), (8, 64)):
        stages = [StageSeconds(1.0, 2.0)] * ranks_
        step = pipeline_seconds(stages, ranks=ranks_, micro_batches=rounds, schedule="1f1b").total
        assert (least_weights(ranks_, 1, rounds) @ np.full(ranks_, 3.0)).max() == pytest.approx(step)


def test_a_kind_without_any_choice_is_infinite_and_warns_of_nothing() -> None:
    """A way may leave one kind of block nothing that has room, and another one much."""
    none = Choices(np.full(2, np.inf), np.array([9.0, 1.0]), np.zeros(2))
    some = Choices(np.array([1.0, 3.0]), np.array([8.0, 2.0]), np.array([0.0, 1.0]))
    with np.errstate(all="raise"):
        found = least_at_prices(
            [RankKinds([(none, 1), (some, 2)], 12.0), RankKinds([(some, 2)], 12.0)], PRICES
        )
    assert np.isinf(found[0]).all()
    assert np.isfinite(found[1]).all()
