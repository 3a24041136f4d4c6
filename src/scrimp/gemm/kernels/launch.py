"""What launchers share: their results, their checks, and constants of elements. Imports no triton.

Layout  Codes are row-major with the scaled axis last, as GEMMs read them. Scales of tiles are
        [rows, groups] with stride (1, rows): one group of 128 neighbouring rows is one run of memory, for
        the kernel that writes it, for the GEMM that reads it, and as cuBLASLt demands it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scrimp.errors import DeviceError, PlanError
from scrimp.formats.codes import BYTES
from scrimp.formats.noise import Noise
from scrimp.precision.formats import Element, lookup_element

TILE = 128
"""Elements of a tile; rows and columns of a block, and of a program's share."""
CODE_TYPES = {"e2m1": torch.float8_e4m3fn, **BYTES}
"""E2M1 values are stored as the E4M3 codes of the same values: FP4 arithmetic on FP8 tensor cores."""
WARPS_NEAREST, WARPS_STOCHASTIC = 8, 16
"""Warps of a program with a block of 128 x 128. Nearest: two programs fit a multiprocessor at 128 registers; with noise
128 do not suffice, and one program should have more warps. By registers alone: times are not measured yet."""
INPUT_TYPES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True)
class RowTiles:
    """A matrix [R, C] in tiles of 128 along its columns."""

    codes: Tensor
    """float8 or int8 [R, C]."""
    scales: Tensor
    """float32 [R, ceil(C / 128)], stride (1, R)."""


@dataclass(frozen=True)
class ColumnTiles:
    """A matrix [R, C] in tiles of 128 along its rows, stored transposed."""

    codes: Tensor
    """float8 or int8 [C, R]."""
    scales: Tensor
    """float32 [C, ceil(R / 128)], stride (1, C)."""


@dataclass(frozen=True)
class WeightBlocks:
    """A matrix [R, C] in blocks of 128 x 128."""

    codes: Tensor
    """float8 or int8 [R, C]."""
    scales: Tensor
    """float32 [ceil(R / 128), ceil(C / 128)]."""
    transposed_codes: Tensor | None
    """The same codes as [C, R]; their scales are `scales.T`."""


@dataclass(frozen=True)
class ScaledRows:
    """A matrix with one scale for each row of its codes, or for all of them."""

    codes: Tensor
    """float8 or int8, the scaled axis last: [R, C], or [C, R] where the rows were scaled along."""
    scales: Tensor
    """float32: [rows of the codes, 1], or [1] of the whole tensor."""


def empty_tiles(rows: int, columns: int, element: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns] and scales [rows, groups], not yet filled."""
    codes = torch.empty(rows, columns, dtype=CODE_TYPES[element], device=device)
    return codes, torch.empty(math.ceil(columns / TILE), rows, device=device).t()


def element_constants(element: Element) -> tuple[float, int, int]:
    """The element as a compile-time constant of a kernel."""
    return element.max_value, element.mantissa_bits, element.min_exponent


def checked_element(name: str) -> Element:
    """The element of a name that codes can be stored in."""
    element = lookup_element(name)
    if name not in CODE_TYPES:
        raise PlanError("no kernel stores this element", got=name, expected=", ".join(CODE_TYPES))
    return element


def check_matrix(name: str, x: Tensor) -> None:
    """Refuse all but row-major bfloat16 and float32 matrices."""
    if x.dim() != 2:
        raise PlanError(f"{name} must be a matrix", got=f"shape {tuple(x.shape)}", expected="2 axes")
    if x.dtype not in INPUT_TYPES:
        raise PlanError(
            f"{name} has a type no kernel reads", got=str(x.dtype), expected="bfloat16 or float32"
        )
    check_row_major(name, x)


def check_row_major(name: str, x: Tensor) -> None:
    """Refuse a matrix with gaps or with its columns first."""
    if not x.is_contiguous():
        raise PlanError(
            f"{name} must be row-major without gaps",
            got=f"strides {x.stride()} for shape {tuple(x.shape)}",
            do="call .contiguous() first",
        )


def check_choice(by_row: bool, by_column: bool, noise: Noise | None, noise_column: Noise | None) -> None:
    """Refuse to quantize along no axis, noise for codes that are not asked for, and one noise for both."""
    if not (by_row or by_column):
        raise PlanError("nothing to quantize", got="by_row=False, by_column=False", expected="one of them")
    for name, stream, wanted in (("noise", noise, by_row), ("noise_column", noise_column, by_column)):
        if stream is not None and not wanted:
            raise PlanError(f"{name} is for codes that are not asked for", do=f"leave {name} out")
    if noise is not None and noise == noise_column:
        raise PlanError(
            "both results would round with the same noise",
            got=f"key {noise.key} twice",
            do="derive a stream for each",
        )


def check_devices(**tensors: Tensor | None) -> None:
    """All tensors on one device, one that runs kernels."""
    import triton

    here = {name: x.device for name, x in tensors.items() if x is not None}
    if len(set(here.values())) > 1:
        got = ", ".join(f"{name} on {device}" for name, device in here.items())
        raise PlanError("operands lie on different devices", got=got, expected="one device")
    device = next(iter(here.values()))
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise DeviceError(
            "triton kernels need a CUDA device",
            got=str(device),
            expected="cuda",
            do="set TRITON_INTERPRET=1 before triton is imported to interpret them slowly",
        )


def hashes(noise: Noise | None, rows: int, columns: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Hashes of row and column addresses; without noise any tensor, for the kernel will not read it."""
    if noise is None:
        return like, like
    return noise.row_hashes(rows, like.device), noise.column_hashes(columns, like.device)


def may_run(name: str, trial: Callable[[], bool]) -> bool:
    """Whether a kernel gives what torch's operators give; warns where it does not, for these are slower.

    Args:
        trial: runs both on a few numbers, and compares.
    """
    try:
        if trial():
            return True
        why = "its numbers are not theirs"
    except Exception as error:  # a compiler that is not there, a card that it does not know
        why = f"{type(error).__name__}: {error}"
    warnings.warn(f"the {name} kernel does not run here, torch's operators do, slower ({why})", stacklevel=2)
    return False


def run(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_warps: int, **constants: Any) -> None:
    """Launch a kernel on the device of its first argument.

    Fusion of products and sums is off: nothing here may depend on it, and triton's default changes
    between 3.9 and 3.10.
    """
    device = arguments[0].device
    if device.type == "cuda":
        with torch.cuda.device(device):
            kernel[grid](*arguments, num_warps=num_warps, enable_fp_fusion=False, **constants)
    else:
        kernel[grid](*arguments, num_warps=num_warps, **constants)
