"""What the library door refuses: plans of other models or devices, losses that are none, several ranks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from scrimp.errors import PlanError
from scrimp.gemm import weight_matrix
from scrimp.planner.precision import PrecisionPlan
from scrimp.statistics import fingerprint
from scrimp.world import World

_log = logging.getLogger("scrimp")


def refuse_ranks() -> None:
    """Several ranks: each would measure its own data, and plan for itself."""
    if (size := World.current().size) > 1:
        raise PlanError(
            "this measures in one process",
            got=f"{size} ranks",
            expected="one process",
            do="call scrimp.measure in a loop of your own; or plan in one process, write the plan to a file, and "
            "apply it on every rank",
        )


def checked_losses(losses: Iterable[Any]) -> Iterator[Tensor]:
    """Losses as they come, each a scalar with its graph.

    Raises:
        PlanError: what the function gave is none.
    """
    number = 0
    for number, loss in enumerate(losses, 1):  # noqa: B007
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            is_tensor = isinstance(loss, Tensor)
            raise PlanError(
                "the loss is no scalar",
                got=f"{loss.dtype} {tuple(loss.shape)}" if is_tensor else type(loss).__name__,
                expected="the mean loss of the batch, a tensor of one number",
                do="return its mean" if is_tensor else "return the tensor itself, such as output.loss",
            )
        if torch.is_grad_enabled() and not loss.requires_grad:
            raise PlanError(
                "the loss has no gradient",
                got="a tensor that does not require grad",
                do="return it with its graph: no detach, item or torch.no_grad in the loss",
            )
        yield loss.reshape(())
    if not number:
        raise PlanError("a statistics batch has no loss", got="no micro-batch", expected="at least one")


def refuse_other_model(plan: PrecisionPlan, linears: Mapping[str, nn.Module]) -> None:
    """Layers that are missing or have other shapes; siblings that the plan lacks are logged."""
    missing = [name for name in plan.layers if name not in linears]
    if missing:
        raise PlanError(
            "the plan is of another model",
            got=f"{len(missing)} of its layers are no linear layers here: {_some(missing)}",
            expected=f"names such as {_some(list(linears), 4)}",
            do="measure this model",
        )
    shapes = [tuple(weight_matrix(linears[name]).shape) for name in plan.layers]
    if fingerprint(tuple(plan.layers), shapes) != plan.model:
        raise PlanError(
            "the plan is of another model",
            got=f"its layers' names, but not all their shapes: {_shapes(plan, linears)}",
            expected="the shapes that were measured, of which a plan has a fingerprint alone",
            do="measure this model",
        )
    beside = [name for name in linears if name not in plan.layers and _pattern(name) in _patterns(plan)]
    if beside:
        _log.warning(
            "%d linear layers are not in the plan, though layers like them are, and stay as they are: %s",
            len(beside),
            _some(beside),
        )


def refuse_other_ranks(plan: PrecisionPlan) -> None:
    """Ranks that ran by different plans would make different updates; a collective where there are several."""
    if not World.current().same(f"{plan.model} {plan.precisions}"):
        raise PlanError(
            "the ranks were given different plans",
            got="another choice of formats on some rank",
            expected="one plan",
            do="plan from the same profile on all, or write one rank's plan to a file and read that",
        )


def refuse_other_device(plan: PrecisionPlan, device: str) -> None:
    """A plan weighs what this device runs; on another one it may gain nothing."""
    if plan.device != device:
        raise PlanError(
            "the plan was made for another device",
            got=plan.device,
            expected=device,
            do="measure here, or take it all the same with other_device=True",
        )


def _shapes(plan: PrecisionPlan, linears: Mapping[str, nn.Module]) -> str:
    """The planned layers' shapes here, (outputs, inputs), each with the first layer that has it, as text."""
    first: dict[tuple[int, ...], str] = {}
    for name in plan.layers:
        first.setdefault(tuple(weight_matrix(linears[name]).shape), name)
    shown = [f"{name!r} {shape}" for shape, name in first.items()]
    return "here " + ", ".join(shown[:8]) + (", ..." if len(shown) > 8 else "")


def _patterns(plan: PrecisionPlan) -> set[str]:
    return {_pattern(name) for name in plan.layers}


def _pattern(name: str) -> str:
    """A layer's name without the numbers of its blocks."""
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))


def _some(names: list[str], most: int = 8) -> str:
    return ", ".join(map(repr, names[:most])) + (", ..." if len(names) > most else "")
