"""Axes: what the dimensions of tensors are made of, found out operator by operator.

Problem  Whether ranks can share a layer depends on what its outputs mean further on. `view` makes heads of features,
         a fused layer's outputs are split in three, keys are repeated for groups of queries. A dimension's number in a
         shape says nothing of this.
Method   Every dimension is an axis. An axis is a leaf, a product of others (a flattened dimension, the outermost factor
         first), or a join of others that lie one after the other (a fused one). Operators refine axes in place: a view
         of 32 features as 4 x 8 makes a product of the leaf, a split a join. Operators that put two dimensions side by
         side, number by number, make them the same axis (`unify`), with all that is known of either. So the rows of a
         query's weight end up as [key heads, queries of each, head size], of which the key heads are the same leaf as
         in the weights of keys and values, whatever order things became known in.
Blocked  A leaf along which numbers do not stay apart, or that is not understood, is blocked, with the reason. It can
         not be shared out.
Limits   Sizes are numbers. A dimension of one number has no axis.
Checked  tests/runtime/parallel/traced/test_traced_axes.py
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Sequence

Dims = list["Axis | None"]
"""A tensor's dimensions; None: of one number."""
MOST_PIECES = 64
"""Ranges that one rank may have of a parameter."""


class Axis:
    """A dimension, or part of one.

    Args:
        size: more than one number.
        blocked: why it cannot be shared out; None: as far as is known it can.
    """

    def __init__(self, size: int, blocked: str | None = None) -> None:
        self.size, self._blocked = size, blocked
        self._same_as: Axis | None = None
        self._factors: tuple[Axis, ...] = ()
        self._pieces: tuple[Axis, ...] = ()

    @property
    def root(self) -> Axis:
        """What stands for all axes that are this one."""
        axis = self
        while axis._same_as is not None:
            axis = axis._same_as
        return axis

    @property
    def blocked(self) -> str | None:
        """Why this leaf cannot be shared out."""
        return self.root._blocked

    def factors(self) -> list[Axis]:
        """Leaves and joins whose product this is, the outermost first."""
        root = self.root
        if not root._factors:
            return [root]
        return [factor for part in root._factors for factor in part.factors()]

    def pieces(self) -> list[Axis]:
        """What lies one after the other in it."""
        root = self.root
        if not root._pieces:
            return [root]
        return [piece for part in root._pieces for piece in part.pieces()]

    @property
    def is_leaf(self) -> bool:
        """Whether nothing is known of what it is made of."""
        return not (self.root._factors or self.root._pieces)

    def leaves(self) -> Iterator[Axis]:
        """All leaves, each as often as it occurs."""
        root = self.root
        if root.is_leaf:
            yield root
        for part in root._factors or root._pieces:
            yield from part.leaves()

    def block(self, why: str) -> None:
        """Keep it on one rank."""
        for leaf in self.leaves():
            leaf._blocked = leaf._blocked or why

    def local_size(self, shared: Collection[Axis], ranks: int) -> int:
        """Its size on each of so many ranks that share some leaves."""
        root = self.root
        if root.is_leaf:
            return root.size // ranks if root in shared else root.size
        if root._factors:
            return math.prod(factor.local_size(shared, ranks) for factor in root._factors)
        return sum(piece.local_size(shared, ranks) for piece in root._pieces)

    def shared_ranges(self, shared: Axis) -> list[range] | None:
        """The ranges of numbers of which every rank has its share, in rising order; None: that is no share of each."""
        found = self._shared_ranges(shared.root)
        whole = sum(map(len, found)) if found else 0
        return found if whole == self.size and len(found) <= MOST_PIECES else None

    def _shared_ranges(self, shared: Axis) -> list[range]:
        root = self.root
        if root.is_leaf:
            return [range(root.size)] if root is shared else []
        if root._pieces:
            starts = itertools.accumulate((piece.size for piece in root._pieces), initial=0)
            return [
                range(start + one.start, start + one.stop)
                for start, piece in zip(starts, root._pieces, strict=False)
                for one in piece._shared_ranges(shared)
            ]
        factors = self.factors()
        number = next((n for n, factor in enumerate(factors) if factor._shared_ranges(shared)), None)
        if number is None:
            return []
        inner = math.prod(factor.size for factor in factors[number + 1 :])
        outer, step = math.prod(factor.size for factor in factors[:number]), factors[number].size * inner
        return [
            range(turn * step + one.start * inner, turn * step + one.stop * inner)
            for turn in range(outer)
            for one in factors[number]._shared_ranges(shared)
        ]

    def _become_product(self, factors: Sequence[Axis]) -> None:
        root = self.root
        parts = tuple(factor for factor in factors if factor.size > 1)
        root._pieces, root._factors = (), parts
        root._hand_down()

    def _become_join(self, pieces: Sequence[Axis]) -> None:
        root = self.root
        root._pieces = tuple(pieces)
        root._hand_down()

    def _hand_down(self) -> None:
        if self._blocked:
            for part in self._factors or self._pieces:
                part.block(self._blocked)


def product(parts: Sequence[Axis]) -> Axis:
    """One dimension of several, the outermost first."""
    if len(parts) == 1:
        return parts[0].root
    axis = Axis(math.prod(part.size for part in parts))
    axis._become_product(parts)
    return axis


def join(parts: Sequence[Axis]) -> Axis:
    """One dimension of several that lie one after the other."""
    if len(parts) == 1:
        return parts[0].root
    axis = Axis(sum(part.size for part in parts))
    axis._become_join(parts)
    return axis


def unify(one: Axis, other: Axis) -> None:
    """Two dimensions are the same from now on: what is found out of one holds of the other. Both are blocked where they
    cannot be, as of different sizes."""
    one, other = one.root, other.root
    if one is other:
        return
    if one.size != other.size:
        why = "it is read beside a dimension of another size"
        one.block(why)
        other.block(why)
        return
    if one.is_leaf or other.is_leaf:
        leaf, kept = (one, other) if one.is_leaf else (other, one)
        leaf._same_as = kept
        if leaf._blocked:
            kept.block(leaf._blocked)
    elif one._pieces and other._pieces:
        bounds = sorted({*_bounds(one), *_bounds(other)})
        for mine, yours in zip(cut_at(one, bounds), cut_at(other, bounds), strict=True):
            unify(mine, yours)
        other.root._same_as = one.root if one.root is not other.root else None
    else:
        _unify_products(one, other)


def _bounds(axis: Axis) -> list[int]:
    """Where its pieces begin, but the first."""
    return list(itertools.accumulate(piece.size for piece in axis.pieces()))[:-1]


def _unify_products(one: Axis, other: Axis) -> None:
    """A product with a product, or with a join, factor by factor from the outermost."""
    left, right = one.factors()[::-1], other.factors()[::-1]
    while left and right:
        mine, yours = left.pop(), right.pop()
        if mine.size == yours.size:
            unify(mine, yours)
            continue
        large, small, rest = (mine, yours, left) if mine.size > yours.size else (yours, mine, right)
        (right if large is mine else left).append(small)
        inner = split(large, small.size)
        if inner is None:
            why = "it is read in two ways that do not fit together"
            one.block(why)
            other.block(why)
            return
        rest.extend(inner[::-1])


def split(axis: Axis, outer: int) -> list[Axis] | None:
    """Take a leaf or a join as a product of an outer factor of this size and an inner one; None: it is none."""
    root = axis.root
    if root.size % outer:
        return None
    inner = root.size // outer
    if root.is_leaf:
        root._become_product([Axis(outer), Axis(inner)])
        return root.factors()
    if root._factors:
        return None
    if any(piece.size % inner for piece in root.pieces()):
        return None
    outers, inners = [], []
    for piece in root.pieces():
        parts = regroup([piece], [piece.size // inner, inner])
        if parts is None:
            return None
        outers.append(parts[0] or Axis(1))
        inners.append(parts[1])
    first = inners[0]
    assert first is not None
    for one in inners[1:]:
        assert one is not None
        unify(first, one)
    root._become_product([join(outers), first])
    return root.factors()


def regroup(dims: Sequence[Axis | None], sizes: Sequence[int]) -> Dims | None:
    """The same numbers in the same order as dimensions of these sizes; None: the axes do not say which is which."""
    rest = [factor for dim in reversed(dims) if dim is not None for factor in reversed(dim.factors())]
    found: Dims = []
    for size in sizes:
        taken, left = [], size
        while left > 1:
            factor = rest.pop()
            if left % factor.size == 0:
                taken.append(factor)
                left //= factor.size
                continue
            parts = split(factor, left) if factor.size % left == 0 else None
            if parts is None:
                return None
            # A factor that was split may have been unified with products: take what makes up the outer size.
            made = 1
            while made < left:
                made *= parts[0].size
                taken.append(parts.pop(0))
            if made != left:
                return None
            rest.extend(reversed(parts))
            left = 1
        found.append(product(taken) if taken else None)
    return found


def cut_at(axis: Axis, bounds: Sequence[int]) -> list[Axis]:
    """The stretches of an axis between these numbers, which rise and lie inside of it."""
    root = axis.root
    inside = [bound for bound in bounds if 0 < bound < root.size]
    if not inside:
        return [root]
    if root.is_leaf:
        ends = [0, *inside, root.size]
        root._become_join([Axis(last - first) for first, last in itertools.pairwise(ends)])
        return list(root._pieces)
    if root._pieces:
        return _cut_join(root, inside)
    factors = root.factors()
    inner = math.prod(factor.size for factor in factors[1:])
    if any(bound % inner for bound in inside):
        why = "it is cut between numbers that belong together"
        root.block(why)
        ends = [0, *inside, root.size]
        return [Axis(last - first, why) for first, last in itertools.pairwise(ends)]
    stretches = cut_at(factors[0], [bound // inner for bound in inside])
    return [product([stretch, *factors[1:]]) for stretch in stretches]


def _cut_join(root: Axis, bounds: Sequence[int]) -> list[Axis]:
    """`cut_at` of a join: pieces in which a bound falls are cut themselves."""
    stretches, current, start = [], list[Axis](), 0
    for piece in root.pieces():
        within = [bound - start for bound in bounds if start < bound < start + piece.size]
        for number, part in enumerate(cut_at(piece, within)):
            if number or start in bounds:
                stretches.append(current)
                current = []
            current.append(part)
        start += piece.size
    stretches.append(current)
    return [join(parts) for parts in stretches]
