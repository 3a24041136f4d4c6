"""Number formats, scalings and rounding: pure functions of tensors, on any device.

`quantize` gives packed codes and scales, `fake_quantize` the values that they stand for; `recipe`
says which operand of which GEMM is quantized how. The names and sizes alone, without torch, are in
`scrimp.precision`.
"""

from scrimp.formats.noise import Noise
from scrimp.formats.quantize import fake_quantize, project, quantize
from scrimp.formats.quantized import FakeQuantized, QuantizedTensor
from scrimp.precision import RECIPES, GemmRecipe, Operand, Recipe, recipe

__all__ = [
    "RECIPES",
    "FakeQuantized",
    "GemmRecipe",
    "Noise",
    "Operand",
    "QuantizedTensor",
    "Recipe",
    "fake_quantize",
    "project",
    "quantize",
    "recipe",
]
