"""Codes of 8 bits that moments could have, as tables of values: for comparison, at any price."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]


def exact(x: Tensor) -> Tensor:
    """No rounding."""
    return x


def rounding(table: Tensor, stochastic: bool, *, floor: bool = False, block: int = 128) -> Rounding:
    """Round to sorted values in [-1, 1] times the largest of each block of a row."""
    least = table[table > 0][0]
    generator = torch.Generator().manual_seed(0)

    def apply(x: Tensor) -> Tensor:
        rows, columns = x.shape
        blocks = F.pad(x, (0, -columns % block)).view(rows, -1, block)
        scale = blocks.abs().amax(2, keepdim=True)
        y = torch.where(scale > 0, blocks / scale, 0.0)
        high = torch.bucketize(y, table).clamp_(max=len(table) - 1)
        low, upper = table[(high - 1).clamp_(min=0)], table[high]
        share = torch.where(upper > low, (y - low) / (upper - low).clamp_min(1e-30), 0.0)
        threshold = torch.rand(share.shape, generator=generator) if stochastic else 0.5
        found = torch.where(threshold < share, upper, low)
        if floor:
            found = torch.where(y > 0, found.clamp_min(least), found)
        return (found * scale).view(rows, -1)[:, :columns]

    return apply


def shifted(mantissa_bits: int, binades: int) -> Tensor:
    """Floats of so many binades, shifted to begin at zero."""
    steps = 2**mantissa_bits
    values = torch.tensor([2.0**e * (1 + k / steps) for e in range(binades) for k in range(steps)]) - 1
    return values / values[-1]


def float8(dtype: torch.dtype) -> Tensor:
    """All finite values of a float8 type, over the largest."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    values = values[values.isfinite()]
    return torch.unique(values / values.max())


def mirrored(values: Tensor) -> Tensor:
    """With both signs."""
    return torch.unique(torch.cat([-values, values]))


def positive(values: Tensor) -> Tensor:
    """Without negative ones."""
    return values[values >= 0]
