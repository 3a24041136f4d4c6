"""Recipes: for each of the three GEMMs of a linear layer, how both operands are quantized.

A linear layer with input X [T, I], weight W [O, I] and gradient G = dL/dY [T, O] runs ::

    fprop  Y  = X W^T   operands X and W, summed over I
    dgrad  dX = G W     operands G and W, summed over O
    wgrad  dW = G^T X   operands G and X, summed over T

and every operand is scaled along the axis that its GEMM sums over. So each tensor is quantized
twice (X along I and along T, and so on), except where a scaling is the same both ways: one
scale per tensor, or square blocks of W.

A recipe names a choice for all three GEMMs; a plan may take each GEMM from another recipe.
Adding a recipe is one entry of `RECIPES`.

Rounding   Stochastic only on gradients: on weights and activations it hurts (NVFP4 report).
Saved      What backward keeps of X for wgrad. A recipe whose wgrad quantizes X keeps those codes: the
           numbers are those of quantizing later, and the bytes are fewer.
Sources    fp8: DeepSeek-V3 (arXiv 2412.19437). fp8_tensor, fp8_row: torchao's float8 recipes, with E5M2
           gradients per tensor. mxfp8, mxfp4: OCP MX 1.0; stochastic gradients for mxfp4 (arXiv
           2502.20586). nvfp4: arXiv 2509.25149 (Hadamard on wgrad, 16x16 weight scales, stochastic
           gradients). fp4: SNIP (arXiv 2602.01410). int8: Jetfire (arXiv 2403.12422), which takes blocks of 32 x 32
           for all tensors and rounds gradients stochastically; here groups are those of fp8. Of integers numbers below
           amax / 254 of a group round to 0, a bias that gradients would notice; E4M3 reaches 1,800 times lower.
           int8_fallback: arXiv 2503.08040, for X of fprop alone: what backward keeps stays one byte a number.
           int8_hadamard: HALO (arXiv 2501.02625) rotates around int8 products with whole rows' transforms; here groups
           of 16 along the summed axis, which no group of scales cuts.
"""

from __future__ import annotations

import difflib
from dataclasses import dataclass, replace
from typing import Literal, get_args

from scrimp.errors import PlanError
from scrimp.precision.formats import lookup_element, lookup_scaling

Rounding = Literal["nearest", "stochastic"]
Gemm = Literal["fprop", "dgrad", "wgrad"]
GEMMS: tuple[Gemm, ...] = ("fprop", "dgrad", "wgrad")
OPERANDS: dict[str, tuple[str, str]] = {"fprop": ("x", "w"), "dgrad": ("g", "w"), "wgrad": ("g", "x")}
"""The two tensors that each GEMM multiplies."""
HADAMARD = 16
"""Numbers that a rotation mixes (`scrimp.formats.hadamard`)."""
MOST_TO_NEAREST = 128
"""Gradients whose sum in bf16 may be rounded to nearest at each addition (`scrimp.gemm.weight_sums`)."""
FALLBACK_SUM = 1024.0
"""What the magnitudes of a tile's codes add up to where it does not fall back: 8 for each of 128."""


@dataclass(frozen=True)
class Operand:
    """How one operand is quantized along the axis that its GEMM sums over."""

    element: str
    scaling: str
    rounding: Rounding = "nearest"
    hadamard: bool = False
    """Rotated by a 16x16 random Hadamard matrix first, as the other operand is: the product is the same."""
    four_over_six: bool = False
    """Per NVFP4 block the better of two scales, that put its largest value at 6 or at 4."""
    fallback: bool = False
    """Tiles with outliers have a second payload for what rounding left of them (`scrimp.formats.fallback`)."""

    def __post_init__(self) -> None:
        """Refuse what no format defines."""
        lookup_element(self.element)
        scaling = lookup_scaling(self.scaling)
        if self.rounding not in get_args(Rounding):
            raise PlanError(
                "there is no such rounding", got=repr(self.rounding), expected=", ".join(get_args(Rounding))
            )
        if scaling.has_tensor_scale and self.element != "e2m1":
            raise PlanError(f"{self.scaling} scales e2m1 elements only", got=self.element, expected="e2m1")
        if self.four_over_six and self.rounding == "stochastic":
            raise PlanError(
                "four_over_six chooses a scale by its error, and so is biased under stochastic rounding",
                expected="one of the two",
            )
        if self.four_over_six and not scaling.has_tensor_scale:
            raise PlanError(
                "four_over_six chooses between two NVFP4 scales",
                got=self.scaling,
                expected="nvfp4 or nvfp4_2d",
            )
        if self.fallback and replace(self, fallback=False) != Operand("int8", "tile"):
            raise PlanError(
                "only tiles of integers that are rounded to nearest fall back",
                got=str(self),
                expected="int8, tile, nearest, hadamard=False",
            )

    def length(self, size: int) -> int:
        """How long the axis that it is scaled along is in its codes: rotated groups are whole."""
        return size + -size % HADAMARD if self.hadamard else size


@dataclass(frozen=True)
class GemmRecipe:
    """Both operands of one GEMM, in the order of `OPERANDS`."""

    a: Operand
    b: Operand

    def __post_init__(self) -> None:
        """Refuse a rotation of one operand alone, as the product would be another one; and two payloads of the second
        operand, which is kept between passes (X, W) and of which nothing keeps two."""
        if self.a.hadamard != self.b.hadamard:
            raise PlanError("one operand is rotated and the other is not", expected="both, or none")
        if self.b.fallback:
            raise PlanError("only the first operand of a product falls back", got=str(self.b))


@dataclass(frozen=True)
class Recipe:
    """The three GEMMs of a linear layer; None runs the GEMM in the named high precision."""

    name: str
    fprop: GemmRecipe | None
    dgrad: GemmRecipe | None
    wgrad: GemmRecipe | None
    bits: int
    """Width of the elements."""
    summary: str

    def gemm(self, name: str) -> GemmRecipe | None:
        """The entry of fprop, dgrad or wgrad."""
        choices = {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}
        return choices[name]

    @property
    def saved(self) -> str:
        """What backward keeps of X by default: "quantized" (wgrad's own operand) or "input"."""
        return "input" if self.wgrad is None else "quantized"


def _of_operands(name: str, bits: int, x: Operand, w: Operand, g: Operand, summary: str) -> Recipe:
    fprop, dgrad, wgrad = GemmRecipe(x, w), GemmRecipe(g, w), GemmRecipe(g, x)
    return Recipe(name, fprop, dgrad, wgrad, bits, summary)


def _int8_fallback() -> Recipe:
    summary = "int8, with a second payload for tiles of fprop's X that have outliers"
    int8 = _of_operands("int8_fallback", 8, _INT8_TILE, _INT8_BLOCK, _INT8_TILE_NOISY, summary)
    return replace(int8, fprop=GemmRecipe(Operand("int8", "tile", fallback=True), _INT8_BLOCK))


def _int8_hadamard() -> Recipe:
    x, w, g = (replace(one, hadamard=True) for one in (_INT8_TILE, _INT8_BLOCK, _INT8_TILE_NOISY))
    summary = "int8, both operands of each product rotated by 16x16 Hadamard matrices"
    return _of_operands("int8_hadamard", 8, x, w, g, summary)


def _nvfp4() -> Recipe:
    x, w = Operand("e2m1", "nvfp4"), Operand("e2m1", "nvfp4_2d")
    g = Operand("e2m1", "nvfp4", "stochastic")
    rotated = GemmRecipe(
        Operand("e2m1", "nvfp4", "stochastic", hadamard=True), Operand("e2m1", "nvfp4", hadamard=True)
    )
    summary = "E2M1, 1x16 scales in E4M3 (W 16x16); Hadamard on wgrad, stochastic gradients"
    return Recipe("nvfp4", GemmRecipe(x, w), GemmRecipe(g, w), rotated, 4, summary)


_E4M3_TILE, _E4M3_BLOCK = Operand("e4m3", "tile"), Operand("e4m3", "block")
_E4M3_TENSOR, _E4M3_ROW, _E4M3_MX = Operand("e4m3", "tensor"), Operand("e4m3", "row"), Operand("e4m3", "mx")
_E2M1_TILE, _E2M1_BLOCK, _E2M1_MX = (Operand("e2m1", scaling) for scaling in ("tile", "block", "mx"))
_INT8_TILE, _INT8_BLOCK = Operand("int8", "tile"), Operand("int8", "block")
_INT8_TILE_NOISY = Operand("int8", "tile", "stochastic")

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe("fp32", None, None, None, 32, "float32"),
        Recipe("bf16", None, None, None, 16, "bfloat16, sums in fp32"),
        _of_operands(
            "fp8",
            8,
            _E4M3_TILE,
            _E4M3_BLOCK,
            _E4M3_TILE,
            "E4M3, 1x128 tiles, W in 128x128 blocks (DeepSeek-V3)",
        ),
        _of_operands(
            "fp8_tensor",
            8,
            _E4M3_TENSOR,
            _E4M3_TENSOR,
            Operand("e5m2", "tensor"),
            "E4M3, gradients E5M2, one scale per tensor",
        ),
        _of_operands("fp8_row", 8, _E4M3_ROW, _E4M3_ROW, _E4M3_ROW, "E4M3, one scale per row"),
        _of_operands("mxfp8", 8, _E4M3_MX, _E4M3_MX, _E4M3_MX, "E4M3, 1x32 power-of-two scales (OCP MX)"),
        _of_operands(
            "int8",
            8,
            _INT8_TILE,
            _INT8_BLOCK,
            _INT8_TILE_NOISY,
            "INT8, 1x128 tiles, W in 128x128 blocks, stochastic gradients (Jetfire's, in fp8's groups)",
        ),
        _int8_fallback(),
        _int8_hadamard(),
        _of_operands(
            "fp4",
            4,
            _E2M1_TILE,
            _E2M1_BLOCK,
            Operand("e2m1", "tile", "stochastic"),
            "E2M1, 1x128 tiles, W in 128x128 blocks, stochastic gradients (SNIP)",
        ),
        _nvfp4(),
        _of_operands(
            "mxfp4",
            4,
            _E2M1_MX,
            _E2M1_MX,
            Operand("e2m1", "mx", "stochastic"),
            "E2M1, 1x32 power-of-two scales (OCP MX), stochastic gradients",
        ),
    )
}
HIGH_PRECISION = tuple(name for name, entry in RECIPES.items() if entry.fprop is None)
"""The recipes that quantize nothing."""


def recipe(name: str) -> Recipe:
    """The recipe of a name.

    Raises:
        PlanError: unknown; names the nearest.
    """
    if name in RECIPES:
        return RECIPES[name]
    near = difflib.get_close_matches(str(name), RECIPES, 1)
    raise PlanError(
        "there is no such recipe",
        got=repr(name),
        expected=", ".join(RECIPES),
        do=f"did you mean {near[0]}?" if near else None,
    )
