"""What there is to measure, on all ranks that train one model: layers, their whole shapes, watched weights.

Problem  A rank has some of the layers (a pipeline), of a layer some experts, or a piece. Sums and gains are of all
         layers in one order, and of whole matrices.
Method   Each rank says what it has, with the sizes of the whole: of a piece its `Shard` knows them. In a pipeline all
         tell one another, and the numbers of blocks give the order.
Limits   Routers are followed only where they are measured: nobody quantizes them, and ranks that share layers run
         them as no planned product.
Checked  tests/statistics/test_collect.py; on ranks tests/training/precision/test_statistics_on_ranks.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from scrimp.gemm import PlannedModel, weight_matrix
from scrimp.precision import is_router
from scrimp.statistics.ranks import Ranks, in_model_order


@dataclass(frozen=True)
class Inventory:
    """Names in the order of the model."""

    layers: tuple[str, ...]
    """To measure."""
    shapes: Mapping[str, tuple[int, int]]
    """[O, I] of the whole weight of each planned layer whose products are watched, of all experts."""
    experts: Mapping[str, int]
    weights: tuple[str, ...]
    """Watched parameters."""
    owned: Mapping[str, str]
    """Planned layer to its weight."""

    @classmethod
    def of(cls, model: nn.Module, planned: PlannedModel, names: Sequence[str], ranks: Ranks) -> Inventory:
        """Take it; in a pipeline a collective.

        Args:
            names: layers to measure, of those that are here.
        """
        parameters, modules = dict(model.named_parameters()), dict(model.named_modules())
        by_id = {id(parameter): name for name, parameter in parameters.items()}
        facts: dict[str, Any] = {}
        for layer, one in planned.layers.items():
            if layer not in names and is_router(layer):
                continue
            here = max(1, len(one.members))
            experts = ranks.experts.get(layer, (0, here))[1]
            outputs, inputs = weight_matrix(modules[layer]).shape
            sizes = {"outputs": outputs // here, "inputs": inputs}
            if one.piece is not None:
                sizes[one.piece.split] = one.piece.size
            whole = sizes["outputs"] * experts, sizes["inputs"]
            facts[layer] = [by_id[id(modules[layer].weight)], *whole, experts]
        weights = [name for name, p in parameters.items() if p.ndim >= 2 and p.requires_grad]
        own: list[Any] = [list(names), facts, weights]
        found: list[Any] = ranks.world.gathered(own) if ranks.stages > 1 else [own]
        every = {layer: fact for one in found for layer, fact in one[1].items()}
        return cls(
            tuple(in_model_order([one[0] for one in found])),
            {layer: (fact[1], fact[2]) for layer, fact in every.items()},
            {layer: fact[3] for layer, fact in every.items()},
            tuple(in_model_order([one[2] for one in found])),
            {layer: fact[0] for layer, fact in every.items()},
        )
