"""Quantization done slowly and plainly in numpy: group after group, casts by ml_dtypes, of integers by numpy.

Divisions that the rules do in float32 are done in float32 here too; everything else is exact.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

Array = np.ndarray[Any, Any]
f32 = np.float32
TYPES = {
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "int8": np.int8,
}
LARGEST = {"e2m1": 6.0, "e4m3": 448.0, "e5m2": 57344.0, "int8": 127.0}
LARGEST_EXPONENT = {"e2m1": 2, "e4m3": 8, "e5m2": 15, "int8": 6}
NOISE_BITS = {"int8": 17}
"""As many as add exactly to the largest value in float32, of the 20 that there are."""
WIDTH = {"row": None, "tile": 128, "block": 128, "mx": 32, "nvfp4": 16, "nvfp4_2d": 16}
ELEMENTS_OF = {name: ("e2m1",) if name.startswith("nvfp4") else tuple(TYPES) for name in ("tensor", *WIDTH)}
COMBINATIONS = [(element, scaling) for scaling, elements in ELEMENTS_OF.items() for element in elements]


def all_values(element: str) -> Array:
    """Every finite value, ascending, zero once."""
    bits = 4 if element == "e2m1" else 8
    codes = np.arange(2**bits, dtype=np.uint8).view(TYPES[element]).astype(np.float64)
    return np.unique(codes[np.abs(codes) <= LARGEST[element]])


def to_type(values: Array, element: str) -> Array:
    """To the nearest even value that numpy's or ml_dtypes' type has."""
    return (np.rint(values) if element == "int8" else values).astype(TYPES[element])


def cast(values: Array, element: str) -> Array:
    """Clamped, then to nearest even; NaN stays NaN and zeros are positive."""
    clamped = np.clip(values, -LARGEST[element], LARGEST[element]).astype(f32)
    # Plus zero: -0 becomes +0.
    values = to_type(np.nan_to_num(clamped), element).astype(f32) + f32(0)
    return np.where(np.isnan(clamped), f32(np.nan), values)


def cast_with_noise(values: Array, element: str, uniform: Array) -> Array:
    """To the upper neighbour where the distance above the lower one and the noise make a whole step."""
    grid = all_values(element)
    clamped = np.clip(values.astype(np.float64), grid[0], grid[-1])
    lower = np.clip(np.searchsorted(grid, clamped, side="right") - 1, 0, len(grid) - 2)
    distance = (clamped - grid[lower]) / (grid[lower + 1] - grid[lower])
    unit = 2.0 ** -NOISE_BITS.get(element, 20)
    uniform = np.floor(uniform / unit) * unit
    return np.where(distance + uniform >= 1, grid[lower + 1], grid[lower]).astype(f32)


def groups_of(shape: tuple[int, ...], scaling: str) -> Iterator[tuple[Any, ...]]:
    """Indices of each group of an array whose last axis is the scaled one."""
    if scaling == "tensor":
        yield (...,)
        return
    width = WIDTH[scaling] or max(1, shape[-1])
    columns = [slice(start, start + width) for start in range(0, shape[-1], width)]
    leading: list[list[Any]] = [list(range(size)) for size in shape[:-1]]
    if scaling in ("block", "nvfp4_2d"):
        leading[-1] = [slice(start, start + width) for start in range(0, shape[-2], width)]
    yield from itertools.product(*leading, columns)


@dataclass
class Result:
    values: Array
    """Without the tensor's scale."""
    scales: list[float]
    """In the order of the groups."""
    tensor_scale: Any
    """1 where the scaling has none."""

    @property
    def dequantized(self) -> Array:
        return self.values * f32(self.tensor_scale)


def power_of_two(amax: float, element: str, *, round_up: bool) -> float:
    if amax == 0:
        return 2.0**-127
    if round_up:
        fraction, exponent = math.frexp(float(f32(amax) / f32(LARGEST[element])))
        exponent -= fraction == 0.5
        # Documented: the smallest scale of a group that is not zero is normal.
        return 2.0 ** min(max(exponent, -126), 127)
    return 2.0 ** max(math.frexp(amax)[1] - 1 - LARGEST_EXPONENT[element], -127)


def e4m3_scale(wanted: float, *, round_up: bool) -> float:
    wanted = min(wanted, 448.0)
    if not round_up:
        return float(f32(wanted).astype(TYPES["e4m3"]))
    grid = all_values("e4m3")
    return float(grid[np.searchsorted(grid, wanted, side="left")])


def tensor_scale_of(x: Array, largest_block_scale: float = 448.0) -> Any:
    amax = f32(np.abs(x).max(initial=0))
    if not np.isfinite(amax):
        return f32(np.nan)
    return f32(1) if amax == 0 else max(amax / f32(6 * largest_block_scale), f32(2.0**-126))


def one_group(
    x: Array, element: str, scaling: str, g: Any, uniform: Array | None, *, at: float = 6.0
) -> tuple[Array, float]:
    """q * s of one group, and s."""
    amax, round_up = f32(np.abs(x).max()), uniform is not None
    if not (np.isfinite(amax) and np.isfinite(g)):
        return np.full_like(x, np.nan), math.nan
    with np.errstate(divide="ignore", invalid="ignore"):
        if scaling == "mx":
            scale = power_of_two(float(amax), element, round_up=round_up)
            scaled = (x.astype(np.float64) / scale).astype(f32)
        elif scaling.startswith("nvfp4"):
            scale = e4m3_scale(float((amax / f32(at)) / g), round_up=round_up)
            # Of numbers this small the reciprocal would overflow: the same with larger exponents.
            lift = f32(2.0**64 if g < 2.0**-100 else 1)
            scaled = (x * lift) * ((f32(1) / (g * lift)) / f32(scale)) if scale else np.zeros_like(x)
        else:
            scale = float(max(amax / f32(LARGEST[element]), f32(2.0**-126)) if amax else f32(1))
            scaled = x / f32(scale)
    q = cast(scaled, element) if uniform is None else cast_with_noise(scaled, element, uniform)
    return q * f32(scale), scale


def slowly(x: Array, element: str, scaling: str, axis: int = -1, uniform: Array | None = None) -> Result:
    """Quantize float32 `x`; `uniform`, of its shape, makes it stochastic."""
    moved = np.moveaxis(x, axis, -1)
    noise = None if uniform is None else np.moveaxis(uniform, axis, -1)
    g = tensor_scale_of(x) if scaling.startswith("nvfp4") else f32(1)
    values, scales = np.empty_like(moved), []
    for group in groups_of(moved.shape, scaling):
        values[group], scale = one_group(
            moved[group], element, scaling, g, None if noise is None else noise[group]
        )
        scales.append(scale)
    return Result(np.moveaxis(values, -1, axis), scales, g)
