"""One GEMM of a linear layer as every back end sees it: which tensors, scaled along which axis.

=====  ============  ===========================  ====================  ==============
GEMM   computes      first operand (sums over)    second operand        M, N, K
=====  ============  ===========================  ====================  ==============
fprop  Y = X W^T     X [T, I] (columns)           W [O, I] (columns)    T, O, I
dgrad  dX = G W      G [T, O] (columns)           W [O, I] (rows)       T, I, O
wgrad  dW = G^T X    G [T, O] (rows)              X [T, I] (rows)       O, I, T
=====  ============  ===========================  ====================  ==============

Tensors stay as they are, row-major; an operand whose sum runs along its rows is read (or copied)
transposed by the back end.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from scrimp.formats import Noise, QuantizedTensor, quantize
from scrimp.formats.quantize import AmaxReducer
from scrimp.precision import GemmRecipe, Operand, recipe

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Formats of products that quantize nothing; layers compute in one of them."""
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
COLUMNS, ROWS = -1, -2
AXES = {"fprop": (COLUMNS, COLUMNS), "dgrad": (COLUMNS, ROWS), "wgrad": (ROWS, ROWS)}
"""The axis that each operand is summed over, and so scaled along."""


@dataclass(frozen=True)
class Shape:
    """Sizes of one GEMM: an M x N result, summed over K."""

    m: int
    n: int
    k: int

    def __str__(self) -> str:
        return f"{self.m} x {self.n} x {self.k} (M x N x K)"

    @property
    def flops(self) -> float:
        """Two per multiplication and addition."""
        return 2.0 * self.m * self.n * self.k


def compute_dtype(x: Tensor) -> torch.dtype:
    """The type in which GEMMs of `x` compute: autocast's if it is on, else that of x."""
    if torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def shape_of(gemm: str, tokens: int, inputs: int, outputs: int) -> Shape:
    """M, N and K of a GEMM of a layer with `inputs` and `outputs` features."""
    sizes = {
        "fprop": Shape(tokens, outputs, inputs),
        "dgrad": Shape(tokens, inputs, outputs),
        "wgrad": Shape(outputs, inputs, tokens),
    }
    return sizes[gemm]


def features_of(gemm: str, shape: Shape) -> tuple[int, int]:
    """Inputs and outputs of the layer whose GEMM has this shape."""
    sizes = {"fprop": (shape.k, shape.n), "dgrad": (shape.n, shape.k), "wgrad": (shape.n, shape.m)}
    return sizes[gemm]


@dataclass(frozen=True)
class Use:
    """One tensor as an operand of one GEMM."""

    operand: Operand | None
    """None: in the high precision of the recipe."""
    axis: int
    noise: Noise
    reduce_amax: AmaxReducer | None = None
    """Maximum over the ranks that hold the other pieces of the tensor."""
    room: QuantizedTensor | None = None
    """Where codes that are kept are to lie; a back end that cannot write there makes tensors of its own."""

    def codes(self, x: Tensor) -> QuantizedTensor:
        """The operand's codes of a tensor, by the reference's rules."""
        assert self.operand is not None
        o = self.operand
        return quantize(
            x,
            o.element,
            o.scaling,
            self.axis,
            o.rounding,
            hadamard=o.hadamard,
            four_over_six=o.four_over_six,
            fallback=o.fallback,
            noise=self.noise,
            reduce_amax=self.reduce_amax,
        )


def operands_of(gemm: str, recipe_name: str) -> tuple[Operand | None, Operand | None]:
    """How a recipe quantizes the two operands of a GEMM."""
    entry: GemmRecipe | None = recipe(recipe_name).gemm(gemm)
    return (None, None) if entry is None else (entry.a, entry.b)


def high_precision(recipe_name: str, compute: torch.dtype) -> torch.dtype:
    """The type in which a GEMM's operands arrive: bf16 and fp32 have their own, others the compute type."""
    return DTYPES.get(recipe_name, compute)


def multiply(a: Tensor, a_axis: int, b: Tensor, b_axis: int) -> Tensor:
    """The product of two matrices over the named axis of each."""
    return (a if a_axis == COLUMNS else a.T) @ (b.T if b_axis == COLUMNS else b)
