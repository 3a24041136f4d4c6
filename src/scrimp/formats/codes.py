"""Rounded values to stored codes and back: torch's types of one byte, and 4-bit codes two to a byte.

A 4-bit code is sign (bit 3), exponent (bits 2-1), mantissa (bit 0), in the order of its values:
0 0.5 1 1.5 2 3 4 6. The first of two neighbours along the last axis takes the low half of a byte, as
`torch.float4_e2m1fn_x2` and torchao have it. E2M1 and integers have no NaN: a NaN becomes code 0, and the
scale of its group, NaN itself, carries the news.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.formats.grouping import PIECE_ELEMENTS, cut
from scrimp.precision.formats import Element

BYTES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}
"""Elements of one byte, in torch's own types."""
_HALF = 0x3F000000
"""The bits of 0.5 as float32."""


def encode(values: Tensor, element: Element) -> Tensor:
    """Codes of values that the element has: one a byte, or uint8 with two a byte along the last axis."""
    if element.name in ("e4m3", "e5m2"):
        return values.to(BYTES[element.name])
    # A NaN's sign differs between processors: it goes with the NaN.
    values = values.nan_to_num(0.0)
    if element.name in BYTES:
        return values.to(BYTES[element.name])
    magnitude = values.abs()
    # Below 2 the code is 2 |v|; from 2 on 2 3 4 6 are 4 5 6 7.
    code = torch.where(
        magnitude < 2, 2 * magnitude, torch.where(magnitude < 4, magnitude + 2, magnitude / 2 + 4)
    )
    code = code.to(torch.uint8) | (torch.signbit(values).to(torch.uint8) << 3)
    if code.shape[-1] % 2:
        code = F.pad(code, (0, 1))
    return code[..., 0::2] | (code[..., 1::2] << 4)


def decode(payload: Tensor, element: Element, length: int) -> Tensor:
    """float32 values of a payload whose last axis holds `length` elements."""
    if element.name in BYTES:
        return payload.to(torch.float32)
    rows = payload.reshape(math.prod(payload.shape[:-1]), payload.shape[-1])
    values = torch.empty(len(rows), length, dtype=torch.float32, device=payload.device)
    step = max(1, PIECE_ELEMENTS.get(payload.device.type, PIECE_ELEMENTS["cuda"]) // max(1, length))
    for part in cut(len(rows), step):
        values[part] = _e2m1_values(rows[part], length)
    return values.view(*payload.shape[:-1], length)


def _e2m1_values(payload: Tensor, length: int) -> Tensor:
    code = torch.stack([payload & 15, payload >> 4], dim=-1).flatten(-2)[..., :length].to(torch.int32)
    magnitude = code & 7
    # From code 2 on the bits are those of a float: two of exponent, one of mantissa. Code 1 is one half.
    bits = torch.where(
        magnitude > 1, ((magnitude >> 1) + 126 << 23) | ((magnitude & 1) << 22), magnitude * _HALF
    )
    return bits.bitwise_or_((code >> 3) << 31).view(torch.float32)
