"""Which modules are linear layers, and the weight of each as the matrix [O, I] that its GEMMs read.

nn.Linear keeps W as [O, I] and computes x W^T. The Conv1D of transformers (GPT-2 and the models that
descend from it) keeps the transpose, [I, O], and computes x W: the same three GEMMs on a view of it. Gradients
and optimizer states have the layout of the parameter, so whoever compares them with O and I asks here.

transformers is never imported for this: a model can hold a Conv1D only where somebody else has imported it.
"""

from __future__ import annotations

import sys
from typing import cast

from torch import Tensor, nn

from scrimp.gemm.adapted import AdaptedLinear
from scrimp.gemm.grouped import GroupedLinear
from scrimp.gemm.split_linear import SplitLinear
from scrimp.gemm.stored_weight import StoredLinear
from scrimp.gemm.summed_linear import SummedLinear


def is_linear(module: nn.Module) -> bool:
    """Whether a module is of a kind that can be planned, whatever its forward does."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def plannable_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer, grouped ones too, by its name, in the model's order."""
    return {
        name: module
        for name, module in model.named_modules()
        if is_linear(module) or isinstance(module, GroupedLinear)
    }


def is_transposed(module: nn.Module) -> bool:
    """Whether a linear layer keeps its weight as [I, O]."""
    return isinstance(module, _conv1d())


def linear_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every linear layer of a model by its name, in the model's order."""
    return {name: module for name, module in model.named_modules() if is_linear(module)}


def weight_matrix(layer: nn.Module) -> Tensor:
    """The weight [O, I]: the parameter, or a view of it that gradients flow through."""
    weight = cast(Tensor, layer.weight)
    return weight.t() if is_transposed(layer) else weight


def has_own_forward(layer: nn.Module) -> bool:
    """Whether a linear layer computes something else than its kind does, which a plan would replace, or which would
    keep a plan out: another library may have given this one object a forward."""
    kind = _conv1d() if is_transposed(layer) else GroupedLinear
    kind = nn.Linear if isinstance(layer, nn.Linear) else kind
    own = (SummedLinear.forward, SplitLinear.forward, AdaptedLinear.forward, StoredLinear.forward)
    known = (cast(type[nn.Module], kind).forward, *own)
    return "forward" in vars(layer) or type(layer).forward not in known


def _conv1d() -> type[nn.Module] | tuple[()]:
    """transformers' class; nothing where transformers is not imported."""
    module = sys.modules.get("transformers.pytorch_utils")
    return () if module is None else cast("type[nn.Module]", module.Conv1D)
