"""The three GEMMs of one linear layer, run as its plan says.

`forward` and `backward` are plain functions of matrices: no autograd, no module. `linear.py` makes an
autograd function and an operator of them, `tensor_parallel.py` runs them on pieces.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.formats import Noise, QuantizedTensor
from scrimp.formats.quantize import AmaxReducer
from scrimp.gemm.backends import Backend, ReferenceBackend
from scrimp.gemm.clock import Clock
from scrimp.gemm.deferred import Deferred, Matrix, made
from scrimp.gemm.observe import Execution, is_every_run_observed, is_observed, report, running
from scrimp.gemm.problem import AXES, COLUMNS, Shape, Use, high_precision, operands_of, shape_of
from scrimp.gemm.storage import saved_class
from scrimp.gemm.weight_operands import weight_operand
from scrimp.gemm.weight_sums import WeightSum
from scrimp.precision import (
    GEMMS,
    HIGH_PRECISION,
    OPERANDS,
    RECOMPUTE,
    LinearPrecision,
    Scaling,
    check_cut,
    lookup_scaling,
)

BackendChooser = Callable[[str, str, Shape, torch.device], Backend]
"""From recipe, GEMM, its shape and the device to the back end that runs it there."""


def reference_only(recipe: str, gemm: str, shape: Shape, device: torch.device) -> Backend:
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
    """The piece of a layer that ranks share."""

    split: str
    """"outputs" (column-parallel: W, Y and G are cut along O) or "inputs" (row-parallel: X and W along I)."""
    group: dist.ProcessGroup
    """The ranks that have its pieces."""
    features: tuple[range, ...]
    """The outputs (or inputs) held here, of those of the whole layer; several ranges of layers that are stacked."""
    begins: frozenset[int]
    """Features at which pieces begin, those of all ranks."""
    size: int
    """Outputs (or inputs) of the whole layer."""

    @property
    def cut_axes(self) -> dict[str, int]:
        """Which axis of which tensor is cut."""
        return {"outputs": {"w": -2, "g": -1}, "inputs": {"w": -1, "x": -1}}[self.split]

    def reducer(self, tensor: str, axis: int, scaling: Scaling) -> AmaxReducer | None:
        """How to take a maximum over the pieces of an operand, None where no scale spans them.

        Args:
            axis: the one that the operand is scaled along.
        """
        cut = self.cut_axes.get(tensor)
        spans_tensor = scaling.has_tensor_scale or (scaling.rows is None and scaling.columns is None)
        spans_cut = spans_tensor or (scaling.columns is None and cut == axis)
        return self.reduce_amax if cut is not None and spans_cut else None

    def reduce_amax(self, amax: Tensor) -> None:
        """The largest of all ranks' numbers, in place."""
        dist.all_reduce(amax, dist.ReduceOp.MAX, group=self.group)

    @property
    def ranks(self) -> int:
        """How many have pieces."""
        return dist.get_world_size(self.group)

    def sum(self, partial: Tensor) -> Tensor:
        """The sum of all ranks' tensors, in float32."""
        total = partial.detach().to(torch.float32, copy=True)
        dist.all_reduce(total, group=self.group)
        return total

    def whole(self, piece: Tensor) -> Tensor:
        """The features of all ranks, in the last axis, from those that each has."""
        found = piece.new_zeros(*piece.shape[:-1], self.size)
        found[..., self._index(piece.device)] = piece.detach()
        dist.all_reduce(found, group=self.group)
        return found

    def own(self, whole: Tensor) -> Tensor:
        """The features that lie here, of all in the last axis."""
        return whole[..., self._index(whole.device)]

    def _index(self, device: torch.device) -> Tensor:
        return torch.tensor([*itertools.chain(*self.features)], device=device)


@dataclass(eq=False)
class PlannedLayer:
    """What a layer's GEMMs need to know; the plan may change between steps."""

    name: str
    precision: LinearPrecision
    clock: Clock = field(default_factory=Clock)
    choose: BackendChooser = reference_only
    shard: Shard | None = None
    group: PlannedLayer | None = None
    """The grouped layer that this expert is of (`scrimp.gemm.planned_grouped`)."""
    members: tuple[PlannedLayer, ...] = field(default=(), repr=False)
    """The experts of a grouped layer."""
    run: int = field(default=0, init=False, repr=False)
    """Which run of tokens an expert computes in this pass."""
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
        self.check(precision)
        self.precision = precision
        if (kind := saved_class(precision.saved)) != getattr(self, "saved_class", None):
            self.saved_class = kind
        for member in self.members:
            member.replan(precision)

    def check(self, precision: LinearPrecision) -> None:
        """Refuse a precision that this layer, or this piece of one, cannot run in.

        Raises:
            PlanError: by what.
        """
        check_precision(precision, self.name)
        if (piece := self.piece) is not None:
            check_cut(self.name, precision, piece.split, piece.begins, piece.size)

    def share(self, shard: Shard) -> None:
        """Run on a piece from now on.

        Raises:
            PlanError: groups of the plan would lie on two ranks; nothing has changed.
        """
        check_cut(self.name, self.precision, shard.split, shard.begins, shard.size)
        self.shard = shard

    def __deepcopy__(self, memo: dict[int, object]) -> PlannedLayer:
        """A layer of its own, on the same clock."""
        copied = replace(self, group=None, members=())
        copied.members = tuple(replace(member, group=copied) for member in self.members)
        return copied

    @property
    def piece(self) -> Shard | None:
        """How ranks share it, or each of its experts; None: they do not."""
        return self.members[0].shard if self.members else self.shard

    @property
    def watched(self) -> PlannedLayer:
        """Whose executions its are: its own, or the grouped layer's that it is of."""
        return self.group or self

    @property
    def is_watched(self) -> bool:
        """Whether anyone is to be told of what it runs now: of a grouped layer the first run of a pass, or all."""
        return (self.run == 0 or is_every_run_observed()) and is_observed(self.watched)

    def is_plain(self, compute: str) -> bool:
        """Every GEMM in the compute format: an ordinary linear layer."""
        return self.precision == LinearPrecision.of(compute)

    def backend(self, recipe: str, gemm: str, tokens: int, weight: Tensor) -> Backend:
        """What runs a GEMM of this layer over so many tokens."""
        outputs, inputs = weight.shape
        return self.choose(recipe, gemm, shape_of(gemm, tokens, inputs, outputs), weight.device)

    def product(self, gemm: str) -> Hashable:
        """What the operand of the weight is kept by (`scrimp.gemm.weight_operands`); None: it is an expert's."""
        return None if self.group is not None else (self, gemm)

    def uses(self, gemm: str, now: tuple[int, int], recipe: str | None = None) -> tuple[Use, Use]:
        """How both operands of a GEMM are quantized, now; of another recipe than the plan's if one is given."""
        return self._use(gemm, 0, now, recipe), self._use(gemm, 1, now, recipe)

    def _use(self, gemm: str, operand: int, now: tuple[int, int], recipe: str | None) -> Use:
        choice = operands_of(gemm, recipe or self.precision.gemm(gemm))[operand]
        tensor, axis = OPERANDS[gemm][operand], AXES[gemm][operand]
        columns: tuple[range, ...] = ()
        reduce_amax = None
        if self.shard is not None and choice is not None:
            if self.shard.cut_axes.get(tensor) == COLUMNS:
                columns = self.shard.features
            reduce_amax = self.shard.reducer(tensor, axis, lookup_scaling(choice.scaling))
        noise = Noise()
        if choice is not None and choice.rounding == "stochastic":
            noise = self.clock.noise(self.name, gemm, operand, now, columns)
        return Use(choice, axis, noise, reduce_amax)


@running
def forward(
    x: Matrix,
    weight: Tensor,
    layer: PlannedLayer,
    compute: torch.dtype,
    *,
    keep_codes: bool,
    now: tuple[int, int] | None = None,
    room: QuantizedTensor | None = None,
) -> tuple[Tensor, QuantizedTensor | None]:
    """Y = X W^T in the compute type, and the codes of X that backward will read.

    Args:
        keep_codes: the plan saves X quantized, and a backward pass will follow.
        now: reading of the layer's clock, if it was taken before.
        room: where the codes are to lie; None: in tensors of their own.
    """
    recipe, saved = layer.precision.fprop, layer.precision.saved
    now = now or layer.clock.now
    tokens = len(x)
    backend, dtype = layer.backend(recipe, "fprop", tokens, weight), high_precision(recipe, compute)
    uses = layer.uses("fprop", now)
    codes = None
    readers = [(backend, uses[0])]
    if keep_codes:
        storing = layer.backend(saved, "wgrad", tokens, weight)
        saved_use = replace(layer.uses("wgrad", now, saved)[1], room=room)
        readers.append((storing, saved_use))
    x = _for(x, readers)
    if keep_codes and storing is backend and dtype == compute:
        a, codes = backend.prepare_and_store(x.to(compute), uses[0], saved_use)
        codes = codes if room is None else room.filled(codes)
    else:
        a = backend.prepare(x.to(dtype), uses[0])
        codes = store_input(x, weight, layer, compute, now=now, room=room) if keep_codes else None
    w = weight_operand(weight, dtype, backend, uses[1], layer.product("fprop"))
    y = backend.multiply("fprop", a, w, compute)
    if layer.is_watched:
        kept = (layer.uses("wgrad", now, saved)[1], layer.uses("wgrad", now)[1]) if keep_codes else None
        _tell(layer, weight, "fprop", backend, (x, weight), uses, y, kept)
    return y, codes


@running
def store_input(
    x: Matrix,
    weight: Tensor,
    layer: PlannedLayer,
    compute: torch.dtype,
    *,
    now: tuple[int, int] | None = None,
    room: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """The codes of X that backward will read, without a product; arguments as of `forward`."""
    saved = layer.precision.saved
    use = replace(layer.uses("wgrad", now or layer.clock.now, saved)[1], room=room)
    backend = layer.backend(saved, "wgrad", len(x), weight)
    # From the compute type, as wgrad would read a saved input.
    codes = backend.store(_for(x, [(backend, use)]).to(compute), use)
    return codes if room is None else room.filled(codes)


@running
def backward(
    g: Matrix,
    x: Matrix | QuantizedTensor | None,
    weight: Tensor,
    layer: PlannedLayer,
    compute: torch.dtype,
    now: tuple[int, int],
    *,
    needs_x: bool,
    needs_weight: bool,
    total: WeightSum | None = None,
) -> tuple[Tensor | None, Tensor | None]:
    """dX in the compute type and dW in the weight's, each where it is needed.

    Args:
        x: the saved input, or its codes.
        now: the clock at the forward pass.
        total: what dW is added to instead of being returned.
    """
    for_x, for_weight = _gradient_operands(g, weight, layer, compute, now, needs_x, needs_weight)
    grad_x = grad_weight = None
    if needs_x:
        recipe, uses = layer.precision.dgrad, layer.uses("dgrad", now)
        backend = layer.backend(recipe, "dgrad", len(g), weight)
        operand = for_x()
        dtype = high_precision(recipe, compute)
        w = weight_operand(weight, dtype, backend, uses[1], layer.product("dgrad"))
        grad_x = backend.multiply("dgrad", operand, w, compute)
        del operand, w, for_x  # before wgrad makes its own
        _tell(layer, weight, "dgrad", backend, (g, weight), uses, grad_x)
    if needs_weight:
        assert x is not None
        recipe, uses = layer.precision.wgrad, layer.uses("wgrad", now)
        backend = layer.backend(recipe, "wgrad", len(g), weight)
        operand = for_weight()
        b = _saved_operand(x, backend, uses[1], high_precision(recipe, compute))
        product = backend.weight_product(operand, b, compute, weight.dtype)
        if total is None or layer.is_watched:
            grad_weight = product.made()
            _tell(layer, weight, "wgrad", backend, (g, x), uses, grad_weight)
        if total is not None:
            total.add(product, grad_weight)
            grad_weight = None
    return grad_x, grad_weight


def _gradient_operands(
    g: Matrix,
    weight: Tensor,
    layer: PlannedLayer,
    compute: torch.dtype,
    now: tuple[int, int],
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """G for dgrad and for wgrad, each made when it is asked for, or both in one pass where a back end can."""
    precision = layer.precision
    backends = [layer.backend(precision.gemm(gemm), gemm, len(g), weight) for gemm in ("dgrad", "wgrad")]
    types = [high_precision(precision.gemm(gemm), compute) for gemm in ("dgrad", "wgrad")]
    uses = [layer.uses(gemm, now)[0] for gemm in ("dgrad", "wgrad")]
    g = _for(g, itertools.compress(zip(backends, uses, strict=True), (needs_x, needs_weight)))
    is_shared = backends[0] is backends[1] and types[0] == types[1]
    if needs_x and needs_weight and is_shared:
        pair = backends[0].prepare_pair(g.to(types[0]), *uses)
        if pair is not None:
            for_x, for_weight = pair
            return lambda: for_x, lambda: for_weight
    return (
        lambda: backends[0].prepare(g.to(types[0]), uses[0]),
        lambda: backends[1].prepare(g.to(types[1]), uses[1]),
    )


def _for(x: Matrix, readers: Iterable[tuple[Backend, Use]]) -> Matrix:
    """A deferred matrix where all that read it make its numbers, else the matrix that they are, made once."""
    if isinstance(x, Deferred) and not all(backend.makes(x, use) for backend, use in readers):
        return x.made()
    return x


def _saved_operand(x: Matrix | QuantizedTensor, backend: Backend, use: Use, dtype: torch.dtype) -> Any:
    """wgrad's X: from its codes where they are the ones that wgrad reads, else quantized now."""
    if isinstance(x, QuantizedTensor):
        if x.operand == use.operand:
            return backend.load(x)
        x = x.dequantize(dtype)
    return backend.prepare(_for(x, [(backend, use)]).to(dtype), use)


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
    weight: Tensor,
    gemm: str,
    backend: Backend,
    operands: tuple[Matrix, Matrix | QuantizedTensor],
    uses: tuple[Use, Use],
    result: Tensor,
    kept: tuple[Use, Use] | None = None,
) -> None:
    if layer.is_watched:
        recipe, watched = layer.precision.gemm(gemm), layer.watched
        first, second = made(operands[0]), operands[1]
        second = second if isinstance(second, QuantizedTensor) else made(second)
        expert = 0 if layer.group is None else int(layer.name.rpartition(".")[2])
        found = Execution(
            watched.name, gemm, recipe, backend.name, weight, first, second, uses, result, expert, kept
        )
        report(watched, found)
