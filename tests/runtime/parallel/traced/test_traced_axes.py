"""Axes against index arithmetic: numbers of a dimension are numbered, and follow views, splits and joins."""

from __future__ import annotations

import pytest
import torch

from scrimp.runtime.parallel.traced.axes import Axis, cut_at, join, product, regroup, split, unify


def owners(axis: Axis, shared: Axis, ranks: int) -> list[int]:
    """Which rank has each number of an axis, by the ranges."""
    ranges = axis.shared_ranges(shared)
    assert ranges is not None
    found = [-1] * axis.size
    for one in ranges:
        for number in one:
            found[number] = (number - one.start) * ranks // len(one)
    return found


def test_heads_of_a_fused_weight_are_each_ranks_own() -> None:
    """[4 query heads, 2 key heads, 2 value heads] of 3 numbers, found by splitting, viewing and grouping."""
    fused = Axis(24)
    q, k, v = cut_at(fused, [12, 18])
    heads = regroup([q], [4, 3])
    keys = regroup([k], [2, 3])
    values = regroup([v], [2, 3])
    assert heads is not None
    assert keys is not None
    assert values is not None
    grouped = regroup([heads[0]], [2, 2])
    assert grouped is not None
    for one in (keys[0], values[0]):
        assert grouped[0] is not None
        assert one is not None
        unify(grouped[0], one)
    leaf = next(fused.leaves())
    assert leaf is keys[0].root  # type: ignore[union-attr]
    expected = [head // 2 for head in range(4) for _ in range(3)] + 2 * [
        head for head in (0, 1) for _ in range(3)
    ]
    assert owners(fused, leaf, 2) == expected
    assert fused.local_size({leaf}, 2) == 12


def test_a_factor_inside_gives_a_stretch_for_each_number_outside() -> None:
    fused = Axis(24)
    parts = regroup([fused], [3, 4, 2])
    assert parts is not None
    assert parts[1] is not None
    indices = torch.arange(24).view(3, 4, 2)
    expected = torch.empty(24, dtype=torch.long)
    expected[indices[:, :2].flatten()], expected[indices[:, 2:].flatten()] = 0, 1
    assert owners(fused, parts[1].root, 2) == expected.tolist()


def test_a_fused_dimension_is_viewed_as_heads() -> None:
    """Heads of queries and of keys side by side, each normed, joined, viewed and split again."""
    fused = join([q := Axis(8), k := Axis(4)])
    found = split(fused, 6)
    assert found is not None
    heads, size = found
    assert (heads.size, size.size) == (6, 2)
    first, second = cut_at(heads, [4])
    assert [first.size, second.size] == [4, 2]
    assert q.factors()[0] is first.root
    assert k.factors()[0] is second.root
    assert q.factors()[1] is k.factors()[1] is size.root


def test_two_views_of_one_dimension_are_refined_together() -> None:
    one, other = product([Axis(4), Axis(6)]), product([Axis(2), Axis(12)])
    unify(one, other)
    assert [factor.size for factor in one.factors()] == [2, 2, 6]
    assert [factor.root for factor in one.factors()] == [factor.root for factor in other.factors()]


@pytest.mark.parametrize(("one", "other"), [([2, 3], [3, 2]), ([4, 3], [6, 2])])
def test_views_that_do_not_fit_together_are_blocked(one: list[int], other: list[int]) -> None:
    left, right = product([Axis(size) for size in one]), product([Axis(size) for size in other])
    unify(left, right)
    assert all(leaf.blocked for leaf in (*left.leaves(), *right.leaves()))


def test_what_blocks_an_axis_blocks_what_it_is_made_of() -> None:
    axis = Axis(12)
    axis.block("because")
    parts = regroup([axis], [3, 4])
    assert parts is not None
    assert [part.blocked for part in parts if part] == ["because"] * 2
    other = Axis(3)
    assert parts[0] is not None
    unify(other, parts[0])
    assert other.blocked == "because"


def test_cutting_between_numbers_that_belong_together_blocks() -> None:
    axis = product([Axis(4), Axis(3)])
    assert all(piece.blocked for piece in cut_at(axis, [5]))
    assert all(leaf.blocked for leaf in axis.leaves())


def test_dimensions_of_different_sizes_are_blocked() -> None:
    one, other = Axis(6), Axis(4)
    unify(one, other)
    assert one.blocked == other.blocked == "it is read beside a dimension of another size"
    assert one.root is not other.root
