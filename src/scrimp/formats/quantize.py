"""Quantize a tensor: to packed codes and scales, or at once back to float32 ("fake quantization").

Both do the same arithmetic, piece by piece (see grouping.py)::

    amax    largest magnitude of each group (over the whole tensor first, where a scale spans it)
    scale   scales.py
    q       round(x / scale) to the element's values, rounding.py
    x~      q * scale; and of groups that fall back what is left, fallback.py

`quantize` is the door for users, storage and tests; `fake_quantize` is what an emulated GEMM
reads: no codes are packed, and nothing is copied into another layout.

Sharded tensors: where a scale spans pieces that lie on several ranks (tensor and row scales), `reduce_amax`
takes the maximum over them, in place, so that sharded and whole tensors quantize alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats import scales as scale_rules
from scrimp.formats.codes import BYTES, encode
from scrimp.formats.fallback import Remainder, remainder_of
from scrimp.formats.grouping import Groups, largest_magnitude
from scrimp.formats.hadamard import SIZE as HADAMARD_SIZE
from scrimp.formats.hadamard import rotate
from scrimp.formats.noise import Noise, combine
from scrimp.formats.quantized import INEXACT_IN_BF16, FakeQuantized, QuantizedTensor
from scrimp.formats.rounding import round_
from scrimp.formats.scales import GroupScales
from scrimp.precision.formats import Element, Scaling, lookup_element, lookup_scaling, scale_shape
from scrimp.precision.recipes import Operand, Rounding

PAYLOAD_TYPES = {"e2m1": torch.uint8, **BYTES}
SCALE_TYPES = {"fp32": torch.float32, "e8m0": torch.uint8, "e4m3": torch.float8_e4m3fn}
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
AmaxReducer = Callable[[Tensor], None]


def quantize(
    x: Tensor,
    element: str = "e2m1",
    scaling: str = "tile",
    axis: int = -1,
    rounding: Rounding = "nearest",
    *,
    hadamard: bool = False,
    four_over_six: bool = False,
    fallback: bool = False,
    noise: Noise | None = None,
    reduce_amax: AmaxReducer | None = None,
) -> QuantizedTensor:
    """Quantize `x`.

    Args:
        x: floating point, one or more axes.
        element: e2m1, e4m3, e5m2 or int8.
        scaling: tensor, row, tile, block, mx, nvfp4 or nvfp4_2d.
        axis: the one that groups lie along: the one that a GEMM sums over. Square groups (block,
            nvfp4_2d) lie in this axis and the last other one.
        rounding: nearest (even), or stochastic: unbiased, for gradients.
        hadamard: rotate groups of 16 along the axis first; `dequantize` rotates back.
        four_over_six: per NVFP4 block the better of two scales.
        fallback: a second payload for tiles of integers that have outliers.
        noise: stream for stochastic rounding; unset: the stream of key 0.
        reduce_amax: takes maxima over shards, in place.

    Raises:
        PlanError: unknown names, a combination that no format defines, not a floating tensor.
    """
    operand = Operand(element, scaling, rounding, hadamard, four_over_six, fallback)
    kind, elements = lookup_scaling(scaling), lookup_element(element)
    _check(x, axis, kind)
    moved = x.detach().movedim(axis, -1)
    # Rotated groups are stored whole: they mix with their padding.
    length = operand.length(moved.shape[-1])
    num_bytes = math.ceil(length * elements.bits / 8)
    size = scale_shape((*moved.shape[:-1], length), kind)
    payloads, scales = [], []
    for scale in (1.0, 0.0) if fallback else (1.0,):  # of nothing
        shape = (*moved.shape[:-1], num_bytes)
        payloads.append(torch.empty(shape, dtype=PAYLOAD_TYPES[element], device=x.device))
        scales.append(torch.full(size, scale, device=x.device).to(SCALE_TYPES[kind.scale_type]))
    # An element keeps its address, whichever way its matrix is read.
    is_transposed = x.dim() > 1 and axis % x.dim() == x.dim() - 2
    stack, tensor_scale = _prepare(_stack(moved, kind), operand, -1, reduce_amax)
    for index, matrix in enumerate(stack):
        stream = (noise or Noise()).derive(index) if len(stack) > 1 else noise or Noise()
        for piece in _rounded(matrix, operand, -1, stream, tensor_scale, reduce_amax, is_transposed):
            groups = slice(piece.first_group, piece.first_group + piece.scales.stored.shape[0])
            for payload, own, (values, stored) in zip(payloads, scales, piece.payloads(), strict=True):
                codes_RB = payload.view(len(stack), -1, num_bytes)[index]
                codes_RB[piece.rows] = encode(values[:, :length], elements)
                own.view(len(stack), -1, own.shape[-1])[index, groups] = stored[:, 0, :, 0]
    rest = None
    if fallback:
        rest = QuantizedTensor(payloads[1], scales[1], None, Operand(element, scaling), axis, x.shape)
    return QuantizedTensor(payloads[0], scales[0], tensor_scale, operand, axis, x.shape, rest)


def fake_quantize(
    x: Tensor,
    operand: Operand,
    axis: int,
    *,
    noise: Noise | None = None,
    reduce_amax: AmaxReducer | None = None,
    keep_rotation: bool = False,
    carrier: torch.dtype = torch.float32,
) -> FakeQuantized:
    """The values of a quantized matrix, without packing codes or changing the layout.

    Args:
        x: a matrix.
        axis: the scaled one.
        keep_rotation: leave Hadamard-rotated values rotated, padded to a multiple of 16 along the axis,
            for a product with another rotated operand.
        carrier: float32; or bfloat16, which is exact: under tile and block scalings it holds the element's values, and
            their scales are `inner`.
    """
    kind = lookup_scaling(operand.scaling)
    _check(x, axis, kind)
    if x.dim() != 2:
        raise PlanError("operands of a GEMM are matrices", got=f"shape {tuple(x.shape)}", expected="2 axes")
    axis = axis % 2 - 2
    stack, tensor_scale = _prepare(x.detach()[None], operand, axis, reduce_amax)
    pieces = _rounded(stack[0], operand, axis, noise or Noise(), tensor_scale, reduce_amax)
    shape = stack.shape[1:]
    if carrier == torch.bfloat16 and kind.name in INEXACT_IN_BF16 and shape.numel():
        found = _beside_scales(pieces, operand, axis, shape, x.device)
    else:
        has_row_scales = kind.rows == 1 and kind.columns is None and axis == -1
        out = torch.empty(shape, dtype=carrier, device=x.device)
        outer = None if tensor_scale is None else tensor_scale.reshape(1, 1)
        if has_row_scales and out.numel():
            outer = torch.empty(len(out), 1, device=x.device)
        for piece in pieces:
            if kind.columns is not None:
                piece.dequantize()
            elif has_row_scales and outer is not None:
                outer[piece.rows] = piece.scales.decode[:, 0, :, 0]
            else:
                outer = piece.scales.decode[:, 0, :, 0]
            out[piece.rows] = piece.values[:, : shape[1]]
        found = FakeQuantized(out, outer)
    if operand.hadamard and not keep_rotation:
        rotated = rotate(found.dequantize(), axis, inverse=True)
        return FakeQuantized(rotated[: x.shape[0], : x.shape[1]].to(carrier), None)
    return found


def _beside_scales(
    pieces: Iterator[_Piece], operand: Operand, axis: int, shape: torch.Size, device: torch.device
) -> FakeQuantized:
    """The element's values in bfloat16, of each payload, with fp32 scales that they are not multiplied by."""
    groups = Groups.of(lookup_scaling(operand.scaling), axis, *shape)
    sizes = [-(-size // group) for size, group in zip(shape, (groups.rows, groups.columns), strict=True)]
    made = [
        (torch.empty(shape, dtype=torch.bfloat16, device=device), torch.empty(sizes, device=device))
        for _ in range(2 if operand.fallback else 1)
    ]
    for piece in pieces:
        own = slice(piece.first_group, piece.first_group + len(piece.scales.decode))
        for (out, inner), (values, scales) in zip(made, piece.payloads(), strict=True):
            out[piece.rows] = values[:, : shape[1]]
            inner[own] = scales[:, 0, :, 0]
    rest = FakeQuantized(made[1][0], None, made[1][1]) if operand.fallback else None
    return FakeQuantized(made[0][0], None, made[0][1], rest)


def project(
    x: Tensor,
    operand: Operand | None,
    axis: int,
    vectors: Tensor,
    *,
    transposed: bool = False,
    dtype: torch.dtype | None = None,
    noise: Noise | None = None,
    reduce_amax: AmaxReducer | None = None,
    padded: bool = False,
) -> Tensor:
    """Q(x) V, or Q(x)^T V, in float64: a fingerprint of a quantized matrix, which never exists as a whole.

    Beside the result, no tensor is larger than a piece (`PIECE_ELEMENTS`) in float64.

    Args:
        x: a matrix [R, C].
        operand: what Q rounds to; None: x as it is.
        axis: the scaled one.
        vectors: V, float64 [C, n]; [R, n] where transposed, or more where a rotation pads x.
        dtype: what x is cast to first; None: its own type.
        padded: keep the rows of the result that a rotation adds: rounding fills them.

    Returns:
        float64 [R, n]; [C, n] where transposed.
    """
    num_rows, num_columns = x.shape
    axis = axis % 2 - 2
    out = vectors.new_zeros(num_columns if transposed else num_rows, vectors.shape[1])
    if operand is None:
        for rows in Groups(1, 1).pieces(num_rows, num_columns, x.device.type):
            _add_product(out, x[rows].to(dtype or x.dtype).double(), rows, vectors, transposed=transposed)
        return out
    _check(x, axis, lookup_scaling(operand.scaling))
    # Rotated values meet rotated vectors: of an axis that is summed here, else the result is rotated back.
    is_summed = (axis == -2) == transposed
    if operand.hadamard:
        length = operand.length(x.shape[axis])
        whole = vectors if is_summed else out
        whole = F.pad(whole, (0, 0, 0, length - len(whole)))
        vectors, out = (rotate(whole.float(), -2).double(), out) if is_summed else (vectors, whole)
    matrix = _Read(x.detach(), dtype or x.dtype, axis if operand.hadamard else None)
    tensor_scale = _tensor_scale([matrix], operand, x.device, reduce_amax)
    for piece in _rounded(matrix, operand, axis, noise or Noise(), tensor_scale, reduce_amax):
        piece.dequantize()
        values = piece.values[:, : matrix.shape[1]].double()
        _add_product(out, values, piece.rows, vectors, transposed=transposed)
    if tensor_scale is not None:
        out *= tensor_scale.double()
    if operand.hadamard and not is_summed:
        out = rotate(out.float(), -2, inverse=True).double()
        out = out if padded else out[: x.shape[axis]]
    return out


def _add_product(out: Tensor, values: Tensor, rows: slice, vectors: Tensor, *, transposed: bool) -> None:
    """Some rows' part of a matrix times vectors."""
    if transposed:
        out.addmm_(values.T, vectors[rows])
    else:
        out[rows] = values @ vectors


class _Read:
    """A matrix that is cast and rotated as its rows are read, and never exists as a whole."""

    def __init__(self, x: Tensor, dtype: torch.dtype, rotated: int | None) -> None:
        self._x, self._dtype, self._rotated, self.device = x, dtype, rotated, x.device
        shape = list(x.shape)
        if rotated is not None:
            shape[rotated] += -shape[rotated] % HADAMARD_SIZE
        self.shape = torch.Size(shape)

    def numel(self) -> int:
        """Elements, with the padding of a rotation."""
        return self.shape.numel()

    def __getitem__(self, rows: slice) -> Tensor:
        if self._rotated is None:
            return self._x[rows].to(self._dtype)
        if self._rotated == -1:
            padding = (0, self.shape[1] - self._x.shape[1])
            return rotate(F.pad(self._x[rows].to(self._dtype).to(torch.float32), padding), -1)
        # Whole groups of rows, of which some may not have been asked for.
        first = rows.start // HADAMARD_SIZE * HADAMARD_SIZE
        last = -(-rows.stop // HADAMARD_SIZE) * HADAMARD_SIZE
        found = self._x[first:last].to(self._dtype).to(torch.float32)
        return rotate(F.pad(found, (0, 0, 0, last - first - len(found))), -2)[
            rows.start - first : rows.stop - first
        ]


@dataclass(frozen=True)
class _Piece:
    """Some rows of a matrix, divided by their scales and rounded."""

    rows: slice
    first_group: int
    values: Tensor
    """float32 [rows, columns or padded columns]: a view of `grouped`."""
    grouped: Tensor
    """The same memory by groups, [A, r, B, c]."""
    scales: GroupScales
    rest: Remainder | None = None

    def payloads(self) -> list[tuple[Tensor, Tensor]]:
        """Values and stored scales; then the same of what groups that fell back leave."""
        found = [(self.values, self.scales.stored)]
        if self.rest is not None:
            rounded = self.rest.rounded.flatten(2).flatten(0, 1)[: len(self.values)]
            found.append((rounded, self.rest.scales))
        return found

    def dequantize(self) -> None:
        """Multiply the values by the scales of their groups, in place, and add what they left."""
        self.grouped.mul_(self.scales.decode)
        if self.rest is not None:
            self.grouped.add_(self.rest.rounded * self.rest.scales)


def _rounded(
    matrix: Tensor | _Read,
    operand: Operand,
    axis: int,
    noise: Noise,
    tensor_scale: Tensor | None,
    reduce_amax: AmaxReducer | None,
    is_transposed: bool = False,
) -> Iterator[_Piece]:
    """Pieces of a matrix with their scales and rounded values."""
    element, kind = lookup_element(operand.element), lookup_scaling(operand.scaling)
    num_rows, num_columns = matrix.shape
    groups = Groups.of(kind, axis, num_rows, num_columns)
    device = matrix.device
    spans_rows = groups.rows == num_rows and num_rows > 1 and kind.columns is None
    whole: Tensor | None = None
    if kind.columns is None and (spans_rows or reduce_amax is not None):
        whole = _largest_of_whole(matrix, groups)
        if reduce_amax is not None:
            reduce_amax(whole)
    if not matrix.numel():
        return
    if spans_rows:
        groups = Groups(1, groups.columns)
    hashes = None
    if operand.rounding == "stochastic":
        hashes = noise.row_hashes(num_rows, device), noise.column_hashes(num_columns, device)
        if is_transposed:
            hashes = noise.column_hashes(num_rows, device), noise.row_hashes(num_columns, device)
    for rows in groups.pieces(num_rows, num_columns, device.type):
        # A copy in float32 that the steps below change in place.
        grouped = groups.view(
            matrix[rows].to(torch.float32, copy=True, memory_format=torch.contiguous_format)
        )
        amax = largest_magnitude(grouped) if whole is None else whole if spans_rows else whole[rows]
        uniform = None
        if hashes is not None:
            uniform = groups.view(combine(hashes[0][rows, None], hashes[1]))
        before = grouped.clone() if operand.fallback else None
        grouped, scales = _scale_and_round(grouped, amax, operand, element, uniform, tensor_scale)
        values = grouped.flatten(2).flatten(0, 1)[: rows.stop - rows.start]
        rest = None
        if before is not None:
            rest = remainder_of(before, grouped, scales.decode, element)
        yield _Piece(rows, rows.start // groups.rows if not spans_rows else 0, values, grouped, scales, rest)


def _scale_and_round(
    grouped: Tensor,
    amax: Tensor,
    operand: Operand,
    element: Element,
    noise: Tensor | None,
    tensor_scale: Tensor | None,
) -> tuple[Tensor, GroupScales]:
    """Groups divided by their scales and rounded, in place, and the scales."""
    no_clip, kind = noise is not None, lookup_scaling(operand.scaling)
    if tensor_scale is None:
        scales = scale_rules.scales_of(amax, kind, element, None, no_clip=no_clip)
        if kind.scale_type == "fp32":
            return round_(grouped.div_(scales.encode), element, noise), scales
        return round_(grouped.mul_(scales.encode), element, noise), scales
    six = scale_rules.scales_of(amax, kind, element, tensor_scale, no_clip=no_clip)
    lift = scale_rules.lift_of(tensor_scale)
    grouped.mul_(lift)
    if not operand.four_over_six:
        return round_(grouped.mul_(six.encode), element, noise), six
    four = scale_rules.e4m3_scales(amax, tensor_scale, no_clip=no_clip, largest=4.0)
    of_six, of_four = (round_(grouped * scales.encode, element, noise) for scales in (six, four))
    true = grouped / (tensor_scale * lift)
    errors = [
        (q * scales.decode - true).square_().sum((1, 3), keepdim=True)
        for q, scales in ((of_six, six), (of_four, four))
    ]
    take_four = errors[1] < errors[0]
    chosen = [
        torch.where(take_four, ours.view(torch.uint8), theirs.view(torch.uint8)).view(torch.float8_e4m3fn)
        if ours.dtype == torch.float8_e4m3fn
        else torch.where(take_four, ours, theirs)
        for ours, theirs in ((four.stored, six.stored), (four.decode, six.decode), (four.encode, six.encode))
    ]
    return grouped.copy_(torch.where(take_four, of_four, of_six)), GroupScales(*chosen)


def _prepare(
    stack: Tensor, operand: Operand, axis: int, reduce_amax: AmaxReducer | None
) -> tuple[Tensor, Tensor | None]:
    """What happens to the whole tensor first: the rotation, and NVFP4's tensor scale."""
    if operand.hadamard:
        stack = rotated_whole(stack, axis)
    return stack, _tensor_scale(list(stack), operand, stack.device, reduce_amax)


def rotated_whole(x: Tensor, axis: int) -> Tensor:
    """Numbers in float32, padded to a multiple of 16 along an axis (-1 or -2) and rotated."""
    pad, wide = -x.shape[axis] % HADAMARD_SIZE, x.to(torch.float32)
    if pad:  # by nothing, F.pad copies all the same
        wide = F.pad(wide, (0, pad) if axis == -1 else (0, 0, 0, pad))
    return rotate(wide, axis)


def _tensor_scale(
    stack: Sequence[Tensor | _Read], operand: Operand, device: torch.device, reduce_amax: AmaxReducer | None
) -> Tensor | None:
    """NVFP4's scale of a whole tensor, a stack of matrices; None of other scalings."""
    if not lookup_scaling(operand.scaling).has_tensor_scale:
        return None
    found = [_largest_of_whole(matrix, Groups(*matrix.shape)) for matrix in stack]
    amax = torch.stack(found or [torch.zeros((), device=device)]).amax()
    if reduce_amax is not None:
        reduce_amax(amax)
    largest = scale_rules.FOUR_OVER_SIX_MAX if operand.four_over_six else scale_rules.E4M3_MAX
    return scale_rules.nvfp4_tensor_scale(amax, largest_block_scale=largest)


def _largest_of_whole(matrix: Tensor | _Read, groups: Groups) -> Tensor:
    """Largest magnitudes, [A, 1, B, 1], of groups that span the rows or the columns of a matrix."""
    num_rows, num_columns = matrix.shape
    spans_rows = groups.rows == num_rows
    if not matrix.numel():
        # A shard without elements takes part in the reduction: the others would wait for it.
        num_groups = 1 if groups.columns == num_columns else num_columns
        return torch.zeros(1 if spans_rows else num_rows, 1, num_groups, 1, device=matrix.device)
    by_row = Groups(1, groups.columns)
    num_found = 1 if spans_rows else num_rows
    largest = torch.zeros(num_found, 1, num_columns // groups.columns, 1, device=matrix.device)
    for rows in by_row.pieces(num_rows, num_columns, matrix.device.type):
        found = largest_magnitude(by_row.view(matrix[rows].to(torch.float32)))
        if spans_rows:
            torch.maximum(largest, found.amax(0, keepdim=True), out=largest)
        else:
            largest[rows] = found
    return largest


def _stack(moved: Tensor, kind: Scaling) -> Tensor:
    """[S, R, C]: square groups stay inside each matrix of a stack; rows are on their own."""
    columns = moved.shape[-1]
    if kind.rows in (1, None):
        return moved.reshape(1, math.prod(moved.shape[:-1]), columns)
    return moved.reshape(math.prod(moved.shape[:-2]), moved.shape[-2], columns)


def _check(x: Tensor, axis: int, kind: Scaling) -> None:
    if not isinstance(x, Tensor) or x.layout != torch.strided or not isinstance(axis, int):
        found = f"{type(x).__name__}, axis {axis!r}" + (f", {x.layout}" if isinstance(x, Tensor) else "")
        raise PlanError("only dense tensors are quantized", got=found, expected="a tensor and a whole number")
    if x.dtype not in FLOATS:
        raise PlanError(
            "only floating tensors are quantized",
            got=str(x.dtype),
            expected="float32, bfloat16, float16 or float64",
        )
    needed = 1 if kind.rows in (1, None) else 2
    if x.dim() < needed or not -x.dim() <= axis < x.dim():
        raise PlanError(
            f"{kind.name} scaling does not fit the tensor",
            got=f"shape {tuple(x.shape)}, axis {axis}",
            expected=f"at least {needed} axes, and an axis of the tensor",
        )
