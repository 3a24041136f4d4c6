"""Tiles of 128 along both axes of a matrix, from one reading of memory.

Problem  X is summed over its columns in fprop and over its rows in wgrad; G likewise in dgrad and wgrad. Two
         quantizers and a transpose read the matrix three times and write it once too often.
Method   A program takes one block of 128 x 128. Its 128 rows are 128 tiles along the columns, its 128 columns
         are 128 tiles along the rows: both sets of maxima, scales and codes come from one reading of
         device memory (and a second of the cache, which halves the registers and so doubles the programs
         at work), and the second set is stored transposed, which is what a GEMM reads.

             s = amax / qmax,   q = round(x / s)         (arithmetic.py)

Hadamard Groups of 16 along the axis of the tiles are rotated first (`maxima.load_rotated`); codes are padded to 16.
         Along the rows a program then reads its block with strides exchanged.
Fallback Of int8 row tiles with outliers what rounding left is rounded again, by scales of its own
         (`formats.fallback`): second codes and scales, and for each block whether one of its tiles has any. Where none
         has, second codes are not written, and nothing may read them.
Noise    Stochastic rounding adds the hashes of an element's row and column in the whole matrix, whichever
         way its codes are stored; the two results take separate streams.
Limits   A group with a NaN or an infinity has the scale NaN; the codes beside it mean nothing.
Checked  tests/gemm/test_triton_tiles.py: codes and scales equal to `scrimp.formats.quantize`, rotated ones where the
         rotation's sums are exact (maxima.py); test_ptx.py: so are those of the PTX compiled for Hopper, run on a CPU,
         and its threads do not race.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

from scrimp.errors import PlanError
from scrimp.formats.hadamard import SIZE as HADAMARD_SIZE
from scrimp.formats.noise import Noise
from scrimp.formats.quantized import QuantizedTensor
from scrimp.gemm.deferred import Matrix
from scrimp.gemm.kernels.arithmetic import (
    block_of_program,
    codes_of,
    fp32_scale,
    magnitude_bits,
    quantized,
    round_nearest,
    store_block,
    store_codes,
)
from scrimp.gemm.kernels.gates import load_source
from scrimp.gemm.kernels.hashes import address_hashes
from scrimp.gemm.kernels.launch import (
    TILE,
    WARPS_NEAREST,
    WARPS_STOCHASTIC,
    ColumnTiles,
    RowTiles,
    cdiv,
    check_choice,
    check_devices,
    check_source,
    checked_element,
    element_constants,
    empty_rest,
    empty_tiles,
    run,
    source_of,
)
from scrimp.gemm.kernels.maxima import load_rotated, rotation_for
from scrimp.precision.recipes import FALLBACK_SUM


@triton.jit
def store_tiles(
    block,
    outer,
    inner,
    num_outer,
    num_inner,
    group,
    tiles,
    hashes,
    AXIS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Quantize a loaded float32 block in tiles along one of its axes, and store their codes and scales.

    AXIS 1: a tile is a piece of a row, 0: of a column, stored transposed. `inner` says where its elements stand in the
    whole matrix, `outer` where the tiles do: codes [outer, inner], scales [outer, groups] column-major, hashes alike.
    Returns what was rounded, and by what it was divided.
    """
    codes, scales = tiles
    scale = fp32_scale(tl.max(magnitude_bits(block), AXIS), ELEMENT)
    tl.store(scales + group * num_outer + outer, scale, mask=outer < num_outer)
    divisor = tl.expand_dims(scale, AXIS)
    q = quantized(block, divisor, outer, inner, num_outer, num_inner, hashes, AXIS, STOCHASTIC, ELEMENT)
    is_packed: tl.constexpr = codes.dtype.element_ty == tl.uint8
    stored = codes_of(q, 4, ELEMENT) if is_packed else q.to(codes.dtype.element_ty)
    if AXIS == 0:
        stored = tl.trans(stored)  # one byte an element crosses the threads, not four
    if is_packed:
        store_codes(codes, stored, outer, group, num_outer, num_inner, 4)
    else:
        store_block(codes, stored, outer, inner, num_outer, num_inner)
    return q, divisor


@triton.jit
def store_rest(
    block,
    q,
    divisor,
    rows,
    columns,
    num_rows,
    num_columns,
    group,
    rest,
    LIMIT: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Quantize what rounding left of the row tiles that fall back, and store its codes where one does."""
    codes, scales, blocks = rest
    total = tl.sum(tl.abs(q), 1)  # of integers: exact in any order
    falls_back = (total > 0) & (total < LIMIT)
    left = tl.where(falls_back[:, None], block - q * divisor, 0.0)
    largest = tl.max(magnitude_bits(left), 1)
    scale = fp32_scale(largest, ELEMENT)
    tl.store(scales + group * num_rows + rows, tl.where(largest > 0, scale, 0.0), mask=rows < num_rows)
    has_rest = tl.max(largest) > 0
    tl.store(blocks + tl.program_id(0), has_rest.to(tl.int32))
    if has_rest:
        again = round_nearest(tl.div_rn(left, scale[:, None]), ELEMENT)
        store_block(codes, again.to(codes.dtype.element_ty), rows, columns, num_rows, num_columns)


@triton.jit
def quantize_tiles_kernel(
    x,
    halves,
    rotation,
    row_codes,
    row_scales,
    column_codes,
    column_scales,
    rest_codes,
    rest_scales,
    rest_blocks,
    row_hashes,
    column_hashes,
    second_row_hashes,
    second_column_hashes,
    num_rows,
    num_columns,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STOCHASTIC_COLUMN: tl.constexpr,
    HADAMARD: tl.constexpr,
    HADAMARD_COLUMN: tl.constexpr,
    LIMIT: tl.constexpr,
    GATE: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of BLOCK x BLOCK a program; tiles along the rows fall back where there is room for a rest."""
    block_row, block_column, rows, columns = block_of_program(num_columns, BLOCK, BLOCK)
    if BY_ROW:
        block = load_rotated(
            x, halves, rotation, rows, columns, num_rows, num_columns, 1, HADAMARD, GATE, BLOCK
        )
        length = tl.cdiv(num_columns, 16) * 16 if HADAMARD else num_columns
        tiles, hashes = (row_codes, row_scales), (row_hashes, column_hashes)
        q, divisor = store_tiles(
            block, rows, columns, num_rows, length, block_column, tiles, hashes, 1, STOCHASTIC, ELEMENT
        )
        if rest_codes is not None:
            rest = (rest_codes, rest_scales, rest_blocks)
            store_rest(
                block, q, divisor, rows, columns, num_rows, num_columns, block_column, rest, LIMIT, ELEMENT
            )
    if BY_COLUMN:
        AXIS: tl.constexpr = 1 if HADAMARD_COLUMN else 0
        length = num_rows
        # Again, from the first-level cache: held in registers through both halves, twice as many are needed. What a
        # gate makes takes longer than that, and is kept unless the first half has rotated it.
        if HADAMARD_COLUMN:
            block = load_rotated(
                x, halves, rotation, columns, rows, num_columns, num_rows, 0, True, GATE, BLOCK
            )
            length = tl.cdiv(num_rows, 16) * 16
        elif GATE is None or HADAMARD or not BY_ROW:
            block = load_source(x, halves, rows, columns, num_rows, num_columns, 1, GATE)
        tiles, hashes = (column_codes, column_scales), (second_column_hashes, second_row_hashes)
        store_tiles(
            block,
            columns,
            rows,
            num_columns,
            length,
            block_row,
            tiles,
            hashes,
            AXIS,
            STOCHASTIC_COLUMN,
            ELEMENT,
        )


def quantize_tiles(
    x: Matrix,
    element: str,
    *,
    by_row: bool,
    by_column: bool,
    noise: Noise | None = None,
    noise_column: Noise | None = None,
    packed: tuple[bool, bool] = (False, False),
    hadamard: tuple[bool, bool] = (False, False),
    fallback: bool = False,
    room: QuantizedTensor | None = None,
) -> tuple[RowTiles | None, ColumnTiles | None]:
    """Quantize a matrix in tiles of 128 along its columns, its rows, or both, reading it once.

    Args:
        x: row-major [R, C], bfloat16 or float32, or what makes it.
        element: e2m1 (stored as E4M3 codes), e4m3, e5m2 or int8.
        by_row: tiles along the columns, codes [R, C].
        by_column: tiles along the rows, codes [C, R].
        noise: rounds the row tiles stochastically; unset: to nearest.
        noise_column: the same for the column tiles.
        packed: of rows and columns, codes of e2m1 two to a byte, as they are kept.
        hadamard: of rows and columns, each 16 numbers along the tiles are rotated first, and codes padded to 16.
        fallback: row tiles of int8 that are rounded to nearest have a rest.
        room: where the column tiles are written, as they are kept; unset: to new tensors.

    Raises:
        PlanError: a tensor or a choice that the kernel does not take.
        DeviceError: not on a CUDA device.
    """
    check_source("x", x)
    check_choice(by_row, by_column, noise, noise_column)
    first, halves, gate = source_of(x)
    check_devices(x=first)
    _check(element, any(packed), fallback, by_row and noise is None and not hadamard[0])
    num_rows, num_columns = x.shape
    row_length, column_length = (
        size + -size % HADAMARD_SIZE if rotated else size
        for size, rotated in zip((num_columns, num_rows), hadamard, strict=True)
    )
    rest = empty_rest(num_rows, num_columns, element, x.device) if fallback else None
    row = empty_tiles(num_rows, row_length, element, x.device, packed[0]) if by_row else None
    column = None
    if by_column:
        tiles = (room.payload, room.scales) if room is not None else None
        column = tiles or empty_tiles(num_columns, column_length, element, x.device, packed[1])
    if x.numel():
        run(
            quantize_tiles_kernel,
            (cdiv(num_rows, TILE) * cdiv(num_columns, TILE),),
            first,
            halves,
            rotation_for(first, any(hadamard)),
            *(row or (first, first)),
            *(column or (first, first)),
            *((None, None, None) if rest is None else (rest.codes, rest.scales, rest.blocks)),
            *address_hashes(noise, noise_column, column_length, row_length, first),
            num_rows,
            num_columns,
            BY_ROW=by_row,
            BY_COLUMN=by_column,
            STOCHASTIC=noise is not None,
            STOCHASTIC_COLUMN=noise_column is not None,
            HADAMARD=hadamard[0],
            HADAMARD_COLUMN=hadamard[1],
            LIMIT=FALLBACK_SUM,
            GATE=gate,
            ELEMENT=element_constants(checked_element(element)),
            BLOCK=TILE,
            num_warps=WARPS_STOCHASTIC
            if noise or noise_column or any(packed) or any(hadamard) or fallback or gate
            else WARPS_NEAREST,
        )
    return RowTiles(*row, rest) if row else None, ColumnTiles(*column) if column else None


def _check(element: str, is_packed: bool, falls_back: bool, has_plain_rows: bool) -> None:
    checked_element(element)
    if falls_back and not (element == "int8" and has_plain_rows):
        what = "only int8 tiles of rows, rounded to nearest and not rotated, fall back"
        raise PlanError(what, got=element if element != "int8" else "no such rows")
    if is_packed and element != "e2m1":
        raise PlanError("codes of a byte are not packed", got=element, expected="e2m1")
