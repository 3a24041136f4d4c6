"""Gains held against real damage: a few layers of each kind run fprop in the lowest format.

Problem  Injected noise does not lie where errors lie. An error of X reaches Y through W, and so along W's largest
         directions, to which the rest of the model listens most: in a Llama after 300 steps it moves updates 1.4 (q)
         to 2 times (k) as far as noise of its size that is even over features. And noise that travels down the stream
         reaches a node shaped by all layers before it, and moves updates up to 1.5 times as far as a fresh error there.
Method   Layers are of one kind where their names differ in numbers alone; those that enter a branch together (q, k and
         v; gate and up) are one kind too. `MEMBERS` of each kind, evenly spread, run fprop in the lowest candidate
         format at once, all else in the compute type: a pass for each kind, four of a Llama, on a batch that gains are
         measured on. Updates by fprop of all layers l of the kind are then multiplied by its rate::

             rate = |change of the updates| / sqrt(sum_k sum_l sum_o (c_k F[k<-l] e_f[l, o])^2)

         with l the members, and o the operands. dgrad and wgrad need none: what noise foretells of them is within a
         tenth in the median.
Limits   The rate of the lowest format is taken for all. Few members keep the disturbance small; many more would
         saturate AdamW's update, and with it the rate.
Checked  tests/statistics/test_calibration.py; test_damage.py; benchmarks/snip_rates.py: against each GEMM alone
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scrimp.statistics.gains import Gains
from scrimp.statistics.structure import Structure

Array = NDArray[np.float64]
MEMBERS = 4
"""Layers of a kind that run in the format."""
UPDATES = 1
"""Row of gains that says how far updates move, after that of gradients."""


def kinds_of(layers: Sequence[str], structure: Structure | None) -> list[list[int]]:
    """Indices of layers, by kind."""
    found: dict[tuple[str, bool], list[int]] = defaultdict(list)
    for index, layer in enumerate(layers):
        place = None if structure is None else structure.place(layer)
        name, is_exit = layer, True
        if structure is not None and place is not None:
            name = structure.sublayers[place].exit
            is_exit = layer == name
        found[re.sub(r"\d+", "*", name), is_exit].append(index)
    return list(found.values())


def spread(indices: Sequence[int], count: int = MEMBERS) -> list[int]:
    """At most so many of them, from the first to the last."""
    if len(indices) <= count:
        return list(indices)
    return [indices[round(place)] for place in np.linspace(0, len(indices) - 1, count)]


def calibrated(
    gains: Gains, errors: Array, kinds: Sequence[Sequence[int]], run: Callable[[list[int]], Array]
) -> Gains:
    """Forward gains of updates times the rate of each layer's kind.

    Args:
        errors: [L, 2], |error| of fprop's result in the lowest format, by operand.
        kinds: indices of layers, by kind.
        run: with these layers' fprop in the format, how far gradients and updates move, [2, K].
    """
    forward = gains.forward.copy()
    for kind in kinds:
        members = spread(kind)
        foretold = np.einsum("okl,lo->", gains.forward[:, UPDATES][..., members] ** 2, errors[members] ** 2)
        square = float((run(members)[UPDATES] ** 2).sum())
        if math.isfinite(square) and square > 0 and math.isfinite(foretold) and foretold > 0:
            forward[:, UPDATES, :, kind] *= math.sqrt(square / foretold)
    return replace(gains, forward=forward)
