"""The 16x16 random Hadamard transform: spreads an outlier over its 16 neighbours.

R = diag(signs) H16 / 4 is orthonormal, so rotating both operands of a GEMM along the axis that it sums
over leaves the product: (A R)(R^T B) = A B. One outlier of size a becomes 16 values of size a / 4, and
a block's scale no longer drowns its other elements. The signs are fixed: both operands, all ranks
and all steps must use the same. H16 is symmetric (Sylvester's construction).

Source   NVFP4 report (arXiv 2509.25149), which uses it on wgrad only.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from scrimp.precision.recipes import HADAMARD

SIZE = HADAMARD
SIGN_BITS = 0b1011_0010_0110_1000
"""Bit i set: row i of the transform changes sign. Any fixed choice does; this one is balanced in no pattern."""


@functools.cache
def _matrix(device: torch.device, inverse: bool) -> Tensor:
    h = torch.ones(1, 1)
    while len(h) < SIZE:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    signs = torch.tensor([-1.0 if SIGN_BITS >> i & 1 else 1.0 for i in range(SIZE)])
    rotation = signs[:, None] * h / 4
    return (rotation.T if inverse else rotation).contiguous().to(device)


def rotate(x: Tensor, axis: int, *, inverse: bool = False) -> Tensor:
    """float32 `x` with each 16 neighbours along an axis (a multiple of 16 long) rotated; a new tensor.

    Args:
        axis: -1 or -2.
        inverse: undo a rotation.
    """
    matrix = _matrix(x.device, inverse)
    with torch.autocast(x.device.type, enabled=False):  # which would multiply in bf16
        if axis == -1:
            return torch.matmul(x.unflatten(-1, (-1, SIZE)), matrix).flatten(-2)
        return torch.matmul(matrix.T, x.unflatten(-2, (-1, SIZE))).flatten(-3, -2)
