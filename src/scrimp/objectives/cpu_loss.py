"""Losses of rows of logits on a CPU, and in their place their gradients, by one kernel that Numba compiles.

Formulas: `scrimp.objectives.cross_entropy`. A row, a megabyte at most, stays in a core's cache from its maximum over
the sum of its exponentials to its gradient; as operators, blocks of rows are widened, read and written nine times.

Limits   float32 and bfloat16; all computes in float32.
Checked  tests/objectives/test_cross_entropy.py
"""

from __future__ import annotations

from typing import Any

import numba
import numpy as np
import torch
from torch import Tensor

from scrimp.cpu.numbers import ONE, exponential, narrow, over_rows, wide
from scrimp.cpu.rows import as_numpy, by_rows

_ZERO, _TWO = np.float32(0.0), np.float32(2.0)


def losses(logits_QV: Tensor, targets_Q: Tensor, z_loss: float, *, training: bool) -> Tensor:
    """Loss and penalty of each token, shape (Q, 2), in float32; 0 where the target is below 0.

    Args:
        logits_QV: when training they become their own gradient, of rows without a target as if it were the first entry.
    """
    losses_Q2 = torch.empty(len(targets_Q), 2)
    arrays = as_numpy(targets_Q.contiguous()), np.float32(z_loss), training, as_numpy(losses_Q2)
    by_rows(_losses, as_numpy(logits_QV), *logits_QV.shape, *arrays)
    return losses_Q2


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
        lse = most + np.log(total)
        of_target = wide(own[target])
        is_real = targets[i] >= 0
        out[i, 0] = lse - of_target if is_real else _ZERO
        out[i, 1] = z_loss * lse * lse if is_real else _ZERO
        if training:
            factor = ONE + _TWO * z_loss * lse
            for j in range(words):
                own[j] = narrow(exponential(wide(own[j]) - lse) * factor, x)
            own[target] = narrow(exponential(of_target - lse) * factor - ONE, x)
