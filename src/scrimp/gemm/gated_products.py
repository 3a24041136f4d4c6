"""The two products of a gated MLP by their plans, with the gate between them made where it is quantized.

Problem  As functions of their own the products meet in tensors: act(gate) * up is written to be read by the second
         product's quantizer, and its gradients to be read by the first one's.
Method   One autograd function has both products, and hands each of them a `Deferred` matrix: forward the gate's result,
         backward its gradients. Gate and up are kept, of the gate's result what the second layer's plan saves of its
         input; where that is nothing, wgrad's quantizer makes it again, without a pass of its own::

             forward   GU = X W1^T;   Y = h(GU) W2^T
             backward  dH = G W2,  dW2 = G^T h(GU);   dX = dGU W1,  dW1 = dGU^T X    with dGU = h'(GU) dH

         A back end that cannot make these numbers gets them as a matrix, from a kernel that does the same.
Compiled Each product is the operator that it is alone (`operators`), so that a graph does not know the plan.
Limits   On CUDA; planned layers without bias that no hook watches, on whole weights, whose first input only a compiled
         graph makes again; in a graph, layers of which one keeps codes. All else runs product by product
         (`models.blocks.Mlp`). So does the memory trace: it counts two matrices that are not there, and not that what
         both products saved is held until all gradients are made; its emulation takes more than that.
Checked  tests/gemm/test_gated_products.py
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.gemm import operators
from scrimp.gemm.backends.operands import has_triton
from scrimp.gemm.deferred import Deferred, Gate
from scrimp.gemm.kernels.launch import may_run
from scrimp.gemm.layer import PlannedLayer
from scrimp.gemm.linear import PlannedLinear, checked_compute, runs_plain
from scrimp.gemm.problem import DTYPE_NAMES, high_precision
from scrimp.gemm.recompute import Operators, is_handled, only_saves
from scrimp.gemm.storage import CODES, RECOMPUTED
from scrimp.gemm.weight_sums import WeightSum, sum_for
from scrimp.precision import HIGH_PRECISION, saved_bytes
from scrimp.precision.saved_inputs import ALIGNMENT


def defers(first: nn.Module, second: nn.Module, x: Tensor) -> bool:
    """Whether two layers run as one function of an input."""
    if not all(_is_fit(layer) for layer in (first, second)):
        return False
    layers = [cast(PlannedLayer, one.planned) for one in (first, second)]
    kinds = [one.saved_class for one in layers]
    if kinds[0] == RECOMPUTED:
        return False
    if torch.compiler.is_compiling():
        # Inputs that are kept as they are say that most likely nothing is quantized, which is all that a graph knows.
        return any(one not in HIGH_PRECISION for one in kinds)
    return not any(runs_plain(x, one) for one in layers)


def _is_fit(layer: nn.Module) -> bool:
    is_own = type(layer).forward is PlannedLinear.forward and "forward" not in vars(layer)
    if not is_own or layer.bias is not None or hasattr(layer.weight, "device_mesh"):
        return False
    hooks = layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks
    return not any(hooks)


def gated_products(
    x: Tensor,
    first: PlannedLinear,
    second: PlannedLinear,
    gate: Gate,
    *,
    keeps_gated: bool = True,
    made_again: bool = False,
) -> Tensor:
    """second(gate(first(x))) by the plans of both layers.

    Args:
        x: [..., I].
        first: makes gate and up side by side.
        keeps_gated: keep for backward what the second layer's plan saves of its input.
        made_again: the graph makes x again in backward, as of `PlannedLinear.forward`.

    Raises:
        ModelError, DeviceError: as of `planned_linear`.
    """
    compute = checked_compute(x, first.weight, None, first.planned)
    weights = first.weight, second.weight
    found = _GatedProducts.apply(  # type: ignore[no-untyped-call]
        x.flatten(0, -2),
        *weights,
        (first.planned, second.planned),
        gate,
        compute,
        torch.is_grad_enabled(),
        keeps_gated,
        made_again,
        tuple(sum_for(weight, x) for weight in weights),
    )
    return cast(Tensor, found).view(*x.shape[:-1], second.weight.shape[0])


_NO_GRADIENTS = (None,) * 7
"""For arguments that are no tensors."""


def last_products() -> Operators:
    """The operator of second products, whose results a region that is made again keeps in a compiled graph."""
    return [torch.ops.scrimp.gated_forward.default]


class _GatedProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_in: Tensor,
        weight_out: Tensor,
        layers: tuple[PlannedLayer, PlannedLayer],
        gate: Gate,
        compute: torch.dtype,
        needs_grad: bool,
        keeps_gated: bool,
        made_again: bool,
        totals: tuple[WeightSum | None, WeightSum | None],
    ) -> Tensor:
        first, second = layers
        is_eager = not torch.compiler.is_compiling()
        if is_eager and is_handled(second):  # a region that is made again ends in it: so is its input
            keeps_gated = False
        saves_in, saves_out = (needs_grad and weight.requires_grad for weight in (weight_in, weight_out))
        kind_in = first.saved_class if saves_in else RECOMPUTED
        if made_again and kind_in == CODES:
            kind_in = DTYPE_NAMES[compute]  # the graph keeps nothing of it
        kind_out = second.saved_class if saves_out and keeps_gated else RECOMPUTED
        now = first.clock.reading
        halves, *kept_in = _forward(x, weight_in, first, now, compute, kind_in, "")
        if kind_out not in (CODES, RECOMPUTED):
            y, *kept_out = _forward(gated(halves, gate), weight_out, second, now, compute, kind_out, "")
        elif is_eager and only_saves(second):
            y = x.new_empty(len(x), len(weight_out), dtype=compute)
            kept_out = [halves.new_empty(0), halves.new_empty(0, dtype=torch.uint8)]
        else:
            y, *kept_out = _forward(halves, weight_out, second, now, compute, kind_out, gate)
        handles = [first.handle, second.handle, *(one.handle for one in totals if one is not None)]
        ctx.save_for_backward(weight_in, weight_out, halves, *kept_in, *kept_out, now, *handles)
        ctx.sums = [one is not None for one in totals]
        ctx.gate, ctx.compute, ctx.input_dtype = gate, compute, x.dtype
        ctx.is_gated_kept = kind_out != RECOMPUTED
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved = ctx.saved_tensors  # once: each reading of it makes again what is not kept
        weight_in, weight_out, halves, *kept, now, first, second = saved[:10]
        x, packed_in, gated_x, packed_out = kept
        sums = list(saved[10:])
        total_in, total_out = (sums.pop(0) if has_sum else None for has_sum in ctx.sums)
        needs_x, needs_in, needs_out = ctx.needs_input_grad[:3]
        needs_gated, gate = needs_x or needs_in, ctx.gate
        run = operators.planned_backward if torch.compiler.is_compiling() else operators.gradients
        grad_h, grad_out = run(
            g,
            gated_x if ctx.is_gated_kept else halves,
            packed_out,
            weight_out,
            second,
            now,
            ctx.compute,
            needs_gated,
            needs_out,
            total_out,
            "" if ctx.is_gated_kept else gate,
        )
        if not needs_gated:
            return None, None, grad_out if total_out is None else None, *_NO_GRADIENTS
        grad_x, grad_in = run(
            grad_h,
            x,
            packed_in,
            weight_in,
            first,
            now,
            ctx.compute,
            needs_x,
            needs_in,
            total_in,
            gate,
            halves,
        )
        return (
            grad_x.to(ctx.input_dtype) if needs_x else None,
            grad_in if needs_in and total_in is None else None,
            grad_out if needs_out and total_out is None else None,
            *_NO_GRADIENTS,
        )


def _forward(
    x: Tensor,
    weight: Tensor,
    layer: PlannedLayer,
    now: Tensor,
    compute: torch.dtype,
    kind: str,
    gate: str,
) -> tuple[Tensor, Tensor, Tensor]:
    """Y, X where it is kept as it is, and its codes where those are; empty tensors for what is not."""
    if torch.compiler.is_compiling():
        operator = (x, weight, layer.handle, now, compute, kind)
        y, packed = operators.gated_forward(*operator, gate) if gate else operators.planned_forward(*operator)
        if kind != CODES:
            # Bytes of its own: a graph that kept the operator's would run the product again for them.
            packed = x.new_empty(0, dtype=torch.uint8)
    else:
        step, first_row = now.tolist()
        packed = x.new_empty(_num_bytes(layer, len(x), weight.shape[1], kind), dtype=torch.uint8)
        y = operators.run_forward(x, weight, layer, (step, first_row), compute, packed, gate)
    is_kept = kind not in (CODES, RECOMPUTED)
    return y, x.to(high_precision(kind, compute)) if is_kept else x.new_empty(0), packed


def _num_bytes(layer: PlannedLayer, tokens: int, features: int, kind: str) -> int:
    """Those of the codes alone: no graph has to hold those of any recipe."""
    if kind != CODES:
        return 0
    return saved_bytes(layer.precision.saved, tokens, features) + 3 * ALIGNMENT


@torch.library.custom_op("scrimp::gated", mutates_args=())
def gated(halves: Tensor, gate: str) -> Tensor:
    """What a gate makes, as a matrix."""
    return Deferred(halves, cast(Gate, gate)).made()


@gated.register_fake
def _(halves: Tensor, gate: str) -> Tensor:
    return halves.new_empty(halves.shape[0], halves.shape[1] // 2)


@torch.library.custom_op("scrimp::gate_gradients", mutates_args=())
def gate_gradients(grad: Tensor, halves: Tensor, gate: str) -> Tensor:
    """The gradients of gate and up side by side, as a matrix."""
    return Deferred(halves, cast(Gate, gate), grad.contiguous()).made()


@gate_gradients.register_fake
def _(grad: Tensor, halves: Tensor, gate: str) -> Tensor:
    return torch.empty_like(halves)


def gate_alone(halves: Tensor, gate: Gate) -> Tensor:
    """The gate between layers that run one by one, with the numbers of those that do not."""
    matrix = halves.flatten(0, -2)
    found = cast(Tensor, _Gate.apply(matrix, gate))  # type: ignore[no-untyped-call]
    return found.view(*halves.shape[:-1], found.shape[-1])


class _Gate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, halves: Tensor, gate: Gate) -> Tensor:
        ctx.save_for_backward(halves)
        ctx.gate = gate
        return cast(Tensor, gated(halves, gate))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return gate_gradients(grad, ctx.saved_tensors[0], ctx.gate), None


_FUNCTIONS: dict[Gate, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": functools.partial(F.gelu, approximate="tanh"),
}


def _is_right(halves: Tensor, gate: Gate, function: Callable[[Tensor], Tensor]) -> bool:
    wide = halves.double().requires_grad_()
    first, second = wide.chunk(2, dim=-1)
    expected = function(first) * second
    (gradients,) = torch.autograd.grad(expected.sum(), wide)
    ones = halves.new_ones(second.shape)
    found = Deferred(halves, gate).made(), Deferred(halves, gate, ones).made()
    pairs = zip(found, (expected, gradients), strict=True)
    return all(torch.allclose(one.double(), other, rtol=1e-5, atol=2e-5) for one, other in pairs)


@functools.cache
def gates_run(device: torch.device) -> bool:
    """Whether the kernels that make a gate's numbers run on a device, and make the right ones."""

    def trial() -> bool:
        generator = torch.Generator().manual_seed(0)
        halves = torch.randn(130, 150, generator=generator).to(device)
        return all(_is_right(halves, gate, function) for gate, function in _FUNCTIONS.items())

    return has_triton() and may_run("gate", trial)
