"""The choices of blocks, beside all choices that there are."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scrimp.planner.layout.knapsack import Cells, Choices, Frontier, cell, frontier, spread, useful

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


def whole(parts: list[Choices], room: float, harm: int) -> Frontier:
    """With cells of one unit, which round nothing."""
    spare = room - sum(one.bytes.min() for one in parts)
    return frontier(parts, room, 1.0, Cells(bytes=max(1, int(spare)), harm=harm))


@given(blocks(), st.integers(0, 20), st.integers(0, 12))
def test_a_stage_is_as_fast_as_the_best_of_all_choices(parts: list[Choices], room: int, harm: int) -> None:
    found = whole(parts, room, harm)
    for allowed in range(harm + 1):
        assert found.seconds[allowed] == brute_force(parts, room, allowed)
    if np.isfinite(found.seconds[-1]):
        pairs = list(zip(parts, found.choices(harm), strict=True))
        assert sum(one.seconds[k] for one, k in pairs) == found.seconds[-1]
        assert sum(one.bytes[k] for one, k in pairs) <= room
        assert sum(one.harm[k] for one, k in pairs) <= harm


@given(
    st.lists(blocks(2), min_size=1, max_size=3),
    st.integers(2, 9),
    st.integers(0, 8),
    st.integers(1, 5),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
)
@settings(max_examples=60)
def test_stages_share_harm_as_the_best_of_all_choices(
    stages: list[list[Choices]], room: int, harm: int, micro_batches: int, fixed: list[int]
) -> None:
    own = [whole(parts, room, harm) for parts in stages]
    bases = [float(one) for one in fixed[: len(stages)]]
    parts = spread([one.seconds for one in own], bases, micro_batches)

    def step(seconds: list[float]) -> float:
        return (micro_batches - 1) * max(seconds) + sum(seconds)

    best = np.inf
    for shares in itertools.product(range(harm + 1), repeat=len(stages)):
        if sum(shares) <= harm:
            best = min(
                best,
                step(
                    [
                        brute_force(one, room, share) + base
                        for one, share, base in zip(stages, shares, bases, strict=True)
                    ]
                ),
            )
    if parts is None:
        assert np.isinf(best)
        return
    assert sum(parts) <= harm
    assert step([one.seconds[at] + base for one, at, base in zip(own, parts, bases, strict=True)]) == best


@given(blocks(4), st.floats(0.5, 20.0), st.floats(0.3, 3.0), st.integers(4, 40))
def test_coarse_cells_exceed_nothing(parts: list[Choices], room: float, scale: float, cells: int) -> None:
    scaled = [Choices(one.seconds, one.bytes * scale, one.harm * scale) for one in parts]
    unit = cell(np.concatenate([one.harm for one in scaled]), 8.0, cells)
    found = frontier(scaled, room, unit, Cells(bytes=cells, harm=int(8.0 / unit)))
    if np.isfinite(found.seconds[-1]):
        pairs = list(zip(scaled, found.choices(len(found.seconds) - 1), strict=True))
        assert sum(one.bytes[k] for one, k in pairs) <= room * (1 + 1e-9)
        assert sum(one.harm[k] for one, k in pairs) <= 8.0 * (1 + 1e-9)


@given(blocks(1))
def test_what_is_left_out_is_no_better_in_anything(parts: list[Choices]) -> None:
    one = parts[0]
    kept = useful(one)
    for index in set(range(len(one.seconds))) - set(kept.tolist()):
        assert any(
            one.seconds[k] <= one.seconds[index]
            and one.bytes[k] <= one.bytes[index]
            and one.harm[k] <= one.harm[index]
            for k in kept
        )


def test_blocks_at_their_least_or_at_the_largest_step_are_exact() -> None:
    """32 equal blocks that keep 3.7 or 0.1 bytes: as many keep all as there is room for, none fewer."""
    one = Choices(np.array([1.0, 1.3]), np.array([3.7, 0.1]), np.zeros(2))
    room = 32 * 0.1 + 19 * 3.6 + 0.01
    found = frontier([one] * 32, room, 1.0, Cells(bytes=64, harm=0))
    assert found.seconds[-1] == pytest.approx(32 * 1.0 + 13 * 0.3)
