"""The model inside its wrappers, and which of its linear layers are planned where nobody names them.

Wrappers   torch.compile and DistributedDataParallel put a prefix before layers' names: the module inside is planned.
           nn.DataParallel runs copies of its module that live for one pass, and is refused.
Default    Every linear layer (`scrimp.gemm.is_linear`) that the optimizer trains, but the head, routers of experts, and
           what cannot be planned. Modules of other kinds that own a matrix are named.
           Which layers these are, `scrimp.models.layers` says, of Scrimp's models and of anybody else's.
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
from scrimp.gemm import has_own_forward
from scrimp.models.layers import layers_of, listed

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


def choose_layers(model: nn.Module, trained: Callable[[Tensor], bool]) -> LayerChoice:
    """Which layers are planned by default, and why the others are not; see the module.

    Args:
        trained: whether a parameter is updated.

    Raises:
        ModelError: there is no linear layer.
    """
    found = layers_of(model)
    left_out = {}
    for name, layer in found.linears.items():
        reason = _obstacle(layer) or found.special.get(name)
        if reason is None and not trained(cast(Tensor, layer.weight)):
            reason = NOT_TRAINED
        if reason is not None:
            left_out[name] = reason
    return LayerChoice(tuple(name for name in found.linears if name not in left_out), left_out)


def default_layers(model: nn.Module, trained: Callable[[Tensor], bool]) -> tuple[str, ...]:
    """The layers of `choose_layers`, of which there must be some; those left out are logged.

    Raises:
        ModelError: there is no linear layer, or none that can be planned.
    """
    choice = choose_layers(model, trained)
    others = layers_of(model).others
    if not choice.layers:
        # Where a head is all there is, the layers that were meant are of a kind that no plan reaches.
        unreached = f"; no plan reaches {listed(others)}" if others else ""
        raise ModelError(
            "no linear layer of the model can be planned",
            got=listed(f"{name} ({reason})" for name, reason in choice.left_out.items()) + unreached,
            expected="trained torch.nn.Linear or transformers' Conv1D modules beside the head",
            do=_advice(choice),
        )
    for name, reason in choice.left_out.items():
        _log.info("%s is left out of the plan: %s", name, reason)
    if others:
        _log.info("no plan reaches the matrices of %s", listed(others))
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
    linears = layers_of(model).linears
    if callable(layers):
        wanted = [name for name, layer in linears.items() if layers(name, layer)]
    else:
        wanted = [layers] if isinstance(layers, str) else list(layers or ())
    unknown = [str(name) for name in wanted if name not in linears]
    if unknown or not wanted:
        raise PlanError(
            "these are no linear layers of the model" if unknown else "no layer was chosen",
            got=listed(unknown) if unknown else None,
            expected=listed(linears),
        )
    return tuple(name for name in linears if name in wanted)


def trained_by(optimizer: Any) -> Callable[[Tensor], bool]:
    """Whether an optimizer updates a parameter."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    return lambda parameter: parameter.requires_grad and id(parameter) in held


def _obstacle(layer: nn.Module) -> str | None:
    """What `swap_in` would refuse."""
    if isinstance(layer, NonDynamicallyQuantizableLinear):
        return "its attention module reads it and never calls it"
    if not hasattr(layer, "planned") and has_own_forward(layer):
        return f"{type(layer).__name__} has a forward of its own"
    return None
