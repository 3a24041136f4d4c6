"""CodedWeight: a weight of which a rank holds the FP8 codes and scales, and no higher-precision numbers.

Problem  Ranks that share a weight by rows need all of it for its GEMMs. GEMMs in FP8 read its codes alone: one byte a
         number, which is all that has to be gathered.
Method   A tensor with the shape, type and device of the weight, so that autograd makes an ordinary gradient for it, and
         without storage. `PlannedLinear` hands its codes to the back end. fprop reads them as they are; dgrad sums over
         the rows, and reads their transpose, which has the same scales::

             quantize(W, axis = rows) = transpose of quantize(W, axis = columns)

Limits   The identity holds where a scale spans a square of the weight (128x128 blocks) or all of it, and rounding is to
         nearest: `is_shareable`. Every other reading of the weight is refused.
Checked  tests/runtime/parallel/test_quantized_gather.py
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from scrimp.errors import ModelError, PlanError
from scrimp.formats import QuantizedTensor
from scrimp.gemm.problem import COLUMNS, Use
from scrimp.precision import Operand

SHAREABLE = ("block", "tensor")
"""Scalings whose codes are the same along both axes of a weight."""


def is_shareable(operand: Operand | None) -> bool:
    """Whether fprop and dgrad can read one set of one-byte codes."""
    if operand is None or operand.element not in ("e4m3", "e5m2") or operand.scaling not in SHAREABLE:
        return False
    return operand.rounding == "nearest" and not operand.hadamard


class CodedWeight(Tensor):
    """A weight [O, I] without numbers of its own."""

    codes: QuantizedTensor | None
    """Scaled along the columns; None before they are gathered."""
    compute: torch.dtype
    """The type that the weight was cast to before it was quantized."""

    @staticmethod
    def __new__(
        cls,
        shape: torch.Size,
        dtype: torch.dtype,
        device: torch.device,
        compute: torch.dtype,
        codes: QuantizedTensor | None = None,
    ) -> CodedWeight:
        """Without storage."""
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        made.codes, made.compute = codes, compute
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """There are no numbers to show."""
        return f"CodedWeight({tuple(self.shape)}, {self.dtype}, codes={self.codes is not None})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Only what makes a parameter of it, and zeros for a gradient that never came."""
        own: CodedWeight = args[0]
        if func is torch.ops.aten.detach.default:
            return CodedWeight(own.shape, own.dtype, own.device, own.compute, own.codes)
        if func is torch.ops.aten.zeros_like.default:
            return torch.zeros(own.shape, dtype=own.dtype, device=own.device)
        raise ModelError(
            "a weight was gathered in FP8 and is read in high precision",
            got=str(func),
            expected="FP8 GEMMs of its layer",
            do="begin to observe a layer before the forward pass of a step",
        )

    def operand(self, use: Use, dtype: torch.dtype, load: Callable[[QuantizedTensor], Any]) -> Any:
        """What a GEMM reads, by the back end's `load`.

        Raises:
            PlanError: it is not what was gathered.
        """
        codes = self.codes
        if codes is None or (use.operand, dtype) != (codes.operand, self.compute):
            raise PlanError(
                "a GEMM reads another format than its weight was gathered in",
                got=f"{use.operand} of {dtype}",
                expected=f"{None if codes is None else codes.operand} of {self.compute}",
                do="change plans between steps only",
            )
        return load(codes if use.axis == COLUMNS else transposed(codes))


def transposed(codes: QuantizedTensor) -> QuantizedTensor:
    """The codes of a matrix scaled along its columns as those scaled along its rows."""
    scales = codes.scales.t().contiguous() if codes.operand.scaling == "block" else codes.scales
    return replace(codes, payload=codes.payload.t().contiguous(), scales=scales, axis=-2)
