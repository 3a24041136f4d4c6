"""PlannedLinear: a linear layer whose three GEMMs each run in their own format.

One autograd function serves every plan: forward runs fprop and keeps what the plan saves (the
input, its codes, or nothing where it is recomputed), backward runs dgrad and wgrad. A layer
that a plan leaves in the compute format takes torch's own path, bit for bit.

Compiled   Under torch.compile the GEMMs are one opaque operator per direction, whose recipes are looked up while it
           runs. So a graph does not know the plan: equal blocks share it, and a new plan compiles
           nothing. Only a change of what is saved (the input, codes of any recipe, nothing) makes another graph.
Types      The result has the compute type: autocast's where it is on, else the input's. The
           weight is cast for each product; no cast copy outlives it.
Parameters stay plain: nothing quantized enters a state dict.
Checked    tests/gemm/test_linear.py, tests/gemm/test_compile.py
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from scrimp.errors import DeviceError, ModelError, PlanError
from scrimp.formats import QuantizedTensor
from scrimp.gemm import operators
from scrimp.gemm.factored import FactoredLinear
from scrimp.gemm.layer import PlannedLayer, backward, forward, store_input
from scrimp.gemm.observe import is_plain_observed
from scrimp.gemm.problem import DTYPE_NAMES, compute_dtype, high_precision
from scrimp.gemm.recompute import Operators, is_handled, only_saves, run_again
from scrimp.gemm.storage import CODES, RECOMPUTED
from scrimp.gemm.summed_linear import summed_linear
from scrimp.gemm.weight_gradients import make_later
from scrimp.gemm.weight_sums import WeightSum, sum_for
from scrimp.precision import HIGH_PRECISION, RECOMPUTE


class PlannedLinear(nn.Linear):
    """A linear layer that runs by a plan. `scrimp.gemm.swap_in` makes one of any linear layer."""

    planned: PlannedLayer

    def forward(self, x: Tensor, *, made_again: bool = False) -> Tensor:
        """x W^T + bias, x of any leading shape.

        Args:
            made_again: the graph makes x again in backward, so that no codes of it need be kept.
        """
        if "planned" not in self.__dict__:
            raise ModelError(
                "a PlannedLinear has no plan", do="make an nn.Linear and give it one with scrimp.gemm.swap_in"
            )
        return planned_linear(x, self.weight, self.bias, self.planned, made_again=made_again)


class PlannedTransposed(nn.Module):
    """A linear layer that keeps its weight as [I, O] (transformers' Conv1D) and runs by a plan."""

    planned: PlannedLayer
    weight: Tensor
    bias: Tensor

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.weight.shape[0]

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.weight.shape[1]

    def forward(self, x: Tensor) -> Tensor:
        """x W + bias, x of any leading shape."""
        if hasattr(self.weight, "device_mesh"):
            raise ModelError(
                f"{self.planned.name}: a transposed weight is not run tensor-parallel by a plan",
                got="a DTensor in the forward pass",
                do="leave the layer out of the plan, or shard it with FSDP only",
            )
        if not torch.compiler.is_compiling() and runs_plain(x, self.planned):
            return cast(Tensor, super().forward(x))
        return planned_linear(x, self.weight.t(), self.bias, self.planned)


def runs_plain(x: Tensor, layer: PlannedLayer) -> bool:
    """Whether an eager layer may take torch's own path: no GEMM is planned otherwise, and nobody observes."""
    return layer.is_plain(DTYPE_NAMES.get(compute_dtype(x), "")) and not is_plain_observed()


def planned_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    layer: PlannedLayer,
    *,
    splits: bool = False,
    made_again: bool = False,
) -> Tensor:
    """x W^T + bias by a layer's plan.

    Args:
        x: [..., I], float32 or bfloat16 (under autocast any of the two).
        weight: [O, I], a parameter.
        bias: [O] or None.
        splits: whether the gradient of the weight may wait (`scrimp.gemm.weight_gradients`); x must need one.
        made_again: as of `PlannedLinear.forward`.

    Raises:
        ModelError, DeviceError: shapes, types or devices that do not belong together.
    """
    if hasattr(weight, "device_mesh"):  # a DTensor, whose module takes a third of a second to import
        from scrimp.gemm.tensor_parallel import sharded_linear

        return sharded_linear(x, cast(Any, weight), bias, layer, planned_linear)
    compute = checked_compute(x, weight, bias, layer)
    is_compiling = torch.compiler.is_compiling()
    if not is_compiling and runs_plain(x, layer):
        return summed_linear(x, weight, bias, layer)
    needs_grad = torch.is_grad_enabled()
    total = None if splits else sum_for(weight, x)
    matrix = x[None] if x.dim() == 1 else x.flatten(0, -2)
    # In a tuple: of an input without a gradient autograd would call the weight's hooks all the same.
    arguments = matrix, (weight,) if splits else weight, layer, compute, needs_grad, total
    apply = partial(operators.CompiledLinear.apply, made_again) if is_compiling else _Linear.apply
    y = cast(Tensor, apply(*arguments))  # type: ignore[no-untyped-call]
    if bias is not None:
        y = y + bias.to(compute)
    return y.view(*x.shape[:-1], weight.shape[0])


def checked_compute(x: Tensor, weight: Tensor, bias: Tensor | None, layer: PlannedLayer) -> torch.dtype:
    """The type that a layer computes in, if its tensors belong together; errors as of `planned_linear`."""
    _check_devices(x, weight, bias, layer)
    compute = compute_dtype(x)
    _check(x, weight, layer, compute)
    return compute


def run_again_before(
    last: nn.Module, function: Callable[..., Tensor], *inputs: Tensor, keeps: Operators = ()
) -> Tensor:
    """last(function(*inputs)), of which backward finds the inputs kept and runs the function again.

    Args:
        last: linear layer.
        keeps: as of `run_again`.
    """
    if isinstance(last, FactoredLinear):
        return cast(Tensor, last.B(run_again_before(last.A, function, *inputs, keeps=keeps)))
    planned = getattr(last, "planned", None)
    keeps_codes = planned is not None and planned.saved_class == CODES
    if torch.compiler.is_compiling() and (not keeps_codes or _drops_codes(last)):
        return of_made_again(last, run_again(function, *inputs, last=None, keeps=keeps))

    def both(*again: Tensor) -> Tensor:
        return cast(Tensor, last(function(*again)))

    return run_again(both, *inputs, last=last, keeps=keeps)


def of_made_again(layer: nn.Module, x: Tensor) -> Tensor:
    """layer(x), where a compiled graph makes x again."""
    if isinstance(layer, FactoredLinear):
        return of_made_again(layer.B, layer.A(x))
    return cast(Tensor, layer(x, made_again=True) if _drops_codes(layer) else layer(x))


def _drops_codes(layer: nn.Module) -> bool:
    """Whether a layer can be told that its input is made again."""
    is_own = isinstance(layer, PlannedLinear) and "forward" not in vars(layer)
    return is_own and not hasattr(layer.weight, "device_mesh")


def recomputed(
    linear: nn.Module, producer: Callable[..., Tensor], *inputs: Tensor, always: bool = False
) -> Tensor:
    """linear(producer(*inputs)), where the plan may drop the product and make it again in backward.

    Args:
        linear: planned or not; `saved: recompute` of its plan asks for it.
        producer: cheap and without randomness, a norm or SwiGLU; its inputs are kept.
        always: whatever the layer's plan saves.
    """
    if isinstance(linear, FactoredLinear):
        return cast(Tensor, linear.B(recomputed(linear.A, producer, *inputs, always=always)))
    planned = getattr(linear, "planned", None)
    if not always and (planned is None or planned.saved_class != RECOMPUTED):
        return cast(Tensor, linear(producer(*inputs)))

    return run_again_before(linear, producer, *inputs)


class _Linear(torch.autograd.Function):
    """The GEMMs of one layer on matrices, by its plan."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        given: Tensor | tuple[Tensor],
        layer: PlannedLayer,
        compute: torch.dtype,
        needs_grad: bool,
        total: WeightSum | None,
    ) -> Tensor:
        splits = isinstance(given, tuple)
        weight = given[0] if isinstance(given, tuple) else given
        # The parameter itself, which what is saved and made again is not.
        ctx.split_weight = weight if splits else None
        saves = needs_grad and (splits or ctx.needs_input_grad[1])
        keeps_codes = saves and layer.precision.saved not in (*HIGH_PRECISION, RECOMPUTE)
        codes: QuantizedTensor | None = None
        if saves and layer.saved_class == RECOMPUTED and not is_handled(layer):
            raise PlanError(
                f"{layer.name} is planned to recompute its input, and nothing tells it how",
                expected="a call through scrimp.gemm.recomputed(layer, producer, *inputs), as Scrimp's own blocks make",
                do=f"add {layer.name}.saved=bf16 to the precision, or call it so",
            )
        with torch.autocast(x.device.type, enabled=False):  # each product has its own type
            if only_saves(layer):
                y = x.new_empty(len(x), len(weight), dtype=compute)
                codes = store_input(x, weight, layer, compute) if keeps_codes else None
            else:
                y, codes = forward(x, weight, layer, compute, keep_codes=keeps_codes)
        ctx.layer, ctx.compute, ctx.now, ctx.total = layer, compute, layer.clock.now, total
        ctx.input_dtype = x.dtype
        ctx.codes_like = None if codes is None else codes.without_tensors()
        kept: list[Tensor | None] = [None if splits else weight]
        if codes is not None:
            kept += [codes.payload, codes.scales, codes.tensor_scale]
        elif saves:
            kept.append(x.to(high_precision(layer.precision.saved, compute)))
        ctx.save_for_backward(*kept)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        weight, *saved = ctx.saved_tensors
        weight = weight if ctx.split_weight is None else ctx.split_weight
        x: Tensor | QuantizedTensor | None = saved[0] if saved else None
        if ctx.codes_like is not None:
            x = ctx.codes_like.with_tensors(*saved)
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        operands = g.contiguous(), x, weight, ctx.layer, ctx.compute, ctx.now

        def gradients(needs_x: bool, needs_weight: bool) -> tuple[Tensor | None, Tensor | None]:
            with torch.autocast(g.device.type, enabled=False):
                return backward(*operands, needs_x=needs_x, needs_weight=needs_weight, total=ctx.total)

        grad_x, grad_weight = gradients(needs_x, needs_weight)
        if ctx.split_weight is not None:
            make_later(weight, lambda: cast(Tensor, gradients(False, True)[1]))
        return None if grad_x is None else grad_x.to(ctx.input_dtype), grad_weight, None, None, None, None


def _check_devices(x: Tensor, weight: Tensor, bias: Tensor | None, layer: PlannedLayer) -> None:
    if x.device != weight.device or (bias is not None and bias.device != weight.device):
        found = f"input on {x.device}, weight on {weight.device}"
        found += "" if bias is None else f", bias on {bias.device}"
        raise DeviceError(f"{layer.name}: its tensors are on different devices", got=found)


def _check(x: Tensor, weight: Tensor, layer: PlannedLayer, compute: torch.dtype) -> None:
    if x.dim() == 0 or x.shape[-1] != weight.shape[1]:
        raise ModelError(
            f"{layer.name}: the input does not fit the weight",
            got=f"{tuple(x.shape)}",
            expected=f"(..., {weight.shape[1]})",
        )
    if compute not in DTYPE_NAMES or not (x.is_floating_point() and weight.is_floating_point()):
        raise ModelError(
            f"{layer.name}: planned layers compute in float32 or bfloat16",
            got=f"{x.dtype} input, {weight.dtype} weight, computing in {compute}",
            do="cast the model, or run it under torch.autocast(..., torch.bfloat16)",
        )
    if x.dtype != weight.dtype and not torch.is_autocast_enabled(x.device.type):
        raise ModelError(
            f"{layer.name}: input and weight have different types",
            got=f"{x.dtype} and {weight.dtype}",
            expected="one type, or autocast",
        )
