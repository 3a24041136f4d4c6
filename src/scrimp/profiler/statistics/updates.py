"""What the optimizer would make of the gradients of one batch, relative to the weights.

::

    size         lr |h(g)| / |W|
    change       lr |h(g') - h(g)| / |W|          g' disturbed
    sensitivity  lr s / |W|, per change of g

Learning rates count relative to the largest, so that a warm-up or a schedule changes nothing; gradients are clipped
by the factor of the clean pass, in disturbed passes too.

Checked  tests/profiler/statistics/test_collect.py: sizes against the optimizer's own step; test_exact.py: changes
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from scrimp.profiler.statistics.sensitivity import OptimizerView, UpdateRule, sensitivity
from scrimp.profiler.statistics.stream import generator_of, square

Array = NDArray[np.float64]


class Updates:
    """The next updates of K watched weights.

    Args:
        gradients: of the clean pass, by parameter name, as the optimizer will read them before clipping.
        weights: names of the watched weights.
        norms: their Frobenius norms.
    """

    def __init__(
        self,
        optimizer: OptimizerView,
        gradients: Mapping[str, Tensor],
        weights: Sequence[str],
        norms: Sequence[float],
    ) -> None:
        self._weights = tuple(weights)
        self._clip = optimizer.clip_factor(math.sqrt(sum(square(g) for g in gradients.values())))
        self._rules: list[UpdateRule | None] = [
            optimizer.rule(name) if name in gradients else None for name in weights
        ]
        largest = max((rule.lr for rule in self._rules if rule is not None), default=0.0)
        self._scales = [
            0.0 if rule is None or not norm else (rule.lr / largest if largest > 0 else 1.0) / norm
            for rule, norm in zip(self._rules, norms, strict=True)
        ]

    def sizes(self, gradients: Mapping[str, Tensor]) -> Array:
        """[K], of the clean updates; 0 for weights that are not updated."""
        found = np.zeros(len(self._weights))
        for index, (name, rule) in enumerate(zip(self._weights, self._rules, strict=True)):
            if rule is not None:
                h = rule.direction(gradients[name].float() * self._clip)
                found[index] = self._scales[index] * math.sqrt(square(h))
        return found

    def change(self, index: int, clean: Tensor, noisy: Tensor) -> float:
        """How far a changed gradient moves the update of one weight."""
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
            gradient = gradients[name].detach() * self._clip
            for row, shape in enumerate((None, spread(index))):
                generator = generator_of(gradient.device, seed, index, 7)
                moved = sensitivity(rule, gradient, generator, shape)
                found[row, index] = self._scales[index] * moved * self._clip
        return found
