"""Forward and backward pass of one block, and of what is no block, with every byte between them counted.

A block stands in a chain: the residual stream comes out of an operation and goes into another, as in a model, so that
autograd treats it like any block's (a leaf, or a gradient that the caller holds, would count more). What
the chain adds are marks: where backward reaches the block and where it leaves it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from scrimp.gemm import PlannedLayer, StoredWeight
from scrimp.gemm.problem import high_precision
from scrimp.gemm.weight_operands import is_kept, weight_operand
from scrimp.models.model import Model
from scrimp.objectives import Objective
from scrimp.profiler.memory_trace.optimizer_memory import GradientSums
from scrimp.profiler.memory_trace.tracker import StorageTracker

Autocast = Callable[[], contextlib.AbstractContextManager[object]]
Block = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class BlockTrace:
    """Bytes of one block, as the fields of the same names of `scrimp.planner.memory.costs.BlockCost`."""

    kept: int
    cast: int
    forward_peak: int
    backward_peak: int


@dataclass(frozen=True)
class EndsTrace:
    """Bytes of embedding, final norm, head and loss, as the fields of `EndsCost`."""

    head_peak: int
    head_gradients: int
    embedding_peak: int


def planned_weights(block: nn.Module) -> Iterator[tuple[PlannedLayer, Tensor]]:
    """The layers of a block whose operands can be kept, with their weights: no experts, no codes of frozen weights."""
    for module in block.modules():
        layer, weight = getattr(module, "planned", None), cast(Tensor, getattr(module, "weight", None))
        if isinstance(layer, PlannedLayer) and not layer.members and not isinstance(weight, StoredWeight):
            yield layer, weight


def weight_operands(planned: Iterable[tuple[PlannedLayer, Tensor]], compute: torch.dtype) -> list[Any]:
    """What fprop and dgrad of layers keep of their weights over the micro-batches of a step."""
    found = []
    for layer, weight in planned:
        for gemm in ("fprop", "dgrad"):
            recipe, use = layer.precision.gemm(gemm), layer.uses(gemm, layer.clock.now)[1]
            if is_kept(use):
                backend = layer.backend(recipe, gemm, 1, weight)
                found.append(weight_operand(weight, high_precision(recipe, compute), backend, use))
    return found


@contextlib.contextmanager
def gradients_of(module: nn.Module, how: GradientSums, *, exist: bool) -> Iterator[None]:
    """Inside, gradients go where the optimizer wants them, and at the end they are freed.

    Args:
        exist: sums of earlier micro-batches are there.
    """
    sums: dict[nn.Parameter, Tensor] = {}

    def collect(parameter: nn.Parameter) -> None:
        gradient, parameter.grad = parameter.grad, None
        assert gradient is not None
        if parameter in sums:
            scratch = torch.empty(how.scratch(parameter), dtype=torch.uint8, device=gradient.device)
            sums[parameter] += gradient
            del scratch
        else:
            sums[parameter] = gradient.to(how.dtype)

    hooks = []
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    for parameter in trained:
        if how.dtype is not None:
            hooks.append(parameter.register_post_accumulate_grad_hook(collect))
        if exist and how.dtype is not None:
            sums[parameter] = torch.zeros_like(parameter, dtype=how.dtype)
        elif exist:
            parameter.grad = torch.zeros_like(parameter)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for parameter in trained:
            parameter.grad = None


def trace_block(block: Block, stream: Tensor, tracker: StorageTracker, autocast: Autocast) -> BlockTrace:
    """Trace one block, inside the tracker and `gradients_of`.

    Args:
        block: the residual stream after it, of the stream before it.
        stream: shape, type and device of the residual stream.
    """
    marks = _Marks(tracker)
    with autocast():
        x = _enter(marks, stream)
        before, boundary = tracker.live, tracker.live - marks.live["start"]
        tracker.reset_peak()
        x = block(x)
        with_casts, forward_peak = tracker.live, tracker.peak
    kept = tracker.live - before
    end = _leave(marks, x)
    del x
    torch.autograd.backward(end)  # the method would leave function modes (`stand_ins`) while it runs
    return BlockTrace(
        kept=kept,
        cast=with_casts - before - kept,
        forward_peak=forward_peak - before,
        backward_peak=marks.peak["block over"] - before - boundary,
    )


def trace_ends(
    model: Model,
    objective: Objective,
    tokens: Tensor,
    *,
    chunk: int,
    tracker: StorageTracker,
    autocast: Autocast,
) -> EndsTrace:
    """Trace what of a model is no block, and the loss that the objective makes of hidden states, inside the tracker
    and `gradients_of`."""
    marks, start = _Marks(tracker), tracker.live
    with autocast():
        x = model.embed(
            tokens
        ).requires_grad_()  # of a frozen embedding too: what blocks give the head needs one
        boundary = x.nbytes
        x.register_hook(lambda _: marks.set("head over"))
        hidden = model.finish(x)
        del x
        sums = objective.head_loss(model, hidden.flatten(0, 1), tokens.flatten(), chunk=chunk)
        del hidden
    torch.autograd.backward(sums.total / tokens.numel())
    head = marks.live["head over"]
    return EndsTrace(
        head_peak=marks.peak["head over"] - start - boundary,
        head_gradients=head - start - boundary,
        embedding_peak=tracker.peak - head,
    )


class _Marks:
    """Live bytes at named moments, and the peaks before each of them."""

    def __init__(self, tracker: StorageTracker) -> None:
        self._tracker = tracker
        self.live: Mapping[str, int] = {}
        self.peak: Mapping[str, int] = {}
        self.set("start")

    def set(self, name: str) -> None:
        self.live = {**self.live, name: self._tracker.live}
        self.peak = {**self.peak, name: self._tracker.peak}
        self._tracker.reset_peak()


def _enter(marks: _Marks, stream: Tensor) -> Tensor:
    leaf = stream.new_empty((), requires_grad=True)
    marks.set("start")
    return cast(Tensor, _Enter.apply(leaf, stream, marks))  # type: ignore[no-untyped-call]


class _Enter(torch.autograd.Function):
    """A residual stream out of nothing; in backward the gradient ends here."""

    @staticmethod
    def forward(ctx: Any, leaf: Tensor, stream: Tensor, marks: _Marks) -> Tensor:
        ctx.marks = marks
        return torch.empty_like(stream)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.marks.set("block over")
        return grad.new_empty(()), None, None


def _leave(marks: _Marks, x: Tensor) -> Tensor:
    return cast(Tensor, _Leave.apply(x, marks))  # type: ignore[no-untyped-call]


class _Leave(torch.autograd.Function):
    """A number of the residual stream; in backward the gradient begins here, and nobody but autograd holds it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, marks: _Marks) -> Tensor:
        ctx.like, ctx.marks = (x.shape, x.dtype, x.device), marks
        return x.new_empty(())

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        shape, dtype, device = ctx.like
        ctx.marks.set("block begins")
        return torch.empty(shape, dtype=dtype, device=device), None
