"""What it costs to store a frozen weight in a format: how far the model's predictions move.

Problem  Beside adapters a base may lie in memory as codes (`scrimp.gemm.stored_weight`). Which layers bear 4 bits? The
         change of the loss on a few texts is mostly noise, up or down. How far predictions move is not.
Method   One weight at a time, in one format, all else as it is; the mean over tokens of the divergence of what the
         model then predicts from what it predicted::

             D[l, f] = mean_t KL(p_t || p_t with W_l stored in f)

         which to second order is e'Fe / 2, with e the error of the weight and F the Fisher information: no gradients
         are needed. Weights of several layers are rounded independently, so that divergences add up; what the chosen
         ones cost together is measured at the end (`divergence_of`).
Cost     A forward pass for each layer and format. Of each only hidden states are kept; logits exist for a chunk of
         tokens at a time.
Limits   A model that computes in bf16 rounds its activations anew whatever changes: a floor below each divergence, of
         some 4e-5 nats in llama-3m, as much as 8 bits cost. Errors that fine-tuning itself would undo are counted
         all the same. A text unlike what the model will read measures another model.
Source   SNIP (arXiv 2602.01410) for the program that chooses; the second order as in Kim et al. 2024, SqueezeLLM
         (arXiv 2306.07629), measured here instead of approximated by a diagonal.
Checked  tests/statistics/test_stored_weights.py
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrimp.gemm import stored_values
from scrimp.models.model import Model
from scrimp.precision import HEAD

_CHUNK = 256


class PredictionDivergence:
    """How far a model's predictions on some rows of tokens move when weights are stored.

    Args:
        model: in evaluation; unchanged but inside its methods.
        tokens_BT: rows; one at a time is run.
    """

    def __init__(self, model: Model, tokens_BT: Tensor) -> None:
        self._model, self._rows = model, tokens_BT.split(1)
        with torch.no_grad():
            self._before = [model(row).flatten(0, -2) for row in self._rows]

    def of_each(
        self, formats: Sequence[str], on_pass: Callable[[], object] = lambda: None
    ) -> dict[str, dict[str, float]]:
        """Layer to recipe to nats per token, of each linear layer of blocks by itself.

        Args:
            on_pass: called after each layer and format.
        """
        found: dict[str, dict[str, float]] = {}
        for layer in storable(self._model):
            found[layer] = {}
            for name in formats:
                found[layer][name] = self.of({layer: name})
                on_pass()
        return found

    @torch.no_grad()
    def of(self, stored: Mapping[str, str]) -> float:
        """Nats per token with layers stored in recipes."""
        total, count = 0.0, 0
        with _stored(self._model, stored):
            for row, before in zip(self._rows, self._before, strict=True):
                after = self._model(row).flatten(0, -2)
                total += self._divergence(before, after)
                count += len(before)
        return total / count

    def _divergence(self, before: Tensor, after: Tensor) -> float:
        parts = zip(before.split(_CHUNK), after.split(_CHUNK), strict=True)
        # In float64: of a layer that moves nothing the sum would be noise around 0 otherwise.
        logs = ([self._model.logits(one).double().log_softmax(-1) for one in pair] for pair in parts)
        return max(0.0, sum(float(F.kl_div(q, p, reduction="sum", log_target=True)) for p, q in logs))


def storable(model: Model) -> dict[str, nn.Parameter]:
    """The weights that a base may store, by their layers' names: of the blocks' linear layers that are no experts."""
    parameters = dict(model.named_parameters())
    layers = model.spec.layers()
    return {
        name: parameters[f"{name}.weight"] for name, one in layers.items() if one.is_storable and name != HEAD
    }


@contextmanager
def _stored(model: Model, stored: Mapping[str, str]) -> Iterator[None]:
    weights = storable(model)
    before = {layer: weights[layer].detach().clone() for layer in stored}
    try:
        for layer, name in stored.items():
            weights[layer].copy_(stored_values(before[layer], name))
        yield
    finally:
        for layer, value in before.items():
            weights[layer].copy_(value)
