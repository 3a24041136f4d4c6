"""The order of a mixture's sources: exact in every prefix, the same wherever one begins to read it."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scrimp.data.interleave import Interleave

some = st.one_of(st.integers(0, 3), st.integers(1, 40))
many_shares = st.lists(some, min_size=1, max_size=9).filter(any).map(tuple)


@given(many_shares)
def test_no_prefix_is_off_by_a_whole_sample(shares: tuple[int, ...]) -> None:
    order, counts, total = Interleave(shares), [0] * len(shares), sum(shares)
    for position in range(2 * total + 1):
        source, before = order[position]
        assert before == counts[source]
        counts[source] += 1
        for share, count in zip(shares, counts, strict=True):
            assert abs(count - Fraction(share * (position + 1), total)) < 1


@given(many_shares, st.integers(0, 10**15))
def test_any_position_is_found_without_those_before_it(shares: tuple[int, ...], position: int) -> None:
    order, total = Interleave(shares), sum(shares)
    rounds, place = divmod(position, total)
    first = [order[number][0] for number in range(place)]  # of the first round, which the others repeat
    source, before = order[position]
    assert source == order[place][0]
    assert before == rounds * shares[source] + first.count(source)
    expected = [rounds * share + first.count(number) for number, share in enumerate(shares)]
    assert order.counts(position) == expected


def test_a_source_alone_is_read_in_its_own_order() -> None:
    order = Interleave((1,))
    assert [order[position] for position in (0, 1, 2, 10**12)] == [(0, 0), (0, 1), (0, 2), (0, 10**12)]


def test_the_window_that_ends_first_is_served_and_of_equals_the_first() -> None:
    """By hand: of shares 1 and 3 windows end at 4 and at 2, 3, 4; at position 2 both end at 4."""
    assert [Interleave((1, 3))[position][0] for position in range(8)] == [1, 1, 0, 1, 1, 1, 0, 1]
    assert [Interleave((2, 2, 2))[position][0] for position in range(6)] == [0, 1, 2, 0, 1, 2]


@pytest.mark.parametrize("shares", [(), (0, 0), (2, -1)])
def test_no_share_is_negative_and_one_is_above_0(shares: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="above 0"):
        Interleave(shares)


def test_there_is_nothing_before_the_first_position() -> None:
    with pytest.raises(IndexError, match="from 0"):
        Interleave((1, 2))[-1]
