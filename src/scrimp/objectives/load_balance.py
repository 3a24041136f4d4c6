"""The auxiliary loss of routed experts: what keeps routers from sending every token to the same few.

Over the L blocks with experts and the S tokens of a micro-batch, c_e the pairs that chose expert e and p_e the sum of
its probabilities (`scrimp.models.experts`)::

    loss = E * sum over e of (c_e / (L S)) * (p_e / (L S))        k at perfect balance, of k experts a token

as transformers computes it. It counts times its weight (`router_aux_loss_coef`), as a penalty: the loss that is shown
stays the objective's own. Gradients reach the routers by p alone.
Sums     Like every loss it is a sum over the counted targets, so that micro-batches weigh by their targets.
Ranks    that share rows add their sums up first: the loss is that of whole rows, and each differentiates its own part.
Limits   It is of a micro-batch, not of a batch: cutting a batch otherwise changes it, in transformers too. All tokens
         of the micro-batch count, those without a target as well.
Checked  tests/models/test_load_balance.py: transformers' function
"""

from __future__ import annotations

import dataclasses

from torch import Tensor

from scrimp.models.model import Model
from scrimp.objectives.base import LossSums

METRIC = "router_aux_loss"


def load_balance(sums_L2E: Tensor, chosen: int) -> Tensor:
    """The auxiliary loss, without its weight.

    Args:
        sums_L2E: of each block the pairs that chose an expert, and the sums of probabilities.
        chosen: experts of a token.
    """
    counts_E, p_E = sums_L2E.sum(0)
    rows = counts_E.sum() / chosen
    loss: Tensor = (counts_E / rows * (p_E / rows)).sum() * sums_L2E.shape[-1]
    return loss


def with_load_balance(model: Model, sums: LossSums, count: int, own: int | None = None) -> LossSums:
    """The sums of a micro-batch whose forward pass has just been, with the auxiliary loss of its routers.

    Args:
        count: its counted targets.
        own: those of them in this rank's part of its rows; None: all.
    """
    routing, sums_L2E = model.spec.routing, model.take_routing()
    if routing is None or sums_L2E is None:
        return sums
    found = load_balance(sums_L2E, routing.chosen)
    metrics = {**sums.metrics, METRIC: found.detach() * (count if own is None else own)}
    penalty = sums.penalty + (routing.balance * count * found).to(sums.penalty.dtype)
    return dataclasses.replace(sums, penalty=penalty, metrics=metrics)
