"""What a back end is: it says what it can run, prepares operands, and multiplies them.

`refusal` answers before anything runs: None, or why not. `prepare` makes a GEMM's operand of a
tensor; `prepare_pair` makes two of one tensor, for back ends that do both in one pass over memory.
`store` and `load` turn the operand that wgrad will read into codes that wait for the backward
pass, and back.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from scrimp.formats import QuantizedTensor
from scrimp.gemm.deferred import Deferred, Matrix, made
from scrimp.gemm.problem import Shape, Use
from scrimp.gemm.weight_sums import Product


class Backend(ABC):
    """Runs GEMMs of some recipes on some devices."""

    name: str

    @abstractmethod
    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        """Why this GEMM cannot run here; None where it can. Without a shape: on any shape."""

    def emulates(self, recipe: str) -> bool:
        """Whether a recipe runs in other units than its own here, so that its speed is not the format's."""
        return False

    def tuning_bytes(self, gemm: str, recipe: str, shape: Shape, out: torch.dtype) -> int:
        """Device memory that `tune` takes at most."""
        return 0

    def tune(  # noqa: B027
        self, gemm: str, recipe: str, shape: Shape, out: torch.dtype, device: torch.device
    ) -> None:
        """Try now what a first call of this GEMM into `out` would try, so that none of a run's own calls does."""

    def makes(self, x: Deferred, use: Use) -> bool:
        """Whether an operand's making makes the numbers of a deferred matrix too; other matrices are handed over."""
        return False

    @abstractmethod
    def prepare(self, x: Matrix, use: Use) -> Any:
        """The operand of one GEMM, in the back end's own form."""

    @abstractmethod
    def multiply(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> Tensor:
        """The product of two prepared operands."""

    def weight_product(self, a: Any, b: Any, compute: torch.dtype, weight: torch.dtype) -> Product:
        """wgrad of two prepared operands, which may add itself to a sum.

        Args:
            compute: what GEMMs multiply into.
            weight: the type of the weight.
        """
        return _Apart(self, a, b, compute, weight)

    def prepare_pair(self, x: Matrix, first: Use, second: Use) -> tuple[Any, Any] | None:
        """Two operands of one tensor in one pass over memory; None where that saves nothing, and they are
        better made one after the other."""
        return None

    def store(self, x: Matrix, use: Use) -> QuantizedTensor:
        """The codes of an operand, to be kept until the backward pass."""
        return use.codes(made(x))

    def prepare_and_store(self, x: Matrix, use: Use, saved: Use) -> tuple[Any, QuantizedTensor]:
        """fprop's operand of X and the codes that wgrad will read, in one pass where the back end can."""
        return self.prepare(x, use), self.store(x, saved)

    @abstractmethod
    def load(self, codes: QuantizedTensor) -> Any:
        """The operand that kept codes stand for."""


@dataclass(frozen=True)
class _Apart(Product):
    """wgrad by a back end that adds nothing."""

    backend: Backend
    a: Any
    b: Any
    compute: torch.dtype
    weight: torch.dtype

    def made(self, dtype: torch.dtype | None = None) -> Tensor:
        """Rounded to the weight's type first."""
        found = self.backend.multiply("wgrad", self.a, self.b, self.compute).to(self.weight)
        return found.to(dtype or self.weight)
