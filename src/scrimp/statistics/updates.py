"""What the optimizer would make of the gradients of one batch, relative to the weights.

::

    size         lr |h(g)| / |W|
    change       lr |h(g') - h(g)| / |W|          g' disturbed
    sensitivity  lr s / |W|, per change of g

Learning rates count relative to the largest, so that a warm-up or a schedule changes nothing; gradients are clipped
by the factor of the clean pass, in disturbed passes too.

Checked  tests/statistics/test_collect.py: sizes against the optimizer's own step; test_exact.py: changes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scrimp.statistics.optimizer_view import OptimizerView, UpdateRule
from scrimp.statistics.ranks import ALONE, Ranks, local
from scrimp.statistics.sensitivity import sensitivity
from scrimp.statistics.stream import generator_of, square

Array = NDArray[np.float64]


class Updates:
    """The next updates of K watched weights.

    Args:
        gradients: of the clean pass, by parameter name, as the optimizer will read them before clipping.
        weights: names of the watched weights.
        norms: their Frobenius norms.
        ranks: that hold pieces of them.
    """

    def __init__(
        self,
        optimizer: OptimizerView,
        gradients: Mapping[str, Tensor],
        weights: Sequence[str],
        norms: Sequence[float],
        ranks: Ranks = ALONE,
    ) -> None:
        self._weights, self._ranks = tuple(weights), ranks
        self.gradient_norms = norms_of(gradients, ranks)
        self._clip = optimizer.clip_factor(math.sqrt(sum(n**2 for n in self.gradient_norms.values())))
        self._rules: list[UpdateRule | None] = [
            _here(optimizer.rule(name)) if name in gradients else None for name in weights
        ]
        self.pieces = [ranks.piece(name, gradients.get(name)) for name in weights]
        largest = ranks.world.largest(max((rule.lr for rule in self._rules if rule is not None), default=0.0))
        self._scales = [
            0.0 if rule is None or not norm else (rule.lr / largest if largest > 0 else 1.0) / norm
            for rule, norm in zip(self._rules, norms, strict=True)
        ]

    def sizes(self, gradients: Mapping[str, Tensor]) -> Array:
        """[K], of the clean updates; 0 for weights that are not updated."""
        found = np.zeros(len(self._weights))
        for index, (name, rule) in enumerate(zip(self._weights, self._rules, strict=True)):
            if rule is not None:
                h = rule.direction(local(gradients[name]).float() * self._clip)
                found[index] = self._scales[index] * math.sqrt(square(h))
        return self._ranks.norms(found, self.pieces)

    def change(self, index: int, clean: Tensor, noisy: Tensor) -> float:
        """How far a changed gradient moves the update of one weight, the piece of it that lies here."""
        rule = self._rules[index]
        if rule is None:
            return 0.0
        change = rule.direction(noisy * self._clip).sub_(rule.direction(clean * self._clip))
        return self._scales[index] * math.sqrt(square(change))

    def sensitivities(
        self, gradients: Mapping[str, Tensor], spread: Callable[[int], Tensor | None], seed: int
    ) -> Array:
        """[2, K]: for changes that are evenly spread, and for those that lie where a GEMM's errors do.

        Args:
            spread: index of a weight to the deviation of such errors, of mean square 1; None: even.
        """
        found = np.zeros((2, len(self._weights)))
        for index, (name, rule) in enumerate(zip(self._weights, self._rules, strict=True)):
            if rule is None:
                continue
            gradient = local(gradients[name]) * self._clip
            norm = self.gradient_norms[name] * self._clip
            piece = None if self._ranks.size == 1 else self.pieces[index]
            for row, shape in enumerate((None, spread(index))):
                generator = generator_of(gradient.device, seed, index, 7)
                moved = sensitivity(rule, gradient, generator, shape, piece=piece, norm=norm)
                found[row, index] = self._scales[index] * moved * self._clip
        joined = self._ranks.norms(found, self.pieces)
        # Of a linear rule every piece has the whole's sensitivity.
        linear = np.array([rule is not None and rule.is_linear for rule in self._rules], dtype=np.float64)
        holders = self._ranks.sum(linear)
        of_pieces = np.sqrt(self._ranks.sum(linear * found**2) / np.maximum(1.0, holders))
        return np.where(holders > 0, of_pieces, joined)


def norms_of(tensors: Mapping[str, Tensor], ranks: Ranks = ALONE) -> dict[str, float]:
    """Frobenius norms of parameters or gradients, of which pieces may lie here, or none."""
    names = list(tensors if ranks.pieces is None else ranks.pieces)
    own = np.array([math.sqrt(square(tensors[name])) if name in tensors else 0.0 for name in names])
    pieces = [ranks.piece(name, tensors.get(name)) for name in names]
    return dict(zip(names, ranks.norms(own, pieces).tolist(), strict=True))


def _here(rule: UpdateRule | None) -> UpdateRule | None:
    return None if rule is None else rule.here()
