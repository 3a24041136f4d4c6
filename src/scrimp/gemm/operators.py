"""The planned GEMMs as two opaque operators, so that a compiled graph does not contain the plan.

Problem  torch.compile specialises on every Python value that it meets. A recipe per GEMM and layer would
         make a graph for each combination, and a re-plan a storm of recompilation.
Method   A layer is a number in an int64 tensor on the CPU: to the graph an input like any other. While the operator
         runs it looks the layer up in a table, and takes the recipes that the plan has now. Saved codes travel
         as one byte tensor, see storage.py.
Limits   No fusion into the GEMMs' neighbours, but of a gate into what quantizes its result (`gated_products`).
Checked  tests/gemm/test_compile.py: no graph breaks, numbers equal to eager, no recompilation.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.formats import QuantizedTensor
from scrimp.gemm.deferred import Deferred, Gate, Matrix
from scrimp.gemm.layer import PlannedLayer, backward, forward, layer_of, store_input
from scrimp.gemm.problem import DTYPE_NAMES, high_precision
from scrimp.gemm.storage import CODES, RECOMPUTED, saved_class, unpack
from scrimp.gemm.weight_sums import WeightSum, sum_of
from scrimp.precision import capacity

Now = tuple[int, int]
"""Reading of a layer's clock."""


def run_forward(
    x: Tensor, weight: Tensor, layer: PlannedLayer, now: Now, compute: torch.dtype, packed: Tensor, gate: str
) -> Tensor:
    """Y, and in `packed` the codes of X, if it has room for any.

    Args:
        gate: x holds gate and up, and X is what this gate makes of them; "": it is X.
    """
    room = None
    if packed.numel():
        room = unpack(packed, layer.precision.saved, (x.shape[0], weight.shape[1]))
    source = Deferred(x, cast(Gate, gate)) if gate else x
    with torch.autocast(x.device.type, enabled=False):
        return forward(source, weight, layer, compute, keep_codes=room is not None, now=now, room=room)[0]


def run_backward(
    g: Tensor,
    x: Tensor,
    packed: Tensor,
    weight: Tensor,
    layer: PlannedLayer,
    now: Now,
    compute: torch.dtype,
    *,
    needs_x: bool,
    needs_weight: bool,
    total: WeightSum | None,
    gate: str = "",
    halves: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dX and dW; an empty tensor for what is not needed, and for dW where it is added to a sum.

    Args:
        gate: without `halves` x holds gate and up, as of `run_forward`, if there are no codes of X.
        halves: what the layer made of X; g is then the gradient of what the gate makes of it.
    """
    source: Matrix = g if halves is None else Deferred(halves, cast(Gate, gate), g)
    saved: Matrix | QuantizedTensor = x
    if packed.numel():
        saved = unpack(packed, layer.precision.saved, (g.shape[0], weight.shape[1]))
    elif needs_weight:
        is_gated = gate and halves is None
        saved = _not_kept(Deferred(x, cast(Gate, gate)) if is_gated else x, weight, layer, compute, now)
    with torch.autocast(g.device.type, enabled=False):
        grad_x, grad_weight = backward(
            source,
            saved,
            weight,
            layer,
            compute,
            now,
            needs_x=needs_x,
            needs_weight=needs_weight,
            total=total,
        )
    nothing = g.new_empty(0)
    return nothing if grad_x is None else grad_x, nothing.clone() if grad_weight is None else grad_weight


def _not_kept(
    x: Matrix, weight: Tensor, layer: PlannedLayer, compute: torch.dtype, now: Now
) -> Matrix | QuantizedTensor:
    """An input of which no codes were kept: as the plan would have saved it, in others than wgrad's."""
    saved = layer.precision.saved
    if saved_class(saved) == CODES and saved != layer.precision.wgrad:
        return store_input(x, weight, layer, compute, now=now)
    return x


@torch.library.custom_op("scrimp::planned_forward", mutates_args=())
def planned_forward(
    x: Tensor, weight: Tensor, handle: Tensor, now: Tensor, compute: torch.dtype, kind: str
) -> tuple[Tensor, Tensor]:
    """Y, and the packed codes of X (empty without)."""
    step, first_row = now.tolist()
    packed = _room(x, weight, kind)
    return run_forward(x, weight, layer_of(handle), (step, first_row), compute, packed, ""), packed


@planned_forward.register_fake
def _(
    x: Tensor, weight: Tensor, handle: Tensor, now: Tensor, compute: torch.dtype, kind: str
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0], dtype=compute), _room(x, weight, kind)


@torch.library.custom_op("scrimp::gated_forward", mutates_args=())
def gated_forward(
    halves: Tensor, weight: Tensor, handle: Tensor, now: Tensor, compute: torch.dtype, kind: str, gate: str
) -> tuple[Tensor, Tensor]:
    """The same of what a gate makes. An operator of its own, so that regions that are made again can leave it out."""
    step, first_row = now.tolist()
    packed = _room(halves, weight, kind)
    return run_forward(halves, weight, layer_of(handle), (step, first_row), compute, packed, gate), packed


@gated_forward.register_fake
def _(
    halves: Tensor, weight: Tensor, handle: Tensor, now: Tensor, compute: torch.dtype, kind: str, gate: str
) -> tuple[Tensor, Tensor]:
    return halves.new_empty(halves.shape[0], weight.shape[0], dtype=compute), _room(halves, weight, kind)


def _room(x: Tensor, weight: Tensor, kind: str) -> Tensor:
    num_bytes = capacity(x.shape[0], weight.shape[1]) if kind == CODES else 0
    return x.new_empty(num_bytes, dtype=torch.uint8)


def gradients(
    g: Tensor,
    x: Tensor,
    packed: Tensor,
    weight: Tensor,
    handle: Tensor,
    now: Tensor,
    compute: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
    total: Tensor | None,
    gate: str = "",
    halves: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """dX and dW, as of `run_backward`; `total` is the handle of a sum."""
    step, first_row = now.tolist()
    return run_backward(
        g.contiguous(),
        x,
        packed,
        weight,
        layer_of(handle),
        (step, first_row),
        compute,
        needs_x=needs_x,
        needs_weight=needs_weight,
        total=None if total is None else sum_of(total),
        gate=gate,
        halves=halves,
    )


planned_backward = torch.library.custom_op("scrimp::planned_backward", gradients, mutates_args=())


@planned_backward.register_fake
def _(
    g: Tensor,
    x: Tensor,
    packed: Tensor,
    weight: Tensor,
    handle: Tensor,
    now: Tensor,
    compute: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
    total: Tensor | None,
    gate: str = "",
    halves: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    grad_x = g.new_empty(g.shape[0], weight.shape[1], dtype=compute) if needs_x else g.new_empty(0)
    return grad_x, torch.empty_like(weight) if needs_weight and total is None else g.new_empty(0)


class CompiledLinear(torch.autograd.Function):
    """The autograd function of a planned layer inside a compiled graph."""

    @staticmethod
    def forward(
        ctx: Any,
        made_again: bool,
        x: Tensor,
        weight: Tensor,
        layer: PlannedLayer,
        compute: torch.dtype,
        needs_grad: bool,
        total: WeightSum | None,
    ) -> Tensor:
        saves = needs_grad and weight.requires_grad
        kind = layer.saved_class if saves else RECOMPUTED
        if made_again and kind == CODES:
            kind = DTYPE_NAMES[compute]  # the graph keeps nothing of it
        now = layer.clock.reading
        y, packed = planned_forward(x, weight, layer.handle, now, compute, kind)
        kept = x.new_empty(0)
        if kind != CODES:
            # Bytes of its own: a graph that kept the operator's would run the product again for them.
            packed = x.new_empty(0, dtype=torch.uint8)
            kept = x.to(high_precision(kind, compute)) if saves else kept
        handles = [] if total is None else [total.handle]
        ctx.save_for_backward(kept, packed, weight, layer.handle, now, *handles)
        ctx.compute, ctx.input_dtype = compute, x.dtype
        return cast(Tensor, y)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kept, packed, weight, handle, now, *totals = ctx.saved_tensors
        total = totals[0] if totals else None
        needs_x, needs_weight = ctx.needs_input_grad[1:3]
        grad_x, grad_weight = planned_backward(
            g, kept, packed, weight, handle, now, ctx.compute, needs_x, needs_weight, total
        )
        return (
            None,
            grad_x.to(ctx.input_dtype) if needs_x else None,
            grad_weight if needs_weight and total is None else None,
            None,
            None,
            None,
            None,
        )
