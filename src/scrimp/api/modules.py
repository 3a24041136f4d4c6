"""The model inside its wrappers, and which of its linear layers are planned where nobody names them.

Wrappers   torch.compile and DistributedDataParallel put a prefix before layers' names: the module inside is planned.
           nn.DataParallel runs copies of its module that live for one pass, and is refused.
Default    Every linear layer (`scrimp.gemm.is_linear`) that the optimizer trains, but the head, routers of experts, and
           what cannot be planned. Modules of other kinds that own a matrix are named.
Head       A linear layer outside numbered modules (``layers.3`` is one) that has a usual name of a head, shares the
           embedding's weight, or is the last of a model whose other layers lie inside such modules. It decides
           the loss directly, and every recipe in use leaves it in high precision.
Checked    tests/api/test_modules.py
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from scrimp.errors import ModelError, PlanError
from scrimp.gemm import has_own_forward, is_linear, linear_modules
from scrimp.models.usual_names import is_head, is_router

NOT_TRAINED = "not trained by this optimizer"

Layers = Iterable[str] | Callable[[str, nn.Module], bool] | None
"""Names, or a predicate of name and layer; None: the default."""
_log = logging.getLogger("scrimp")


@dataclass(frozen=True)
class LayerChoice:
    """Linear layers that are planned, in the model's order, and those that are not, each with its reason."""

    layers: tuple[str, ...]
    left_out: dict[str, str]


def unwrap(model: nn.Module) -> nn.Module:
    """The module whose names count.

    Raises:
        ModelError: not a module, or an nn.DataParallel.
    """
    while isinstance(model, nn.Module):
        if isinstance(model, nn.DataParallel):
            raise ModelError(
                "nn.DataParallel runs copies of a model, which no plan reaches",
                got="a model in nn.DataParallel",
                do="give its .module, and train that: with DistributedDataParallel on several devices",
            )
        inner = getattr(model, "_orig_mod", None)  # of torch.compile
        if inner is None and isinstance(model, nn.parallel.DistributedDataParallel):
            inner = model.module
        if inner is None:
            return model
        model = inner
    raise ModelError("only modules are planned", got=type(model).__name__, expected="a torch.nn.Module")


def linear_layers(model: nn.Module) -> dict[str, nn.Module]:
    """By name; refuses a model without any."""
    found = linear_modules(model)
    if not found:
        others = other_matrices(model)
        raise ModelError(
            "the model has no linear layer, whose formats could be planned",
            got=f"matrices of other modules: {_listed(others)}" if others else type(model).__name__,
            expected="torch.nn.Linear modules, or transformers' Conv1D",
        )
    return found


def other_matrices(model: nn.Module) -> list[str]:
    """Modules that own a matrix and are neither linear layers nor embeddings, each with its class: no plan reaches
    their products."""
    return [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not is_linear(module)
        and not isinstance(module, nn.Embedding)
        and any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False))
    ]


def choose_layers(model: nn.Module, trained: Callable[[Tensor], bool]) -> LayerChoice:
    """Which layers are planned by default, and why the others are not; see the module.

    Args:
        trained: whether a parameter is updated.

    Raises:
        ModelError: there is no linear layer.
    """
    linears = linear_layers(model)
    heads = _heads(model, linears)
    left_out = {}
    for name, layer in linears.items():
        reason = _obstacle(layer) or heads.get(name) or _router(name)
        if reason is None and not trained(cast(Tensor, layer.weight)):
            reason = NOT_TRAINED
        if reason is not None:
            left_out[name] = reason
    return LayerChoice(tuple(name for name in linears if name not in left_out), left_out)


def default_layers(model: nn.Module, trained: Callable[[Tensor], bool]) -> tuple[str, ...]:
    """The layers of `choose_layers`, of which there must be some; those left out are logged.

    Raises:
        ModelError: there is no linear layer, or none that can be planned.
    """
    choice = choose_layers(model, trained)
    others = other_matrices(model)
    if not choice.layers:
        # Where a head is all there is, the layers that were meant are of a kind that no plan reaches.
        unreached = f"; no plan reaches {_listed(others)}" if others else ""
        raise ModelError(
            "no linear layer of the model can be planned",
            got=_listed(f"{name} ({reason})" for name, reason in choice.left_out.items()) + unreached,
            expected="trained torch.nn.Linear or transformers' Conv1D modules beside the head",
            do=_advice(choice),
        )
    for name, reason in choice.left_out.items():
        _log.info("%s is left out of the plan: %s", name, reason)
    if others:
        _log.info("no plan reaches the matrices of %s", _listed(others))
    return choice.layers


def _advice(choice: LayerChoice) -> str:
    """What makes one of the layers that were left out one that can be planned."""
    reasons = choice.left_out.values()
    if any(reason == NOT_TRAINED for reason in reasons):
        return "give the optimizer that trains them"
    plannable = [
        name for name, reason in choice.left_out.items() if reason.startswith(("the head", "a router"))
    ]
    if plannable:
        return f"to plan one of these all the same, name it: layers={plannable[:1]}"
    return "use torch.nn.Linear for the layers that are to be planned"


def named_layers(model: nn.Module, layers: Layers) -> tuple[str, ...]:
    """What a user asked for, in the model's order.

    Raises:
        PlanError: a name that is no linear layer, or no layer at all.
    """
    linears = linear_layers(model)
    if callable(layers):
        wanted = [name for name, layer in linears.items() if layers(name, layer)]
    else:
        wanted = [layers] if isinstance(layers, str) else list(layers or ())
    unknown = [str(name) for name in wanted if name not in linears]
    if unknown or not wanted:
        raise PlanError(
            "these are no linear layers of the model" if unknown else "no layer was chosen",
            got=_listed(unknown) if unknown else None,
            expected=_listed(linears),
        )
    return tuple(name for name in linears if name in wanted)


def trained_by(optimizer: Any) -> Callable[[Tensor], bool]:
    """Whether an optimizer updates a parameter."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return lambda parameter: parameter.requires_grad and id(parameter) in held


def _heads(model: nn.Module, linears: dict[str, nn.Module]) -> dict[str, str]:
    outside = [name for name in linears if not _is_numbered(name)]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    found = {name: "the head, by its name" for name in outside if is_head(name)}
    found |= {
        name: "the head: it shares the embedding's weight"
        for name in outside
        if id(linears[name].weight) in embeddings
    }
    last = list(linears)[-1]
    if not found and last in outside and len(outside) < len(linears):
        found[last] = "the head: the last layer, outside the blocks"
    return found


def _is_numbered(name: str) -> bool:
    """Whether it lies inside of a numbered module."""
    return any(part.isdecimal() for part in name.split(".")[:-1])


def _router(name: str) -> str | None:
    return "a router of experts" if is_router(name) else None


def _obstacle(layer: nn.Module) -> str | None:
    """What `swap_in` would refuse."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "its attention module reads it and never calls it"
    if not hasattr(layer, "planned") and has_own_forward(layer):
        return f"{type(layer).__name__} has a forward of its own"
    return None


def _listed(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")
