"""Gains held against real damage: a few layers of each kind run fprop in the lowest format.

Problem  Injected noise does not lie where errors lie. An error of X reaches Y through W: in a Llama after 300 steps it
         moves updates 1.4 to 2.4 times as far as noise of its size that is even over features. And noise that travels
         down the stream reaches a node shaped by all layers before it, and moves updates up to 1.6 times as far as a
         fresh error there.
Method   Layers are of one kind where their names differ in the numbers of blocks alone; those that enter a branch of
         the stream together (q, k and v; gate and up) are one kind too, and so are those that write to the stream last,
         one of each kind, for behind them only the head reads it. Of `BRANCHES` of each kind, evenly spread, all layers
         run fprop in the lowest candidate format at once, all else in the compute type: a pass for each kind, five of a
         Llama, on a batch that gains are measured on. Updates by fprop of all layers l of the kind are then multiplied
         by its rate::

             rate = |change of the updates| / sqrt(sum_k sum_l sum_o (c_k F[k<-l] e_f[l, o])^2)

         with l those that ran, and o the operands. dgrad and wgrad need none: what noise foretells of them is within a
         tenth in the median. Where the change is no finite number, neither are the gains: the kind gets no low format.
Limits   The rate of the lowest format is taken for all, and one for all depths, that of the largest of the four. The
         change also holds what roundings of the compute type do differently beside it. Few branches keep the
         disturbance small; many more would saturate AdamW's update, and with it the rate.
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

from scrimp.statistics.gains import UPDATES, Gains
from scrimp.statistics.structure import Structure

Array = NDArray[np.float64]
BRANCHES = 4
"""How many branches of each kind run in the format."""


def kinds_of(layers: Sequence[str], structure: Structure | None) -> list[list[list[int]]]:
    """Indices of layers, by kind and branch; without a structure each layer is a branch of its own."""
    found: dict[tuple[str, bool], dict[str, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, layer in enumerate(layers):
        place = None if structure is None else structure.place(layer)
        exit_ = layer if structure is None or place is None else structure.sublayers[place].exit
        kind = re.sub(r"\b\d+\b", "*", exit_), layer == exit_
        found[kind][exit_].append(index)
    kinds = [list(branches.values()) for branches in found.values()]
    if structure is None:
        return kinds
    last = [
        branches.pop()
        for (_, is_exit), branches in zip(found, kinds, strict=True)
        if is_exit and len(branches) > 1
    ]
    return [*kinds, last] if last else kinds


def spread(branches: Sequence[list[int]]) -> list[int]:
    """The layers of at most `BRANCHES` of them, from the first to the last."""
    count = min(len(branches), BRANCHES)
    places = np.linspace(0, len(branches) - 1, count).round().astype(int)
    return [index for place in places for index in branches[place]]


def calibrated(
    gains: Gains, errors: Array, kinds: Sequence[Sequence[list[int]]], run: Callable[[list[int]], Array]
) -> Gains:
    """Forward gains of updates times the rate of each layer's kind.

    Args:
        errors: [L, 2], |error| of fprop's result in the lowest format, by operand.
        kinds: indices of layers, by kind and branch.
        run: with these layers' fprop in the format, how far gradients and updates move, [2, K].
    """
    forward = gains.forward.copy()
    for branches in kinds:
        members = spread(branches)
        foretold = np.einsum("okl,lo->", gains.forward[:, UPDATES][..., members] ** 2, errors[members] ** 2)
        square = float((run(members)[UPDATES] ** 2).sum())
        rate = math.sqrt(square / foretold) if foretold > 0 else 1.0
        for branch in branches:
            forward[:, UPDATES, :, branch] *= rate if math.isfinite(square) else math.nan
    return replace(gains, forward=forward)
