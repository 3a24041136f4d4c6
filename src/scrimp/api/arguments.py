"""Arguments of the library door, in the forms that users give them: budgets, candidates, optimizers, batches."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from scrimp.errors import PlanError
from scrimp.optim.foreign import TorchOptimizer
from scrimp.planner.precision import Budget, PrecisionPlan, PrecisionProfile, Weights
from scrimp.precision import GEMMS, recipe

FORMATS = ("fp8", "nvfp4")
MOST_BATCHES = 64


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


def profile_from(profile: Any) -> PrecisionProfile:
    if not isinstance(profile, PrecisionProfile):
        raise PlanError(
            "a plan is made from a profile", got=type(profile).__name__, expected="what scrimp.measure gives"
        )
    return profile


def refuse_other_types(*, policy: Any, weights: Any, current: Any) -> None:
    """Refuse arguments of `scrimp.plan` that are something else than their names say."""
    for name, value, kind in (
        ("policy", policy, str),
        ("weights", Weights() if weights is None else weights, Weights),
    ):
        if not isinstance(value, kind):
            raise PlanError(f"{name} is of another type", got=repr(value), expected=kind.__name__)
    if not isinstance(current, PrecisionPlan | None):
        raise PlanError(
            "the current plan is none", got=type(current).__name__, expected="what scrimp.plan gives"
        )


def other_from(seconds: Any) -> float:
    """Seconds of a step beside the planned GEMMs."""
    if isinstance(seconds, int | float) and not isinstance(seconds, bool) and 0 <= seconds < math.inf:
        return float(seconds)
    raise PlanError("other_seconds is no time", got=repr(seconds), expected="a finite number, 0 or more")


def seconds_from(seconds: Any, profile: PrecisionProfile) -> NDArray[np.float64] | None:
    """[L, 3, P], a table of times in any form that numpy reads; None stays None."""
    if seconds is None:
        return None
    shape = (len(profile.layers), len(GEMMS), len(profile.formats))
    expected = (
        f"numbers of shape {list(shape)}: {shape[0]} layers, fprop, dgrad and wgrad, "
        f"and {', '.join(profile.formats)}"
    )
    try:
        table = np.asarray(seconds, dtype=np.float64)
    except (TypeError, ValueError):
        raise PlanError("seconds is no table", got=type(seconds).__name__, expected=expected) from None
    if table.shape != shape:
        raise PlanError("seconds has a wrong shape", got=list(table.shape), expected=expected)
    wrong = ~(np.isfinite(table) & (table >= 0))
    if wrong.any():
        i, j, p = np.argwhere(wrong)[0].tolist()
        where = f"{profile.layers[i]}.{GEMMS[j]} in {profile.formats[p]}"
        raise PlanError(
            f"seconds of {where} are no time", got=table[i, j, p], expected="a finite number, 0 or more"
        )
    return table


def stages_from(stages: Any, profile: PrecisionProfile) -> tuple[int, ...] | None:
    """[L], pipeline stages; None stays None."""
    if stages is None:
        return None
    count = len(profile.layers)
    is_list = isinstance(stages, Sequence | np.ndarray) and not isinstance(stages, str | bytes)
    found = list(stages) if is_list else []
    if not is_list or len(found) != count:
        got = len(found) if is_list else repr(stages)
        raise PlanError("every layer needs a pipeline stage", got=got, expected=f"{count} numbers")
    for stage in found:
        if not isinstance(stage, int | np.integer) or isinstance(stage, bool) or stage < 0:
            raise PlanError("this is no pipeline stage", got=repr(stage), expected="0, 1, 2, ...")
    return tuple(int(stage) for stage in found)


def candidates_from(formats: Sequence[str]) -> tuple[str, ...]:
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


def optimizer_from(optimizer: Any) -> Any:
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


def view_of(optimizer: Any, model: nn.Module, sensitivity: str, max_norm: float) -> TorchOptimizer:
    if sensitivity not in ("auto", "gradient"):
        raise PlanError(
            "sensitivities are not taken that way", got=repr(sensitivity), expected="auto or gradient"
        )
    make = TorchOptimizer if sensitivity == "auto" else TorchOptimizer.as_gradients
    return make(optimizer, model, max_norm=max_norm or 0.0)


def updates_of(optimizer: Any) -> int:
    """Updates that an optimizer has made, where it counts them."""
    return max((int(state.get("step", 0)) for state in optimizer.state.values()), default=0)


def indices_of(current: PrecisionPlan, profile: PrecisionProfile) -> NDArray[np.int64]:
    """[L, 3], a plan's formats by their places in a profile."""
    odd = sorted(set(current.layers) ^ set(profile.layers))
    if odd:
        raise PlanError(
            "the current plan has other layers than the profile",
            got="layers of one of them alone: " + ", ".join(map(repr, odd[:8])),
        )
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


def first_of(batches: Iterable[Any]) -> tuple[Any, Iterator[Any]]:
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
