"""What the real errors of fprop do to the loss, to first order, from one backward pass.

Problem  Taken as random, errors say how far the loss is moved if tokens are independent. They are not: tokens of a
         sequence are moved alike, and early in training so are sequences, one way.
Method   Backward holds all that the first-order change needs. With X [T, I], W [O, I] and G = dLoss/dY [T, O] of a
         layer, and Q as the product would quantize them, token t changes the loss by::

             E   = Q(X) Q(W)' - X W' = (Q(X) - X) W' + Q(X) (Q(W) - W)'
             d_t = <G_t, E_t>        = <(G W)_t, (Q(X) - X)_t> + <G_t, (Q(X) (Q(W) - W)')_t>

         Sums of d over each of 16 parts of the batch, one behind the other, are kept. Their sum D is what the batch
         shows, and their spread how far other batches may differ from it::

             variance of D = 16 / 15 sum_p (d_p - D / 16)^2

Cost     For each micro-batch a product, and for each format a quantization of X and of W and one product more. Memory
         for some numbers of float32 as large as X, one layer and format at a time.
Ranks    All is linear in G: sums over ranks, of whole products, or of the pieces that tensor-parallel ranks have.
Limits   Parts cut sequences where a batch has fewer than 16. Tokens of experts lie in parts by where they stand among
         all that a rank's expert has. The change of second order is measured by the curvature along noise.
Source   Scrimp's own; the term itself is the first of the Taylor expansion that SNIP (arXiv 2602.01410, eq. (1)) takes
         the deviation of.
Checked  tests/statistics/test_loss_changes.py: against derivatives of the loss by the errors, in float64.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scrimp.gemm import Execution, PlannedLayer
from scrimp.gemm.problem import Use
from scrimp.planner.precision.profile import LOSS_PARTS
from scrimp.precision import GEMMS
from scrimp.statistics.norms import error_of
from scrimp.statistics.ranks import ALONE, Ranks

Array = NDArray[np.float64]
FPROP, _, WGRAD = GEMMS


class LossChanges:
    """An observer; sums of one statistics batch.

    Args:
        layers: that run here, by name.
        recipes: candidate formats.
        ranks: that the layers run on.
    """

    def __init__(
        self, layers: Mapping[str, PlannedLayer], recipes: Sequence[str], ranks: Ranks = ALONE
    ) -> None:
        self._layers, self._recipes, self._ranks = layers, recipes, ranks
        self._pieces: dict[tuple[str, str, int], list[Array]] = defaultdict(list)
        """(layer, recipe, expert) to the 16 sums of each micro-batch."""

    def __call__(self, execution: Execution) -> None:
        """Observe a wgrad; others say nothing."""
        layer, expert = execution.layer, execution.expert
        if execution.gemm != WGRAD or layer not in self._layers:
            return
        x = execution.b
        assert isinstance(x, Tensor), "statistics are taken with inputs saved in the compute type"
        planned = self._ranks.member(self._layers[layer], expert)
        g, w = execution.a.detach(), execution.weight.detach()
        x, w = x.detach().to(g.dtype), w.to(g.dtype)
        passed = (g @ w).float()
        for recipe in self._recipes:
            uses = planned.uses(FPROP, planned.clock.now, recipe)
            if any(use.operand is not None for use in uses):
                changes = _by_token(g, x, w, passed, uses).double().cpu().numpy()
                pieces = np.arange(len(g)) * LOSS_PARTS // len(g)
                sums = np.zeros(LOSS_PARTS)
                np.add.at(sums, pieces, changes)
                self._pieces[layer, recipe, expert].append(sums)

    def join(self, layers: Sequence[str]) -> Array:
        """[L, P, 16] of all ranks' tokens, in units of the loss; after the pass, by all ranks and the same on each."""
        own = np.zeros((len(layers), len(self._recipes), LOSS_PARTS))
        for (layer, recipe, _), pieces in self._pieces.items():
            found = own[layers.index(layer), self._recipes.index(recipe)]
            copies = self._ranks.copies() if self._layers[layer].piece is None else 1
            for number, sums in enumerate(pieces):
                np.add.at(found, self._ranks.parts(number, len(pieces), LOSS_PARTS), sums / copies)
        return self._ranks.sum(own * self._ranks.share)


def _by_token(g: Tensor, x: Tensor, w: Tensor, passed: Tensor, uses: tuple[Use, Use]) -> Tensor:
    """d [T], in float32; `passed` is G W."""
    of_x, of_w = (error_of(value, use) for value, use in zip((x, w), uses, strict=True))
    shared = (x + of_x.to(x.dtype)) @ of_w.to(x.dtype).t()
    changes: Tensor = torch.linalg.vecdot(passed, of_x) + torch.linalg.vecdot(g.float(), shared.float())
    return changes
