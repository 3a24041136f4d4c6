"""Weights and gradients on their way against a set of what is on the device, moved by the runtime's rules."""

from itertools import pairwise, product

import pytest

from scrimp.planner.memory.visits import moving_gradients, streamed_peak, visiting_weights

SIZES = (1, 10, 100, 1000, 10000)
PLACES = list(product((False, True), repeat=len(SIZES)))


def total(blocks: set[int]) -> int:
    return sum(SIZES[i] for i in blocks)


@pytest.mark.parametrize("leaves", PLACES)
def test_weights_come_one_block_ahead_and_the_last_two_stay(leaves: tuple[bool, ...]) -> None:
    order = [i for i, away in enumerate(leaves) if away]
    following, before = dict(pairwise(order)), {after: i for i, after in pairwise(order)}
    here: set[int] = set()
    forward, backward = [], []
    for i in range(len(SIZES)):
        if i in order:
            here |= {i, following.get(i, i)}
        forward.append(total(here))
        if i in order and i not in order[-2:]:
            here.remove(i)
    head = total(here)
    for i in reversed(range(len(SIZES))):
        if i in order:
            here |= {i, before.get(i, i)}
        backward.append(total(here))
        here -= {i}
    found = visiting_weights(SIZES, leaves)
    assert (list(found.forward), found.head, list(found.backward)) == (forward, head, backward[::-1])


@pytest.mark.parametrize("accumulates", [False, True])
@pytest.mark.parametrize("leaves", PLACES)
def test_gradients_leave_after_their_block_and_come_before_it(
    leaves: tuple[bool, ...], accumulates: bool
) -> None:
    order = [i for i, away in enumerate(leaves) if away]
    before = {after: i for i, after in pairwise(order)}
    here: set[int] = set()
    backward = []
    for i in reversed(range(len(SIZES))):
        if i in order and accumulates:
            here |= {i, before.get(i, i)}
        backward.append(total(here))
        here -= {i + 1}  # its copy is waited for when the next block's pass is over
        here |= {i} & set(order)
    found = moving_gradients(SIZES, leaves, accumulates)
    assert (list(found.backward), found.embedding) == (backward[::-1], total(here))


def test_an_update_holds_a_block_and_its_neighbour() -> None:
    assert streamed_peak([], [], 7) == 7
    assert streamed_peak([5], [1], 7) == 5 + 7
    assert streamed_peak([5, 6, 9], [1, 2, 3], 7) == 5 + 6 + 7
    assert streamed_peak([5, 6, 9], [1, 20, 3], 7) == 6 + 9 + 20
