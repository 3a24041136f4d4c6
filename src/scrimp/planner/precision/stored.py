"""The formats that frozen weights lie in, under a budget of bytes.

    min sum_l D[l, f_l]    with    sum_l bytes(l, f_l) <= share x bytes in bf16

with D measured (`scrimp.statistics.stored_weights`), 0 for a weight that stays in bf16. An integer program of one
choice per layer.
Checked  tests/planner/precision/test_stored.py, against all combinations
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

import numpy as np

from scrimp.planner.solver import Limit, Program, solve
from scrimp.precision import BF16_BYTES, recipe, storage_bytes
from scrimp.precision.stored import AS_IT_IS

Shape = tuple[int, int]


def choose_stored(
    divergences: Mapping[str, Mapping[str, float]], shapes: Mapping[str, Shape], share: float
) -> dict[str, str]:
    """Layer to recipe, or bf16.

    Args:
        divergences: by layer and recipe, in any unit.
        shapes: of the weights, (outputs, inputs).
        share: most bytes, of those in bf16.

    Raises:
        PlanError: the budget cannot be kept, with the least that can.
    """
    formats = [*next(iter(divergences.values())), AS_IT_IS]
    costs = np.array([[*of.values(), 0.0] for of in divergences.values()])
    amounts = np.array([[weight_bytes(shapes[layer], name) for name in formats] for layer in divergences])
    limit = Limit(
        "bytes of the base's linear layers, as a share of bf16's", amounts / amounts[:, -1].sum(), most=share
    )
    chosen = solve(Program(costs, [limit])).choices
    return {layer: formats[choice] for layer, choice in zip(divergences, chosen, strict=True)}


def weight_bytes(shape: Shape, name: str) -> int:
    """Bytes of a weight that is stored in a recipe, or in bf16."""
    fprop = recipe(name).fprop
    if fprop is None:
        return BF16_BYTES * shape[0] * shape[1]
    return storage_bytes(shape, fprop.b.element, fprop.b.scaling)


def stored_text(chosen: Mapping[str, str]) -> str:
    """A choice as rules of `adapter.base`: the most frequent format, then a rule for each name whose layers all have
    another one, or for each layer that has."""
    base = Counter(chosen.values()).most_common(1)[0][0]
    kinds: dict[str, list[str]] = {}
    for layer in chosen:
        kinds.setdefault(layer.split(".", 2)[2], []).append(layer)
    rules = [base]
    for kind, layers in kinds.items():
        names = {chosen[layer] for layer in layers}
        if len(names) == 1 and len(layers) > 1 and base not in names:
            rules.append(f"*.{kind}={chosen[layers[0]]}")
        else:
            rules += [f"{layer}={chosen[layer]}" for layer in layers if chosen[layer] != base]
    return ",".join(rules)
