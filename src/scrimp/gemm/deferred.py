"""A gate's result, or the gradient before it, that is made where it is read.

Problem  Between its two products a gated MLP makes h = act(gate) * up, and in backward the gradients of gate and up. As
         passes of their own they read 4 and write 2 bytes for each number of h, and 6 and 4 bytes backward; then
         the quantizers of the products read what was written, 2 and 4 bytes, or twice that where a scale spans a
         tensor.
Method   The matrix that a product is given does not exist: `Deferred` holds what it is made of, and quantizers make
         each number as they load it (`kernels/gates.py`). ::

             u = gate (SwiGLU),  u = sqrt(8 / pi) (gate + 0.044715 gate^3) (GeGLU, whose tanh is a sigmoid)
             h = gate s(u) up                            s(u) = 1 / (1 + e^-u)
             d up = dh gate s(u)
             d gate = dh up s(u) (1 + gate u' (1 - s(u)))

         Computed in float32 and rounded once to the type of gate and up, as a matrix of its own is.
Checked  tests/gemm/test_gates.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Gate = Literal["silu", "gelu"]
"""By the function of gate: SwiGLU, and GeGLU by its approximation with tanh."""


@dataclass(frozen=True, eq=False)
class Deferred:
    """act(gate) * up, or with `grad` the gradients of gate and up side by side."""

    halves: Tensor
    """Gate and up side by side: [T, 2F], row-major."""
    gate: Gate
    grad: Tensor | None = None
    """[T, F], row-major: of act(gate) * up."""

    @property
    def shape(self) -> torch.Size:
        """[T, F]; of gradients [T, 2F]."""
        rows, columns = self.halves.shape
        return torch.Size((rows, columns // 2 if self.grad is None else columns))

    @property
    def dtype(self) -> torch.dtype:
        """The type of its numbers."""
        return self.halves.dtype

    @property
    def device(self) -> torch.device:
        """Where it would lie."""
        return self.halves.device

    def __len__(self) -> int:
        return len(self.halves)

    def numel(self) -> int:
        """How many numbers it has."""
        return self.shape.numel()

    def to(self, dtype: torch.dtype) -> Tensor | Deferred:
        """In another type it is a matrix of its own."""
        return self if dtype == self.dtype else self.made().to(dtype)

    def made(self) -> Tensor:
        """The matrix itself."""
        from scrimp.gemm import kernels

        return kernels.gate_matrix(self)


Matrix = Tensor | Deferred


def made(x: Matrix) -> Tensor:
    """The matrix itself."""
    return x.made() if isinstance(x, Deferred) else x
