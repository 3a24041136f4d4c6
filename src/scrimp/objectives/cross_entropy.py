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
Soft     With targets q of a teacher (`soft_targets`) and their weight w the cross-entropy of q takes w of the target's
         place; loss stays that of y, which is shown, and penalty gets the rest:

             penalty         = c lse^2 + w (sum_v -q[v] log p[v] - (lse - logits[y]))
             d total / logits = p (1 + 2 c lse) - (1 - w) onehot(y) - w q

Sources  With weights of sources (`source_weights`) a target's row of the gradient is multiplied by its own; loss stays
         that without weights, penalty gets the rest.
Ranks    that have parts of the vocabulary exchange three numbers per token (`cut_vocabulary`).
Types    GEMMs run in the compute type (autocast's, else that of h) or as a plan says, softmax and sums in
         float32, and the weight's gradient is summed over chunks in float32. Float64 stays
         float64.
Memory   One chunk x V in the compute type: the logits become their own gradient in place, a
         block of rows at a time. Blocks are a matter of speed: on the CPU their float32
         copies stay in the cache (measured in docs/lab-log.md), on CUDA they are so large that
         launching kernels should cost nothing (not measured). One kernel does it all, without copies, on a CPU
         where Numba is (`cpu_loss`), and on CUDA where Triton is (`scrimp.gemm.kernels.loss`), if it was right when it
         was tried there; predictions for CUDA still count the operators. More tokens per chunk mean fewer additions
         to the weight's gradient, which cost bf16 time (benchmarks/loss_memory.py).
Limits   One backward pass per forward pass, through both sums with equal weight; anything
         else is refused. No second derivatives.
Checked  tests/objectives/test_cross_entropy.py

Shapes: S tokens (B*T), D width, V vocabulary; a chunk has Q of the S tokens, a block R of the Q.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.cpu import TYPES, has_kernels
from scrimp.data import IGNORED
from scrimp.formats.grouping import cut
from scrimp.gemm import HeadGemms, PlannedLayer, compute_dtype, kernels
from scrimp.gemm.backends.operands import has_triton
from scrimp.gemm.kernels.launch import INPUT_TYPES, may_run
from scrimp.models.functions import at_least_float32, float32_or_wider, runs_cpu_functions
from scrimp.objectives.base import LossSums
from scrimp.objectives.cut_vocabulary import CutVocabulary
from scrimp.objectives.soft_targets import SoftTargets, Taught
from scrimp.objectives.source_weights import SourceWeights

BLOCK_ELEMENTS = {"cpu": 2**21, "cuda": 2**26}
"""Logits whose softmax is computed at once, by device type."""


def cross_entropy_sums(
    hidden_SD: Tensor,
    weight_VD: Tensor,
    targets_S: Tensor,
    *,
    chunk: int = 0,
    z_loss: float = 0.0,
    planned: PlannedLayer | None = None,
    vocabulary: CutVocabulary | None = None,
    soft: SoftTargets | None = None,
    weights: SourceWeights | None = None,
) -> LossSums:
    """The cross-entropy of hidden states against targets, and the z-loss as its penalty, with the head's GEMM inside.

    Args:
        hidden_SD: hidden states after the final norm.
        weight_VD: the head's matrix.
        targets_S: token ids, or -100 to ignore.
        chunk: tokens whose logits exist at once; 0 for all.
        z_loss: weight of the squared log-partition.
        planned: formats of the head's three GEMMs; None: the compute type.
        vocabulary: the words of `weight_VD`, where other ranks have others; None: it has all.
        soft: what a teacher says of the same tokens, not beside `vocabulary`; None: there is none.
        weights: what targets count, not beside `vocabulary`; None: all alike.
    """
    training = torch.is_grad_enabled()
    chunk = chunk or len(targets_S)
    cross_entropy, z, losses_G = _ChunkedLoss.apply(  # type: ignore[no-untyped-call]
        hidden_SD,
        weight_VD,
        targets_S,
        chunk,
        z_loss,
        compute_dtype(hidden_SD),
        training,
        planned,
        vocabulary,
        soft,
        weights,
    )
    return LossSums(cross_entropy, z, {} if weights is None else weights.metrics(losses_G, targets_S))


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
        planned: PlannedLayer | None,
        vocabulary: CutVocabulary | None,
        soft: SoftTargets | None,
        weights: SourceWeights | None,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        needs_hidden, needs_weight = (training and needed for needed in ctx.needs_input_grad[:2])
        sums = hidden_SD.new_zeros(2, dtype=float32_or_wider(compute))
        losses_G = None if weights is None else sums.new_zeros(len(weights.weights_G))
        grad_hidden = torch.empty_like(hidden_SD) if needs_hidden else None
        grad_weight: Tensor | None = None
        with torch.autocast(hidden_SD.device.type, enabled=False):
            head = HeadGemms(weight_VD, planned, compute)
            for part in cut(len(targets_S), chunk):
                hidden, targets = hidden_SD[part].to(compute), targets_S[part]
                real_Q1 = (targets != IGNORED)[:, None]
                logits_QV = head.fprop(hidden)
                differentiates = needs_hidden or needs_weight
                taught = None if soft is None else Taught(soft.weight, soft.probabilities(part))
                each = None if weights is None else sums.new_empty(2, len(targets), 1)
                found = _losses(logits_QV, targets, real_Q1, z_loss, differentiates, vocabulary, taught, each)
                if weights is not None and each is not None and losses_G is not None:
                    found[1], of_sources_G = weights.weigh(logits_QV, each, part)
                    losses_G += of_sources_G
                sums += found
                # From here on logits_QV holds the gradient.
                if grad_hidden is not None or needs_weight:
                    grad_part, grad_weight = head.backward(
                        grad_weight,
                        logits_QV,
                        hidden,
                        real_Q1,
                        part.start,
                        needs_hidden=needs_hidden,
                        needs_weight=needs_weight,
                    )
                    if grad_hidden is not None and grad_part is not None:
                        grad_hidden[part] = grad_part
                # Else the next chunk's would be made beside them.
                del logits_QV, taught
        if grad_weight is not None:
            grad_weight = grad_weight.to(weight_VD.dtype)
        ctx.gradients = grad_hidden, grad_weight
        ctx.has_penalty = bool(z_loss) or soft is not None or weights is not None
        ctx.set_materialize_grads(False)
        if losses_G is not None:
            ctx.mark_non_differentiable(losses_G)
        return sums[0].clone(), sums[1].clone(), losses_G

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_ce: Tensor | None, grad_z: Tensor | None, _: None
    ) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError(
                "the loss was differentiated twice; its gradients are kept for one backward pass"
            )
        if ctx.has_penalty and not _same(grad_ce, grad_z):
            raise RuntimeError("loss and penalty must be differentiated together: use LossSums.total")
        # Taken out of ctx, so that autograd can hand on these tensors without a copy.
        gradients, ctx.gradients = ctx.gradients, None
        hidden, weight = (None if g is None or grad_ce is None else g.mul_(grad_ce) for g in gradients)
        return hidden, weight, *[None] * 9


def _losses(
    logits_QV: Tensor,
    targets_Q: Tensor,
    real_Q1: Tensor,
    z_loss: float,
    training: bool,
    vocabulary: CutVocabulary | None,
    taught: Taught | None,
    each_2Q1: Tensor | None,
) -> Tensor:
    """Both sums of one chunk, shape (2,); when training, logits_QV becomes its own gradient.

    Args:
        each_2Q1: becomes the loss and the penalty of each token; not beside `vocabulary`.
    """
    rows = max(1, BLOCK_ELEMENTS.get(logits_QV.device.type, 2**26) // logits_QV.shape[1])
    if vocabulary is not None:
        return vocabulary.losses(logits_QV, targets_Q, real_Q1, z_loss, training, rows=rows)
    kernel = None if taught is not None else _kernel_for(logits_QV)
    if kernel is not None:
        losses_Q2 = kernel(logits_QV, targets_Q, z_loss, training=training)
        if each_2Q1 is not None:
            each_2Q1.copy_(losses_Q2.T[:, :, None])
        return losses_Q2.sum(0)
    index_Q1 = targets_Q[:, None].clamp_min(0)
    sums_B2 = logits_QV.new_empty(-(-len(logits_QV) // rows), 2, dtype=float32_or_wider(logits_QV.dtype))
    for part in cut(len(logits_QV), rows):
        of_block = None if taught is None else Taught(taught.weight, taught.probabilities[part])
        found_2R1 = _block(logits_QV[part], index_Q1[part], real_Q1[part], z_loss, training, of_block)
        sums_B2[part.start // rows] = found_2R1.sum(dim=(1, 2))
        if each_2Q1 is not None:
            each_2Q1[:, part] = found_2R1
    return sums_B2.sum(0)


def _kernel_for(logits_QV: Tensor) -> Callable[..., Tensor] | None:
    """What does all in one kernel there; None: nothing."""
    device, dtype = logits_QV.device, logits_QV.dtype
    runs_kernels = device.type == "cpu" and runs_cpu_functions() and has_kernels()
    if runs_kernels and dtype in TYPES and logits_QV.is_contiguous():
        from scrimp.objectives import cpu_loss  # Numba takes half a second to import

        return cpu_loss.losses
    has_kernel = logits_QV.is_cuda and dtype in INPUT_TYPES and has_triton() and _may_run(device)
    return kernels.cross_entropy if has_kernel else None


@functools.cache
def _may_run(device: torch.device) -> bool:
    """Whether the kernel gives the operators' losses and gradients there, tried once in a process."""

    def trial() -> bool:
        generator = torch.Generator().manual_seed(0)
        logits = (3 * torch.randn(5, 9001, generator=generator)).to(device)
        targets = torch.tensor([0, 9000, -1, 17, 4096], device=device)
        index, real, operators = targets[:, None].clamp_min(0), (targets >= 0)[:, None], logits.clone()
        expected = _block(operators, index, real, 1e-3, training=True).sum(dim=(1, 2))
        found = kernels.cross_entropy(logits, targets, 1e-3, training=True).sum(0)
        are_close = torch.allclose(logits, operators, rtol=1e-4, atol=1e-6)
        return are_close and torch.allclose(found, expected, rtol=1e-5)

    return may_run("loss", trial)


def _block(
    logits_RV: Tensor,
    index_R1: Tensor,
    real_R1: Tensor,
    z_loss: float,
    training: bool,
    taught: Taught | None = None,
) -> Tensor:
    """Loss and penalty of each token, shape (2, R, 1); when training, logits_RV becomes its own gradient."""
    wide_RV = at_least_float32(logits_RV)
    target_logit_R1 = wide_RV.gather(1, index_R1)
    log_p_RV = torch.log_softmax(wide_RV, dim=-1)
    nll_R1 = -log_p_RV.gather(1, index_R1)
    lse_R1 = target_logit_R1 + nll_R1
    penalty_R1, weight = z_loss * lse_R1.square(), 0.0
    if taught is not None:
        weight = taught.weight
        penalty_R1 += weight * (-(taught.probabilities * log_p_RV).sum(1, keepdim=True) - nll_R1)
    if training:
        # wide_RV is logits_RV itself, or its float32 copy.
        grad_RV = torch.exp(log_p_RV, out=wide_RV)
        if z_loss:
            grad_RV.mul_(1 + 2 * z_loss * lse_R1)
        grad_RV.scatter_add_(1, index_R1, grad_RV.new_full((), weight - 1.0).expand_as(index_R1))
        if taught is not None:
            grad_RV.add_(taught.probabilities, alpha=-weight)
        if grad_RV is not logits_RV:
            logits_RV.copy_(grad_RV)
    return torch.stack([nll_R1, penalty_R1]).masked_fill_(~real_R1, 0.0)


def _same(first: Tensor | None, second: Tensor | None) -> bool:
    # One object in the usual case (loss + penalty) / n; only otherwise are values read.
    return first is second or (first is not None and second is not None and torch.equal(first, second))
