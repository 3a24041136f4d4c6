"""Device functions that kernels share: blocks, and the arithmetic of `scrimp.formats`: maxima, scales, rounding, noise.

Blocks    A program takes one block of a matrix; those side by side along the columns run one after the other.
Element   ELEMENT is (largest value, mantissa bits, smallest exponent), see `launch.element_constants`.
Maxima    are taken over the bits of |x| as int32: for floats without sign that is their order, a NaN is
          the largest of all and is never lost (a GPU's float maximum drops it), and the result
          does not depend on the order of the reduction.
Division  is `div_rn`: triton's `/` of float32 is approximate on a GPU.
Nearest   M = 1.5 * 2^(23 - m) * 2^e, with e the exponent of t or the smallest one; (t + M) - M rounds t to
          m bits, to even. M is made from t's exponent field by integer operations. Triton passes no
          reassociation flag to LLVM, so the two operations stay; a product fused into one of
          them would be by a power of two, hence exact.
Noise     Of its 20 bits those are taken that add exactly to the element's largest value (rounding.py).
Cast      Values are rounded before they are cast: whatever a cast does (triton's interpreter rounds
          subnormals wrongly, torch 2.11's header gives NaN above 464), here it is exact. A
          zero is always +0.
bfloat16  is read and rounded to by integers for the same reason: the interpreter's casts truncate, and lose
          subnormals.
"""
# mypy: disable-error-code="import-untyped,no-untyped-def,no-untyped-call,untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

EXPONENT_FIELD = tl.constexpr(0x7F800000)
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
MANTISSA_FIELD = tl.constexpr(0x007FFFFF)
ONE = tl.constexpr(0x3F800000)
SMALLEST_NORMAL = tl.constexpr(2.0**-126)
SMALL_TENSOR_SCALE = tl.constexpr(2.0**-100)
LIFT = tl.constexpr(2.0**64)
E4M3 = tl.constexpr((448.0, 3, -6))
E4M3_MAX = tl.constexpr(448.0)
NVFP4_MAX = tl.constexpr((6.0 * 448.0,))
"""What NVFP4's largest element and its largest block scale make of a tensor's scale of 1."""
NOISE_BITS = tl.constexpr(20)


@triton.jit
def block_of_program(num_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(row and column of the block among the blocks, its rows, its columns), of a matrix with so many columns."""
    blocks_wide = tl.cdiv(num_columns, COLUMNS)
    block_row = (tl.program_id(0) // blocks_wide).to(tl.int64)
    block_column = (tl.program_id(0) % blocks_wide).to(tl.int64)
    rows = block_row * ROWS + tl.arange(0, ROWS)
    columns = block_column * COLUMNS + tl.arange(0, COLUMNS)
    return block_row, block_column, rows, columns


@triton.jit
def load_block(x, rows, columns, num_rows, num_columns):
    """A float32 block of a row-major matrix, zero beyond the edges."""
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    return widen(tl.load(x + rows[:, None] * num_columns + columns[None, :], mask=mask, other=0.0))


@triton.jit
def store_block(to, block, rows, columns, num_rows, num_columns):
    """Store a block of a row-major matrix, but for what lies beyond the edges."""
    mask = (rows < num_rows)[:, None] & (columns < num_columns)[None, :]
    tl.store(to + rows[:, None] * num_columns + columns[None, :], block, mask=mask)


@triton.jit
def magnitude_bits(x):
    """Bits of |x| as int32, which order like the magnitudes; above those of infinity for a NaN."""
    return x.to(tl.int32, bitcast=True) & MAGNITUDE


@triton.jit
def fp32_scale(amax_bits, ELEMENT: tl.constexpr):
    """amax / qmax, at least 2^-126; 1 for zeros; NaN where a member is not finite."""
    scale = tl.div_rn(amax_bits.to(tl.float32, bitcast=True), ELEMENT[0])
    scale = tl.where(scale < SMALLEST_NORMAL, SMALLEST_NORMAL, scale)
    scale = tl.where(amax_bits == 0, 1.0, scale)
    return tl.where(amax_bits < EXPONENT_FIELD, scale, float("nan"))


@triton.jit
def e8m0_scale(amax_bits, ELEMENT: tl.constexpr, MAX_EXPONENT: tl.constexpr, NO_CLIP: tl.constexpr):
    """(decode, encode): a power of two and its reciprocal, by OCP's floor rule or rounded up.

    Rounded up: one more than the floor where the fraction is above that of the largest value, which no rounding of
    amax / qmax hides; and at least 2^-126 where that quotient is not zero, above half the smallest number.
    """
    biased = (amax_bits >> 23) - MAX_EXPONENT
    if NO_CLIP:
        fraction = ((amax_bits & MANTISSA_FIELD) | ONE).to(tl.float32, bitcast=True)
        biased += (fraction > ELEMENT[0] * 2.0**-MAX_EXPONENT).to(tl.int32)
        biased = tl.maximum(biased, (amax_bits > ELEMENT[0] * 0.5).to(tl.int32))
    biased = tl.minimum(tl.maximum(biased, 0), 254)
    is_finite = amax_bits < EXPONENT_FIELD
    decode = tl.where(is_finite, power_of_two(biased), float("nan"))
    return decode, tl.where(is_finite, power_of_two(254 - biased), float("nan"))


@triton.jit
def power_of_two(biased):
    """2^(biased - 127) for biased exponents from 0, which is subnormal, to 254."""
    return tl.where(biased == 0, 1 << 22, biased << 23).to(tl.float32, bitcast=True)


@triton.jit
def lift_of(tensor_scale):
    """What x and g are multiplied by before x is divided by their scales, where the reciprocal of g would overflow."""
    return tl.where(tensor_scale < SMALL_TENSOR_SCALE, LIFT, 1.0)


@triton.jit
def e4m3_scale(amax_bits, tensor_scale, NO_CLIP: tl.constexpr):
    """(decode, encode) of an NVFP4 group: b = E4M3(amax / 6 / g), and (1 / g) / b for lifted numbers."""
    amax = amax_bits.to(tl.float32, bitcast=True)
    wanted = tl.div_rn(tl.div_rn(amax, 6.0), tensor_scale)
    wanted = tl.where(wanted > E4M3_MAX, E4M3_MAX, wanted)
    wanted = tl.where(amax_bits < EXPONENT_FIELD, wanted, float("nan"))
    decode = round_nearest(wanted, E4M3)
    if NO_CLIP:
        decode = tl.where(decode < wanted, decode + spacing(decode, E4M3), decode)
    inverse = tl.div_rn(tl.div_rn(1.0, tensor_scale * lift_of(tensor_scale)), decode)
    return decode, tl.where(decode == 0, 0.0, inverse)


@triton.jit
def exponent_bits(t, ELEMENT: tl.constexpr):
    """Bits of 2^e, e the exponent of t or the smallest normal one; of infinity for a NaN."""
    return tl.maximum(t.to(tl.int32, bitcast=True) & EXPONENT_FIELD, (ELEMENT[2] + 127) << 23)


@triton.jit
def spacing(t, ELEMENT: tl.constexpr):
    """Distance of an element's values around t."""
    return (exponent_bits(t, ELEMENT) - (ELEMENT[1] << 23)).to(tl.float32, bitcast=True)


@triton.jit
def saturate(t, ELEMENT: tl.constexpr):
    """t between the largest values; a NaN stays NaN, for it compares as neither."""
    t = tl.where(t > ELEMENT[0], ELEMENT[0], t)
    return tl.where(t < -ELEMENT[0], -ELEMENT[0], t)


@triton.jit
def rounded(t, noise, STOCHASTIC: tl.constexpr, ELEMENT: tl.constexpr):
    """t rounded to an element's values; noise is read where rounding is stochastic."""
    return round_stochastic(t, noise, ELEMENT) if STOCHASTIC else round_nearest(t, ELEMENT)


@triton.jit
def round_nearest(t, ELEMENT: tl.constexpr):
    """t rounded to the nearest value of an element, ties to even."""
    t = saturate(t, ELEMENT)
    lift = ((23 - ELEMENT[1]) << 23) + (1 << 22)
    power = (exponent_bits(t, ELEMENT) + lift).to(tl.float32, bitcast=True)
    return (t + power) - power


@triton.jit
def round_stochastic(t, noise, ELEMENT: tl.constexpr):
    """t rounded down or up with the probability of its distance; noise in [0, 1)."""
    t = saturate(t, ELEMENT)
    bits = exponent_bits(t, ELEMENT) - (ELEMENT[1] << 23)
    step = bits.to(tl.float32, bitcast=True)
    inverse = ((254 << 23) - bits).to(tl.float32, bitcast=True)
    if ELEMENT[1] > 23 - NOISE_BITS:
        unit: tl.constexpr = 2.0 ** (ELEMENT[1] - 23)
        units: tl.constexpr = 2.0 ** (23 - ELEMENT[1])
        noise = (noise * units).to(tl.int32).to(tl.float32) * unit
    lifted = t * inverse + noise
    # Floor of a small number by rounding; tl.floor is cvt.rmi.ftz, which calls a subnormal below zero zero.
    nearest = (lifted + 1.5 * 2.0**23) - 1.5 * 2.0**23
    floor = tl.where(nearest > lifted, nearest - 1.0, nearest)
    return saturate(floor * step, ELEMENT)


@triton.jit
def codes_of(q, BITS: tl.constexpr, ELEMENT: tl.constexpr):
    """uint8 codes of an element's values; of a NaN the largest code of 8 bits, and 0 of 4, which have none.

    Times 2^(-126 - e), with e its smallest exponent, the values have the exponents of float32, subnormal where theirs
    are: the code is then the head of the bits.
    """
    magnitude = magnitude_bits(q * 2.0 ** (-126 - ELEMENT[2])) >> (23 - ELEMENT[1])
    nan = 0 if BITS == 4 else 0x7F
    sign = (q.to(tl.int32, bitcast=True) >> (32 - BITS)) & (1 << (BITS - 1))
    return tl.where(q == q, magnitude | sign, nan).to(tl.uint8)


@triton.jit
def value_of(codes, BITS: tl.constexpr, ELEMENT: tl.constexpr):
    """float32 values of uint8 codes: what `codes_of` undoes. Codes of NaN give numbers."""
    wide = codes.to(tl.int32)
    magnitude = (wide & ((1 << (BITS - 1)) - 1)) << (23 - ELEMENT[1])
    value = magnitude.to(tl.float32, bitcast=True) * 2.0 ** (126 + ELEMENT[2])
    sign = (wide >> (BITS - 1)) << 31
    return (value.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def store_codes(to, codes, outer, inner_block, num_outer, num_inner, BITS: tl.constexpr):
    """Store uint8 codes [outer, inner], two to a byte where they have 4 bits."""
    PER_BYTE: tl.constexpr = 8 // BITS
    COLUMNS: tl.constexpr = codes.shape[1] // PER_BYTE
    if PER_BYTE == 2:
        low, high = tl.split(tl.reshape(codes, (codes.shape[0], COLUMNS, 2)))
        codes = low | (high << 4)
    num_bytes = tl.cdiv(num_inner, PER_BYTE)
    store_block(to, codes, outer, inner_block * COLUMNS + tl.arange(0, COLUMNS), num_outer, num_bytes)


@triton.jit
def address_hash(address, key):
    """`scrimp.formats.noise`: int32 hashes of int64 addresses, of rows by a key, of columns by its complement."""
    x = (address * -7046029254386353131) ^ key
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -4658895280553007687
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -7723592293110705685
    return (x ^ ((x >> 31) & 0x1FFFFFFFF)).to(tl.int32)


@triton.jit
def element_hash(row_hash, column_hash):
    """32 bits for each element, from int32 hashes of its row and column."""
    h = row_hash + column_hash
    h = (h ^ (h >> 15)) * 0x2C1B3C6D
    return (h ^ (h >> 12)) * 0x297A2D39


@triton.jit
def uniform(row_hash, column_hash):
    """`scrimp.formats.noise.combine`: 20-bit numbers in [0, 1) from int32 hashes."""
    return (element_hash(row_hash, column_hash) >> 12).to(tl.float32) * 2.0**-20 + 0.5


@triton.jit
def quantized(
    block,
    scale,
    outer,
    inner,
    num_outer,
    num_inner,
    hashes,
    AXIS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    ELEMENT: tl.constexpr,
):
    """A float32 block divided by its scales and rounded to an element's values.

    AXIS is the one that a scale spans. `inner` says where the block's elements stand along it in the whole matrix,
    `outer` where they stand across it; hashes alike, read where rounding is stochastic.
    """
    noise = 0.0
    if STOCHASTIC:
        outer_hash = tl.load(hashes[0] + outer, mask=outer < num_outer, other=0)
        inner_hash = tl.load(hashes[1] + inner, mask=inner < num_inner, other=0)
        noise = uniform(tl.expand_dims(outer_hash, AXIS), tl.expand_dims(inner_hash, 1 - AXIS))
    return rounded(tl.div_rn(block, scale), noise, STOCHASTIC, ELEMENT)


@triton.jit
def widen(x):
    """float32 of bfloat16 or float32."""
    if x.dtype == tl.bfloat16:
        bits = x.to(tl.int16, bitcast=True).to(tl.int32) << 16
        wide = bits.to(tl.float32, bitcast=True)
    else:
        wide = x
    return wide


@triton.jit
def to_bfloat16(x):
    """float32 to the nearest bfloat16, ties to even; every NaN becomes the same one."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def to_bfloat16_stochastic(x, hashes):
    """float32 to a bfloat16 beside it by the high bits of hashes; what is not finite becomes NaN."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + ((hashes >> 16) & 0xFFFF)) >> 16
    is_finite = (bits & MAGNITUDE) < EXPONENT_FIELD
    return tl.where(is_finite, rounded, 0x7FC0).to(tl.int16).to(tl.bfloat16, bitcast=True)
