"""A gradient added to its sum in bf16, rounded stochastically, in one pass over both.

Problem  Where weights have no fp32 masters, gradients of micro-batches are added up in bf16, and rounded with noise so
         that small ones are not lost. As torch's operators that is 45 kernels for every million numbers of every
         micro-batch: half of a step of a 7B model (benchmarks/results/2026-11-27-step-account-h100-before.md).
Method   Each program takes a block of the matrix: widen both, add in float32, round by hashes of the elements'
         addresses (`arithmetic.address_hash`, made here from the stream's key, so that nothing else is read)::

             total = stochastic(total + gradient)        6 bytes for each number, its floor

         The bits are those of `scrimp.optim.stochastic_rounding`, whatever the block.
Limits   Not timed on a GPU yet.
Checked  tests/gemm/test_triton_sums.py: against torch's operators bit for bit
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats.noise import Noise, signed
from scrimp.gemm.kernels.arithmetic import (
    address_hash,
    block_of_program,
    element_hash,
    load_block,
    store_block,
    to_bfloat16_stochastic,
)
from scrimp.gemm.kernels.launch import cdiv, check_devices, check_matrix, run

ROWS, COLUMNS = 8, 512
"""The size of a block: a row of it is a kilobyte of bf16."""
WARPS = 4
_SCALARS = ["first_row", "first_column", "row_key", "column_key"]
"""What is not compiled for its values, which change with each tensor and step."""


@triton.jit(do_not_specialize=_SCALARS)
def add_rounded_kernel(
    total,
    gradient,
    num_rows,
    num_columns,
    first_row,
    first_column,
    row_key,
    column_key,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One block of the sum. Keys are int64; first_row and first_column are the address of the first element."""
    _, _, rows, columns = block_of_program(num_columns, ROWS, COLUMNS)
    exact = load_block(total, rows, columns, num_rows, num_columns)
    exact += load_block(gradient, rows, columns, num_rows, num_columns)
    row_hash = address_hash(rows + first_row, row_key.to(tl.int64))
    column_hash = address_hash(columns + first_column, column_key.to(tl.int64))
    hashes = element_hash(row_hash[:, None], column_hash[None, :])
    store_block(total, to_bfloat16_stochastic(exact, hashes), rows, columns, num_rows, num_columns)


def add_rounded(total: Tensor, gradient: Tensor, noise: Noise) -> None:
    """Add a gradient to a sum in place.

    Args:
        total: bfloat16 [rows, columns], row-major.
        gradient: bfloat16 or float32, likewise.
        noise: the stream, with the address of the first element; its columns in one piece.

    Raises:
        PlanError, DeviceError: tensors or noise that the kernel does not read.
    """
    check_matrix("gradient", gradient)
    check_matrix("total", total)
    check_devices(total=total, gradient=gradient)
    if total.dtype != torch.bfloat16 or total.shape != gradient.shape or noise.columns:
        raise PlanError(
            "a rounded sum is of matrices of one shape, in bfloat16, whose columns lie in one piece",
            got=f"{total.dtype} {tuple(total.shape)} and {tuple(gradient.shape)}, {len(noise.columns)} ranges",
        )
    if not total.numel():
        return
    num_rows, num_columns = total.shape
    run(
        add_rounded_kernel,
        (cdiv(num_rows, ROWS) * cdiv(num_columns, COLUMNS),),
        total,
        gradient,
        num_rows,
        num_columns,
        noise.first_row,
        noise.first_column,
        signed(noise.key),
        signed(~noise.key),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )
