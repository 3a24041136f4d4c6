"""Number formats as data: element types, scalings, and the bytes they take. Needs no torch.

A low-precision tensor is a payload of narrow elements q and, per group of elements, a decode
scale s: x is about q * s. The element says which values q can have, the scaling says which
elements share a scale and in which format that scale is kept.

=========  ====  ========================================  =======  ===================
element    bits  positive values                           largest  smallest
=========  ====  ========================================  =======  ===================
e2m1       4     0.5 1 1.5 2 3 4 6                         6        0.5
e4m3       8     4 significant bits, normal from 2^-6      448      2^-9; NaN, no inf
e5m2       8     3 significant bits, normal from 2^-14     57,344   2^-16; NaN and inf
int8       8     1 2 3 ... 127                             127      1; no NaN
=========  ====  ========================================  =======  ===================

An integer is a float with one exponent: the values of int8 from 64 to 127 have 7 significant bits, and those below are
spaced as evenly as subnormal numbers are. So one rule rounds all elements. The code -128 is never given: a code and
its negative are both codes.

===========  ========================================  ==============================
scaling      one scale for                             scale
===========  ========================================  ==============================
tensor       the whole tensor                          fp32
row          each row along the scaled axis            fp32
tile         1 x 128 along the scaled axis             fp32
block        128 x 128 of the last two axes            fp32
mx           1 x 32 along the scaled axis              power of two, E8M0 (OCP MX 1.0)
nvfp4        1 x 16 along the scaled axis              E4M3, times one fp32 per tensor
nvfp4_2d     16 x 16 of the last two axes              E4M3, times one fp32 per tensor
===========  ========================================  ==============================

Sources  OCP Microscaling Formats 1.0; NVIDIA's NVFP4 report (arXiv 2509.25149); DeepSeek-V3
         (arXiv 2412.19437) for tiles and blocks; Jetfire (arXiv 2403.12422) for int8 in small groups.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from scrimp.errors import PlanError

ScaleType = Literal["fp32", "e8m0", "e4m3"]
SCALE_BYTES: dict[str, int] = {"fp32": 4, "e8m0": 1, "e4m3": 1}


@dataclass(frozen=True)
class Element:
    """Which values an element can have."""

    name: str
    bits: int
    mantissa_bits: int
    """Explicit ones; a normal value has one more significant bit."""
    min_exponent: int
    """Exponent of the smallest normal value; the values below it are spaced evenly."""
    max_exponent: int
    """Exponent of the largest value: what the MX floor rule subtracts."""
    max_value: float


@dataclass(frozen=True)
class Scaling:
    """Which elements share a scale, and how the scale is kept."""

    name: str
    rows: int | None
    """Rows of a group; None: all of them."""
    columns: int | None
    """Elements of a group along the scaled axis; None: all of them."""
    scale_type: ScaleType

    @property
    def has_tensor_scale(self) -> bool:
        """One fp32 scale per tensor beside the scales of the groups."""
        return self.scale_type == "e4m3"


ELEMENTS: dict[str, Element] = {
    element.name: element
    for element in (
        Element("e2m1", 4, 1, 0, 2, 6.0),
        Element("e4m3", 8, 3, -6, 8, 448.0),
        Element("e5m2", 8, 2, -14, 15, 57344.0),
        Element("int8", 8, 6, 6, 6, 127.0),
    )
}
SCALINGS: dict[str, Scaling] = {
    scaling.name: scaling
    for scaling in (
        Scaling("tensor", None, None, "fp32"),
        Scaling("row", 1, None, "fp32"),
        Scaling("tile", 1, 128, "fp32"),
        Scaling("block", 128, 128, "fp32"),
        Scaling("mx", 1, 32, "e8m0"),
        Scaling("nvfp4", 1, 16, "e4m3"),
        Scaling("nvfp4_2d", 16, 16, "e4m3"),
    )
}


def scale_shape(shape: Sequence[int], scaling: Scaling) -> tuple[int, ...]:
    """Shape of the scales of a tensor whose last axis is the scaled one; ragged groups count whole.

    Only the last two axes are grouped: leading axes (experts, say) each have scales of their own,
    except that a tensor scale is one for all.
    """
    if scaling.rows is None and scaling.columns is None:
        return (1,)
    *leading, columns = shape
    if scaling.rows not in (1, None):
        *leading, rows = leading
        leading.append(math.ceil(rows / scaling.rows))
    return (*leading, 1 if scaling.columns is None else math.ceil(columns / scaling.columns))


def storage_bytes(shape: Sequence[int], element: str, scaling: str) -> int:
    """Bytes of payload and scales of a quantized tensor whose last axis is the scaled one.

    Two 4-bit codes share a byte along that axis; an odd row ends with half a byte unused.
    """
    bits, kind = lookup_element(element).bits, lookup_scaling(scaling)
    payload = math.prod(shape[:-1]) * math.ceil(shape[-1] * bits / 8)
    scales = math.prod(scale_shape(shape, kind)) * SCALE_BYTES[kind.scale_type]
    return payload + scales + (4 if kind.has_tensor_scale else 0)


def lookup_element(name: str) -> Element:
    """The element of a name; PlanError with the known ones otherwise."""
    if name not in ELEMENTS:
        raise PlanError("there is no such element type", got=repr(name), expected=", ".join(ELEMENTS))
    return ELEMENTS[name]


def lookup_scaling(name: str) -> Scaling:
    """The scaling of a name; PlanError with the known ones otherwise."""
    if name not in SCALINGS:
        raise PlanError("there is no such scaling", got=repr(name), expected=", ".join(SCALINGS))
    return SCALINGS[name]
