"""The GEMM over tiles and blocks: FP8 or INT8 tensor cores, promotion to float32 at every 128 of K.

Problem  Codes of different tiles have different scales, so a sum may run over codes only within a tile; and
         Hopper's FP8 accumulator is reported to keep about 14 bits (DeepSeek-V3), too few for a long sum.
Method   For each 128 of K a fresh product P = A_k B_k^T is made by the tensor cores and added, scaled, to a float32
         accumulator in registers:

             C += P * (sa[:, None] * sb[None, :])

         so that no sum inside the tensor cores is longer than 128. `promote_every=32` also adds every 32
         in float32 (one instruction of the tensor cores): for measuring whether 128 loses anything.
Exact    With E2M1 operands P is a sum of at most 128 multiples of 1/4 below 36: exact in 15 bits. With integers the
         tensor cores add in int32, and P is at most 127 * 127 * 128 < 2^21, which float32 has: a result differs from
         another order of the work only by the sums of tiles.
Tiles    Programs run in groups of rows of C, so that the operands of neighbours stay in the second-level cache.
         Shapes of tiles (`scaled_matmul_kernel.configs`) are tried at the first call of each N and each bucket of M
         and K, where numbers of tokens stand: powers of two, so that a last chunk or a shorter batch tries nothing
         again. Triton keeps results of other types apart, so they are tried in the type that a run multiplies into. A
         run has them tried before it begins (`tune`). Whichever wins, an element's products are added in the same
         order.
Fallback Where one of A's 128 x 128 codes has a second code for what rounding left (`formats.fallback`), the product of
         these with the same codes of B is added, by scales of their own. The flag of the block is one number for the
         program: blocks without a rest cost its reading.
Sums     `add_scaled_matmul` adds C to a sum of gradients instead of storing it: of float32 by one addition, of bf16
         rounded stochastically by hashes of the addresses, as `rounded_sums` does, without a rounding in between.
Limits   Operands come through pointers (cp.async), not tensor-memory descriptors; rates are not measured yet.
Checked  tests/gemm/test_triton_matmul.py: against float64, interpreted within the bound of float32 sums, on a GPU of
         tensor cores that keep 14 bits.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats.noise import Noise, signed
from scrimp.gemm.kernels.arithmetic import (
    address_hash,
    element_hash,
    to_bfloat16,
    to_bfloat16_stochastic,
    widen,
)
from scrimp.gemm.kernels.launch import TILE, RestOfTiles, cdiv, check_devices, check_row_major, empty_rest

PAIRS = ({torch.float8_e4m3fn, torch.float8_e5m2}, {torch.int8})
"""Types of codes that are multiplied by one another."""
PROMOTIONS = (32, 128)
_NO_NOISE = Noise()
TIMER_BYTES = 2**28
"""What triton's timer writes between two calls, to empty the second-level cache."""
# (M, N, warps, stages). A warp group of 4 warps holds 64 x 128 twice, product and sum, in 128 registers a thread.
_SHAPES = (
    (128, 128, 8, 3),
    (128, 128, 8, 4),
    (64, 128, 4, 4),
    (128, 64, 4, 4),
    (64, 64, 4, 4),
    (64, 64, 4, 6),
)


def _configs() -> list[triton.Config]:
    # The interpreter cannot measure time: it gets one configuration, a small one.
    shapes = _SHAPES[4:5] if triton.knobs.runtime.interpret else _SHAPES
    return [
        triton.Config({"BLOCK_M": m, "BLOCK_N": n, "GROUP_M": 8}, num_warps=warps, num_stages=stages)
        for m, n, warps, stages in shapes
    ]


@triton.jit
def load_codes(address, inside, EVEN_K: tl.constexpr):
    """Codes of one tile, 0 beyond the end of K."""
    return tl.load(address) if EVEN_K else tl.load(address, mask=inside, other=0.0)


@triton.jit
def scaled_product(a_tile, b_tile, a_scale, b_scale, BLOCK_SCALED: tl.constexpr, PROMOTE_EVERY: tl.constexpr):
    """What 128 of K add to a tile of C."""
    if PROMOTE_EVERY == 128:
        # A fresh sum of one tile: triton's own promotion within it is off (its default on Hopper).
        product = tl.dot(a_tile, b_tile)
    else:
        product = tl.dot(a_tile, b_tile, max_num_imprecise_acc=PROMOTE_EVERY)
    scales = (a_scale * b_scale)[:, None] if BLOCK_SCALED else a_scale[:, None] * b_scale[None, :]
    return product.to(tl.float32) * scales  # from int32, of integers


@triton.autotune(_configs(), key=["M_BUCKET", "N", "K_BUCKET", "BLOCK_SCALED"], restore_value=["c"])
@triton.jit(do_not_specialize=["first_row", "first_column", "row_key", "column_key"])
def scaled_matmul_kernel(
    a,
    a_scales,
    b,
    b_scales,
    rest,
    rest_scales,
    rest_blocks,
    c,
    M,
    N,
    K,
    M_BUCKET,
    K_BUCKET,
    a_scales_row,
    a_scales_group,
    b_scales_row,
    b_scales_group,
    first_row,
    first_column,
    row_key,
    column_key,
    BLOCK_SCALED: tl.constexpr,
    ADDS: tl.constexpr,
    EVEN_K: tl.constexpr,
    PROMOTE_EVERY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile [BLOCK_M, BLOCK_N] of C a program; both divide 128, so that a tile has one scale of a block of B and one
    flag of a block of A. The rest of A lies as A does."""
    BLOCK_K: tl.constexpr = 128
    tiles_m = tl.cdiv(M, BLOCK_M)
    tiles_n = tl.cdiv(N, BLOCK_N)
    program = tl.program_id(0)
    first_m = program // (GROUP_M * tiles_n) * GROUP_M
    group_m = tl.minimum(tiles_m - first_m, GROUP_M)
    tile_m = first_m + program % (GROUP_M * tiles_n) % group_m
    tile_n = program % (GROUP_M * tiles_n) // group_m

    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    # Rows beyond the edge read the first ones again: no mask in the loop, and they are not stored.
    wrapped_rows = (rows % M).to(tl.int64)
    wrapped_columns = (columns % N).to(tl.int64)
    k = tl.arange(0, BLOCK_K)
    a_offsets = wrapped_rows[:, None] * K + k[None, :]
    a_address = a + a_offsets
    b_address = b + wrapped_columns[None, :] * K + k[:, None]
    a_scale_address = a_scales + wrapped_rows * a_scales_row
    if BLOCK_SCALED:
        b_scale_address = b_scales + (tile_n * BLOCK_N // 128).to(tl.int64) * b_scales_row
    else:
        b_scale_address = b_scales + wrapped_columns * b_scales_row

    if rest is not None:
        flags = rest_blocks + (tile_m * BLOCK_M // 128).to(tl.int64) * tl.cdiv(K, BLOCK_K)
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for group in range(tl.cdiv(K, BLOCK_K)):
        inside = k < K - group * BLOCK_K
        a_tile = load_codes(a_address, inside[None, :], EVEN_K)
        b_tile = load_codes(b_address, inside[:, None], EVEN_K)
        a_scale = tl.load(a_scale_address + group * a_scales_group)
        b_scale = tl.load(b_scale_address + group * b_scales_group)
        total += scaled_product(a_tile, b_tile, a_scale, b_scale, BLOCK_SCALED, PROMOTE_EVERY)
        if rest is not None:
            has_rest = tl.load(flags + group) != 0
            if has_rest:
                rest_tile = load_codes(rest + a_offsets + group * BLOCK_K, inside[None, :], EVEN_K)
                rest_scale = tl.load(rest_scales + wrapped_rows * a_scales_row + group * a_scales_group)
                total += scaled_product(rest_tile, b_tile, rest_scale, b_scale, BLOCK_SCALED, PROMOTE_EVERY)
        a_address += BLOCK_K
        b_address += BLOCK_K

    mask = (rows < M)[:, None] & (columns < N)[None, :]
    address = c + rows.to(tl.int64)[:, None] * N + columns[None, :]
    if ADDS:
        total = widen(tl.load(address, mask=mask, other=0.0)) + total
    if c.dtype.element_ty != tl.bfloat16:
        tl.store(address, total, mask=mask)
    elif ADDS:
        row_hash = address_hash(rows + first_row.to(tl.int64), row_key.to(tl.int64))
        column_hash = address_hash(columns + first_column.to(tl.int64), column_key.to(tl.int64))
        hashes = element_hash(row_hash[:, None], column_hash[None, :])
        tl.store(address, to_bfloat16_stochastic(total, hashes), mask=mask)
    else:
        tl.store(address, to_bfloat16(total), mask=mask)


def bucket(size: int) -> int:
    """The power of two that is not smaller."""
    return 1 << (size - 1).bit_length()


def tuning_bytes(m: int, n: int, k: int, out: torch.dtype, *, fallback: bool = False) -> int:
    """Device memory that `tune` takes at most, the timer's buffer included."""
    groups = ceil(k / TILE)
    rows = (2 * m if fallback else m) + n
    flags = 4 * groups * ceil(m / TILE) if fallback else 0
    return rows * (k + 4 * groups) + flags + 2 * out.itemsize * m * n + TIMER_BYTES


def tune(
    m: int,
    n: int,
    k: int,
    out: torch.dtype,
    *,
    is_block: bool,
    codes: torch.dtype,
    device: torch.device,
    fallback: bool = False,
) -> None:
    """Try the shapes of tiles for a product of these sizes and type of codes into `out`, on operands of its own, if
    that has not been done.

    Args:
        fallback: with a rest in every fourth block.
    """
    generator = torch.Generator(device).manual_seed(0)
    operands = [
        torch.randint(0, 120, (rows, k), dtype=torch.uint8, device=device, generator=generator)
        for rows in (m, n)
    ]
    groups, rows = ceil(k / TILE), ceil(n / TILE) if is_block else n
    scales = [torch.ones(groups, size, device=device).t() for size in (m, rows)]
    a, b = (one.view(codes) for one in operands)
    rest = empty_rest(m, k, "int8", device) if fallback else None
    if rest is not None:
        rest.blocks.view(-1)[:] = torch.arange(rest.blocks.numel(), device=device) % 4 == 0
    scaled_matmul(a, scales[0], b, scales[1], out, rest=rest)


def scaled_matmul(
    a_codes: Tensor,
    a_scales: Tensor,
    b_codes: Tensor,
    b_scales: Tensor,
    out_dtype: torch.dtype = torch.bfloat16,
    *,
    promote_every: int = 128,
    rest: RestOfTiles | None = None,
) -> Tensor:
    """C [M, N] = A B^T for codes with 128-tiles along K.

    Args:
        a_codes: float8 or int8 [M, K], row-major.
        a_scales: float32 [M, ceil(K / 128)], any strides.
        b_codes: float8 [N, K], row-major; int8 where a_codes are.
        b_scales: float32 [N, ceil(K / 128)] of tiles, or [ceil(N / 128), ceil(K / 128)] of blocks, any strides.
        out_dtype: bfloat16 or float32.
        promote_every: 128, or 32 to add in float32 within a tile too.
        rest: of A, whose scales lie as A's.

    Raises:
        PlanError: shapes or types that do not fit together.
        DeviceError: not on a CUDA device.
    """
    is_block = _check(a_codes, a_scales, b_codes, b_scales, out_dtype, promote_every)
    check_devices(a_codes=a_codes, a_scales=a_scales, b_codes=b_codes, b_scales=b_scales)
    _check_rest(rest, a_codes, a_scales)
    (m, k), n = a_codes.shape, b_codes.shape[0]
    if not m * n * k:
        return torch.zeros(m, n, dtype=out_dtype, device=a_codes.device)
    c = torch.empty(m, n, dtype=out_dtype, device=a_codes.device)
    _launch(a_codes, a_scales, b_codes, b_scales, c, is_block, rest=rest, promote_every=promote_every)
    return c


def add_scaled_matmul(
    total: Tensor,
    a_codes: Tensor,
    a_scales: Tensor,
    b_codes: Tensor,
    b_scales: Tensor,
    noise: Noise | None,
) -> None:
    """total += A B^T in place; operands as of `scaled_matmul`.

    Args:
        total: float32 or bfloat16 [M, N], row-major.
        noise: how a sum in bfloat16 is rounded, with the address of its first element, columns in one piece; None: the
            sum is in float32.

    Raises:
        PlanError, DeviceError: as `scaled_matmul`, and a sum or noise that does not fit.
    """
    is_block = _check(a_codes, a_scales, b_codes, b_scales, total.dtype, PROMOTIONS[-1])
    check_devices(total=total, a_codes=a_codes, a_scales=a_scales, b_codes=b_codes, b_scales=b_scales)
    check_row_major("total", total)
    shape, is_rounded = (len(a_codes), len(b_codes)), total.dtype == torch.bfloat16
    if total.shape != shape or is_rounded != (noise is not None) or (noise is not None and noise.columns):
        raise PlanError(
            "the product does not fit its sum",
            got=f"{total.dtype} {tuple(total.shape)} and noise {noise}",
            expected=f"{shape}; noise whose columns lie in one piece for bfloat16, none for float32",
        )
    if total.numel() * a_codes.shape[1]:
        _launch(a_codes, a_scales, b_codes, b_scales, total, is_block, adds=True, noise=noise or _NO_NOISE)


def _launch(
    a_codes: Tensor,
    a_scales: Tensor,
    b_codes: Tensor,
    b_scales: Tensor,
    c: Tensor,
    is_block: bool,
    *,
    rest: RestOfTiles | None = None,
    promote_every: int = PROMOTIONS[-1],
    adds: bool = False,
    noise: Noise = _NO_NOISE,
) -> None:
    (m, n), k = c.shape, a_codes.shape[1]

    def grid(meta: dict[str, int]) -> tuple[int]:
        return (cdiv(m, meta["BLOCK_M"]) * cdiv(n, meta["BLOCK_N"]),)

    def launch(**options: bool) -> None:
        scaled_matmul_kernel[grid](
            a_codes,
            a_scales,
            b_codes,
            b_scales,
            *((None, None, None) if rest is None else (rest.codes, rest.scales, rest.blocks)),
            c,
            m,
            n,
            k,
            bucket(m),
            bucket(k),
            *a_scales.stride(),
            *b_scales.stride(),
            noise.first_row,
            noise.first_column,
            signed(noise.key),
            signed(~noise.key),
            BLOCK_SCALED=is_block,
            ADDS=adds,
            EVEN_K=k % TILE == 0,
            PROMOTE_EVERY=promote_every,
            **options,
        )

    if c.device.type == "cuda":
        with torch.cuda.device(c.device):
            # One fused multiply-add per sum; named, for triton 3.10 changes the default.
            launch(enable_fp_fusion=True)
    else:
        launch()


def _check_rest(rest: RestOfTiles | None, a_codes: Tensor, a_scales: Tensor) -> None:
    """Refuse a rest that does not lie as A does."""
    if rest is None:
        return
    check_devices(a_codes=a_codes, rest_codes=rest.codes, rest_scales=rest.scales, rest_blocks=rest.blocks)
    check_row_major("rest.codes", rest.codes)
    check_row_major("rest.blocks", rest.blocks)
    blocks = tuple(ceil(size / TILE) for size in a_codes.shape)
    found = [(one.dtype, tuple(one.shape)) for one in (rest.codes, rest.scales, rest.blocks)]
    types = (torch.int8, torch.float32, torch.int32)
    shapes = (tuple(a_codes.shape), tuple(a_scales.shape), blocks)
    expected = list(zip(types, shapes, strict=True))
    is_alike = a_codes.dtype == torch.int8 and rest.scales.stride() == a_scales.stride()
    if found != expected or not is_alike:
        got = f"{found} beside {a_codes.dtype}, strides of scales {rest.scales.stride()} and {a_scales.stride()}"
        raise PlanError("the rest does not fit its operand", got=got, expected=f"{expected}, equal strides")


def _check(
    a_codes: Tensor, a_scales: Tensor, b_codes: Tensor, b_scales: Tensor, out_dtype: torch.dtype, promote: int
) -> bool:
    """Refuse what does not fit; whether b's scales are those of blocks."""
    for name, codes in (("a_codes", a_codes), ("b_codes", b_codes)):
        if codes.dim() != 2 or not any(codes.dtype in pair for pair in PAIRS):
            got = f"{codes.dtype} {tuple(codes.shape)}"
            expected = "e4m3fn, e5m2 or int8, 2 axes"
            raise PlanError(f"{name} must be a matrix of float8 or int8", got=got, expected=expected)
        check_row_major(name, codes)
    if not any({a_codes.dtype, b_codes.dtype} <= pair for pair in PAIRS):
        got = f"{a_codes.dtype} and {b_codes.dtype}"
        raise PlanError(
            "no tensor core multiplies these codes", got=got, expected="both float8, or both int8"
        )
    (m, k), (n, other_k) = a_codes.shape, b_codes.shape
    if k != other_k:
        raise PlanError("the operands differ in K", got=f"{k} and {other_k}", expected="the same K, last")
    groups, blocks = ceil(k / TILE), ceil(n / TILE)
    for name, scales, shapes in (
        ("a_scales", a_scales, [(m, groups)]),
        ("b_scales", b_scales, [(n, groups), (blocks, groups)]),
    ):
        if scales.dtype != torch.float32 or tuple(scales.shape) not in shapes:
            got = f"{scales.dtype} {tuple(scales.shape)}"
            raise PlanError(f"{name} do not fit the codes", got=got, expected=f"float32 {shapes}")
    if out_dtype not in (torch.bfloat16, torch.float32):
        raise PlanError("no such result type", got=str(out_dtype), expected="bfloat16 or float32")
    if promote not in PROMOTIONS:
        raise PlanError("promote_every is not possible", got=promote, expected="32 or 128")
    # One row of B is one block and one tile alike.
    return tuple(b_scales.shape) != (n, groups)
