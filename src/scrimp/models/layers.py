"""The linear layers of a model that exists, and what is known of them: of Scrimp's models and of anybody else's.

A model of Scrimp says by its specification which layers it has. Of other models their modules and names must do:

Head     A linear layer outside numbered modules (``layers.3`` is one) that has a usual name of a head, shares the
         embedding's weight, or is the last of a model whose other layers lie inside such modules. It decides the loss
         directly, and every recipe in use leaves it in high precision.
Routers  of experts, by their usual names.
Checked  tests/api/test_modules.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from torch import nn

from scrimp.errors import ModelError
from scrimp.gemm import is_linear, linear_modules
from scrimp.models.model import Model
from scrimp.models.usual_names import is_head, is_router
from scrimp.precision import HEAD


@dataclass(frozen=True)
class ModelLayers:
    """What of a model could have formats of its own."""

    linears: dict[str, nn.Module]
    """Linear layers by name, in the model's order; there are some."""
    special: dict[str, str]
    """Those that stay in high precision unless somebody names them, each with the reason: heads and routers."""
    others: list[str]
    """Modules that own a matrix and are neither linear layers nor embeddings, each with its class: no plan reaches
    their products."""


def layers_of(model: nn.Module) -> ModelLayers:
    """The layers of a model, whoever made it.

    Raises:
        ModelError: it has no linear layer.
    """
    linears, others = linear_modules(model), _others(model)
    if not linears:
        raise ModelError(
            "the model has no linear layer, whose formats could be planned",
            got=f"matrices of other modules: {listed(others)}" if others else type(model).__name__,
            expected="torch.nn.Linear modules, or transformers' Conv1D",
        )
    routers = {name: "a router of experts" for name in linears if is_router(name)}
    heads = _heads(model, linears)
    if isinstance(model, Model):
        heads = {HEAD: "the head"} if HEAD in linears else {}
    return ModelLayers(linears, routers | heads, others)


def listed(names: Iterable[str], most: int = 8) -> str:
    """Names in one line."""
    names = list(names)
    return ", ".join(names[:most]) + (", ..." if len(names) > most else "")


def _others(model: nn.Module) -> list[str]:
    return [
        f"{name} ({type(module).__name__})"
        for name, module in model.named_modules()
        if not is_linear(module)
        and not isinstance(module, nn.Embedding)
        and any(parameter.ndim >= 2 for parameter in module.parameters(recurse=False))
    ]


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
