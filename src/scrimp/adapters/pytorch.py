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
         per layer. Beside gradients, one copy of the weights' gradients on the host.
Limits   One process: statistics are not reduced over ranks (a plan made by one process can be applied on all).
Checked  tests/adapters/test_pytorch.py; examples/train_any_loop.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scrimp.adapters.checks import checked_losses, refuse_other_device, refuse_other_model, refuse_ranks
from scrimp.adapters.modules import (
    Layers,
    LayerChoice,
    choose_layers,
    linear_layers,
    named_layers,
    trained_by,
    unwrap,
)
from scrimp.errors import ModelError, PlanError
from scrimp.gemm import LinearPrecision, PlannedModel, compute_dtype, refuse_unrunnable, swap_in
from scrimp.planner.bits import Budget, PrecisionPlan, PrecisionProfile, Question, Weights, make_plan
from scrimp.precision import GEMMS, recipe
from scrimp.profiler import resolve_device
from scrimp.profiler.statistics import Subject, TorchOptimizer, collect, untouched

Loss = Callable[[nn.Module, Any], Tensor]
"""From the model and a batch to its mean loss, a scalar with its graph."""
Losses = Callable[[nn.Module, Any], Iterator[Tensor]]
"""From the model and a statistics batch to each micro-batch's share of the batch's mean loss."""

FORMATS = ("fp8", "nvfp4")
MOST_BATCHES = 64
PROBE_TOKENS = 1024
"""Tokens of the GEMMs that a plan is tried with before it is applied."""
_PLANNED = "_scrimp_planned"
_COMPUTE = {torch.float32: "fp32", torch.bfloat16: "bf16"}
_log = logging.getLogger("scrimp")


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
        ModelError: no linear layer, none that is trained, a layer that the loss does not use.
        PlanError: arguments that do not fit together, an optimizer whose rule is not known, several ranks.
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
    refuse_ranks()  # until `collect` reduces its sums over ranks
    inner, candidates = unwrap(model), _candidates(formats)
    optimizer = _torch_optimizer(optimizer)
    view = _view(optimizer, inner, sensitivity, max_norm)

    def checked(batch: Any) -> Iterator[Tensor]:
        return checked_losses(losses(model, batch))

    with _measurable(inner, layers, trained_by(optimizer)) as (planned, names), untouched(inner, planned):
        first, rest = _first_of(batches)
        subject = Subject(
            model=inner,
            planned=planned,
            optimizer=view,
            losses=checked,
            compute=_compute_of(inner, planned, names, lambda: next(checked(first))),
            device_name=device_name(inner),
            step=_updates(optimizer),
        )
        every = itertools.chain((first,), rest)
        return collect(subject, every, candidates, layers=names, gains=gains, seed=seed)


def plan(
    profile: PrecisionProfile,
    budget: Budget | Mapping[str, float] | float,
    *,
    policy: str = "snip",
    weights: Weights | None = None,
    current: PrecisionPlan | None = None,
    stages: Sequence[int] | None = None,
    seconds: NDArray[np.float64] | None = None,
    solver: str = "auto",
    time_limit: float = 60.0,
    step: int | None = None,
) -> PrecisionPlan:
    """The formats that do least harm within a budget.

    Args:
        budget: a share of the planned layers' FLOPs in 4 bits; or a Budget; or its one entry by name.
        policy: snip, or one of the baselines (`scrimp.planner.bits.policies`).
        weights: of the terms of the cost against each other.
        current: the plan of now, which only a clearly better one replaces.
        stages: pipeline stage of each layer, in the profile's order; each keeps the budget.
        seconds: [L, 3, P], measured times of every layer's GEMMs in every format, for a budget in seconds
            (`GemmTimes.table`).
        solver: auto, highs, knapsack or relaxation.
        time_limit: seconds, for the solver.
        step: updates after which the plan begins; None: where the profile was taken.

    Raises:
        PlanError: the budget cannot be reached (says what can), a policy that does not exist, a current plan
            of other layers or of a format that was not measured.
    """
    if stages is not None and len(stages) != len(profile.layers):
        raise PlanError(
            "every layer needs a pipeline stage", got=len(stages), expected=f"{len(profile.layers)} numbers"
        )
    question = Question(
        profile,
        budget_from(budget),
        policy=policy,
        weights=weights or Weights(),
        stages=stages,
        seconds=seconds,
        current=None if current is None else _indices(current, profile),
        solver=solver,
        time_limit=time_limit,
    )
    return make_plan(question, step=profile.step if step is None else step)


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
        PlanError: a plan of another model (names the layers), of another device, or with a recipe that no back
            end runs here. Nothing has changed then.
    """
    if not isinstance(plan, PrecisionPlan):
        raise PlanError("only a plan is applied", got=type(plan).__name__, expected="what scrimp.plan gives")
    inner = unwrap(model)
    linears = linear_layers(inner)
    refuse_other_model(plan, linears)
    weight = linears[next(iter(plan.layers))].weight
    if not other_device:
        refuse_other_device(plan, device_name(inner, weight))
    precisions = plan.precisions
    shapes = {name: (linears[name].in_features, linears[name].out_features) for name in precisions}
    refuse_unrunnable(precisions, shapes, PROBE_TOKENS, weight.device)
    return put_in_force(inner, precisions, seed=seed)


def put_in_force(
    model: nn.Module, precisions: Mapping[str, LinearPrecision], *, seed: int = 0
) -> PlannedModel:
    """Give an unwrapped model's layers these precisions; the first time, or again to the same layers."""
    planned = planned_of(model)
    if planned is None:
        planned = swap_in(model, precisions, seed=seed)
        setattr(model, _PLANNED, planned)
        return planned
    odd = sorted(set(precisions) ^ set(planned.layers))
    if odd:
        raise PlanError(
            "the plan is not of the layers that the model runs by a plan now",
            got=f"in one of them only: {', '.join(odd[:8])}" + (", ..." if len(odd) > 8 else ""),
            do="call swap_out of the PlannedModel that apply gave, then apply this plan",
        )
    planned.replan(precisions)
    return planned


def planned_of(model: nn.Module) -> PlannedModel | None:
    """What `apply` has given a model; None for a plain one, or one that was swapped out again."""
    planned = vars(unwrap(model)).get(_PLANNED)
    return planned if isinstance(planned, PlannedModel) and planned.layers else None


def device_name(model: nn.Module, weight: Tensor | None = None) -> str:
    """Name of the device of a weight, else of the model's first linear layer, as plans have it."""
    weight = next(iter(linear_layers(model).values())).weight if weight is None else weight
    return resolve_device(str(weight.device)).name


def budget_from(budget: Budget | Mapping[str, float] | float) -> Budget:
    """A budget in whichever form a user gives it.

    Raises:
        PlanError: not one of the forms, an unknown name, or a value out of range.
    """
    if isinstance(budget, Budget):
        return budget
    if isinstance(budget, int | float) and not isinstance(budget, bool):
        return Budget(fp4_flops=float(budget))
    names = [field.name for field in dataclasses.fields(Budget)]
    if isinstance(budget, Mapping) and set(budget) <= set(names):
        values = [value for value in budget.values() if value is not None]
        if all(isinstance(value, int | float) and not isinstance(value, bool) for value in values):
            return Budget(**budget)
    raise PlanError(
        "this is no budget",
        got=repr(budget),
        expected=f"a share of FLOPs in 4 bits such as 0.75, or one of {', '.join(names)} by name with its number",
    )


def _indices(current: PrecisionPlan, profile: PrecisionProfile) -> NDArray[np.int64]:
    """[L, 3], a plan's formats by their places in a profile."""
    odd = sorted(set(current.layers) ^ set(profile.layers))
    if odd:
        raise PlanError("the current plan has other layers than the profile", got=", ".join(odd[:8]))
    rows = [[current.layers[layer].gemms[gemm].choice for gemm in GEMMS] for layer in profile.layers]
    missing = sorted({name for row in rows for name in row} - set(profile.formats))
    if missing:
        raise PlanError(
            "the current plan has formats that were not measured",
            got=", ".join(missing),
            expected=", ".join(profile.formats),
            do="measure with these candidates too",
        )
    return np.array([[profile.formats.index(name) for name in row] for row in rows], dtype=np.int64)


def _candidates(formats: Sequence[str]) -> tuple[str, ...]:
    names = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in names:
        recipe(name)
    if not names or len(set(names)) < len(names) or min(recipe(name).bits for name in names) >= 16:
        raise PlanError(
            "these candidates leave nothing to choose",
            got=", ".join(names) or "none",
            expected="recipes, each once, at least one of 4 or 8 bits",
        )
    return names


def _torch_optimizer(optimizer: Any) -> Any:
    """The optimizer inside a wrapper such as accelerate's."""
    inner = getattr(optimizer, "optimizer", None)
    optimizer = inner if isinstance(inner, torch.optim.Optimizer) else optimizer
    if not hasattr(optimizer, "param_groups"):
        raise PlanError(
            "this is no optimizer",
            got=type(optimizer).__name__,
            expected="the torch.optim.Optimizer of the loop",
        )
    return optimizer


def _view(optimizer: Any, model: nn.Module, sensitivity: str, max_norm: float) -> TorchOptimizer:
    if sensitivity not in ("auto", "gradient"):
        raise PlanError(
            "sensitivities are not taken that way", got=repr(sensitivity), expected="auto or gradient"
        )
    make = TorchOptimizer if sensitivity == "auto" else TorchOptimizer.as_gradients
    return make(optimizer, model, max_norm=max_norm or 0.0)


def _updates(optimizer: Any) -> int:
    """Updates that an optimizer has made, where it counts them."""
    return max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)


@contextlib.contextmanager
def _measurable(
    model: nn.Module, layers: Layers, trained: Callable[[nn.Parameter], bool]
) -> Iterator[tuple[PlannedModel, tuple[str, ...]]]:
    """The planned layers of a model, swapped in for a while where it has none, and those to measure."""
    planned = planned_of(model)
    wanted = None if layers is None else named_layers(model, layers)
    if planned is not None:
        yield planned, wanted or tuple(planned.layers)
        return
    try:
        choice = choose_layers(model, trained)
    except ModelError:
        if wanted is None:
            raise
        choice = LayerChoice((), {})
    if wanted is None:
        for name, reason in choice.left_out.items():
            _log.info("%s is left out of the measurement: %s", name, reason)
    # The stream is found only where all its layers are watched, so all are planned for a while.
    every = dict.fromkeys((*choice.layers, *(wanted or ())), LinearPrecision.of("bf16"))
    planned = swap_in(model, every)
    try:
        yield planned, wanted or choice.layers
    finally:
        planned.swap_out()


def _compute_of(
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
            got=", ".join(idle[:8]),
            do="leave them out: name the others with layers=",
        )
    types = {_COMPUTE[dtype] for dtype in found.values()}
    if len(types) > 1:
        bf16 = [name for name, dtype in found.items() if dtype == torch.bfloat16]
        raise ModelError(
            "the layers to plan compute in two types",
            got=f"bf16 in {', '.join(bf16[:4])} and others, fp32 in the rest",
            expected="one compute type",
            do="measure and plan those of one type: layers=",
        )
    return types.pop()


def _first_of(batches: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
    """The first batch and the others; refuses what holds none, or a whole data set."""
    is_one = isinstance(batches, Tensor | Mapping | str) or not isinstance(batches, Iterable)
    if is_one:
        raise PlanError(
            "measuring takes several batches",
            got=f"one {type(batches).__name__}",
            expected="an iterable of statistics batches",
            do="put a single batch in a list",
        )
    if isinstance(batches, Sized) and len(batches) > MOST_BATCHES:
        raise _too_many(f"{len(batches):,}")
    iterator = _counted(iter(batches))
    for first in iterator:
        return first, iterator
    raise PlanError(
        "no batch was given to measure on",
        expected="at least one, better four",
        do="an iterator that was read to its end before gives none: make a new one",
    )


def _counted(batches: Iterator[Any]) -> Iterator[Any]:
    for number, batch in enumerate(batches):
        if number >= MOST_BATCHES:
            raise _too_many("more")
        yield batch


def _too_many(got: str) -> PlanError:
    return PlanError(
        "so many statistics batches take hours and say no more than a few",
        got=got,
        expected=f"at most {MOST_BATCHES}",
        do="give a few, such as itertools.islice(loader, 4)",
    )
