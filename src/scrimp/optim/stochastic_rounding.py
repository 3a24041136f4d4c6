"""Random bits per element, and fp32 numbers rounded to bf16 with them.

Problem  An Adam update is about 0.1 % of a weight, and bf16 has steps of 0.4 to 0.8 %: rounded to nearest, most
         updates vanish. Rounded up with the probability of the distance, their mean stays.
Method   A float's neighbours in a format of fewer mantissa bits differ by 1 in the integer of its upper bits, so

             stochastic(x) = upper bits of (bits of x + n),   n uniform in [0, 2^16)

         rounds away from zero with probability (lower bits of x) / 2^16, and carries into the exponent by itself.
         n comes from `scrimp.formats.noise`: h of (key, row, column), a pure function of the address. Several roundings
         of one element (weight, m, v) each take the high bits of their own number of a sequence that starts there,

             h_0 = h,   h_{k+1} = (h_k ^ h_k >> 15) * 0x2c1b3c6d    (mod 2^32)

         which costs 3 operations instead of 7 for a key of its own.
Limits   NaN and infinity come out as NaN.
Checked  tests/optim/test_stochastic_rounding.py: the hash against `Noise.uniform`, means, correlation of neighbours,
         keys and streams; tests/optim/test_update.py: over steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from scrimp.formats.noise import MULTIPLIERS, Noise

_BF16_BITS = 16
"""Mantissa bits that fp32 has more than bf16."""


class Scratch:
    """Arrays that are used again from piece to piece: fresh memory costs a CPU more than the arithmetic on it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._arrays: dict[str, Tensor] = {}

    def floats(self, name: str, shape: tuple[int, int]) -> Tensor:
        """A float32 array of some content; of one name there is one at a time."""
        return self.integers(name, shape).view(torch.float32)

    def integers(self, name: str, shape: tuple[int, int]) -> Tensor:
        """An int32 array, likewise."""
        count = shape[0] * shape[1]
        if name not in self._arrays or self._arrays[name].numel() < count:
            self._arrays[name] = torch.empty(count, dtype=torch.int32, device=self._device)
        return self._arrays[name][:count].view(shape)


class NoiseTable:
    """The noise of one matrix: hashes of its columns are computed once, those of rows piece by piece.

    Args:
        noise: stream, with the address of the matrix's first row and column where it is a shard.
    """

    def __init__(self, noise: Noise, num_columns: int, scratch: Scratch, device: torch.device) -> None:
        self._noise, self._scratch, self._device = noise, scratch, device
        self._columns = noise.column_hashes(num_columns, device)

    def streams(self, rows: slice, columns: slice) -> Iterator[Tensor]:
        """Independent int32 hashes [rows, columns] without end. Each overwrites the one before."""
        noise = dataclasses.replace(self._noise, first_row=self._noise.first_row + rows.start)
        hashes = noise.row_hashes(rows.stop - rows.start, self._device)[:, None]
        shape = (rows.stop - rows.start, columns.stop - columns.start)
        h, shifted = self._scratch.integers("hash", shape), self._scratch.integers("bits", shape)
        torch.add(hashes, self._columns[columns], out=h)
        for shift, multiplier in zip((15, 12), MULTIPLIERS, strict=True):
            h.bitwise_xor_(torch.bitwise_right_shift(h, shift, out=shifted)).mul_(multiplier)
        while True:
            yield h
            h.bitwise_xor_(torch.bitwise_right_shift(h, 15, out=shifted)).mul_(MULTIPLIERS[0])


def high_bits(hashes: Tensor, count: int, scratch: Scratch) -> Tensor:
    """The highest `count` bits of int32 hashes, as numbers in [0, 2^count), in the array "bits"."""
    bits = scratch.integers("bits", (hashes.shape[0], hashes.shape[1]))
    return torch.bitwise_right_shift(hashes, 32 - count, out=bits).bitwise_and_((1 << count) - 1)


def to_bf16(x: Tensor, hashes: Tensor, scratch: Scratch) -> Tensor:
    """float32 numbers that bf16 has, by stochastic rounding. Gives float32, so that a copy to bf16 is exact."""
    bits = high_bits(hashes, _BF16_BITS, scratch).add_(x.view(torch.int32)).bitwise_and_(-(1 << _BF16_BITS))
    # A NaN whose mantissa is full carries into the sign and becomes zero: 0 * x makes it NaN again.
    return bits.view(torch.float32).add_(x, alpha=0)
