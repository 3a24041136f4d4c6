"""AdamW's update of one parameter, one kernel for all of its states, whatever formats they have.

Problem  As torch's operators the update is some 80 kernels for every million numbers, and moves 350 to 580 bytes a
         parameter where averages or weights are below float32 (`scrimp.optim.update`, which says what is computed).
Method   Each program takes a block of rows by 128 columns, so that those who share a scale of 8-bit averages are a row
         of it: reads weight, gradient and averages, computes in float32, rounds, and writes each back where it was::

             bf16 weights and averages 14 bytes a number, 8-bit averages 10, fp32 masters with them 16: the floor

         Every operation is one correctly rounded IEEE operation (no fused multiply-add, `sqrt_rn`, `div_rn`), in the
         operators' order, and hashes are those of the elements' addresses, made here from the stream's key: the same
         bits as by the operators, whatever the block. What a tensor is stored in decides how it is read and written.
Limits   Of what is not finite any NaN may come out, and codes under a scale that is not finite are any: what they stand
         for is not finite either. Vectors, which are columns, use one in 128 lanes. Not timed on a GPU yet.
Source   Loshchilov & Hutter, arXiv 1711.05101; codes: `scrimp.optim.moments`
Checked  tests/gemm/test_triton_adamw.py: against torch's operators bit for bit; test_ptx.py: what the compiler makes
         of it
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from collections.abc import Mapping

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats import moment_codes
from scrimp.formats.noise import MULTIPLIERS, Noise, signed
from scrimp.gemm.kernels.arithmetic import (
    address_hash,
    block_of_program,
    element_hash,
    load_block,
    magnitude_bits,
    store_block,
    to_bfloat16,
    to_bfloat16_stochastic,
    widen,
)
from scrimp.gemm.kernels.launch import INPUT_TYPES, cdiv, check_devices, check_matrix, check_row_major, run

ROWS, COLUMNS = 8, moment_codes.BLOCK
"""The size of a block: a row of it is what shares a scale."""
WARPS = 4
_SCALARS = ["first_row", "first_column", "row_key", "column_key"]
"""What is not compiled for its values, which change with each tensor and step."""
DROPPED_BITS = tl.constexpr(moment_codes.DROPPED_BITS)
NOISE_SHIFT = tl.constexpr(32 - moment_codes.DROPPED_BITS)
NOISE_FIELD = tl.constexpr((1 << moment_codes.DROPPED_BITS) - 1)
SHIFT = tl.constexpr(moment_codes.SHIFT)
SHIFT_BITS = tl.constexpr(moment_codes.SHIFT_CODE << moment_codes.DROPPED_BITS)
STEP = tl.constexpr(moment_codes.STEP)
SMALLEST_SCALE = tl.constexpr(moment_codes.SMALLEST_SCALE)
SCALE_OF_SIGNED = tl.constexpr(moment_codes.MARGIN / moment_codes.TOP_SIGNED)
SCALE_OF_UNSIGNED = tl.constexpr(moment_codes.MARGIN / moment_codes.TOP_UNSIGNED)
NEXT_HASH = tl.constexpr(MULTIPLIERS[0])


@triton.jit
def read_average(values, scales, group, rows, columns, num_rows, num_columns):
    """A float32 block of an average; zero beyond the edges."""
    if scales is None:
        x = load_block(values, rows, columns, num_rows, num_columns)
    else:
        mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        stored = tl.load(values + rows[:, None] * num_columns + columns[None, :], mask=mask, other=0)
        stored = stored.to(tl.int32)
        sign = stored >> 31  # of codes without one: 0
        bits = ((stored ^ sign) << DROPPED_BITS) + SHIFT_BITS
        y = bits.to(tl.float32, bitcast=True) - SHIFT
        y = (y.to(tl.int32, bitcast=True) ^ (sign << 31)).to(tl.float32, bitcast=True)
        address = scales + rows * tl.cdiv(num_columns, columns.shape[0]) + group
        x = y * widen(tl.load(address, mask=rows < num_rows, other=0.0))[:, None]
    return x


@triton.jit
def write_average(values, scales, x, hashes, group, rows, columns, num_rows, num_columns):
    """Round an average to what it is stored in; hashes are read where it is not float32."""
    if scales is None:
        if values.dtype.element_ty == tl.bfloat16:
            x = to_bfloat16_stochastic(x, hashes)
        store_block(values, x, rows, columns, num_rows, num_columns)
    else:
        is_signed: tl.constexpr = values.dtype.element_ty == tl.int8
        bits = magnitude_bits(x)
        scale = scale_of(tl.max(bits, 1), SCALE_OF_SIGNED if is_signed else SCALE_OF_UNSIGNED)
        address = scales + rows * tl.cdiv(num_columns, columns.shape[0]) + group
        tl.store(address, to_bfloat16(scale), mask=rows < num_rows)
        factor = tl.where(scale > 0, tl.div_rn(1.0, tl.maximum(scale, SMALLEST_SCALE)), 0.0)
        y = bits.to(tl.float32, bitcast=True) * factor[:, None]
        if not is_signed:
            y = tl.where(y < STEP, STEP, y)
        noise = (hashes >> NOISE_SHIFT) & NOISE_FIELD
        codes = ((y + SHIFT).to(tl.int32, bitcast=True) + noise) >> DROPPED_BITS
        if is_signed:
            codes ^= x.to(tl.int32, bitcast=True) >> 31
        store_block(values, codes.to(values.dtype.element_ty), rows, columns, num_rows, num_columns)


@triton.jit
def scale_of(largest_bits, FACTOR: tl.constexpr):
    """The bfloat16 number, as float32, by which a block is divided; 0 where all is zero, not finite where it is not."""
    largest = largest_bits.to(tl.float32, bitcast=True)
    scale = largest * FACTOR
    scale = tl.where(scale < SMALLEST_SCALE, SMALLEST_SCALE, scale)
    scale = ((scale.to(tl.int32, bitcast=True) + 0xFFFF) & -0x10000).to(tl.float32, bitcast=True)
    return tl.where(largest > 0, scale, largest)


@triton.jit
def next_hash(hashes):
    """`scrimp.optim.stochastic_rounding`: the noise of an element's next rounding."""
    return (hashes ^ (hashes >> 15)) * NEXT_HASH


@triton.jit(do_not_specialize=_SCALARS)
def adamw_kernel(
    weight,
    gradient,
    mean,
    mean_scales,
    square,
    square_scales,
    num_rows,
    num_columns,
    first_row,
    first_column,
    row_key,
    column_key,
    clip,
    beta1,
    rest1,
    beta2,
    rest2,
    root,
    eps,
    rate,
    kept,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One block of a parameter. Scales are None of averages that have none; keys are int64, first_row and first_column
    the address of the first element; numbers are those of `update_adamw`, rest1 and rest2 what betas leave of 1."""
    _, group, rows, columns = block_of_program(num_columns, ROWS, COLUMNS)
    row_hash = address_hash(rows + first_row, row_key.to(tl.int64))
    column_hash = address_hash(columns + first_column, column_key.to(tl.int64))
    hashes = element_hash(row_hash[:, None], column_hash[None, :])
    g = load_block(gradient, rows, columns, num_rows, num_columns) * clip
    if gradient.dtype.element_ty == tl.bfloat16:
        g = widen(to_bfloat16(g))
    m = read_average(mean, mean_scales, group, rows, columns, num_rows, num_columns)
    m = m * beta1 + g * rest1
    v = read_average(square, square_scales, group, rows, columns, num_rows, num_columns)
    v = v * beta2 + g * g * rest2
    change = tl.div_rn(m, tl.sqrt_rn(v) * root + eps) * rate
    w = load_block(weight, rows, columns, num_rows, num_columns) * kept - change
    tl.debug_barrier()  # threads may write what others read: stores are laid out as the stored type wants it
    if weight.dtype.element_ty == tl.bfloat16:
        store_block(weight, to_bfloat16_stochastic(w, hashes), rows, columns, num_rows, num_columns)
        hashes = next_hash(hashes)
    else:
        store_block(weight, w, rows, columns, num_rows, num_columns)
    write_average(mean, mean_scales, m, hashes, group, rows, columns, num_rows, num_columns)
    if mean.dtype.element_ty != tl.float32:
        hashes = next_hash(hashes)
    write_average(square, square_scales, v, hashes, group, rows, columns, num_rows, num_columns)


def update_adamw(
    weight: Tensor,
    gradient: Tensor,
    averages: Mapping[str, Tensor],
    noise: Noise,
    *,
    clip: float,
    beta1: float,
    beta2: float,
    root: float,
    eps: float,
    rate: float,
    kept: float,
) -> None:
    """Update a parameter and its averages in place.

    Args:
        weight: bfloat16, rounded stochastically, or float32 [rows, columns], row-major.
        gradient: likewise.
        averages: exp_avg and exp_avg_sq of that shape in float32 or bfloat16; or int8 and uint8, with exp_avg_scale and
            exp_avg_sq_scale, bfloat16 [rows, ceil(columns / 128)].
        noise: the stream, with the address of the first element; its columns in one piece.
        clip: the gradient is multiplied by it first, and rounded to its type.
        root: what the square root of the average of squares is multiplied by.
        rate: the learning rate, of a corrected mean.
        kept: what decay leaves of 1.

    Raises:
        PlanError, DeviceError: tensors or noise that the kernel does not read.
    """
    _check(weight, gradient, averages, noise)
    if not weight.numel():
        return
    num_rows, num_columns = weight.shape
    run(
        adamw_kernel,
        (cdiv(num_rows, ROWS) * cdiv(num_columns, COLUMNS),),
        weight,
        gradient,
        *(averages.get(f"{name}{end}") for name in ("exp_avg", "exp_avg_sq") for end in ("", "_scale")),
        num_rows,
        num_columns,
        noise.first_row,
        noise.first_column,
        signed(noise.key),
        signed(~noise.key),
        *map(float, (clip, beta1, 1.0 - beta1, beta2, 1.0 - beta2, root, eps, rate, kept)),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
        num_warps=WARPS,
    )


def _check(weight: Tensor, gradient: Tensor, averages: Mapping[str, Tensor], noise: Noise) -> None:
    check_matrix("weight", weight)
    check_matrix("gradient", gradient)
    check_devices(weight=weight, gradient=gradient, **averages)
    groups = weight.shape[0], cdiv(weight.shape[1], COLUMNS)
    fits = weight.shape == gradient.shape and not noise.columns
    for name, code in (("exp_avg", torch.int8), ("exp_avg_sq", torch.uint8)):
        average, scales = averages[name], averages.get(f"{name}_scale")
        check_row_major(name, average)
        fits &= average.shape == weight.shape
        if scales is None:
            fits &= average.dtype in INPUT_TYPES
        else:
            check_row_major(f"{name}_scale", scales)
            fits &= (average.dtype, scales.dtype, scales.shape) == (code, torch.bfloat16, groups)
    if not fits:
        got = {name: f"{x.dtype} {tuple(x.shape)}" for name, x in averages.items()}
        raise PlanError(
            "an update is of matrices of one shape, averages in float32, bfloat16 or 8 bits with their scales",
            got=f"{tuple(weight.shape)}, gradient {tuple(gradient.shape)}, {got}, {len(noise.columns)} ranges",
        )
