"""What the real errors of fprop do to the loss, to first order, from one backward pass.

Problem  Taken as random, errors say how far the loss is moved if tokens are independent. They are not: tokens of a
         sequence are moved alike, and early in training so are sequences, one way.
Method   Backward holds all that the first-order change needs. With X [T, I], W [O, I] and G = dLoss/dY [T, O] of a
         layer, and Q as the product would quantize them, token t changes the loss by::

             E   = Q(X) Q(W)' - X W' = (Q(X) - X) W' + Q(X) (Q(W) - W)'
             d_t = <G_t, E_t>        = <(G W)_t, (Q(X) - X)_t> + <G_t, (Q(X) (Q(W) - W)')_t>

         Sums of d over each of 16 parts of the tokens (of every micro-batch the first sixteenth, and so on) are
         kept: their sum D is what the batch shows, and their spread how far other batches may differ from it::

             variance of D = 16 / 15 sum_p (d_p - D / 16)^2

         In small models at steps 60 and 300 D correlates by 0.97 and 0.77 with what the loss of the same batch
         really did, layer by layer.
Cost     A quantization of X and of W in each format, one product, and one more for each format.
Ranks    All is linear in G: sums over ranks, of whole products, or of the parts that tensor-parallel ranks have.
Limits   Parts may cut a sequence where a micro-batch has fewer than 16: what its tokens share is then missed. Change of
         second order is measured by the curvature along noise.
Source   Scrimp's own; the term itself is the first of the Taylor expansion that SNIP (arXiv 2602.01410, eq. (1)) takes
         the deviation of.
Checked  tests/statistics/test_loss_changes.py: against changes of the loss by errors made small, in float64.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from scrimp.formats import QuantizedTensor
from scrimp.gemm import Execution, PlannedLayer
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
        self._sums: dict[tuple[str, str], Array] = {}

    def __call__(self, execution: Execution) -> None:
        """Observe a wgrad; others say nothing."""
        if execution.gemm != WGRAD or execution.layer not in self._layers:
            return
        planned = self._layers[execution.layer]
        if planned.members:
            first, _ = self._ranks.experts.get(execution.layer, (0, 0))
            planned = planned.members[execution.expert - first]
        g, x, w = execution.a, execution.b, execution.weight
        if isinstance(x, QuantizedTensor):
            x = x.dequantize()
        g, x, w = g.detach(), x.detach().to(g.dtype), w.detach().to(g.dtype)
        passed = (g @ w).float()
        parts = torch.arange(len(g), device=g.device) * LOSS_PARTS // max(1, len(g))
        for recipe in self._recipes:
            uses = planned.uses(FPROP, planned.clock.now, recipe)
            if all(use.operand is None for use in uses):
                continue
            of_x, of_w = (error_of(value, use) for value, use in zip((x, w), uses, strict=True))
            shared = (x + of_x.to(x.dtype)) @ of_w.to(w.dtype).t()
            by_token = (passed * of_x).sum(1) + (g * shared).float().sum(1)
            found = torch.zeros(LOSS_PARTS, device=g.device).index_add_(0, parts, by_token)
            sums = self._sums.setdefault((execution.layer, recipe), np.zeros(LOSS_PARTS))
            sums += found.double().cpu().numpy()

    def join(self, layers: Sequence[str]) -> Array:
        """[L, P, 16] of all ranks' tokens, in units of the loss; after the pass, by all ranks and the same on each."""
        own = np.zeros((len(layers), len(self._recipes), LOSS_PARTS))
        for (i, layer), (p, recipe) in itertools.product(enumerate(layers), enumerate(self._recipes)):
            if (found := self._sums.get((layer, recipe))) is not None:
                is_whole = self._layers[layer].piece is None
                own[i, p] = found / (self._ranks.copies() if is_whole else 1)
        return self._ranks.sum(own * self._ranks.share)
