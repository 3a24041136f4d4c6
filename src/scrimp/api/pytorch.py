"""Scrimp in any PyTorch loop: measure a model in training, plan its formats, run by the plan.

::

    profile = scrimp.measure(model, optimizer, batches, loss)      a few batches; the run is left as it was
    plan = scrimp.plan(profile, 0.75)                              three quarters of the linear FLOPs in 4 bits
    scrimp.apply(model, plan)                                      now; again later, with another plan

Between two steps, wherever the loop likes. Names of layers are those of the model inside its wrappers.

State    `apply` keeps a `PlannedModel` in an attribute of the model, outside its state dict: parameters and their names
         are untouched, checkpoints do not change, and a deep copy of the model has a plan of its own. A loop
         that saves checkpoints keeps the plan beside them (`PrecisionPlan.write`) and applies it again.
Cost     Of `measure`, per batch: a forward and backward pass in the compute type that also quantizes every operand in
         every candidate; for the gains, about six passes more on the first batch, or with gains="exact" about four
         per layer, and one for each kind of layer. Beside gradients, one copy of the weights' gradients on the host.
Ranks    Under DistributedDataParallel, `fully_shard` and tensor parallel all ranks call these functions alike,
         each with its own rows of the batches, and with the model as the loop calls it. All get the same profile
         and make the same plan; `apply` refuses plans that differ. Limits: `scrimp.statistics.ranks`.
Checked  tests/api/test_pytorch.py, test_pytorch_plans.py, test_pytorch_refusals.py; examples/train_any_loop.py
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn

from scrimp.api.applied import compute_of, device_name, measurable, put_in_force
from scrimp.api.arguments import (
    FORMATS,
    budget_from,
    candidates_from,
    first_of,
    indices_of,
    optimizer_from,
    other_from,
    profile_from,
    refuse_other_types,
    seconds_from,
    stages_from,
    updates_of,
    view_of,
)
from scrimp.api.checks import checked_losses, refuse_other_device, refuse_other_model, refuse_other_ranks
from scrimp.api.modules import Layers, trained_by, unwrap
from scrimp.errors import PlanError
from scrimp.export.export_precision import ExportTarget, plan_for
from scrimp.gemm import LinearPrecision, PlannedModel, refuse_unrunnable, weight_matrix
from scrimp.models.layers import layers_of
from scrimp.planner.precision import Budget, PrecisionPlan, PrecisionProfile, Question, Weights
from scrimp.statistics import Ranks, Subject, collect, untouched

Loss = Callable[[nn.Module, Any], Tensor]
"""From the model and a batch to its mean loss, a scalar with its graph."""
Losses = Callable[[nn.Module, Any], Iterator[Tensor]]
"""From the model and a statistics batch to each micro-batch's share of the batch's mean loss."""

PROBE_TOKENS = 1024
"""Tokens of the GEMMs that a plan is tried with before it is applied."""


def measure(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    loss: Loss,
    *,
    formats: Sequence[str] = FORMATS,
    layers: Layers = None,
    gains: str = "auto",
    max_norm: float = 0.0,
    sensitivity: str = "auto",
    seed: int = 0,
) -> PrecisionProfile:
    """What each format would do to the loss and to the next update, GEMM by GEMM.

    Weights, optimizer, gradients, buffers and torch's random states are afterwards as they were.

    Args:
        model: plain, or run by a plan of `apply` already; may be compiled, and is then measured eagerly.
        optimizer: torch's AdamW, Adam or SGD, with the state that it has reached.
        batches: a few statistics batches, each what `loss` takes.
        loss: autocast inside it decides the compute type, bf16 or fp32.
        formats: candidate recipes.
        layers: names, or a predicate of name and layer; None: all that are planned already, else all
            trained ones but the head (`choose_layers`).
        gains: ratios, blocks or exact; auto: ratios where the model has a residual stream, else exact.
        max_norm: what the loop clips the gradient's norm to; 0: it does not.
        sensitivity: auto: by the optimizer's rule; gradient: of any optimizer, updates taken as
            proportional to gradients.
        seed: of the noise.

    Raises:
        ModelError: no linear layer, none that is trained, a layer that the loss does not use or whose forward
            another library has replaced, ranks that nothing joins.
        PlanError: arguments that do not fit together, an optimizer whose rule is not known.
        TrainingError: a loss that is not finite.
    """
    return measure_accumulated(
        model,
        optimizer,
        batches,
        lambda outer, batch: iter((loss(outer, batch),)),
        formats=formats,
        layers=layers,
        gains=gains,
        max_norm=max_norm,
        sensitivity=sensitivity,
        seed=seed,
    )


def measure_accumulated(
    model: nn.Module,
    optimizer: Any,
    batches: Iterable[Any],
    losses: Losses,
    *,
    formats: Sequence[str] = FORMATS,
    layers: Layers = None,
    gains: str = "auto",
    max_norm: float = 0.0,
    sensitivity: str = "auto",
    seed: int = 0,
) -> PrecisionProfile:
    """`measure` for loops that accumulate gradients: `losses` gives each micro-batch's share of the mean loss."""
    ranks = Ranks.of(model)
    inner, candidates = unwrap(model), candidates_from(formats)
    optimizer = optimizer_from(optimizer)
    view = view_of(optimizer, inner, sensitivity, max_norm)

    def checked(batch: Any) -> Iterator[Tensor]:
        return checked_losses(losses(model, batch))

    with measurable(inner, layers, trained_by(optimizer)) as (planned, names), untouched(inner, planned):
        first, rest = first_of(batches)
        subject = Subject(
            model=inner,
            planned=planned,
            optimizer=view,
            losses=checked,
            compute=compute_of(inner, planned, names, lambda: next(checked(first))),
            device_name=device_name(inner),
            step=updates_of(optimizer),
        )
        every = itertools.chain((first,), rest)
        return collect(subject, every, candidates, layers=names, gains=gains, seed=seed, ranks=ranks)


def plan(
    profile: PrecisionProfile,
    budget: Budget | Mapping[str, float] | float,
    *,
    policy: str = "snip",
    weights: Weights | None = None,
    current: PrecisionPlan | None = None,
    stages: Sequence[int] | None = None,
    seconds: NDArray[np.float64] | Sequence[Any] | None = None,
    other_seconds: float = 0.0,
    step: int | None = None,
    target: ExportTarget | None = None,
) -> PrecisionPlan:
    """The formats that do least harm within a budget.

    Args:
        budget: a share of the planned layers' FLOPs in 4 bits; or a Budget; or its one entry by name: fp4_flops,
            saved_bytes, step_seconds, speedup or divergence (`scrimp.planner.precision.budget`).
        policy: snip, or one of the baselines (`scrimp.planner.precision.policies`).
        weights: of the terms of the cost against each other.
        current: the current plan, which only a clearly better one replaces.
        stages: pipeline stage of each layer, in the profile's order; each keeps the budget.
        seconds: [L, 3, P], measured times of every layer's GEMMs in every format of the profile, for a budget in
            step_seconds or speedup (`GemmTimes.table`); a speedup is over the column of bf16.
        other_seconds: what a step takes beside them; part of its time in such a budget.
        step: updates after which the plan begins; None: where the profile was taken.
        target: torchao or transformer-engine, to choose only what that trainer runs; None: this library.

    Raises:
        PlanError: the budget cannot be reached (says what can), a policy that does not exist, a current plan
            of other layers or of a format that was not measured.
    """
    profile = profile_from(profile)
    refuse_other_types(policy=policy, weights=weights, current=current)
    question = Question(
        profile,
        budget_from(budget),
        policy=policy,
        weights=weights or Weights(),
        stages=stages_from(stages, profile),
        seconds=seconds_from(seconds, profile),
        other_seconds=other_from(other_seconds),
        current=None if current is None else indices_of(current, profile),
    )
    return plan_for(question, target, step=profile.step if step is None else step)


def apply(
    model: nn.Module, plan: PrecisionPlan, *, other_device: bool = False, seed: int = 0
) -> PlannedModel:
    """Run a model by a plan from the next forward pass on.

    Applied again, with a plan of the same layers, it changes their formats: in a millisecond, without a restart. The
    result's `swap_out` makes ordinary layers again.

    Args:
        other_device: take a plan that was made for another device.
        seed: of the rounding noise; counts when a model is planned first.

    Returns:
        The planned layers of the model; the same object every time.

    Raises:
        PlanError: a plan of another model (names the layers), of another device, other than that of other
            ranks, or with a recipe that no back end runs here. Nothing has changed then.
    """
    if not isinstance(plan, PrecisionPlan):
        raise PlanError("only a plan is applied", got=type(plan).__name__, expected="what scrimp.plan gives")
    refuse_other_ranks(plan)
    inner = unwrap(model)
    linears = layers_of(inner).linears
    refuse_other_model(plan, linears)
    if not other_device:
        weight = weight_matrix(linears[next(iter(plan.layers))])
        refuse_other_device(plan, device_name(inner, weight))
    return run_by(inner, plan.precisions, seed=seed)


def run_by(model: nn.Module, precisions: Mapping[str, LinearPrecision], *, seed: int = 0) -> PlannedModel:
    """Run an unwrapped model's layers in these formats; what `apply` does once it knows the plan to be the model's.

    Raises:
        PlanError: a recipe that no back end runs here.
    """
    linears = layers_of(model).linears
    weights = {name: weight_matrix(linears[name]) for name in precisions}
    shapes = {name: (weight.shape[1], weight.shape[0]) for name, weight in weights.items()}
    refuse_unrunnable(precisions, shapes, PROBE_TOKENS, next(iter(weights.values())).device)
    return put_in_force(model, precisions, seed=seed)
