"""MX and NVFP4 groups from one reading of memory: packed codes with their scales, or their values in bfloat16.

Problem  Operator by operator a matrix is read and written some twenty times before its codes lie in memory, and twice
         as often where backward needs another copy, along the rows and rotated.
Method   A program takes a block of 64 x 64, whole groups of 1 x 32 (mx), 1 x 16 (nvfp4) or 16 x 16 (nvfp4_2d):
         along the columns, along the rows, or both, the second from the first-level cache. Along the rows it reads the
         same memory with strides exchanged, and stores codes transposed, which is what a GEMM reads. ::

             s = scale of the largest |x|,   q = round(x / s)         (arithmetic.py)

         ========  ============================================================================================
         codes     a byte for each number, E2M1 two to a byte; scales of one byte, E8M0 or E4M3
         swizzled  the same, scales in cuBLASLt's order: padded to 128 rows x 4 groups, each such tile as
                   32 x 4 x 4; those of 16 x 16 blocks once for each row. Programs cover whole tiles
         values    q s in bfloat16, in the matrix's own layout. A code times its scale is exact there, so that a
                   bfloat16 GEMM over values gives the format's numbers on any GPU
         ========  ============================================================================================

         NVFP4 has a scale of the whole tensor besides, g = amax / (6 * 448), whose maximum maxima.py finds in
         a reading before: 2 + 2 + 1/2 bytes for each number of a bf16 matrix, of MX 2 + 1 or 2 + 1/2.
Codes    are made by integers from values that are rounded already (`arithmetic.codes_of`): any GPU has them.
Hadamard Groups of 16 are rotated in float32 first, see maxima.py, of whose limits codes partake: a code may fall to the
         other side of a tie. They stay rotated and padded to 16.
Noise    As in tiles.py: of an element's row and column in the whole matrix, two streams where there are two results.
Limits   four_over_six has no kernel. E4M3 values under mx with a scale below 2^-124 are not exact in bfloat16. A group
         with a NaN or an infinity has the scale NaN, and of NVFP4 all groups have; the codes beside it are those of
         NaN, of E2M1 0. Not timed on a GPU yet.
Checked  tests/gemm/test_triton_groups.py: bits equal to `scrimp.formats.quantize` and `fake_quantize`; test_ptx.py: so
         are those of the PTX compiled for Hopper, run on a CPU, and its threads do not race.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats import Noise
from scrimp.formats.hadamard import SIZE as HADAMARD_SIZE
from scrimp.gemm.deferred import Matrix
from scrimp.gemm.kernels.arithmetic import (
    E4M3,
    NVFP4_MAX,
    block_of_program,
    codes_of,
    e4m3_scale,
    e8m0_scale,
    fp32_scale,
    lift_of,
    magnitude_bits,
    rounded,
    store_block,
    store_codes,
    to_bfloat16,
    uniform,
)
from scrimp.gemm.kernels.hashes import address_hashes
from scrimp.gemm.kernels.launch import (
    TILE,
    GroupsOf,
    QuantizedGroups,
    cdiv,
    check_choice,
    check_devices,
    check_source,
    element_constants,
    run,
    source_of,
)
from scrimp.gemm.kernels.maxima import largest_magnitudes, load_rotated, rotation_for
from scrimp.precision.formats import lookup_element, lookup_scaling
from scrimp.precision.recipes import Operand

SCALINGS = ("mx", "nvfp4", "nvfp4_2d")
BLOCK, WARPS = 64, 8
"""16 numbers a thread: of 32 and more, scales along the rows and noise leave one program to a multiprocessor, or spill.
By registers alone: times are not measured yet."""


@triton.jit
def store_scales(
    scales,
    found,
    outer_block,
    inner_block,
    num_outer,
    num_inner,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    SWIZZLED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Scales [group rows, 1, group columns, 1] of a block; SWIZZLED: of each row, with zeros for what is not there."""
    COLUMNS: tl.constexpr = BLOCK // GROUP_COLUMNS
    ROWS: tl.constexpr = BLOCK if SWIZZLED else BLOCK // GROUP_ROWS
    if SWIZZLED:
        found = tl.broadcast_to(found, (BLOCK // GROUP_ROWS, GROUP_ROWS, COLUMNS, 1))
    num_rows = num_outer if SWIZZLED else tl.cdiv(num_outer, GROUP_ROWS)
    num_columns = tl.cdiv(num_inner, GROUP_COLUMNS)
    block = tl.reshape(found, (ROWS, COLUMNS))
    rows = outer_block * ROWS + tl.arange(0, ROWS)
    columns = inner_block * COLUMNS + tl.arange(0, COLUMNS)
    if SWIZZLED:
        is_there = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
        tiles_wide = tl.cdiv(num_columns, 4)
        tile = (rows // 128 * tiles_wide)[:, None] + (columns // 4)[None, :]
        within = (rows % 32 * 16 + rows % 128 // 32 * 4)[:, None] + (columns % 4)[None, :]
        mask = (columns < tiles_wide * 4)[None, :]
        tl.store(scales + tile * 512 + within, tl.where(is_there, block, 0), mask=mask)
    else:
        store_block(scales, block, rows, columns, num_rows, num_columns)


@triton.jit
def rounded_groups(
    block,
    amax,
    tensor_scale,
    noise,
    STOCHASTIC: tl.constexpr,
    NVFP4: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(rounded values, scales) of a block, by group rows, rows of a group, group columns and columns of a group.

    The first program stores the scale of the whole tensor, if there is one.
    """
    shape: tl.constexpr = (BLOCK // GROUP_ROWS, GROUP_ROWS, BLOCK // GROUP_COLUMNS, GROUP_COLUMNS)
    grouped = tl.reshape(block, shape)
    largest = tl.max(tl.max(magnitude_bits(grouped), 3, keep_dims=True), 1, keep_dims=True)
    if NVFP4:
        g = fp32_scale(magnitude_bits(tl.load(amax)), NVFP4_MAX)
        if tl.program_id(0) == 0:
            tl.store(tensor_scale, g)
        decode, encode = e4m3_scale(largest, g, STOCHASTIC)
        grouped *= lift_of(g)
    else:
        decode, encode = e8m0_scale(largest, ELEMENT, MAX_EXPONENT, STOCHASTIC)
    if STOCHASTIC:
        noise = tl.reshape(noise, shape)
    return rounded(grouped * encode, noise, STOCHASTIC, ELEMENT), decode


@triton.jit
def store_values(to, values, outer, inner, num_outer, num_inner, AXIS: tl.constexpr):
    """Store values [outer, inner] of a row-major matrix in bfloat16, whose columns `inner` are where AXIS is 1."""
    mask = (outer < num_outer)[:, None] & (inner < num_inner)[None, :]
    if AXIS == 1:
        address = to + outer[:, None] * num_inner + inner[None, :]
    else:
        address = to + outer[:, None] + inner[None, :] * num_outer
    tl.store(address, to_bfloat16(values), mask=mask)


@triton.jit
def store_groups(
    x,
    halves,
    rotation,
    result,
    hashes,
    outer_block,
    inner_block,
    num_outer,
    num_inner,
    AXIS: tl.constexpr,
    HOW: tl.constexpr,
    GATE: tl.constexpr,
    NVFP4: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    BITS: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Quantize one block in groups along `inner`: the columns where AXIS is 1, the rows where it is 0.

    HOW is (rotated, rounded stochastically, scales swizzled); `result` has the largest magnitude, where codes or
    bfloat16 values go, scales, and the tensor's scale.
    """
    amax, out, scales, tensor_scale = result
    outer = outer_block * BLOCK + tl.arange(0, BLOCK)
    inner = inner_block * BLOCK + tl.arange(0, BLOCK)
    block = load_rotated(x, halves, rotation, outer, inner, num_outer, num_inner, AXIS, HOW[0], GATE, BLOCK)
    if HOW[0]:
        num_inner = tl.cdiv(num_inner, 16) * 16
    noise = 0.0
    if HOW[1]:
        outer_hash = tl.load(hashes[0] + outer, mask=outer < num_outer, other=0)
        inner_hash = tl.load(hashes[1] + inner, mask=inner < num_inner, other=0)
        noise = uniform(outer_hash[:, None], inner_hash[None, :])
    q, decode = rounded_groups(
        block,
        amax,
        tensor_scale,
        noise,
        HOW[1],
        NVFP4,
        GROUP_ROWS,
        GROUP_COLUMNS,
        MAX_EXPONENT,
        ELEMENT,
        BLOCK,
    )
    if out.dtype.element_ty == tl.bfloat16:
        store_values(out, tl.reshape(q * decode, (BLOCK, BLOCK)), outer, inner, num_outer, num_inner, AXIS)
    else:
        q = codes_of(tl.reshape(q, (BLOCK, BLOCK)), BITS, ELEMENT)
        store_codes(out, q, outer, inner_block, num_outer, num_inner, BITS)
        found = codes_of(decode, 8, E4M3) if NVFP4 else (magnitude_bits(decode) >> 23).to(tl.uint8)
        store_scales(
            scales,
            found,
            outer_block,
            inner_block,
            num_outer,
            num_inner,
            GROUP_ROWS,
            GROUP_COLUMNS,
            HOW[2],
            BLOCK,
        )


@triton.jit
def quantize_groups_kernel(
    x,
    halves,
    rotation,
    row_amax,
    row_out,
    row_scales,
    row_tensor_scale,
    column_amax,
    column_out,
    column_scales,
    column_tensor_scale,
    row_hashes,
    column_hashes,
    second_row_hashes,
    second_column_hashes,
    num_rows,
    num_columns,
    ROW: tl.constexpr,
    COLUMN: tl.constexpr,
    GATE: tl.constexpr,
    NVFP4: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    GROUP_COLUMNS: tl.constexpr,
    MAX_EXPONENT: tl.constexpr,
    BITS: tl.constexpr,
    ELEMENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One block of BLOCK x BLOCK a program. ROW and COLUMN say how (`store_groups`), None: not asked for."""
    block_row, block_column, _, _ = block_of_program(tl.cdiv(num_columns, 128) * 128, BLOCK, BLOCK)
    if ROW is not None:
        store_groups(
            x,
            halves,
            rotation,
            (row_amax, row_out, row_scales, row_tensor_scale),
            (row_hashes, column_hashes),
            block_row,
            block_column,
            num_rows,
            num_columns,
            1,
            ROW,
            GATE,
            NVFP4,
            GROUP_ROWS,
            GROUP_COLUMNS,
            MAX_EXPONENT,
            BITS,
            ELEMENT,
            BLOCK,
        )
    if COLUMN is not None:
        store_groups(
            x,
            halves,
            rotation,
            (column_amax, column_out, column_scales, column_tensor_scale),
            (second_column_hashes, second_row_hashes),
            block_column,
            block_row,
            num_columns,
            num_rows,
            0,
            COLUMN,
            GATE,
            NVFP4,
            GROUP_ROWS,
            GROUP_COLUMNS,
            MAX_EXPONENT,
            BITS,
            ELEMENT,
            BLOCK,
        )


def quantize_groups(
    x: Matrix, by_row: GroupsOf | None, by_column: GroupsOf | None
) -> tuple[QuantizedGroups | None, QuantizedGroups | None]:
    """Quantize a matrix in groups along its columns, its rows, or both, reading it once beside NVFP4's maximum.

    Args:
        x: row-major [R, C], bfloat16 or float32, or what makes it.
        by_row: groups along the columns.
        by_column: groups along the rows, of the same scaling and element; their codes come out transposed.

    Raises:
        PlanError: a tensor or a choice that the kernel does not take.
        DeviceError: not on a CUDA device.
    """
    check_source("x", x)
    wanted = [one for one in (by_row, by_column) if one is not None]
    _check(wanted, by_row, by_column)
    check_devices(x=source_of(x)[0], **{f"amax {number}": one.amax for number, one in enumerate(wanted)})
    row = None if by_row is None else by_row.empty(x, -1)
    column = None if by_column is None else by_column.empty(x, -2)
    if x.numel():
        _launch(x, by_row, by_column, row, column)
    return row, column


def group_maxima(x: Matrix, by_row: Operand | None, by_column: Operand | None) -> list[Tensor | None]:
    """NVFP4's largest magnitudes of a matrix for groups along its columns and its rows, from one reading of memory.

    None where nothing is asked for, and of scalings without a scale of the whole tensor.
    """
    operands = [
        one if one is not None and lookup_scaling(one.scaling).has_tensor_scale else None
        for one in (by_row, by_column)
    ]
    if operands == [None, None]:
        return [None, None]
    found = iter(largest_magnitudes(x, *(None if one is None else one.hadamard for one in operands)))
    return [None if one is None else next(found) for one in operands]


def _launch(
    x: Matrix,
    by_row: GroupsOf | None,
    by_column: GroupsOf | None,
    row: QuantizedGroups | None,
    column: QuantizedGroups | None,
) -> None:
    """The kernel, after the maxima that are not given."""
    operand = next(one.operand for one in (by_row, by_column) if one is not None)
    element, scaling = lookup_element(operand.element), lookup_scaling(operand.scaling)
    amax_row, amax_column = group_maxima(
        x, *(None if one is None or one.amax is not None else one.operand for one in (by_row, by_column))
    )
    first, halves, gate = source_of(x)
    num_rows, num_columns = x.shape
    rows, columns = (size + -size % HADAMARD_SIZE for size in x.shape)
    run(
        quantize_groups_kernel,
        (cdiv(num_rows, TILE) * cdiv(num_columns, TILE) * (TILE // BLOCK) ** 2,),
        first,
        halves,
        rotation_for(first, any(one is not None and one.operand.hadamard for one in (by_row, by_column))),
        *_arguments(first, by_row, row, amax_row),
        *_arguments(first, by_column, column, amax_column),
        *address_hashes(_stream(by_row), _stream(by_column), rows, columns, first),
        num_rows,
        num_columns,
        ROW=by_row and by_row.how,
        COLUMN=by_column and by_column.how,
        GATE=gate,
        NVFP4=scaling.has_tensor_scale,
        GROUP_ROWS=scaling.rows,
        GROUP_COLUMNS=scaling.columns,
        MAX_EXPONENT=element.max_exponent,
        BITS=element.bits,
        ELEMENT=element_constants(element),
        BLOCK=BLOCK,
        num_warps=WARPS,
    )


def _stream(wanted: GroupsOf | None) -> Noise | None:
    return None if wanted is None else wanted.stream


def _arguments(
    x: Tensor, wanted: GroupsOf | None, found: QuantizedGroups | None, amax: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Maximum, codes or values, scales, and the tensor's scale; any tensor for what the kernel does not read."""
    if wanted is None or found is None:
        return x, x, x, x
    largest = amax if wanted.amax is None else wanted.amax
    codes = found.codes if wanted.form == "values" else found.codes.view(torch.uint8)
    scale = found.tensor_scale
    return (
        x if largest is None else largest,
        codes,
        found.scales.view(torch.uint8),
        x if scale is None else scale,
    )


def _check(wanted: list[GroupsOf], by_row: GroupsOf | None, by_column: GroupsOf | None) -> None:
    check_choice(by_row is not None, by_column is not None, _stream(by_row), _stream(by_column))
    for one in wanted:
        operand, amax = one.operand, one.amax
        if operand.scaling not in SCALINGS:
            raise PlanError("no kernel for these groups", got=operand.scaling, expected=", ".join(SCALINGS))
        if operand.element == "int8":
            raise PlanError("integers in groups have no kernel", do="use scrimp.formats.quantize")
        if operand.four_over_six:
            raise PlanError("four_over_six has no kernel", do="use scrimp.formats.quantize")
        if amax is not None and not lookup_scaling(operand.scaling).has_tensor_scale:
            raise PlanError(f"{operand.scaling} has no tensor scale", do="leave amax out")
        if amax is not None and (amax.numel() != 1 or amax.dtype != torch.float32):
            got = f"{amax.dtype} {tuple(amax.shape)}"
            raise PlanError("amax must be one number", got=got, expected="float32, one element")
    if len({(one.operand.scaling, one.operand.element) for one in wanted}) > 1:
        raise PlanError("both results have one scaling and element", got=", ".join(map(str, wanted)))
