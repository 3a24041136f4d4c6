"""Codes and scales as one run of bytes, and back: what a compiled graph carries to its backward pass.

A graph must know its tensors' sizes, but not the plan. So the run has the capacity of the largest recipe, whatever
the layer's is now: layers move between 8-bit and 4-bit recipes without a new graph, and a compiled graph saves no
memory by 4-bit codes over 8-bit ones. Every part begins at a multiple of 16 bytes, as
kernels demand of their operands. Kernels that quantize write there themselves (`Use.room`).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from scrimp.formats import QuantizedTensor
from scrimp.formats.quantize import PAYLOAD_TYPES, SCALE_TYPES
from scrimp.gemm.problem import ROWS, operands_of
from scrimp.precision import (
    HIGH_PRECISION,
    RECOMPUTE,
    Operand,
    capacity,
    lookup_element,
    lookup_scaling,
    scale_shape,
)
from scrimp.precision.saved_inputs import ALIGNMENT

RECOMPUTED = RECOMPUTE
CODES = "codes"


def saved_class(saved: str) -> str:
    """What a compiled graph knows of what is saved: a high precision, recompute, or that it is codes."""
    return saved if saved in (*HIGH_PRECISION, RECOMPUTED) else CODES


def pack(codes: QuantizedTensor) -> Tensor:
    """Codes of an input X [T, I] as a run of bytes."""
    packed = codes.payload.new_empty(capacity(*codes.shape), dtype=torch.uint8)
    room_in(packed, codes.operand, (codes.shape[0], codes.shape[1])).filled(codes)
    return packed


def unpack(packed: Tensor, recipe_name: str, shape: tuple[int, int]) -> QuantizedTensor:
    """The codes of X [T, I] in a run of bytes, as a recipe's wgrad reads it."""
    operand = operands_of("wgrad", recipe_name)[1]
    assert operand is not None
    return room_in(packed, operand, shape)


def room_in(packed: Tensor, operand: Operand, shape: tuple[int, int]) -> QuantizedTensor:
    """Where the codes of X [T, I] lie in a run of bytes, whether they are there yet or not."""
    element, kind = lookup_element(operand.element), lookup_scaling(operand.scaling)
    length = operand.length(shape[0])
    parts = _Parts(packed)
    tensor_scale = parts.take(torch.float32, 1).reshape(()) if kind.has_tensor_scale else None
    sizes, dtype = scale_shape((shape[1], length), kind), SCALE_TYPES[kind.scale_type]
    # Those of tiles as their kernels write them and cuBLASLt reads them.
    scales = parts.take(dtype, *sizes[::-1]).t() if kind.name == "tile" else parts.take(dtype, *sizes)
    payload = parts.take(PAYLOAD_TYPES[element.name], shape[1], math.ceil(length * element.bits / 8))
    return QuantizedTensor(payload, scales, tensor_scale, operand, ROWS, torch.Size(shape))


class _Parts:
    """Cuts parts off a run of bytes, one after the other."""

    def __init__(self, packed: Tensor) -> None:
        self._packed, self._start = packed, 0

    def take(self, dtype: torch.dtype, *sizes: int) -> Tensor:
        """The next part."""
        num_bytes = math.prod(sizes) * dtype.itemsize
        part = self._packed[self._start : self._start + num_bytes]
        self._start += num_bytes + -num_bytes % ALIGNMENT
        return part.view(dtype).view(sizes)
