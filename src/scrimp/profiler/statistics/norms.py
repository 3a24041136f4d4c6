"""Norms and quantization errors of every GEMM, from one ordinary pass in the compute type.

`NormWatch` observes the planned GEMMs as they run. It sums squares over the micro-batches of a statistics batch, and
quantizes both operands of every GEMM as each candidate format would, for the norm of the error: the very
operands that the format's GEMM would read, scaled along the axis that it sums over, stochastic
where its recipe is. A rotated operand is compared after rotating back, which keeps the norm.

The weight does not change between batches, and nearest rounding has no luck: its errors are computed once.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

from torch import Tensor

from scrimp.formats import QuantizedTensor, fake_quantize
from scrimp.gemm import Execution, PlannedLayer
from scrimp.gemm.problem import Use, operands_of
from scrimp.precision import GEMMS, OPERANDS
from scrimp.profiler.statistics.stream import square

_NAMES = {"fprop": ("x", "w", "y"), "dgrad": ("g", "w", "gx"), "wgrad": ("g", "x", "gw")}
"""First operand, second operand and result."""
_COUNTED_IN = {"x": "fprop", "w": "fprop", "y": "fprop", "g": "dgrad", "gx": "dgrad"}
"""The GEMM that a tensor's norm is taken from, of those that read it."""

ErrorKey = tuple[str, str, str, int]
"""Layer, GEMM, recipe, operand."""


class NormWatch:
    """An observer; sums of one statistics batch."""

    def __init__(
        self,
        layers: Mapping[str, PlannedLayer],
        recipes: Sequence[str],
        weight_errors: dict[ErrorKey, float] | None = None,
    ) -> None:
        self._layers = layers
        self._recipes = [name for name in recipes if any(operands_of(gemm, name) != (None, None) for gemm in GEMMS)]
        self.squares: dict[tuple[str, str], float] = defaultdict(float)
        """(layer, tensor) to |tensor|^2."""
        self.errors: dict[ErrorKey, float] = defaultdict(float)
        """|Q(A) - A|^2."""
        self.tokens: dict[str, int] = defaultdict(int)
        self._weight_errors = {} if weight_errors is None else weight_errors

    def __call__(self, execution: Execution) -> None:
        """Observe one GEMM."""
        if execution.layer not in self._layers:
            return
        names = _NAMES[execution.gemm]
        b = execution.b.dequantize() if isinstance(execution.b, QuantizedTensor) else execution.b
        for name, value in zip(names, (execution.a, b, execution.result), strict=True):
            if _COUNTED_IN.get(name) == execution.gemm:
                self._count(execution.layer, name, value)
        for recipe in self._recipes:
            for operand, value in enumerate((execution.a, b)):
                self._measure_error((execution.layer, execution.gemm, recipe, operand), value)

    def _count(self, layer: str, name: str, value: Tensor) -> None:
        if name == "w":
            self.squares[layer, name] = square(value)
        else:
            self.squares[layer, name] += square(value)
        if name == "x":
            self.tokens[layer] += len(value)

    def _measure_error(self, key: ErrorKey, value: Tensor) -> None:
        layer, gemm, recipe, operand = key
        is_weight = OPERANDS[gemm][operand] == "w"
        if is_weight and key in self._weight_errors:
            self.errors[key] = self._weight_errors[key]
            return
        planned = self._layers[layer]
        use = planned.uses(gemm, planned.clock.now, recipe)[operand]
        if is_weight:
            self.errors[key] = self._weight_errors[key] = error_square(value, use)
        else:
            self.errors[key] += error_square(value, use)


def error_square(value: Tensor, use: Use) -> float:
    """|Q(A) - A|^2 of one operand."""
    if use.operand is None:
        return 0.0
    quantized = fake_quantize(value, use.operand, use.axis, noise=use.noise, reduce_amax=use.reduce_amax)
    return square(quantized.dequantize().sub_(value))

