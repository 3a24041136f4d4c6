"""States of the maps of one weight matrix, each on the rank that makes its update.

Problem  What GaLore keeps of a map has neither the shape of the weights nor a part of it for each of their parts.
Method   A state of a parameter is one row of float32 numbers: those of its first map, row by row, then those of the
         second. Of this row a rank has the stretches of the maps that it owns (`scrimp.optim.shared_maps`), so that a
         checkpoint is the same whoever owns what, and any layout reads it.
Checked  tests/optim/test_galore.py; tests/optim/test_galore_on_ranks.py, tests/training/test_optimizers_on_ranks.py:
         ranks
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from scrimp.optim.shared_maps import Map
from scrimp.parts import TensorPart

Shapes = Mapping[str, tuple[int, ...]]
"""End of a state's name to its shape, of one map."""


class OwnedStates:
    """Zeros for the maps of a parameter that this rank owns.

    Args:
        shapes: of the states of each map of the parameter, from its first rows to its last; all with the same names.
        owned: those whose states lie here.
        is_writer: whether this rank writes them.
    """

    def __init__(
        self, shapes: Mapping[Map, Shapes], owned: Collection[Map], device: torch.device, *, is_writer: bool
    ) -> None:
        self._views: dict[Map, dict[str, Tensor]] = {one: {} for one in shapes if one in owned}
        self._parts: dict[str, TensorPart] = {}
        for name in next(iter(shapes.values())):
            sizes = [math.prod(each[name]) for each in shapes.values()]
            places = {
                one: range(*ends)
                for one, ends in zip(shapes, pairwise(accumulate(sizes, initial=0)), strict=True)
            }
            here = [places[one] for one in self._views]
            local = torch.zeros(sum(map(len, here)), device=device)
            for one, piece in zip(self._views, local.split(list(map(len, here))), strict=True):
                self._views[one][name] = piece.view(shapes[one][name])
            if sum(sizes):
                self._parts[name] = _part(local, sum(sizes), here, is_writer=is_writer)

    def of(self, one: Map) -> dict[str, Tensor]:
        """The states of a map that lies here, by name, each in its shape."""
        return self._views[one]

    def parts(self) -> Iterator[tuple[str, TensorPart]]:
        """Name and storage of every state, as checkpoints hold it; none of a name that no map has numbers of."""
        yield from self._parts.items()


def _part(local: Tensor, size: int, here: Sequence[range], *, is_writer: bool) -> TensorPart:
    """Stretches of a row of numbers, one after the other."""
    joined: list[range] = []
    for one in here:
        if joined and joined[-1].stop == one.start:
            joined[-1] = range(joined[-1].start, one.stop)
        elif len(one):
            joined.append(one)
    first = joined[0].start if joined else 0
    return TensorPart(local, (size,), (first,), is_writer, tuple(joined) if len(joined) > 1 else ())
