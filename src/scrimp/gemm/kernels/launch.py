"""What launchers share: their results, their checks, and constants of elements. Imports no triton.

Layout  Codes are row-major with the scaled axis last, as GEMMs read them. Scales of tiles are
        [rows, groups] with stride (1, rows): one group of 128 neighbouring rows is one run of memory, for
        the kernel that writes it, for the GEMM that reads it, and as cuBLASLt demands it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from scrimp.errors import DeviceError, PlanError
from scrimp.formats.codes import BYTES
from scrimp.formats.noise import Noise
from scrimp.formats.quantize import PAYLOAD_TYPES, SCALE_TYPES
from scrimp.formats.quantized import QuantizedTensor
from scrimp.gemm.deferred import Deferred, Matrix
from scrimp.precision.formats import Element, lookup_element, lookup_scaling, scale_shape
from scrimp.precision.recipes import Operand

TILE = 128
"""Elements of a tile; rows and columns of a block, and of a program's share."""
CODE_TYPES = {"e2m1": torch.float8_e4m3fn, **BYTES}
"""E2M1 values are stored as the E4M3 codes of the same values: FP4 arithmetic on FP8 tensor cores."""
WARPS_NEAREST, WARPS_STOCHASTIC = 8, 16
"""Warps of a program with a block of 128 x 128. Nearest: two programs fit a multiprocessor at 128 registers; with noise
or a rest 128 do not suffice, nor where codes are packed or numbers rotated, and one program should have more warps. By
registers alone: times are not measured yet."""
INPUT_TYPES = (torch.bfloat16, torch.float32)
Form = Literal["codes", "swizzled", "values", "kept"]
"""Groups: codes with scales in their order or in cuBLASLt's, or values in bfloat16. Kept: as QuantizedTensor has them;
groups as codes, tiles with E2M1 two to a byte."""


@dataclass(frozen=True)
class RestOfTiles:
    """What tiles that fell back leave to second codes."""

    codes: Tensor
    """int8 [R, C]; not written in blocks of which no tile has a rest."""
    scales: Tensor
    """float32 [R, ceil(C / 128)], stride (1, R); 0 where there is no rest."""
    blocks: Tensor
    """int32 [ceil(R / 128), ceil(C / 128)]: whether one of 128 tiles has a rest."""


@dataclass(frozen=True)
class RowTiles:
    """A matrix [R, C] in tiles of 128 along its columns."""

    codes: Tensor
    """float8 or int8 [R, C], C padded to 16 where it was rotated; packed uint8 [R, ceil(C / 2)]."""
    scales: Tensor
    """float32 [R, ceil(C / 128)], stride (1, R)."""
    rest: RestOfTiles | None = None


@dataclass(frozen=True)
class ColumnTiles:
    """A matrix [R, C] in tiles of 128 along its rows, stored transposed."""

    codes: Tensor
    """float8 or int8 [C, R], R padded likewise; packed uint8 [C, ceil(R / 2)]."""
    scales: Tensor
    """float32 [C, ceil(R / 128)], stride (1, C)."""


@dataclass(frozen=True)
class WeightBlocks:
    """A matrix [R, C] in blocks of 128 x 128."""

    codes: Tensor
    """float8 or int8, the summed axis last: [R, C] or [C, R]; padded to 16 where it was rotated."""
    scales: Tensor
    """float32 [ceil(R / 128), ceil(C / 128)], or transposed, as the codes."""


@dataclass(frozen=True)
class ScaledRows:
    """A matrix with one scale for each row of its codes, or for all of them."""

    codes: Tensor
    """float8 or int8, the scaled axis last: [R, C], or [C, R] where the rows were scaled along."""
    scales: Tensor
    """float32: [rows of the codes, 1], or [1] of the whole tensor."""


@dataclass(frozen=True)
class QuantizedGroups:
    """A matrix in MX or NVFP4 groups."""

    codes: Tensor
    """float8, or uint8 with two E2M1 codes a byte, the scaled axis last; or bfloat16 values in the matrix's own layout,
    where groups were rotated padded to a multiple of 16 along the scaled axis."""
    scales: Tensor
    """One byte for each group: E4M3, or uint8 biased exponents; in cuBLASLt's order one axis, of values nothing."""
    tensor_scale: Tensor | None
    """NVFP4's, float32 of no axes."""


@dataclass(frozen=True)
class GroupsOf:
    """One result that is asked for."""

    operand: Operand
    """mx, nvfp4 or nvfp4_2d scaling, without four_over_six."""
    form: Form = "codes"
    noise: Noise | None = None
    """Stream for stochastic rounding; None: that of key 0."""
    amax: Tensor | None = None
    """NVFP4's largest magnitude, float32 of one element; None: that of the matrix."""
    room: QuantizedTensor | None = None
    """Where the result is written, as it is kept; None: to new tensors."""

    @property
    def how(self) -> tuple[bool, bool, bool]:
        """Rotated, rounded stochastically, scales in cuBLASLt's order."""
        operand = self.operand
        return operand.hadamard, operand.rounding == "stochastic", self.form == "swizzled"

    @property
    def stream(self) -> Noise | None:
        """The noise that it is rounded with."""
        return (self.noise or Noise()) if self.operand.rounding == "stochastic" else None

    def empty(self, x: Matrix, axis: int) -> QuantizedGroups:
        """Room for the result; what is not there has the scale 1."""
        if self.room is not None and x.numel():
            return QuantizedGroups(self.room.payload, self.room.scales, self.room.tensor_scale)
        shape = list(x.shape)
        shape[axis] = self.operand.length(shape[axis])
        scaling = lookup_scaling(self.operand.scaling)
        make = torch.empty if x.numel() else torch.ones
        tensor_scale = make((), device=x.device) if scaling.has_tensor_scale else None
        if self.form == "values":
            nothing = torch.empty(0, dtype=torch.uint8, device=x.device)
            values = torch.empty(shape, dtype=torch.bfloat16, device=x.device)
            return QuantizedGroups(values, nothing, tensor_scale)
        outer, inner = shape if axis == -1 else shape[::-1]
        element = lookup_element(self.operand.element)
        payload = (outer, math.ceil(inner * element.bits / 8))
        size = scale_shape((outer, inner), scaling)
        if self.form == "swizzled":
            size = (math.ceil(outer / 128) * math.ceil(size[1] / 4) * 512,)
        return QuantizedGroups(
            torch.empty(payload, dtype=PAYLOAD_TYPES[element.name], device=x.device),
            torch.empty(size, dtype=SCALE_TYPES[scaling.scale_type], device=x.device),
            tensor_scale,
        )


def cdiv(size: int, of: int) -> int:
    """How many cover a size. Triton's takes as long on the host as an allocation."""
    return -(-size // of)


def empty_tiles(
    rows: int, columns: int, element: str, device: torch.device, packed: bool = False
) -> tuple[Tensor, Tensor]:
    """Codes [rows, columns], or two to a byte, and scales [rows, groups], not yet filled."""
    width, dtype = (-(-columns // 2), torch.uint8) if packed else (columns, CODE_TYPES[element])
    codes = torch.empty(rows, width, dtype=dtype, device=device)
    return codes, torch.empty(math.ceil(columns / TILE), rows, device=device).t()


def empty_rest(rows: int, columns: int, element: str, device: torch.device) -> RestOfTiles:
    """Room for the rest of row tiles, not yet filled."""
    blocks = torch.empty(math.ceil(rows / TILE), math.ceil(columns / TILE), dtype=torch.int32, device=device)
    return RestOfTiles(*empty_tiles(rows, columns, element, device), blocks)


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


def check_source(name: str, x: Matrix) -> None:
    """The same of what a matrix is made of, where it is deferred."""
    if not isinstance(x, Deferred):
        check_matrix(name, x)
        return
    check_matrix(f"{name}.halves", x.halves)
    check_devices(halves=x.halves, grad=x.grad)
    if x.grad is None:
        return
    check_matrix(f"{name}.grad", x.grad)
    rows, columns = x.halves.shape
    if x.grad.dtype != x.dtype or x.grad.shape != (rows, columns // 2):
        got = f"{x.grad.dtype} {tuple(x.grad.shape)} for {x.dtype} {tuple(x.halves.shape)}"
        raise PlanError(f"{name} has a gradient that does not fit its gate", got=got)


def source_of(x: Matrix) -> tuple[Tensor, Tensor, tuple[bool, bool] | None]:
    """What kernels read of a matrix, and how they make it (`gates.load_source`)."""
    if not isinstance(x, Deferred):
        return x, x, None
    first = x.halves if x.grad is None else x.grad
    return first, x.halves, (x.grad is not None, x.gate == "gelu")


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
    if noise is None or noise_column is None:
        return
    if replace(noise, key=noise_column.key) != noise_column:
        got = f"{noise} and {noise_column}"
        raise PlanError("both results are of one matrix", got=got, expected="streams of the same addresses")
    if noise == noise_column:
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


def may_run(name: str, trial: Callable[[], bool]) -> bool:
    """Whether a kernel gives what torch's operators give; warns where it does not, for these are slower.

    Args:
        trial: runs both on a few numbers, and compares.
    """
    try:
        if trial():
            return True
        why = "its numbers are not theirs"
    except torch.OutOfMemoryError:
        raise  # it says nothing of the kernel
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
