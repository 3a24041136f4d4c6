"""The planned GEMMs as two opaque operators, so that a compiled graph does not contain the plan.

Problem  torch.compile specialises on every Python value that it meets. A recipe per GEMM and layer would
         make a graph for each combination, and a re-plan a storm of recompilation.
Method   A layer is a number in an int64 tensor on the CPU: to the graph an input like any other. While the operator
         runs it looks the layer up in a table, and takes the recipes that the plan has now. Saved codes travel
         as one byte tensor, see storage.py.
Limits   No fusion into the GEMMs' neighbours; quantization is fused by Scrimp's own kernels instead.
Checked  tests/gemm/test_compile.py: no graph breaks, numbers equal to eager, no recompilation.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.formats import QuantizedTensor
from scrimp.gemm.layer import PlannedLayer, backward, forward, layer_of
from scrimp.gemm.problem import high_precision
from scrimp.gemm.storage import CODES, RECOMPUTED, unpack
from scrimp.gemm.weight_sums import WeightSum, sum_of
from scrimp.precision import capacity


@torch.library.custom_op("scrimp::planned_forward", mutates_args=())
def planned_forward(
    x: Tensor, weight: Tensor, handle: Tensor, now: Tensor, compute: torch.dtype, kind: str
) -> tuple[Tensor, Tensor]:
    """Y, and the packed codes of X (empty without)."""
    layer = layer_of(handle)
    step, first_row = now.tolist()
    room, packed = None, x.new_empty(_num_bytes(x, kind), dtype=torch.uint8)
    if kind == CODES:
        room = unpack(packed, layer.precision.saved, (x.shape[0], x.shape[1]))
    with torch.autocast(x.device.type, enabled=False):
        y, _ = forward(
            x, weight, layer, compute, keep_codes=room is not None, now=(step, first_row), room=room
        )
    return y, packed


def _num_bytes(x: Tensor, kind: str) -> int:
    return capacity(x.shape[0], x.shape[1]) if kind == CODES else 0


@planned_forward.register_fake
def _(
    x: Tensor, weight: Tensor, handle: Tensor, now: Tensor, compute: torch.dtype, kind: str
) -> tuple[Tensor, Tensor]:
    y = x.new_empty(x.shape[0], weight.shape[0], dtype=compute)
    return y, x.new_empty(_num_bytes(x, kind), dtype=torch.uint8)


@torch.library.custom_op("scrimp::planned_backward", mutates_args=())
def planned_backward(
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
) -> tuple[Tensor, Tensor]:
    """dX and dW; an empty tensor for what is not needed, and for dW where it is added to the sum of a handle."""
    layer = layer_of(handle)
    saved: Tensor | QuantizedTensor = x
    if packed.numel():
        saved = unpack(packed, layer.precision.saved, (g.shape[0], weight.shape[1]))
    step, first_row = now.tolist()
    with torch.autocast(g.device.type, enabled=False):
        grad_x, grad_weight = backward(
            g.contiguous(),
            saved,
            weight,
            layer,
            compute,
            (step, first_row),
            needs_x=needs_x,
            needs_weight=needs_weight,
            total=None if total is None else sum_of(total),
        )
    nothing = g.new_empty(0)
    return nothing if grad_x is None else grad_x, nothing.clone() if grad_weight is None else grad_weight


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
) -> tuple[Tensor, Tensor]:
    grad_x = g.new_empty(g.shape[0], weight.shape[1], dtype=compute) if needs_x else g.new_empty(0)
    return grad_x, torch.empty_like(weight) if needs_weight and total is None else g.new_empty(0)


class CompiledLinear(torch.autograd.Function):
    """The autograd function of a planned layer inside a compiled graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        layer: PlannedLayer,
        compute: torch.dtype,
        needs_grad: bool,
        total: WeightSum | None,
    ) -> Tensor:
        saves = needs_grad and weight.requires_grad
        kind = layer.saved_class if saves else RECOMPUTED
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
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x, grad_weight = planned_backward(
            g, kept, packed, weight, handle, now, ctx.compute, needs_x, needs_weight, total
        )
        return (
            grad_x.to(ctx.input_dtype) if needs_x else None,
            grad_weight if needs_weight and total is None else None,
            None,
            None,
            None,
            None,
        )
