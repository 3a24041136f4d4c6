"""Hashes of the addresses of rows and columns, which quantizers round stochastically by: one launch.

Problem  Torch's operators make the hashes of a matrix in 30 small kernels a stream (`scrimp.formats.noise`). They move
         next to nothing, but the host takes its time to launch each.
Method   One kernel for rows and columns of both streams (`arithmetic.address_hash`). The quantizers read what they need
         of them, a few kilobytes: made by each program itself, hashes take so many registers that quantizers of
         tiles spill.
Checked  tests/gemm/test_triton_hashes.py: against `scrimp.formats.noise`
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.formats.noise import Noise, signed
from scrimp.gemm.kernels.arithmetic import address_hash
from scrimp.gemm.kernels.launch import cdiv, run

BLOCK, WARPS = 1024, 4
_NUMBERS = ["first_row", "first_column", "key", "second_key"]
"""What is not compiled for its values, which change with each tensor and step."""


@triton.jit(do_not_specialize=_NUMBERS)
def address_hashes_kernel(
    out,
    addresses,
    first_row,
    first_column,
    key,
    second_key,
    num_rows,
    num_columns,
    IN_PIECES: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Some hashes of one stream: of rows, then of columns, whose addresses are read where they lie IN_PIECES."""
    blocks = tl.cdiv(num_rows + num_columns, BLOCK)
    stream = tl.program_id(0) // blocks
    at = (tl.program_id(0) % blocks).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    of_rows = key.to(tl.int64) + stream * (second_key.to(tl.int64) - key.to(tl.int64))
    is_row, is_there = at < num_rows, at < num_rows + num_columns
    if IN_PIECES:
        column = tl.load(addresses + at - num_rows, mask=is_there & (at >= num_rows), other=0)
    else:
        column = at - num_rows + first_column.to(tl.int64)
    address = tl.where(is_row, at + first_row.to(tl.int64), column)
    found = address_hash(address, tl.where(is_row, of_rows, ~of_rows))
    tl.store(out + stream * (num_rows + num_columns) + at, found, mask=is_there)


def address_hashes(
    noise: Noise | None, second: Noise | None, num_rows: int, num_columns: int, like: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """int32 hashes of rows and columns of one stream, and of a second one of the same matrix.

    Where there is no stream any tensor stands for its hashes: no kernel will read them.
    """
    streams = [one for one in (noise, second) if one is not None]
    if not streams:
        return like, like, like, like
    place = streams[0]
    found = torch.empty(len(streams), num_rows + num_columns, dtype=torch.int32, device=like.device)
    run(
        address_hashes_kernel,
        (cdiv(num_rows + num_columns, BLOCK) * len(streams),),
        found,
        place.column_addresses(num_columns, like.device) if place.columns else found,
        place.first_row,
        place.first_column,
        signed(place.key),
        signed(streams[-1].key),
        num_rows,
        num_columns,
        IN_PIECES=bool(place.columns),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    rows, columns = found[:, :num_rows], found[:, num_rows:]
    first, last = (rows[0], columns[0]), (rows[-1], columns[-1])
    return (*(first if noise else (like, like)), *(last if second else (like, like)))
