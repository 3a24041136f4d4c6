"""Quantized tensors: packed codes with their scales, or the values that they stand for.

`QuantizedTensor` is what is stored; `FakeQuantized` is what an emulated GEMM multiplies: values, and beside them the
scales that leave its sum or that bfloat16 cannot hold. How numbers become either is `quantize`.

Checked  tests/formats/test_quantized_tensor.py
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from scrimp.formats import scales as scale_rules
from scrimp.formats.codes import decode
from scrimp.formats.grouping import Groups
from scrimp.formats.hadamard import rotate
from scrimp.precision.formats import Scaling, lookup_element, lookup_scaling
from scrimp.precision.recipes import Operand

INEXACT_IN_BF16 = ("tile", "block")
"""Scalings by fp32 numbers inside a GEMM's sum; all others multiply by powers of two, by E4M3 numbers, or after it."""
INNER_GROUP = 128
"""Numbers along the summed axis that share a scale of `INEXACT_IN_BF16`."""


@dataclass(frozen=True)
class FakeQuantized:
    """What a quantized matrix stands for: values times, where a scale leaves the sum of a GEMM, that scale."""

    values: Tensor
    """float32 or bfloat16, in the matrix's own layout."""
    outer: Tensor | None
    """Broadcasts against values: [1, 1] for tensor and NVFP4's second scale, one per row for row scales."""
    inner: Tensor | None = None
    """float32 scales of groups of `INNER_GROUP` along the summed axis, which values have not been multiplied by yet; in
    the matrix's own layout. None: they have been."""
    rest: FakeQuantized | None = None
    """Beside `inner`: what is to be added, of groups that fell back; zeros, also its scales, for all others."""

    def wide(self) -> Tensor:
        """The values in float32, without the outer scale."""
        values = self.values.to(torch.float32)
        if self.inner is None:
            return values
        scales = self.inner
        for axis, size in enumerate(values.shape):
            if scales.shape[axis] < size:
                scales = scales.repeat_interleave(INNER_GROUP, axis).narrow(axis, 0, size)
        found = values * scales
        return found if self.rest is None else found + self.rest.wide()

    def dequantize(self) -> Tensor:
        """The values with their outer scale."""
        return self.wide() if self.outer is None else self.wide() * self.outer


@dataclass(frozen=True)
class QuantizedTensor:
    """Codes and scales of a tensor. Their layout has the scaled axis last, as GEMMs read it."""

    payload: Tensor
    """float8 or int8, or uint8 with two 4-bit codes a byte; the tensor's axes, the scaled one moved last."""
    scales: Tensor
    """Scales of the groups, in the payload's axes: float32, float8_e4m3fn, or uint8 biased exponents."""
    tensor_scale: Tensor | None
    """NVFP4's fp32 scale of the whole tensor."""
    operand: Operand
    axis: int
    shape: torch.Size
    """Shape of the original tensor."""
    rest: QuantizedTensor | None = None
    """What groups that fell back leave to a second payload; codes and scales of 0 for all others."""

    @property
    def nbytes(self) -> int:
        """Bytes of payload and scales; `scrimp.precision.storage_bytes` predicts them, of each payload."""
        tensor_scale = 0 if self.tensor_scale is None else self.tensor_scale.nbytes
        rest = 0 if self.rest is None else self.rest.nbytes
        return self.payload.nbytes + self.scales.nbytes + tensor_scale + rest

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The values, in the original shape; of a matrix in pieces, so that nothing wide is larger than one."""
        if len(self.shape) != 2 or self.axis % 2 == 0:
            return self._whole(dtype)
        values = self.payload.new_empty(self.shape, dtype=dtype)
        groups = Groups(lookup_scaling(self.operand.scaling).rows or 1, 1)
        for rows in groups.pieces(*self.shape, values.device.type):
            values[rows] = self.of_rows(rows)._whole(dtype)
        return values

    def of_rows(self, rows: slice) -> QuantizedTensor:
        """Some rows of a matrix that is scaled along its columns; they begin with a group."""
        kind = lookup_scaling(self.operand.scaling)
        scales = self.scales
        if kind.rows is not None:
            scales = scales[rows.start // kind.rows : -(-rows.stop // kind.rows)]
        payload = self.payload[rows]
        shape = torch.Size((len(payload), self.shape[1]))
        rest = None if self.rest is None else self.rest.of_rows(rows)
        return replace(self, payload=payload, scales=scales, shape=shape, rest=rest)

    def _whole(self, dtype: torch.dtype) -> Tensor:
        last = self.axis % len(self.shape)
        columns = self.shape[last]
        values = self._values()
        if values.numel() and lookup_scaling(self.operand.scaling).columns is None:
            values = values * self.scales
        if self.tensor_scale is not None:
            values = values * self.tensor_scale
        if self.operand.hadamard:
            values = rotate(values.unsqueeze(0), -1, inverse=True)[0, ..., :columns]
        return values.movedim(-1, self.axis).to(dtype)

    def with_tensors(self, payload: Tensor, scales: Tensor, tensor_scale: Tensor | None) -> QuantizedTensor:
        """The same format with other tensors: those that autograd hands back. What it keeps has one payload."""
        return replace(self, payload=payload, scales=scales, tensor_scale=tensor_scale)

    def filled(self, codes: QuantizedTensor) -> QuantizedTensor:
        """Itself, with the bytes of other codes of its operand and shape, which may be those that it has already."""
        for to, part in zip(self._parts(), codes._parts(), strict=True):
            if to.data_ptr() != part.data_ptr():
                to.copy_(part.reshape(to.shape))
        return self

    def _parts(self) -> list[Tensor]:
        parts = [self.payload, self.scales]
        return parts if self.tensor_scale is None else [*parts, self.tensor_scale]

    def without_tensors(self) -> QuantizedTensor:
        """The format alone, which keeps no memory."""
        nothing = self.payload.new_empty(0)
        return replace(self, payload=nothing, scales=nothing, tensor_scale=None)

    def dequantize_matrix(self) -> FakeQuantized:
        """The values of a matrix, and the scale that can be taken out of a GEMM's sum; rotated values stay rotated."""
        return self.matrix_of(self._values())

    def element_matrix(self) -> FakeQuantized:
        """The same of scalings that bfloat16 cannot hold: the element's values, with the scales beside them."""
        element = lookup_element(self.operand.element)
        values = decode(self.payload, element, self.shape[self.axis]).to(torch.bfloat16)
        found = self.matrix_of(values, inner=self.scale_values())
        return found if self.rest is None else replace(found, rest=self.rest.element_matrix())

    def matrix_of(self, values: Tensor, inner: Tensor | None = None) -> FakeQuantized:
        """The same, of what the codes times the scales of their groups are, the scaled axis last.

        Args:
            inner: scales that the values have not been multiplied by.
        """
        is_upright = self.axis % 2 == 1
        outer = self.tensor_scale
        if outer is None and lookup_scaling(self.operand.scaling).columns is None:
            outer = self.scales
        if outer is not None:
            outer = outer.reshape(-1, 1) if is_upright else outer.reshape(1, -1)
        if inner is not None and not is_upright:
            inner = inner.T
        return FakeQuantized(values if is_upright else values.T, outer, inner)

    def _values(self) -> Tensor:
        """Codes times the scales of groups, the scaled axis last, without outer scales."""
        element, kind = lookup_element(self.operand.element), lookup_scaling(self.operand.scaling)
        values = decode(self.payload, element, self.operand.length(self.shape[self.axis]))
        if values.numel() and kind.columns is not None:
            values = values * _spread(self.scale_values(), kind, values.shape)
        return values if self.rest is None else values + self.rest._values()

    def scale_values(self) -> Tensor:
        """The scales of groups as fp32 numbers, in their own shape."""
        if self.scales.dtype == torch.uint8:
            return scale_rules.e8m0_value(self.scales)
        return self.scales.to(torch.float32)


def _spread(scales: Tensor, kind: Scaling, shape: torch.Size) -> Tensor:
    """Scales of groups repeated for every element of a group."""
    if kind.rows not in (1, None):
        scales = scales.repeat_interleave(kind.rows, -2)[..., : shape[-2], :]
    return scales.repeat_interleave(kind.columns or 1, -1)[..., : shape[-1]]
