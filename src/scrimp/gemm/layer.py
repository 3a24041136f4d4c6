"""The three GEMMs of one linear layer, run as its plan says.

`forward` and `backward` are plain functions of matrices: no autograd, no module. `linear.py` makes an
autograd function and an operator of them, `sharded.py` runs them on pieces.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats import QuantizedTensor
from scrimp.formats.quantize import AmaxReducer
from scrimp.gemm.backends import Backend, ReferenceBackend
from scrimp.gemm.clock import Clock
from scrimp.gemm.observe import Execution, is_observed, report
from scrimp.gemm.problem import AXES, Use, high_precision, operands_of
from scrimp.gemm.storage import saved_class
from scrimp.precision import GEMMS, HIGH_PRECISION, OPERANDS, RECOMPUTE, LinearPrecision

BackendChooser = Callable[[str, str], Backend]
"""From recipe and GEMM to the back end that runs it."""


def reference_only(recipe: str, gemm: str) -> Backend:
    """The chooser that always takes the reference."""
    return _REFERENCE


_REFERENCE = ReferenceBackend()


_numbers = itertools.count()
_layers: weakref.WeakValueDictionary[int, PlannedLayer] = weakref.WeakValueDictionary()


def layer_of(handle: Tensor) -> PlannedLayer:
    """The layer that a handle stands for."""
    return _layers[int(handle)]


@dataclass
class Shard:
    """Where the pieces of a tensor-parallel layer lie."""

    split: str
    """"outputs" (column-parallel: W, Y and G are cut along O) or "inputs" (row-parallel: X and W along I)."""
    reduce_amax: AmaxReducer
    first_feature: int
    """Index of the first output (or input) feature held here."""
    num_pieces: int

    def reducer(self, tensor: str, gemm: str, use_axis: int, spans: str) -> AmaxReducer | None:
        """How to take a maximum over the pieces of an operand, None where a scale spans none.

        Args:
            spans: "tensor", "row" or "group": what a scale covers.
        """
        cut_axis = {"outputs": {"w": -2, "g": -1}, "inputs": {"w": -1, "x": -1}}[self.split].get(tensor)
        if cut_axis is None or spans == "group" or (spans == "row" and cut_axis != use_axis):
            return None
        return self.reduce_amax


@dataclass(eq=False)
class PlannedLayer:
    """What a layer's GEMMs need to know; the plan may change between steps."""

    name: str
    precision: LinearPrecision
    clock: Clock = field(default_factory=Clock)
    choose: BackendChooser = reference_only
    shard: Shard | None = None
    handle: Tensor = field(init=False, repr=False, compare=False)
    """Stands for this layer in compiled graphs."""

    saved_class: str = field(init=False)
    """All that a compiled graph knows of the plan."""

    def __post_init__(self) -> None:
        """Enter the table of layers."""
        self.replan(self.precision)
        number = next(_numbers)
        _layers[number] = self
        self.handle = torch.tensor(number, dtype=torch.int64, device="cpu")

    def replan(self, precision: LinearPrecision) -> None:
        """Run by another plan from now on; between two steps."""
        check_precision(precision, self.name)
        self.precision = precision
        if (kind := saved_class(precision.saved)) != getattr(self, "saved_class", None):
            self.saved_class = kind

    def __deepcopy__(self, memo: dict[int, object]) -> PlannedLayer:
        """A layer of its own, on the same clock."""
        return PlannedLayer(self.name, self.precision, self.clock, self.choose, self.shard)

    def is_plain(self, compute: str) -> bool:
        """Every GEMM in the compute format: an ordinary linear layer."""
        p = self.precision
        return {p.fprop, p.dgrad, p.wgrad} == {compute} and p.saved in (compute, RECOMPUTE)

    def use(self, gemm: str, operand: int, now: tuple[int, int], recipe: str | None = None) -> Use:
        """How one operand of a GEMM is quantized, now."""
        choice = operands_of(gemm, recipe or self.precision.gemm(gemm))[operand]
        tensor, axis = OPERANDS[gemm][operand], AXES[gemm][operand]
        first_column, reduce_amax = 0, None
        if self.shard is not None and choice is not None:
            if tensor == "g" and self.shard.split == "outputs":
                first_column = self.shard.first_feature
            spans = {"tensor": "tensor", "nvfp4": "tensor", "nvfp4_2d": "tensor", "row": "row"}
            reduce_amax = self.shard.reducer(tensor, gemm, axis, spans.get(choice.scaling, "group"))
        noise = self.clock.noise(self.name, gemm, operand, now, first_column)
        return Use(choice, axis, noise, reduce_amax)


def forward(
    x: Tensor,
    weight: Tensor,
    layer: PlannedLayer,
    compute: torch.dtype,
    *,
    keep_codes: bool,
    now: tuple[int, int] | None = None,
) -> tuple[Tensor, QuantizedTensor | None]:
    """Y = X W^T in the compute type, and the codes of X that backward will read.

    Args:
        keep_codes: the plan saves X quantized, and a backward pass will follow.
        now: reading of the layer's clock, if it was taken before.
    """
    recipe, saved = layer.precision.fprop, layer.precision.saved
    now = now or layer.clock.now
    backend = layer.choose(recipe, "fprop")
    x_use, w_use = layer.use("fprop", 0, now), layer.use("fprop", 1, now)
    dtype = high_precision(recipe, compute)
    a = backend.prepare(x.to(dtype), x_use)
    y = backend.multiply("fprop", a, backend.prepare(weight.to(dtype), w_use), compute)
    _tell(layer, "fprop", recipe, backend, x, weight, y)
    codes = None
    if keep_codes:
        # From the compute type, as wgrad would read a saved input.
        codes = layer.choose(saved, "wgrad").store(x.to(compute), layer.use("wgrad", 1, now, saved))
    return y, codes


def backward(
    g: Tensor,
    x: Tensor | QuantizedTensor | None,
    weight: Tensor,
    layer: PlannedLayer,
    compute: torch.dtype,
    now: tuple[int, int],
    *,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """dX in the compute type and dW in the weight's, each where it is needed.

    Args:
        x: the saved input, or its codes.
        now: the clock at the forward pass.
    """
    grad_x = grad_weight = None
    precision = layer.precision
    backends = {gemm: layer.choose(precision.gemm(gemm), gemm) for gemm in ("dgrad", "wgrad")}
    types = {gemm: high_precision(precision.gemm(gemm), compute) for gemm in ("dgrad", "wgrad")}
    uses = {gemm: layer.use(gemm, 0, now) for gemm in ("dgrad", "wgrad")}
    gradients: dict[str, object] = {}
    if needs_x and needs_weight and backends["dgrad"] is backends["wgrad"] and types["dgrad"] == types["wgrad"]:
        pair = backends["dgrad"].prepare_pair(g.to(types["dgrad"]), uses["dgrad"], uses["wgrad"])
        gradients = dict(zip(("dgrad", "wgrad"), pair, strict=True))
    else:
        for gemm, is_needed in (("dgrad", needs_x), ("wgrad", needs_weight)):
            if is_needed:
                gradients[gemm] = backends[gemm].prepare(g.to(types[gemm]), uses[gemm])
    if needs_x:
        backend = backends["dgrad"]
        w = backend.prepare(weight.to(types["dgrad"]), layer.use("dgrad", 1, now))
        grad_x = backend.multiply("dgrad", gradients.pop("dgrad"), w, compute)
        _tell(layer, "dgrad", precision.dgrad, backend, g, weight, grad_x)
    if needs_weight:
        assert x is not None
        backend = backends["wgrad"]
        b = _saved_operand(x, backend, layer, types["wgrad"], now)
        grad_weight = backend.multiply("wgrad", gradients.pop("wgrad"), b, compute)
        grad_weight = grad_weight.to(weight.dtype)
        _tell(layer, "wgrad", precision.wgrad, backend, g, x, grad_weight)
    return grad_x, grad_weight


def _saved_operand(
    x: Tensor | QuantizedTensor, backend: Backend, layer: PlannedLayer, dtype: torch.dtype, now: tuple[int, int]
) -> object:
    """wgrad's X: from its codes where they are the ones that wgrad reads, else quantized now."""
    use = layer.use("wgrad", 1, now)
    if isinstance(x, QuantizedTensor):
        if x.operand == use.operand:
            return backend.load(x)
        x = x.dequantize(dtype)
    return backend.prepare(x.to(dtype), use)


def check_precision(precision: LinearPrecision, name: str) -> None:
    """Refuse names that no recipe has, and savings that no wgrad can read."""
    for gemm in GEMMS:
        operands_of(gemm, precision.gemm(gemm))
    if precision.saved in (*HIGH_PRECISION, RECOMPUTE):
        return
    if operands_of("wgrad", precision.saved)[1] is None:
        raise PlanError(f"{name}: no codes of {precision.saved} can be saved", got=precision.saved)


def _tell(
    layer: PlannedLayer,
    gemm: str,
    recipe: str,
    backend: Backend,
    a: Tensor,
    b: Tensor | QuantizedTensor,
    result: Tensor,
) -> None:
    if is_observed():
        report(Execution(layer.name, gemm, recipe, backend.name, a, b, result))
