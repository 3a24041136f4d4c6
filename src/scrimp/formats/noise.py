"""Counter-based noise for stochastic rounding: a pure function of key, row and column.

Problem  Rounding noise must be independent between elements, tensors, micro-steps and steps, and must
         not depend on how the work was cut: over ranks, micro-batches, chunks or threads.
Method   Every element has an address (row, column) in the whole tensor; every use of a tensor has a
         64-bit key. A full 64-bit mix of (key, row) and one of (key, column) are computed once per row
         and column; per element their sum goes through two multiply-xorshift rounds:

             h = mix64(key ^ golden row) + mix64(~key ^ golden column)      (low 32 bits)
             h ^= h >> 15;  h *= 0x2c1b3c6d;  h ^= h >> 12;  h *= 0x297a2d39
             u = (h >> 12) * 2^-20 + 1/2                          in [0, 1)

         with arithmetic shifts, so that the same lines run in int32 on every back end.
Limits   u has 20 bits: so many that t + u is exact for every t that rounding produces (below 16), and a
         value that the format has is never moved. What remains is a bias of at most 2^-20 steps, downwards.
         Where t goes up to 127 (int8), rounding takes 17 of them, and the bias is at most 2^-17.
Checked  tests/formats/test_noise.py: means and moving averages over steps, correlation between
         neighbours, rows, keys; pieces of a tensor equal to the whole.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15
MULTIPLIERS = (0x2C1B3C6D, 0x297A2D39)
BITS = 20
UNIT = 2.0**-BITS


@dataclass(frozen=True)
class Noise:
    """A stream of uniform numbers, one per element address."""

    key: int = 0
    """64 bits. `derive` makes keys of independent streams."""
    first_row: int = 0
    """Address of the first row here, where the tensor is a piece of a larger one."""
    first_column: int = 0
    columns: tuple[range, ...] = ()
    """Addresses of the columns here where they are several ranges; in place of `first_column`."""

    def derive(self, *identifiers: int) -> Noise:
        """An independent stream for each tuple of identifiers (step, layer, operand, ...)."""
        key = self.key
        for identifier in identifiers:
            key = _mix(key ^ _mix(identifier + 1))
        return dataclasses.replace(self, key=key)

    def row_hashes(self, num_rows: int, device: torch.device | str) -> Tensor:
        """int32 hash of each row's address, shape (rows,)."""
        return _hashes(self.key, _addresses(self.first_row, num_rows, device))

    def column_hashes(self, num_columns: int, device: torch.device | str) -> Tensor:
        """int32 hash of each column's address, shape (columns,)."""
        return _hashes(~self.key & _MASK64, self.column_addresses(num_columns, device))

    def column_addresses(self, num_columns: int, device: torch.device | str) -> Tensor:
        """int64 address of each column, shape (columns,)."""
        own, left = [], num_columns
        for part in self.columns[:-1]:
            own.append(_addresses(part.start, len(part), device))
            left -= len(part)
        own.append(_addresses(self.columns[-1].start if self.columns else self.first_column, left, device))
        return own[0] if len(own) == 1 else torch.cat(own)

    def uniform(self, num_rows: int, num_columns: int, device: torch.device | str) -> Tensor:
        """Numbers in [0, 1), float32, shape (rows, columns)."""
        return combine(self.row_hashes(num_rows, device)[:, None], self.column_hashes(num_columns, device))


def combine(rows: Tensor, columns: Tensor) -> Tensor:
    """Uniform numbers from int32 hashes of rows and columns, broadcast against each other."""
    h = rows + columns
    for shift, multiplier in zip((15, 12), MULTIPLIERS, strict=True):
        h.bitwise_xor_(h >> shift).mul_(multiplier)
    return h.bitwise_right_shift_(12).to(torch.float32).mul_(UNIT).add_(0.5)


def _addresses(first: int, count: int, device: torch.device | str) -> Tensor:
    """So many in a row, made where they are used, without waiting for a copy."""
    return torch.arange(first, first + count, dtype=torch.int64, device=device)


def _hashes(key: int, x: Tensor) -> Tensor:
    """The low 32 bits of mix64(key ^ address), as int32; arithmetic modulo 2^64 as in `_mix`. Changes `x`."""
    # Integer arithmetic: the same on every device.
    x.mul_(signed(_GOLDEN)).bitwise_xor_(signed(key))
    for shift, multiplier in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        x.bitwise_xor_((x >> shift) & ((1 << (64 - shift)) - 1)).mul_(signed(multiplier))
    x.bitwise_xor_((x >> 31) & ((1 << 33) - 1))
    return x.to(torch.int32)


def _mix(x: int) -> int:
    """SplitMix64's output function."""
    x = (x + _GOLDEN) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def signed(x: int) -> int:
    """The int64 with the same bits."""
    x &= _MASK64
    return x - (1 << 64) if x >> 63 else x
