"""One scale for each row, for each column, or for the whole matrix, in as few passes over memory as they need.

Problem  A scale needs the largest number that it spans before the first one is rounded. A row fits a cache; a column
         and a whole matrix do not, and are read twice. What is summed over the columns in one GEMM and over the
         rows in another is quantized both ways.
Method   Bytes for each number of a bf16 matrix, of device memory; maxima, scales and hashes vanish:

         =====================  =================================================  ================
         codes                  passes                                             bytes
         =====================  =================================================  ================
         rows, along columns    one; a program takes a row, and reads it again     2 + 1
                                from its cache where registers do not hold it
         rows, along rows       maxima of the columns; codes                       2, 2 + 1
         rows, both ways        maxima of rows and columns; codes of both          2, 2 + 1 + 1
         tensor, one way        maximum of all (`tensor_amax`); codes              2, 2 + 1
         tensor, both ways      the same; codes, rounded once and stored twice     2, 2 + 1 + 1
         =====================  =================================================  ================

         Codes along the rows are stored transposed, which is what a GEMM reads. Both passes over
         blocks take 128 x 128 numbers a program, as tiles.py does; where rows and columns have scales
         of their own, the second half of the program reads its block again from the first-level cache.

             s = amax / qmax,   q = round(x / s)         (arithmetic.py)

Maxima   Programs that share a row or a column meet in an atomic maximum over the bits of |x|: the largest is
         the same in any order. Every program makes the scales that it divides by; the first one of a row
         (column, matrix) stores them.
Noise    As in tiles.py: of an element's row and column in the whole matrix, two streams where there are two results.
Limits   Where a scale spans a NaN or an infinity it is NaN; the codes beside it mean nothing. Maxima are those of the
         tensor that is here: what ranks share is not for these kernels. Rows are assumed to fit a cache: with four
         programs at work on each multiprocessor of an H100, rows of up to 45,000 bf16 numbers fit its
         second level. Not timed on a GPU yet.
Checked  tests/gemm/test_triton_rows.py: codes and scales equal to `scrimp.formats.quantize`.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.formats.noise import Noise
from scrimp.formats.quantized import QuantizedTensor
from scrimp.gemm.deferred import Matrix
from scrimp.gemm.kernels.arithmetic import (
    block_of_program,
    fp32_scale,
    magnitude_bits,
    quantized,
    rounded,
    store_block,
    uniform,
)
from scrimp.gemm.kernels.gates import load_source, source_values
from scrimp.gemm.kernels.hashes import address_hashes
from scrimp.gemm.kernels.launch import (
    CODE_TYPES,
    TILE,
    WARPS_NEAREST,
    WARPS_STOCHASTIC,
    ScaledRows,
    cdiv,
    check_choice,
    check_devices,
    check_source,
    checked_element,
    element_constants,
    run,
    source_of,
)
from scrimp.gemm.kernels.maxima import tensor_amax
from scrimp.precision.formats import lookup_element

SMALLEST_CHUNK, LARGEST_CHUNK = 256, 4096
"""Numbers of a row that a program holds at a time: powers of two, so that few kernels are compiled."""
CHUNK_OF_WARP = 256
"""Eight numbers a thread, one load of 16 bytes in bf16: more warps to a row leave fewer rows at work, whose second
reading the caches then hold."""


@triton.jit
def store_chunk(
    codes,
    chunk,
    scale,
    columns,
    num_columns,
    row_hash,
    column_hashes,
    STOCHASTIC: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """Quantize some numbers of a row, and store their codes."""
    noise = 0.0
    if STOCHASTIC:
        noise = uniform(row_hash, tl.load(column_hashes + columns, mask=columns < num_columns, other=0))
    q = rounded(tl.div_rn(chunk, scale), noise, STOCHASTIC, ELEMENT)
    tl.store(codes + columns, q.to(codes.dtype.element_ty), mask=columns < num_columns)


@triton.jit
def quantize_rows_kernel(
    x,
    halves,
    codes,
    scales,
    row_hashes,
    column_hashes,
    num_columns,
    WHOLE: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    GATE: tl.constexpr,
    ELEMENT: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One row a program; WHOLE: it fits one chunk, and is held in registers between its maximum and its codes."""
    row = tl.program_id(0).to(tl.int64)
    codes += row * num_columns
    columns = tl.arange(0, CHUNK)
    row_hash = 0
    if STOCHASTIC:
        row_hash = tl.load(row_hashes + row)
    chunk = source_values(x, halves, row, columns, columns < num_columns, num_columns, GATE)
    largest = magnitude_bits(chunk)
    if not WHOLE:
        for start in range(CHUNK, num_columns, CHUNK):
            here = start + columns
            chunk = source_values(x, halves, row, here, here < num_columns, num_columns, GATE)
            largest = tl.maximum(largest, magnitude_bits(chunk))
    scale = fp32_scale(tl.max(largest), ELEMENT)
    tl.store(scales + row, scale)
    if WHOLE:
        store_chunk(codes, chunk, scale, columns, num_columns, row_hash, column_hashes, STOCHASTIC, ELEMENT)
    else:
        for start in range(0, num_columns, CHUNK):
            here = start + columns
            chunk = source_values(x, halves, row, here, here < num_columns, num_columns, GATE)
            store_chunk(codes, chunk, scale, here, num_columns, row_hash, column_hashes, STOCHASTIC, ELEMENT)


@triton.jit
def largest_magnitudes_kernel(
    x,
    halves,
    row_maxima,
    column_maxima,
    num_rows,
    num_columns,
    BY_ROW: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Bits of the largest magnitude of each column, and of each row if asked for; both were zeros."""
    _, _, rows, columns = block_of_program(num_columns, BLOCK, BLOCK)
    bits = magnitude_bits(load_source(x, halves, rows, columns, num_rows, num_columns, 1, GATE))
    if BY_ROW:
        tl.atomic_max(row_maxima + rows, tl.max(bits, 1), mask=rows < num_rows, sem="relaxed")
    tl.atomic_max(column_maxima + columns, tl.max(bits, 0), mask=columns < num_columns, sem="relaxed")


@triton.jit
def scale_of(
    maxima,
    scales,
    outer,
    num_outer,
    block_along,
    AXIS: tl.constexpr,
    TENSOR: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """What a block is divided by, from its maxima; the first block along the axis stores it. TENSOR: one for all."""
    if TENSOR:
        divisor = fp32_scale(tl.load(maxima), ELEMENT)
        if tl.program_id(0) == 0:
            tl.store(scales, divisor)
    else:
        scale = fp32_scale(tl.load(maxima + outer, mask=outer < num_outer, other=0), ELEMENT)
        if block_along == 0:
            tl.store(scales + outer, scale, mask=outer < num_outer)
        divisor = tl.expand_dims(scale, AXIS)
    return divisor


@triton.jit
def write_codes_kernel(
    x,
    halves,
    row_maxima,
    row_codes,
    row_scales,
    column_maxima,
    column_codes,
    column_scales,
    row_hashes,
    column_hashes,
    second_row_hashes,
    second_column_hashes,
    num_rows,
    num_columns,
    BY_ROW: tl.constexpr,
    BY_COLUMN: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    TENSOR: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    STOCHASTIC_COLUMN: tl.constexpr,
    GATE: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block a program, by scales whose maxima are known. TRANSPOSED: codes by row are stored both ways."""
    block_row, block_column, rows, columns = block_of_program(num_columns, BLOCK, BLOCK)
    if BY_ROW:
        block = load_source(x, halves, rows, columns, num_rows, num_columns, 1, GATE)
        scale = scale_of(row_maxima, row_scales, rows, num_rows, block_column, 1, TENSOR, ELEMENT)
        noise = (row_hashes, column_hashes)
        q = quantized(block, scale, rows, columns, num_rows, num_columns, noise, 1, STOCHASTIC, ELEMENT).to(
            row_codes.dtype.element_ty
        )
        store_block(row_codes, q, rows, columns, num_rows, num_columns)
        if TRANSPOSED:
            store_block(column_codes, tl.trans(q), columns, rows, num_columns, num_rows)
    if BY_COLUMN:
        # Again, from the first-level cache: held in registers through both halves, twice as many are needed. What a
        # gate makes takes longer than that.
        if GATE is None or not BY_ROW:
            block = load_source(x, halves, rows, columns, num_rows, num_columns, 1, GATE)
        scale = scale_of(column_maxima, column_scales, columns, num_columns, block_row, 0, TENSOR, ELEMENT)
        noise = (second_column_hashes, second_row_hashes)
        q = quantized(
            block, scale, columns, rows, num_columns, num_rows, noise, 0, STOCHASTIC_COLUMN, ELEMENT
        ).to(column_codes.dtype.element_ty)
        store_block(column_codes, tl.trans(q), columns, rows, num_columns, num_rows)


def quantize_rows(
    x: Matrix,
    element: str,
    *,
    by_row: bool,
    by_column: bool,
    noise: Noise | None = None,
    noise_column: Noise | None = None,
    room: QuantizedTensor | None = None,
) -> tuple[ScaledRows | None, ScaledRows | None]:
    """Quantize a matrix with a scale for each row, for each column, or both.

    Args:
        x: row-major [R, C], bfloat16 or float32, or what makes it.
        element: e4m3, e5m2 or int8; e2m1 is stored as E4M3 codes.
        by_row: a scale for each row, codes [R, C].
        by_column: a scale for each column, codes [C, R].
        noise: rounds the codes of rows stochastically; unset: to nearest.
        noise_column: the same for those of columns.
        room: where those of columns are written, with their scales; unset: to new tensors.

    Raises:
        PlanError: a tensor or a choice that the kernels do not take.
        DeviceError: not on a CUDA device.
    """
    _check(x, element, by_row, by_column, noise, noise_column)
    num_rows, num_columns = x.shape
    row = _empty(x, element, num_rows, by_row, transposed=False)
    column = _empty(x, element, num_columns, by_column, transposed=True, room=room)
    if not x.numel():
        return row, column
    if column is None:
        assert row is not None
        _quantize_along_rows(x, element, row, noise)
        return row, column
    maxima = torch.zeros(num_columns + (num_rows if by_row else 0), dtype=torch.int32, device=x.device)
    of_columns, of_rows = maxima[:num_columns], maxima[num_columns:]
    first, halves, gate = source_of(x)
    run(
        largest_magnitudes_kernel,
        (cdiv(num_rows, TILE) * cdiv(num_columns, TILE),),
        first,
        halves,
        of_rows if by_row else first,
        of_columns,
        num_rows,
        num_columns,
        BY_ROW=by_row,
        GATE=gate,
        BLOCK=TILE,
        num_warps=WARPS_STOCHASTIC if gate else WARPS_NEAREST,
    )
    _write_codes(x, element, (of_rows, of_columns), row, column, (noise, noise_column), of_tensor=False)
    return row, column


def quantize_tensor(
    x: Matrix,
    element: str,
    *,
    by_row: bool,
    by_column: bool,
    noise: Noise | None = None,
    noise_column: Noise | None = None,
    room: QuantizedTensor | None = None,
) -> tuple[ScaledRows | None, ScaledRows | None]:
    """Quantize a matrix with one scale, the same for both results; arguments as of `quantize_rows`."""
    _check(x, element, by_row, by_column, noise, noise_column)
    scale = torch.empty(1, device=x.device) if room is None else room.scales.view(1)
    if not x.numel():
        scale.fill_(1.0)
    row = _empty(x, element, 1, by_row, transposed=False, scales=scale)
    column = _empty(x, element, 1, by_column, transposed=True, scales=scale, room=room)
    if x.numel():
        amax = tensor_amax(x).view(torch.int32)
        _write_codes(x, element, (amax, amax), row, column, (noise, noise_column), of_tensor=True)
    return row, column


def _check(
    x: Matrix, element: str, by_row: bool, by_column: bool, noise: Noise | None, noise_column: Noise | None
) -> None:
    check_source("x", x)
    checked_element(element)
    check_choice(by_row, by_column, noise, noise_column)
    check_devices(x=source_of(x)[0])


def _empty(
    x: Matrix,
    element: str,
    num_scales: int,
    wanted: bool,
    *,
    transposed: bool,
    scales: Tensor | None = None,
    room: QuantizedTensor | None = None,
) -> ScaledRows | None:
    """Codes and scales to be filled; what spans nothing has the scale 1."""
    if not wanted:
        return None
    if room is not None:
        return ScaledRows(room.payload, room.scales if x.numel() else room.scales.fill_(1.0))
    shape = x.shape[::-1] if transposed else x.shape
    codes = torch.empty(shape, dtype=CODE_TYPES[element], device=x.device)
    if scales is None:
        make = torch.empty if x.numel() else torch.ones
        scales = make(num_scales, 1, device=x.device)
    return ScaledRows(codes, scales)


def _quantize_along_rows(x: Matrix, element: str, row: ScaledRows, noise: Noise | None) -> None:
    """Both maxima and codes from one reading of memory."""
    num_rows, num_columns = x.shape
    first, halves, gate = source_of(x)
    chunk = min(max(triton.next_power_of_2(num_columns), SMALLEST_CHUNK), LARGEST_CHUNK)
    run(
        quantize_rows_kernel,
        (num_rows,),
        first,
        halves,
        row.codes,
        row.scales,
        *address_hashes(noise, None, num_rows, num_columns, first)[:2],
        num_columns,
        WHOLE=num_columns <= chunk,
        STOCHASTIC=noise is not None,
        GATE=gate,
        ELEMENT=element_constants(lookup_element(element)),
        CHUNK=chunk,
        num_warps=chunk // CHUNK_OF_WARP,
    )


def _write_codes(
    x: Matrix,
    element: str,
    maxima: tuple[Tensor, Tensor],
    row: ScaledRows | None,
    column: ScaledRows | None,
    noise: tuple[Noise | None, Noise | None],
    *,
    of_tensor: bool,
) -> None:
    """The second pass: maxima, codes and noise are those of rows and of columns."""
    num_rows, num_columns = x.shape
    first, halves, gate = source_of(x)
    is_stochastic = any(stream is not None for stream in noise)
    # One scale and no noise: both results have the same codes.
    is_same = of_tensor and row is not None and column is not None and not is_stochastic
    run(
        write_codes_kernel,
        (cdiv(num_rows, TILE) * cdiv(num_columns, TILE),),
        first,
        halves,
        *((maxima[0], row.codes, row.scales) if row else (first, first, first)),
        *((maxima[1], column.codes, column.scales) if column else (first, first, first)),
        *address_hashes(*noise, num_rows, num_columns, first),
        num_rows,
        num_columns,
        BY_ROW=row is not None,
        BY_COLUMN=column is not None and not is_same,
        TRANSPOSED=is_same,
        TENSOR=of_tensor,
        STOCHASTIC=noise[0] is not None,
        STOCHASTIC_COLUMN=noise[1] is not None,
        GATE=gate,
        ELEMENT=element_constants(lookup_element(element)),
        BLOCK=TILE,
        num_warps=WARPS_STOCHASTIC if is_stochastic or gate else WARPS_NEAREST,
    )
