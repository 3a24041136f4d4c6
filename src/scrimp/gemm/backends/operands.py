"""What the fast back ends share: checks of a tensor, and codes from Triton's quantizers.

E2M1 in E4M3   Every E2M1 value is an E4M3 value, so FP4 codes can be multiplied by FP8 tensor cores. Stored codes are
               packed, two to a byte (`kernels.widen_codes`).
Checked        tests/gemm/test_native.py
"""

from __future__ import annotations

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scrimp.errors import DeviceError, PlanError
from scrimp.formats import Noise, QuantizedTensor
from scrimp.formats.quantize import FLOATS
from scrimp.gemm import kernels
from scrimp.gemm.deferred import Deferred, Matrix, made
from scrimp.gemm.kernels.launch import Form, GroupsOf, QuantizedGroups, RestOfTiles
from scrimp.gemm.problem import COLUMNS, ROWS, Use
from scrimp.precision import Operand

GROUPS = ("mx", "nvfp4", "nvfp4_2d")
PAIRED = {"tile": "quantize_tiles", "row": "quantize_rows", "tensor": "quantize_tensor"}
PAIRED.update(dict.fromkeys(GROUPS, "quantize_groups"))
"""Scalings whose launchers quantize along both axes at once."""


@dataclass(frozen=True)
class KernelCodes:
    """A matrix as a GEMM reads it: the summed axis last."""

    codes: Tensor
    """float8 or int8 [rows, K]; E2M1 as E4M3, or packed to be kept. Of groups as in `kernels.QuantizedGroups`: E2M1
    packed, or bfloat16 values."""
    scales: Tensor
    """float32 [rows, ceil(K / 128)] of tiles, [ceil(rows / 128), ceil(K / 128)] of blocks, [rows, 1] of rows, [1] of a
    tensor; any strides. One byte for each group."""
    tensor_scale: Tensor | None = None
    """NVFP4's."""
    rest: RestOfTiles | None = None
    """What row tiles that fall back leave."""


def checked_matrix(x: Tensor) -> Tensor:
    """Refuse what no back end takes, in the words of `scrimp.formats`."""
    if x.dim() != 2:
        raise PlanError("operands of a GEMM are matrices", got=f"shape {tuple(x.shape)}", expected="2 axes")
    if x.dtype not in FLOATS:
        raise PlanError(
            "only floating tensors are quantized",
            got=str(x.dtype),
            expected="float32, bfloat16, float16 or float64",
        )
    return x.detach()


def check_same_device(a: Tensor, b: Tensor) -> None:
    """Refuse operands on two devices."""
    if a.device != b.device:
        raise DeviceError("operands lie on different devices", got=f"{a.device} and {b.device}")


def readable(x: Matrix) -> Matrix:
    """The same numbers, row-major in a type that kernels read."""
    if isinstance(x, Deferred):
        return x
    x = checked_matrix(x)
    return (x if x.dtype in (torch.bfloat16, torch.float32) else x.float()).contiguous()


@functools.cache
def has_triton() -> bool:
    """Whether triton is installed."""
    return importlib.util.find_spec("triton") is not None


def kernel_codes(x: Matrix, use: Use, form: Form = "codes") -> KernelCodes:
    """Quantize a matrix by Triton's kernels, in one of the scalings that have them.

    Args:
        form: of groups, and of tiles whether they are kept.
    """
    assert use.operand is not None
    if use.operand.scaling == "block":
        if form == "kept" and use.operand.element == "e2m1":
            raise PlanError(
                "no kernel packs blocks of 4 bits", do="keep tiles, or use the reference back end"
            )
        axis = -1 if use.axis == COLUMNS else -2
        hadamard = use.operand.hadamard
        blocks = kernels.quantize_blocks(made(readable(x)), use.operand.element, axis, hadamard=hadamard)
        return KernelCodes(blocks.codes, blocks.scales)
    by_row, by_column = (use, None) if use.axis == COLUMNS else (None, use)
    row, column = _quantized(x, by_row, by_column, (form, form))
    found = row or column
    assert found is not None
    return found


def is_kernel_pair(first: Use, second: Use) -> bool:
    """Whether one call makes both operands of a tensor: of one scaling and element, one along each axis."""
    a, b = first.operand, second.operand
    if a is None or b is None or a.scaling not in PAIRED or (a.scaling, a.element) != (b.scaling, b.element):
        return False
    if b.fallback:
        return False
    shares_noise = _noise(first) is not None and _noise(first) == _noise(second)
    return (first.axis, second.axis) == (COLUMNS, ROWS) and not shares_noise


def kernel_pair(
    x: Matrix, first: Use, second: Use, forms: tuple[Form, Form] = ("codes", "codes")
) -> tuple[KernelCodes, KernelCodes]:
    """Both operands of a pair that `is_kernel_pair` allows, from the same passes; forms as of `kernel_codes`."""
    row, column = _quantized(x, first, second, forms)
    assert row is not None
    assert column is not None
    return row, column


def _quantized(
    x: Matrix, by_row: Use | None, by_column: Use | None, forms: tuple[Form, Form]
) -> tuple[KernelCodes | None, KernelCodes | None]:
    """A matrix in tiles or groups, or with scales of rows or of the tensor: along its columns, its rows, or both."""
    use = by_row or by_column
    assert use is not None
    assert use.operand is not None
    if use.operand.scaling in GROUPS:
        return _in_groups(readable(x), (by_row, by_column), forms)
    # Looked up by name: triton is imported when a launcher is first asked for.
    quantize = getattr(kernels, PAIRED[use.operand.scaling])
    is_packed = use.operand.element == "e2m1" and "kept" in forms
    options: dict[str, Any] = {"packed": tuple(form == "kept" for form in forms)} if is_packed else {}
    options |= {"fallback": True} if use.operand.fallback else {}
    if use.operand.scaling == "tile":
        options["hadamard"] = _is_rotated(by_row), _is_rotated(by_column)
    if (room := _room(by_column, forms[1])) is not None:
        options["room"] = room
    row, column = quantize(
        readable(x),
        use.operand.element,
        by_row=by_row is not None,
        by_column=by_column is not None,
        noise=None if by_row is None else _noise(by_row),
        noise_column=None if by_column is None else _noise(by_column),
        **options,
    )
    rest = row.rest if use.operand.fallback else None
    return (
        None if row is None else KernelCodes(row.codes, row.scales, rest=rest),
        None if column is None else KernelCodes(column.codes, column.scales),
    )


def _in_groups(
    x: Matrix, uses: tuple[Use | None, Use | None], forms: tuple[Form, Form]
) -> tuple[KernelCodes | None, KernelCodes | None]:
    """The same of groups, with the largest numbers of all ranks where they share a tensor."""
    maxima = kernels.group_maxima(x, *(None if use is None else use.operand for use in uses))
    asked: list[GroupsOf | None] = []
    for use, form, amax in zip(uses, forms, maxima, strict=True):
        if use is not None and use.reduce_amax is not None and amax is not None:
            use.reduce_amax(amax)
        operand = None if use is None else use.operand
        if use is None or operand is None:
            asked.append(None)
        else:
            asked.append(GroupsOf(operand, form, use.noise, amax, _room(use, form)))
    row, column = kernels.quantize_groups(x, *asked)
    return _of_groups(row), _of_groups(column)


def _of_groups(found: QuantizedGroups | None) -> KernelCodes | None:
    return None if found is None else KernelCodes(found.codes, found.scales, found.tensor_scale)


def _room(use: Use | None, form: Form) -> QuantizedTensor | None:
    """Where codes that are kept are to lie."""
    return use.room if use is not None and form == "kept" else None


def to_stored(found: KernelCodes, operand: Operand, axis: int, shape: torch.Size) -> QuantizedTensor:
    """The tensor that `scrimp.formats.quantize` gives, of kept codes; where a scale is NaN codes mean nothing, and may
    differ."""
    assert found.rest is None, "only second operands are kept, and none falls back"
    return QuantizedTensor(found.codes, found.scales, found.tensor_scale, operand, axis, shape)


def from_stored(codes: QuantizedTensor) -> KernelCodes:
    """The operand that stored tile or block codes stand for."""
    payload = codes.payload
    if codes.operand.element == "e2m1":
        payload = kernels.widen_codes(payload, codes.shape[codes.axis])
    return KernelCodes(payload, codes.scales)


def _is_rotated(use: Use | None) -> bool:
    return use is not None and use.operand is not None and use.operand.hadamard


def _noise(use: Use) -> Noise | None:
    assert use.operand is not None
    return use.noise if use.operand.rounding == "stochastic" else None
