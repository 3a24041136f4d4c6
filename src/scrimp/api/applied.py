"""The planned layers of any model: where they are kept, and those that are planned only while they are measured."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from scrimp.api.modules import Layers, choose_layers, default_layers, named_layers, unwrap
from scrimp.errors import ModelError, PlanError
from scrimp.gemm import LinearPrecision, PlannedModel, compute_dtype, swap_in, weight_matrix
from scrimp.gemm.problem import DTYPE_NAMES
from scrimp.models.layers import layers_of
from scrimp.profiler import resolve_device
from scrimp.world import World

_PLANNED = "_scrimp_planned"
"""Attribute of a model; no part of its state dict."""


def put_in_force(
    model: nn.Module, precisions: Mapping[str, LinearPrecision], *, seed: int = 0
) -> PlannedModel:
    """Give an unwrapped model's layers these precisions; the first time, or again to the same layers.

    Every GEMM that changes is proven when it runs next, on all ranks alike.
    """
    are_several = World.current().size > 1
    planned = planned_of(model)
    if planned is None:
        planned = swap_in(model, precisions, seed=seed)
        setattr(model, _PLANNED, planned)
        planned.prove({}, on_all_ranks=are_several)
        return planned
    odd = sorted(set(precisions) ^ set(planned.layers))
    if odd:
        raise PlanError(
            "the plan is not of the layers that the model runs by a plan now",
            got=f"in one of them only: {', '.join(map(repr, odd[:8]))}" + (", ..." if len(odd) > 8 else ""),
            do="call swap_out of the PlannedModel that apply gave, then apply this plan",
        )
    before = {name: layer.precision for name, layer in planned.layers.items()}
    planned.replan(precisions)
    planned.prove(before, on_all_ranks=are_several)
    return planned


def planned_of(model: nn.Module) -> PlannedModel | None:
    """What `apply` has given a model; None for a plain one, or one that was swapped out again."""
    planned = vars(unwrap(model)).get(_PLANNED)
    return planned if isinstance(planned, PlannedModel) and planned.layers else None


def device_name(model: nn.Module, weight: Tensor | None = None) -> str:
    """Name of the device of a weight, else of the model's first linear layer, as plans have it."""
    weight = weight_matrix(next(iter(layers_of(model).linears.values()))) if weight is None else weight
    return resolve_device(str(weight.device)).name


@contextlib.contextmanager
def measurable(
    model: nn.Module, layers: Layers, trained: Callable[[Tensor], bool]
) -> Iterator[tuple[PlannedModel, tuple[str, ...]]]:
    """The planned layers of a model, swapped in for a while where it has none, and those to measure."""
    planned = planned_of(model)
    wanted = None if layers is None else named_layers(model, layers)
    if planned is not None:
        _refuse_untrained(model, wanted or tuple(planned.layers), trained)
        yield planned, wanted or tuple(planned.layers)
        return
    if wanted is None:
        wanted = others = default_layers(model, trained)
    else:
        _refuse_untrained(model, wanted, trained)
        # The residual stream is found only where all its layers are watched: all are planned for a while.
        others = choose_layers(model, trained).layers
    planned = swap_in(model, dict.fromkeys((*others, *wanted), LinearPrecision.of("bf16")))
    try:
        yield planned, wanted
    finally:
        planned.swap_out()


def _refuse_untrained(model: nn.Module, layers: Sequence[str], trained: Callable[[Tensor], bool]) -> None:
    linears = layers_of(model).linears
    frozen = [name for name in layers if not trained(cast(Tensor, linears[name].weight))]
    if frozen:
        raise ModelError(
            "layers to measure are not trained by this optimizer",
            got=", ".join(map(repr, frozen[:8])) + (", ..." if len(frozen) > 8 else ""),
            do="leave them out: name the others with layers=",
        )


def compute_of(
    model: nn.Module, planned: PlannedModel, names: Sequence[str], forward: Callable[[], object]
) -> str:
    """The type that the layers compute in, from one forward pass."""
    modules, found = dict(model.named_modules()), dict[str, torch.dtype]()

    def watch(name: str) -> Callable[[nn.Module, tuple[Tensor, ...]], None]:
        return lambda module, inputs: found.__setitem__(name, compute_dtype(inputs[0]))

    planned.replan(LinearPrecision.of("bf16"))
    model.train()
    with contextlib.ExitStack() as stack:
        for name in names:
            stack.callback(modules[name].register_forward_pre_hook(watch(name)).remove)
        forward()
    idle = [name for name in names if name not in found]
    if idle:
        raise ModelError(
            "layers take no part in the loss",
            got=", ".join(map(repr, idle[:8])),
            do="leave them out: name the others with layers=",
        )
    types = {DTYPE_NAMES[dtype] for dtype in found.values()}
    if len(types) > 1:
        bf16 = [name for name, dtype in found.items() if dtype == torch.bfloat16]
        raise ModelError(
            "the layers to plan compute in two types",
            got=f"bf16 in {', '.join(bf16[:4])} and others, fp32 in the rest",
            expected="one compute type",
            do="measure and plan those of one type: layers=",
        )
    return types.pop()
