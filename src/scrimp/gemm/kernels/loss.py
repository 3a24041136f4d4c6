"""Cross-entropy of logits, which become their own gradient, in one kernel.

Problem  The loss reads and writes more than anything else outside of products: as torch's operators 28 bytes for each
         logit, 15 % of a step of a model of 0.5B.
Method   A program takes a row, twice: first for its largest logit m and the sum of exponentials, both in one reading
         (each piece of the row rescales the sum before it), then for the gradient, which overwrites the logits. With
         y the target and c the weight of the z-loss::

             lse = m + log(sum of exp(x - m))
             loss = lse - x_y,   penalty = c lse^2
             gradient = exp(x - lse) (1 + 2 c lse) - onehot(y)

         2 bytes read, 2 read again, by a row that fits it from the cache, and 2 written.
Limits   Sums are taken in another order than torch's, always the same. Rows whose target is below 0 have no loss; their
         gradients are as if it were 0, for the head drops them. Not timed on a GPU yet.
Source   The rescaled sum: Milakov & Gimelshein, arXiv 1805.02867
Checked  tests/gemm/test_triton_cross_entropy.py: against float64, and the operators' gradients
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.gemm.kernels.arithmetic import to_bfloat16, widen
from scrimp.gemm.kernels.launch import check_devices, check_matrix, run

CHUNK, WARPS = 4096, 8
"""Logits that a program holds at a time: 16 a thread."""


@triton.jit
def cross_entropy_kernel(
    logits, targets, losses, num_columns, z_loss, TRAINING: tl.constexpr, CHUNK: tl.constexpr
):
    """One row; losses is [rows, 2]: loss and penalty."""
    row = tl.program_id(0).to(tl.int64)
    start = logits + row * num_columns
    inside = tl.arange(0, CHUNK)
    largest = tl.full((), float("-inf"), tl.float32)
    total = tl.full((), 0.0, tl.float32)
    for first in range(0, num_columns, CHUNK):
        columns = first + inside
        x = widen(tl.load(start + columns, mask=columns < num_columns, other=float("-inf")))
        higher = tl.maximum(largest, tl.max(x, 0))
        total = total * tl.exp(largest - higher) + tl.sum(tl.exp(x - higher), 0)
        largest = higher
    lse = largest + tl.log(total)
    target = tl.load(targets + row)
    index = tl.maximum(target, 0)
    loss = lse - widen(tl.load(start + index))
    is_real = target >= 0
    tl.store(losses + 2 * row, tl.where(is_real, loss, 0.0))
    tl.store(losses + 2 * row + 1, tl.where(is_real, z_loss * lse * lse, 0.0))
    if TRAINING:
        factor = 1.0 + 2.0 * z_loss * lse
        for first in range(0, num_columns, CHUNK):
            columns = first + inside
            mask = columns < num_columns
            x = widen(tl.load(start + columns, mask=mask, other=float("-inf")))
            gradient = tl.exp(x - lse) * factor - (columns == index).to(tl.float32)
            if logits.dtype.element_ty == tl.bfloat16:
                gradient = to_bfloat16(gradient)
            tl.store(start + columns, gradient, mask=mask)


def cross_entropy(logits: Tensor, targets: Tensor, z_loss: float, *, training: bool) -> Tensor:
    """Loss and penalty of each row, float32 [rows, 2]; when training, the logits become their gradient.

    Args:
        logits: bfloat16 or float32 [rows, columns], row-major.
        targets: int64 [rows]; below 0: no loss.

    Raises:
        PlanError, DeviceError: tensors that the kernel does not read.
    """
    check_matrix("logits", logits)
    check_devices(logits=logits, targets=targets)
    if targets.dtype != torch.int64 or targets.shape != logits.shape[:1] or not targets.is_contiguous():
        raise PlanError(
            "targets must be one int64 for each row of the logits",
            got=f"{targets.dtype} {tuple(targets.shape)} for {tuple(logits.shape)}",
        )
    losses = torch.empty(len(logits), 2, device=logits.device)
    if len(logits):
        run(
            cross_entropy_kernel,
            (len(logits),),
            logits,
            targets,
            losses,
            logits.shape[1],
            float(z_loss),
            TRAINING=training,
            CHUNK=min(CHUNK, triton.next_power_of_2(logits.shape[1])),
            num_warps=WARPS,
        )
    return losses
