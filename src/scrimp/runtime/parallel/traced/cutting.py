"""Leaves a rank its pieces of a module's parameters, and the sizes that its code reads. Nothing is exchanged here."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from scrimp.gemm import is_linear, is_transposed
from scrimp.parts import Cut
from scrimp.runtime.parallel.traced.tensor_plan import ParameterCut

Sizes = Mapping[str, Mapping[str, int]]
"""By module its attributes on each rank; of a dataclass in an attribute, by a dot."""


def cut_module(
    module: nn.Module, cuts: Mapping[str, ParameterCut], sizes: Sizes, rank: int, ranks: int
) -> dict[str, Cut]:
    """Replace parameters by one rank's pieces of them, wherever they are shared, and set sizes.

    Returns:
        what the rank has of each, by name.
    """
    own = {name: cut.of(rank, ranks) for name, cut in cuts.items()}
    named = dict(module.named_parameters())
    pieces = {id(named[name]): _piece(named[name], cut) for name, cut in own.items()}
    for holder in list(module.modules()):
        for name, parameter in list(holder._parameters.items()):
            if parameter is not None and id(parameter) in pieces:
                holder._parameters[name] = pieces[id(parameter)]
                _tell(holder)
    modules = dict(module.named_modules())
    for name, attributes in sizes.items():
        for attribute, size in attributes.items():
            _set(modules[name], attribute, size)
    return own


def piece_of(tensor: Tensor, cut: Cut) -> Tensor:
    """A rank's piece of a whole tensor, in memory of its own."""
    stretches = [tensor.narrow(cut.dimension, one.start, len(one)) for one in cut.ranges]
    return torch.cat(stretches, cut.dimension) if len(stretches) > 1 else stretches[0].clone()


def _piece(parameter: nn.Parameter, cut: Cut) -> nn.Parameter:
    return nn.Parameter(piece_of(parameter.detach(), cut), requires_grad=parameter.requires_grad)


def _tell(holder: nn.Module) -> None:
    """A layer how large it is now."""
    weight: Any = getattr(holder, "weight", None)
    if is_transposed(holder):
        holder.nx, holder.nf = weight.shape
    elif is_linear(holder):
        holder.out_features, holder.in_features = weight.shape
    elif isinstance(holder, nn.Embedding):
        holder.num_embeddings, holder.embedding_dim = weight.shape


def _set(module: nn.Module, attribute: str, size: int) -> None:
    first, _, field = attribute.partition(".")
    if field:  # others may have the same object
        inner: Any = copy.copy(getattr(module, first))
        object.__setattr__(inner, field, size)
        setattr(module, first, inner)
    else:
        setattr(module, attribute, size)
