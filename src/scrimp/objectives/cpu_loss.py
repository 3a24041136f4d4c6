"""Losses of rows of logits on a CPU, and in their place their gradients, by one kernel that Numba compiles.

Formulas: `scrimp.objectives.cross_entropy`. A row stays in a core's cache from its maximum over the sum of its
exponentials to its gradient; as operators, blocks of rows are widened, read and written nine times.

Limits   float32 and bfloat16; all computes in float32.
Checked  tests/objectives/test_cross_entropy.py
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from scrimp.cpu.numbers import ONE, compiled, exponential, narrow, over_rows, wide
from scrimp.cpu.rows import as_numpy, by_rows
from scrimp.data import IGNORED
from scrimp.tracing import has_memory

_ZERO, _TWO = np.float32(0.0), np.float32(2.0)


def losses(logits_QV: Tensor, targets_Q: Tensor, z_loss: float, *, training: bool) -> Tensor:
    """Loss and penalty of each token, shape (Q, 2), in float32; 0 where the target is to be ignored.

    Args:
        logits_QV: when training they become their own gradient, of rows without a target as if it were the first entry.

    Raises:
        IndexError: a target is none of the V words.
    """
    losses_Q2 = logits_QV.new_empty(len(targets_Q), 2, dtype=torch.float32)
    targets = as_numpy(targets_Q.to(torch.int64).contiguous())
    if has_memory(targets_Q):
        words = targets[targets != IGNORED]
        outside = words[(words < 0) | (words >= logits_QV.shape[1])]
        if outside.size:
            raise IndexError(f"target {outside[0]} of a vocabulary of {logits_QV.shape[1]}")
    arrays = targets, np.float32(z_loss), training, as_numpy(losses_Q2)
    by_rows(_losses, as_numpy(logits_QV), *logits_QV.shape, *arrays)
    return losses_Q2


@compiled()
def _loss(most: Any, of_target: Any, log_total: Any) -> Any:
    """Compiled without another order of sums: in that it would be rounded as the logits are."""
    return (most - of_target) + log_total


@over_rows()
def _losses(x: Any, first: int, last: int, targets: Any, z_loss: Any, training: bool, out: Any) -> None:
    words = x.shape[1]
    for i in numba.prange(first, last):
        own, target = x[i], max(targets[i], 0)
        most, total = wide(own[0]), _ZERO
        for j in range(words):
            most = max(most, wide(own[j]))
        for j in range(words):
            total += exponential(wide(own[j]) - most)
        log_total = np.log(total)
        lse, of_target, is_real = most + log_total, wide(own[target]), targets[i] != IGNORED
        out[i, 0] = _loss(most, of_target, log_total) if is_real else _ZERO
        out[i, 1] = z_loss * lse * lse if is_real else _ZERO
        if training:
            factor = (ONE + _TWO * z_loss * lse) / total
            for j in range(words):
                own[j] = narrow(exponential(wide(own[j]) - most) * factor, x)
            own[target] = narrow(exponential(of_target - most) * factor - ONE, x)
