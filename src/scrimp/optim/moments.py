"""How Adam's two moving averages are stored: fp32, bf16 or 8 bits, with unbiased rounding.

Problem  m and v take 8 of the 16 bytes per parameter of plain training. A moving average changes by 1 - beta of its
         distance per step: below half a step of the format, rounding to nearest stops it for good (v in bf16 at beta
         0.999 stays at a third of its limit). And a v that rounds to zero divides the next update by almost nothing.
Method   What is kept is rounded stochastically: E[stored] = value, so that averages go on moving on average. The update
         itself reads the fp32 values before they are rounded.

         8 bits: blocks of 128 along a row share a bf16 scale s, and |x| / s is stored as a float y with 4 mantissa
         bits, shifted by its smallest normal number c so that spacing is even down to zero::

             y = |x| / s + c,  c = 2^-15       code = bits of y, from the lowest mantissa bit kept, minus those of c
             x = (y - c) s                     s = max |x| of the block / (top - c), rounded up

         m has a sign and 7 bits: top = 2^-7, steps of 3 to 6 %, the smallest 1/4000 of the block's largest.
         v has 8 bits: top = 2, steps as fine, the smallest 1/10^6 of the block's largest, and every v below it is
         kept as that step: an update may come out smaller, never blown up. A block of zeros stays zero.
         Blocks never cross rows, so that shards by rows hold the same numbers.
         Vectors (norms, biases: a few in ten thousand parameters) keep fp32 moments in this format.

         Bytes per parameter, both moments: fp32 8, bf16 4, 8 bits 2 + 4/128 = 2.03.
Limits   Elements below 1/700 of the largest |g| of their block get updates that are too small.
         Being unbiased has a price where averages are fast (beta 0.9, 0.95): over 20 steps weights drift by 3.3 %
         of their way with m in 8 bits and 1.4 % with v; to nearest, 2.4 and 1.0 %. E4M3 would drift by 6.3 and
         2.7 %, 5 mantissa bits by less, but with a range that outliers exceed (`benchmarks/moment_formats.py`).
Source   Block-wise 8-bit moments: Dettmers et al., arXiv 2110.02861; stochastic rounding in LLMQ (specs/memory.md).
Checked  tests/optim/test_moments.py: codes against float64, means, slow averages, zeros and outliers.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.nn import functional

from scrimp.formats.moment_codes import (
    BLOCK,
    DROPPED_BITS,
    MARGIN,
    SHIFT,
    SHIFT_CODE,
    SMALLEST_SCALE,
    STEP,
    TOP_SIGNED,
    TOP_UNSIGNED,
)
from scrimp.optim.stochastic_rounding import Scratch, high_bits, to_bf16

MomentFormat = Literal["fp32", "bf16", "8bit"]
_TOP = {torch.int8: TOP_SIGNED, torch.uint8: TOP_UNSIGNED}

Place = tuple[slice, slice]
"""Rows and columns of a piece; columns begin at a multiple of `BLOCK`."""


class Moment(Protocol):
    """One moving average of a matrix [rows, columns]."""

    def tensors(self) -> dict[str, Tensor]:
        """Suffix of the name to storage."""
        ...

    def read(self, place: Place, out: Tensor, scratch: Scratch) -> Tensor:
        """float32 values of a piece, to be changed in place: in `out`, or the storage itself."""
        ...

    def write(self, place: Place, values: Tensor, noise: Iterator[Tensor], scratch: Scratch) -> None:
        """Keep a piece that was read. `values` may be overwritten.

        Args:
            noise: int32 hashes [rows, columns]; takes one if the format rounds.
        """
        ...


@dataclass(frozen=True)
class DenseMoment:
    """In float32 or bfloat16, in the shape of the parameter."""

    values: Tensor

    def tensors(self) -> dict[str, Tensor]:
        """The values alone."""
        return {"": self.values}

    def read(self, place: Place, out: Tensor, scratch: Scratch) -> Tensor:
        """The storage itself in float32, a copy in bfloat16."""
        stored = as_matrix(self.values)[place]
        return stored if stored.dtype == torch.float32 else out.copy_(stored)

    def write(self, place: Place, values: Tensor, noise: Iterator[Tensor], scratch: Scratch) -> None:
        """Round to bfloat16; float32 lies in place already."""
        if self.values.dtype == torch.bfloat16:
            as_matrix(self.values)[place].copy_(to_bf16(values, next(noise), scratch))


@dataclass(frozen=True)
class BlockMoment:
    """In 8 bits: int8 codes (m) or uint8 codes (v, never negative), and a bfloat16 scale per block of a row."""

    codes: Tensor
    """The parameter's shape."""
    scales: Tensor
    """[rows, ceil(columns / BLOCK)]"""

    def tensors(self) -> dict[str, Tensor]:
        """Codes and scales."""
        return {"": self.codes, "_scale": self.scales}

    def read(self, place: Place, out: Tensor, scratch: Scratch) -> Tensor:
        """Decoded values."""
        stored = as_matrix(self.codes)[place]
        codes = out.view(torch.int32).copy_(stored)
        if stored.dtype == torch.int8:
            signs = scratch.integers("signs", (codes.shape[0], codes.shape[1]))
            codes.bitwise_xor_(torch.bitwise_right_shift(codes, 31, out=signs))
        codes.bitwise_left_shift_(DROPPED_BITS).add_(SHIFT_CODE << DROPPED_BITS)
        out.sub_(SHIFT)
        if stored.dtype == torch.int8:
            out.copysign_(stored)
        _by_blocks(out, self._scales(place).float())
        return out

    def write(self, place: Place, values: Tensor, noise: Iterator[Tensor], scratch: Scratch) -> None:
        """Scale each block by its largest, round, and store."""
        dtype, shape = self.codes.dtype, (values.shape[0], values.shape[1])
        hashes = next(noise)
        if dtype == torch.int8:
            signs = torch.bitwise_right_shift(
                values.view(torch.int32), 31, out=scratch.integers("signs", shape)
            )
        y = values.abs_()
        scales = _scales_of(_largest_by_block(y), _TOP[dtype])
        self._scales(place).copy_(scales)
        _by_blocks(y, torch.where(scales > 0, 1 / scales, 0.0))
        if dtype == torch.uint8:
            y.clamp_(min=STEP)
        codes = y.add_(SHIFT).view(torch.int32)
        codes.add_(high_bits(hashes, DROPPED_BITS, scratch)).bitwise_right_shift_(DROPPED_BITS)
        if dtype == torch.int8:
            codes.bitwise_xor_(signs)
        as_matrix(self.codes)[place].copy_(codes)  # of an int32, a byte keeps the lowest 8 bits

    def _scales(self, place: Place) -> Tensor:
        rows, columns = place
        return self.scales[rows, columns.start // BLOCK : -(-columns.stop // BLOCK)]


@dataclass(frozen=True)
class Moments:
    """Both averages of one parameter."""

    mean: Moment
    square: Moment

    @classmethod
    def zeros(cls, format_: MomentFormat, like: Tensor) -> Moments:
        """Averages before the first step, of a parameter's shape and on its device."""
        if format_ == "8bit" and like.ndim >= 2:
            rows, columns = as_matrix(like).shape
            shape = (rows, -(-columns // BLOCK))
            return cls(
                *(
                    BlockMoment(
                        torch.zeros_like(like, dtype=dtype, memory_format=torch.contiguous_format),
                        torch.zeros(shape, dtype=torch.bfloat16, device=like.device),
                    )
                    for dtype in (torch.int8, torch.uint8)
                )
            )
        dtype = torch.bfloat16 if format_ == "bf16" else torch.float32
        return cls(*(DenseMoment(torch.zeros_like(like, dtype=dtype)) for _ in range(2)))

    @classmethod
    def over(cls, tensors: Mapping[str, Tensor]) -> Moments:
        """Averages that lie in given tensors, by the names of `tensors`."""

        def moment(name: str) -> Moment:
            if f"{name}_scale" in tensors:
                return BlockMoment(tensors[name], tensors[f"{name}_scale"])
            return DenseMoment(tensors[name])

        return cls(moment("exp_avg"), moment("exp_avg_sq"))

    def tensors(self) -> dict[str, Tensor]:
        """Every tensor of the state: exp_avg, exp_avg_sq, and in 8 bits exp_avg_scale, exp_avg_sq_scale."""
        named = (("exp_avg", self.mean), ("exp_avg_sq", self.square))
        return {f"{name}{end}": tensor for name, one in named for end, tensor in one.tensors().items()}

    @property
    def are_fp32(self) -> bool:
        """Whether both are plain float32."""
        return all(tensor.dtype == torch.float32 for tensor in self.tensors().values())


def as_matrix(tensor: Tensor) -> Tensor:
    """A view [first dimension, all others]; vectors and scalars become columns."""
    return tensor.view(tensor.shape[0] if tensor.ndim else 1, math.prod(tensor.shape[1:]))


def dense(moment: Moment, like: Tensor) -> Tensor:
    """All values, in the shape of the parameter; decoded ones as a float32 copy."""
    if isinstance(moment, DenseMoment):
        return moment.values
    matrix = as_matrix(like)
    rows, columns = matrix.shape
    values = torch.empty((rows, columns), dtype=torch.float32, device=like.device)
    whole = slice(0, rows), slice(0, columns)
    return moment.read(whole, values, Scratch(like.device)).view(like.shape)


def _scales_of(largest: Tensor, top: float) -> Tensor:
    """bfloat16 numbers s, as float32, with largest / s just within `top`; 0 where all is zero, a NaN where one is."""
    scales = (largest * (MARGIN / top)).clamp_(min=SMALLEST_SCALE)
    scales.view(torch.int32).add_(0xFFFF).bitwise_and_(-0x10000)
    return torch.where(largest > 0, scales, largest)  # a NaN may have rounded to zero


def _largest_by_block(values: Tensor) -> Tensor:
    """[rows, columns] to [rows, blocks]."""
    rows, columns = values.shape
    if columns % BLOCK:
        values = functional.pad(values, (0, -columns % BLOCK))
    return values.view(rows, -1, BLOCK).amax(2)


def _by_blocks(values: Tensor, factors: Tensor) -> None:
    """Multiply in place [rows, columns] by [rows, blocks]."""
    columns = values.shape[1]
    whole = columns // BLOCK
    if whole:
        blocks = values[:, : whole * BLOCK].unflatten(1, (whole, BLOCK))
        blocks.mul_(factors[:, :whole, None])
    if columns % BLOCK:
        values[:, whole * BLOCK :].mul_(factors[:, whole:])
