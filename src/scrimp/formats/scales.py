"""From the largest magnitude of a group to its decode scale: three kinds of scale.

fp32    s = amax / qmax. A group of zeros has s = 1; s is at least 2^-126, the smallest normal number,
        so that subnormal groups round to zero instead of dividing by a number that devices flush.
e8m0    s = 2^(floor(log2 amax) - emax), the rule of OCP MX: the largest values may saturate. With
        `no_clip` s = 2^ceil(log2(amax / qmax)): nothing saturates, as unbiased stochastic rounding demands.
        Biased exponents are 0 to 254; 255 is NaN. Without clipping, a subnormal amax / qmax gives 2^-126.
e4m3    NVFP4: g = amax_tensor / (6 * 448) for the tensor, b = E4M3(amax / 6 / g) for the group, s = b g.
        b rounds to nearest and may round down, so that x / s reaches up to 6.4 and saturates; with
        `no_clip` it rounds up. g is at least 2^-126: in tensors whose largest number is below 3.2e-35 the groups'
        scales take over, down to subnormal numbers.

A group with a NaN or an infinity gets the scale NaN (E4M3 and E8M0 have one): the whole group
dequantizes to NaN, so that an overflow is seen and never rounded away. Under one scale per tensor, and
under NVFP4's second scale, the group is the whole tensor.

x is divided by s as written for fp32 scales; for the other two it is multiplied by a reciprocal, which
is exact for powers of two, and for NVFP4 is (1 / g) / b, as torchao and NVIDIA's kernels compute it. Where g is small
that overflows: both x and g are then multiplied by 2^64 first, which changes no bit of the result.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.precision.formats import Element, Scaling

SMALLEST_NORMAL = 2.0**-126
SMALL_TENSOR_SCALE = 2.0**-100
"""Down to it, the reciprocal of NVFP4's second scale over the smallest E4M3 number is finite."""
LIFT = 2.0**64
"""What numbers under a smaller one are multiplied by before they are scaled."""
E4M3_MAX = 448.0
FOUR_OVER_SIX_MAX = 256.0
"""Largest block scale where a block may put its maximum at 4: 1.5 times it, 384, must be an E4M3 value."""
_EXPONENT_FIELD = 0x7F800000
_MANTISSA_FIELD = 0x007FFFFF
_NAN_EXPONENT = 255


@dataclass(frozen=True)
class GroupScales:
    """Scales of groups, all of one broadcastable shape."""

    stored: Tensor
    """The scales as they are kept: float32, float8_e4m3fn, or uint8 biased exponents."""
    decode: Tensor
    """float32: what a code is multiplied by (without the tensor's scale)."""
    encode: Tensor
    """float32: what x is divided by (fp32 scales) or multiplied by (the others)."""


def scales_of(
    amax: Tensor, kind: Scaling, element: Element, tensor_scale: Tensor | None, *, no_clip: bool
) -> GroupScales:
    """Scales of a kind for groups with these largest magnitudes.

    Args:
        tensor_scale: NVFP4's; None of other kinds.
        no_clip: nothing may saturate.
    """
    if kind.scale_type == "fp32":
        return fp32_scales(amax, element)
    if tensor_scale is None:
        return e8m0_scales(amax, element, no_clip=no_clip)
    return e4m3_scales(amax, tensor_scale, no_clip=no_clip)


def quotient(amax: Tensor, divisor: float) -> Tensor:
    """amax / divisor as IEEE rounds it: by a Python number torch's CUDA kernel multiplies by the reciprocal instead."""
    return amax / torch.full((), divisor, dtype=amax.dtype, device=amax.device)


def fp32_scales(amax: Tensor, element: Element) -> GroupScales:
    """One fp32 scale per group."""
    scale = quotient(amax, element.max_value).clamp_min_(SMALLEST_NORMAL)
    scale = torch.where(amax == 0, 1.0, scale)
    scale = torch.where(torch.isfinite(amax), scale, torch.nan)
    return GroupScales(scale, scale, scale)


def e8m0_scales(amax: Tensor, element: Element, *, no_clip: bool) -> GroupScales:
    """A power of two per group."""
    if no_clip:
        bits = quotient(amax, element.max_value).view(torch.int32)
        biased = (bits >> 23) + ((bits & _MANTISSA_FIELD) > 0)
    else:
        biased = (amax.view(torch.int32) >> 23) - element.max_exponent
    biased = biased.clamp_(0, 254)
    biased = torch.where(torch.isfinite(amax), biased, _NAN_EXPONENT)
    decode = e8m0_value(biased)
    # 2^(127 - exponent): the reciprocal, always a normal number or (at 254) a subnormal one.
    return GroupScales(biased.to(torch.uint8), decode, 1.0 / decode)


def e8m0_value(biased: Tensor) -> Tensor:
    """float32 powers of two of biased exponents; NaN for 255."""
    wide = biased.to(torch.int32)
    # 2^-127 is subnormal: its bits are half of the smallest normal number's.
    bits = torch.where(wide == 0, 1 << 22, torch.where(wide == _NAN_EXPONENT, 0x7FC00000, wide << 23))
    return bits.to(torch.int32).view(torch.float32)


def nvfp4_tensor_scale(amax: Tensor, *, largest_block_scale: float = E4M3_MAX) -> Tensor:
    """g, the fp32 scale of the whole tensor; 1 for zeros, NaN where a number is not finite."""
    scale = quotient(amax, 6.0 * largest_block_scale).clamp_min_(SMALLEST_NORMAL)
    scale = torch.where(amax == 0, 1.0, scale)
    return torch.where(torch.isfinite(amax), scale, torch.nan)


def lift_of(tensor_scale: Tensor) -> Tensor:
    """What x and g are multiplied by before x is divided by their scales: a power of two, 1 where g is not small."""
    return torch.where(tensor_scale < SMALL_TENSOR_SCALE, LIFT, 1.0)


def e4m3_scales(amax: Tensor, tensor_scale: Tensor, *, no_clip: bool, largest: float = 6.0) -> GroupScales:
    """An E4M3 scale per group, beside the tensor's.

    Args:
        largest: the element value at which the group's maximum is put: 6, or 4.

    Returns:
        scales whose `encode` is for x times `lift_of(tensor_scale)`.
    """
    wanted = (quotient(amax, largest) / tensor_scale).clamp_max_(E4M3_MAX)
    stored = wanted.to(torch.float8_e4m3fn)
    decode = stored.to(torch.float32)
    if no_clip:
        # The next code up is the next value up: codes of positive values are in their order.
        up = (stored.view(torch.uint8) + (decode < wanted)).view(torch.float8_e4m3fn)
        stored = torch.where(torch.isfinite(wanted), up.to(torch.float32), torch.nan).to(torch.float8_e4m3fn)
        decode = stored.to(torch.float32)
    # An all-zero group, or one too small for any scale, has b = 0: its codes are 0.
    lifted = tensor_scale * lift_of(tensor_scale)
    encode = torch.where(decode == 0, 0.0, (1.0 / lifted) / decode)
    return GroupScales(stored, decode, encode)
