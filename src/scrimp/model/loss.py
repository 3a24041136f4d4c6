"""Cross-entropy in chunks, so that the full logits never exist.

Problem  The logits are the largest tensor of a small model's step: 8,192 tokens over 32,000
         entries are 1 GiB in float32, their log-probabilities and gradients as much again.
Method   Per chunk of tokens: logits = h W^T, their log-softmax, the loss, and at once the
         gradients. With p = softmax(logits), lse = logsumexp(logits), y the target and c the
         weight of the z-loss:

             loss            = lse - logits[y] + c lse^2
             d loss / logits = p (1 + 2 c lse) - onehot(y)

         The gradients of h and of W need this chunk alone. They are made in the forward
         pass, kept (S*D and V*D numbers) and scaled by the incoming gradient in the backward
         pass: nothing is computed twice and no logits outlive their chunk. Without gradients
         (evaluation) only the losses are computed.
Sums     The result is a sum over the real targets, not a mean: the caller divides by the
         number of targets of the whole batch, so that the loss does not depend on how the
         batch is cut into micro-batches. Targets of -100 count nothing.
Types    GEMMs run in the compute type (autocast's, else that of h), softmax and sums in
         float32, and the weight's gradient is summed over chunks in float32. Float64 stays
         float64.
Memory   At most three tensors of chunk x V in float32 at a time (logits, log-probabilities,
         and a copy in the compute type where that is smaller); measured in
         benchmarks/loss_memory.py.
Limits   One backward pass per forward pass, through both sums with equal weight; anything
         else is refused. No second derivatives.
Checked  tests/model/test_loss.py

Shapes: S tokens (B*T), D width, V vocabulary; a chunk has Q of the S tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.model.functions import at_least_float32, compute_dtype, float32_or_wider

IGNORED = -100
"""Target of a position that has none."""


@dataclass(frozen=True)
class LossSums:
    """Sums over the real targets of one forward pass: scalars, differentiable together."""

    cross_entropy: Tensor
    """Negative log-probabilities of the targets."""
    z: Tensor
    """z_loss times the squared log-partitions."""

    @property
    def total(self) -> Tensor:
        """What to differentiate: cross_entropy + z."""
        return self.cross_entropy + self.z


def cross_entropy_sums(
    hidden_SD: Tensor, weight_VD: Tensor, targets_S: Tensor, *, chunk: int = 0, z_loss: float = 0.0
) -> LossSums:
    """The loss of hidden states against targets, with the head's GEMM inside.

    Args:
        hidden_SD: hidden states after the final norm.
        weight_VD: the head's matrix.
        targets_S: token ids, or -100 to ignore.
        chunk: tokens whose logits exist at once; 0 for all.
        z_loss: weight of the squared log-partition.
    """
    training = torch.is_grad_enabled()
    chunk = chunk or len(targets_S)
    cross_entropy, z = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_SD, weight_VD, targets_S, chunk, z_loss, compute_dtype(hidden_SD), training
    )
    return LossSums(cross_entropy, z)


class _ChunkedLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_SD: Tensor,
        weight_VD: Tensor,
        targets_S: Tensor,
        chunk: int,
        z_loss: float,
        compute: torch.dtype,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        needs_hidden, needs_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        sums = hidden_SD.new_zeros(2, dtype=float32_or_wider(compute))
        grad_hidden = torch.empty_like(hidden_SD) if needs_hidden else None
        grad_weight: Tensor | None = None
        with torch.autocast(hidden_SD.device.type, enabled=False):
            weight = weight_VD.to(compute)
            for start in range(0, len(targets_S), chunk):
                part = slice(start, start + chunk)
                hidden, targets = hidden_SD[part].to(compute), targets_S[part]
                real_Q1 = (targets != IGNORED)[:, None]
                chunk_sums, grad_QV = _chunk(
                    hidden, weight, targets, real_Q1, z_loss, needs_hidden or needs_weight
                )
                sums += chunk_sums
                # Ignored rows are zeroed on the small side of each GEMM, not in the Q x V gradient.
                if grad_hidden is not None:
                    grad_hidden[part] = (grad_QV @ weight).mul_(real_Q1)
                if needs_weight:
                    grad_weight = _accumulate(grad_weight, grad_QV.T, hidden * real_Q1)
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VD.dtype)
        ctx.gradients, ctx.z_loss = (grad_hidden, grad_weight), z_loss
        ctx.set_materialize_grads(False)
        return sums[0].clone(), sums[1].clone()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_ce: Tensor | None, grad_z: Tensor | None) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss was differentiated twice; its gradients are kept for one backward pass"
            )
        if ctx.z_loss and not _same(grad_ce, grad_z):
            raise RuntimeError("cross_entropy and z must be differentiated together: use LossSums.total")
        # Taken out of ctx, so that autograd can hand on these tensors without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        hidden, weight = (None if g is None or grad_ce is None else g.mul_(grad_ce) for g in gradients)
        return hidden, weight, None, None, None, None, None


def _chunk(
    hidden_QD: Tensor, weight_VD: Tensor, targets_Q: Tensor, real_Q1: Tensor, z_loss: float, training: bool
) -> tuple[Tensor, Tensor]:
    """Both sums of one chunk, and the gradient of its logits (of ignored rows too), grad_QV."""
    logits_QV = at_least_float32(hidden_QD @ weight_VD.T)
    index_Q1 = targets_Q[:, None].clamp_min(0)
    target_logit_Q1 = logits_QV.gather(1, index_Q1)
    log_p_QV = torch.log_softmax(logits_QV, dim=-1)
    del logits_QV
    nll_Q1 = -log_p_QV.gather(1, index_Q1)
    lse_Q1 = target_logit_Q1 + nll_Q1
    sums = torch.stack([nll_Q1, z_loss * lse_Q1.square()]).masked_fill_(~real_Q1, 0.0).sum(dim=(1, 2))
    if not training:
        return sums, log_p_QV
    grad_QV = log_p_QV.exp_()
    if z_loss:
        grad_QV.mul_(1 + 2 * z_loss * lse_Q1)
    grad_QV.scatter_add_(1, index_Q1, grad_QV.new_full((), -1.0).expand_as(index_Q1))
    return sums, grad_QV.to(hidden_QD.dtype)


def _accumulate(total: Tensor | None, left: Tensor, right: Tensor) -> Tensor:
    """total + left @ right in float32 or wider, in place from the second time on."""
    if total is None:
        return at_least_float32(left @ right)
    if total.dtype == left.dtype:
        return total.addmm_(left, right)
    return total.add_(left @ right)


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    # One object in the usual case (cross_entropy + z) / n; only otherwise are values read.
    return first is second or (first is not None and second is not None and torch.equal(first, second))
