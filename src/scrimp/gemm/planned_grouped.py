"""Grouped layers whose products run by a plan: every expert quantized as if it were a layer of its own.

Method   A grouped layer has one plan, and for each expert a member (`PlannedLayer.members`) with the same formats and a
         name of its own, ``blocks.0.mlp.experts.down.3``: scales span one expert's matrix or tokens and no other's, and
         rounding noise has the expert's address. The three products are a loop over the experts that have tokens::

             for each run e:  forward(X[run e], W_e, member e), backward(G[run e], X[run e], W_e, member e)

         bit for bit what E planned linear layers would do.
Saved    Codes of each run, where the plan saves codes. In a compiled graph the input in the compute type instead, of
         which backward makes the codes: the same numbers, and more memory; a graph cannot know the sizes of runs.
Proofs   Watchers are told of the first run of a pass alone: how many there are, the tokens decide.
Ranks    may share experts: members are named by the experts' numbers among all, and run on pieces as other layers do
         (`scrimp.runtime.pieces`).
Limits   Run lengths are read by the host: on a GPU each product waits for the router. A trace without data takes all
         tokens as one run, the most that a product can take. No part of a DTensor.
Checked  tests/gemm/test_grouped.py
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from scrimp.errors import PlanError
from scrimp.formats import QuantizedTensor
from scrimp.gemm.grouped import GroupedLinear, runs
from scrimp.gemm.layer import PlannedLayer, backward, forward, layer_of, store_input
from scrimp.gemm.linear import runs_plain
from scrimp.gemm.problem import compute_dtype, high_precision
from scrimp.gemm.recompute import is_handled, only_saves
from scrimp.gemm.storage import RECOMPUTED
from scrimp.gemm.weight_gradients import make_later
from scrimp.precision import HIGH_PRECISION, RECOMPUTE

Codes = QuantizedTensor | None


class PlannedGrouped(GroupedLinear):
    """A grouped layer that runs by a plan. `scrimp.gemm.swap_in` makes one of any."""

    planned: PlannedLayer

    def forward(self, x_AI: Tensor, ends_E: Tensor) -> Tensor:
        """y_AO, as of `GroupedLinear`."""
        is_compiling = torch.compiler.is_compiling()
        if not is_compiling and runs_plain(x_AI, self.planned):
            return super().forward(x_AI, ends_E)
        self.check(x_AI, ends_E)
        function = _CompiledGroups if is_compiling else _Groups
        compute, needs_grad = compute_dtype(x_AI), torch.is_grad_enabled()
        weight = (self.weight,) if self.splits else self.weight
        found = function.apply(x_AI, weight, ends_E, self.planned, compute, needs_grad)  # type: ignore[no-untyped-call]
        return cast(Tensor, found)


def members_of(layer: PlannedLayer, experts: int) -> tuple[PlannedLayer, ...]:
    """A plan for each expert of a layer."""
    return tuple(
        PlannedLayer(f"{layer.name}.{expert}", layer.precision, layer.clock, layer.choose, group=layer)
        for expert in range(experts)
    )


def _each(
    layer: PlannedLayer, weight: Tensor, ends: Tensor, tokens: int
) -> Iterator[tuple[PlannedLayer, int, Tensor, slice]]:
    """Plan, number here, matrix and rows of each expert that has tokens."""
    matrices = weight.view(len(ends), -1, weight.shape[1])
    for number, (expert, rows) in enumerate(runs(ends, tokens)):
        member = layer.members[expert]
        member.run, member.clock = number, layer.clock
        yield member, expert, matrices[expert], rows


class _Groups(torch.autograd.Function):
    """The products of one layer, by its plan."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        given: Tensor | tuple[Tensor],
        ends: Tensor,
        layer: PlannedLayer,
        compute: torch.dtype,
        needs_grad: bool,
    ) -> Tensor:
        splits = isinstance(given, tuple)
        weight = given[0] if isinstance(given, tuple) else given
        ctx.split_weight = weight if splits else None
        saves = needs_grad and (splits or ctx.needs_input_grad[1])
        keeps_codes = saves and layer.precision.saved not in (*HIGH_PRECISION, RECOMPUTE)
        if saves and layer.saved_class == RECOMPUTED and not is_handled(layer):
            raise PlanError(
                f"{layer.name} is planned to recompute its input, and nothing tells it how",
                expected="a call through scrimp.gemm.grouped.regrouped, as Scrimp's own blocks make",
                do=f"add {layer.name}.saved=bf16 to the precision, or call it so",
            )
        found: list[Codes] = []
        y = x.new_zeros(len(x), len(weight) // len(ends), dtype=compute)
        with torch.autocast(x.device.type, enabled=False):
            for member, _, matrix, rows in _each(layer, weight, ends, len(x)):
                if only_saves(layer):
                    codes = store_input(x[rows], matrix, member, compute) if keeps_codes else None
                else:
                    y[rows], codes = forward(x[rows], matrix, member, compute, keep_codes=keeps_codes)
                found.append(codes)
        ctx.layer, ctx.compute, ctx.now, ctx.input_dtype = layer, compute, layer.clock.now, x.dtype
        ctx.codes_like = [None if codes is None else codes.without_tensors() for codes in found]
        kept = [x.to(high_precision(layer.precision.saved, compute))] if saves and not keeps_codes else []
        tensors = [t for codes in found for t in (() if codes is None else _tensors(codes))]
        ctx.save_for_backward(None if splits else weight, ends, *kept, *tensors)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, ends, *saved = ctx.saved_tensors
        weight = weight if ctx.split_weight is None else ctx.split_weight
        inputs: list[Tensor | QuantizedTensor | None]
        if any(like is not None for like in ctx.codes_like):
            parts = iter(saved)
            inputs = [like.with_tensors(*(next(parts) for _ in range(3))) for like in ctx.codes_like]
        else:
            inputs = [saved[0][rows] if saved else None for _, rows in runs(ends, len(g))]
        operands = g, inputs, weight, ends, ctx.layer, ctx.compute, ctx.now
        grad_x, grad_weight = _gradients(*operands, ctx.needs_input_grad[:2])
        if ctx.split_weight is not None:
            make_later(weight, lambda: cast(Tensor, _gradients(*operands, (False, True))[1]))
        return None if grad_x is None else grad_x.to(ctx.input_dtype), grad_weight, None, None, None, None


def _tensors(codes: QuantizedTensor) -> tuple[Tensor | None, ...]:
    return codes.payload, codes.scales, codes.tensor_scale


def _gradients(
    g: Tensor,
    inputs: list[Tensor | QuantizedTensor | None],
    weight: Tensor,
    ends: Tensor,
    layer: PlannedLayer,
    compute: torch.dtype,
    now: tuple[int, int],
    needs: tuple[bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """dX and dW of all runs."""
    needs_x, needs_weight = needs
    grad_x = g.new_zeros(len(g), weight.shape[1], dtype=compute) if needs_x else None
    grad_weight = torch.zeros_like(weight) if needs_weight else None
    g = g.contiguous()
    with torch.autocast(g.device.type, enabled=False):
        for (member, expert, matrix, rows), x in zip(_each(layer, weight, ends, len(g)), inputs, strict=True):
            dx, dw = backward(
                g[rows], x, matrix, member, compute, now, needs_x=needs_x, needs_weight=needs_weight
            )
            if grad_x is not None and dx is not None:
                grad_x[rows] = dx
            if grad_weight is not None and dw is not None:
                grad_weight[expert * len(matrix) : (expert + 1) * len(matrix)] = dw
    return grad_x, grad_weight


@torch.library.custom_op("scrimp::planned_groups", mutates_args=())
def planned_groups(
    x: Tensor, weight: Tensor, ends: Tensor, handle: Tensor, now: Tensor, compute: torch.dtype
) -> Tensor:
    """Y of all runs."""
    layer, (step, first_row) = layer_of(handle), now.tolist()
    y = x.new_zeros(len(x), len(weight) // len(ends), dtype=compute)
    with torch.autocast(x.device.type, enabled=False):
        for member, _, matrix, rows in _each(layer, weight, ends, len(x)):
            y[rows], _ = forward(x[rows], matrix, member, compute, keep_codes=False, now=(step, first_row))
    return y


@planned_groups.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor, handle: Tensor, now: Tensor, compute: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[0] // ends.shape[0], dtype=compute)


@torch.library.custom_op("scrimp::planned_groups_backward", mutates_args=())
def planned_groups_backward(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    handle: Tensor,
    now: Tensor,
    compute: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """dX and dW; an empty tensor for what is not needed."""
    layer, (step, first_row) = layer_of(handle), now.tolist()
    at, nothing = (step, first_row), g.new_empty(0)
    saves_codes = layer.precision.saved not in (*HIGH_PRECISION, RECOMPUTE)
    inputs: list[Tensor | QuantizedTensor | None] = []
    with torch.autocast(g.device.type, enabled=False):
        for member, _, matrix, rows in _each(layer, weight, ends, len(x)):
            made = saves_codes and needs_weight
            inputs.append(store_input(x[rows], matrix, member, compute, now=at) if made else x[rows])
    grad_x, grad_weight = _gradients(g, inputs, weight, ends, layer, compute, at, (needs_x, needs_weight))
    return nothing if grad_x is None else grad_x, nothing.clone() if grad_weight is None else grad_weight


@planned_groups_backward.register_fake
def _(
    g: Tensor,
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    handle: Tensor,
    now: Tensor,
    compute: torch.dtype,
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    grad_x = g.new_empty(g.shape[0], weight.shape[1], dtype=compute) if needs_x else g.new_empty(0)
    return grad_x, torch.empty_like(weight) if needs_weight else g.new_empty(0)


class _CompiledGroups(torch.autograd.Function):
    """The same inside a compiled graph."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        ends: Tensor,
        layer: PlannedLayer,
        compute: torch.dtype,
        needs_grad: bool,
    ) -> Tensor:
        now = layer.clock.reading
        kind = layer.saved_class
        kept = x.to(high_precision(kind, compute) if kind in HIGH_PRECISION else compute)
        ctx.save_for_backward(kept, weight, ends, layer.handle, now)
        ctx.compute, ctx.input_dtype = compute, x.dtype
        return cast(Tensor, planned_groups(x, weight, ends, layer.handle, now, compute))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        kept, weight, ends, handle, now = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        grad_x, grad_weight = planned_groups_backward(
            g, kept, weight, ends, handle, now, ctx.compute, needs_x, needs_weight
        )
        return (
            grad_x.to(ctx.input_dtype) if needs_x else None,
            grad_weight if needs_weight else None,
            None,
            None,
            None,
            None,
        )
