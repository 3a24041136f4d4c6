"""The tensors of all ranks, where each has some of the blocks: names, types and shapes that all of them know.

Of a pipeline each rank has the tensors of its stages. A checkpoint is of all, in the order in which one process has
them: what is no block before or after the blocks, and these by their numbers. A tensor that is on other ranks alone is
here a part without a number, which is neither written nor read.
Checked  tests/training/test_pipelines.py
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from scrimp.models import place
from scrimp.parts import TensorPart
from scrimp.world import World


def everywhere(parts: Mapping[str, TensorPart], world: World) -> dict[str, TensorPart]:
    """What this rank holds of the tensors of all ranks, in the order of one process.

    Args:
        parts: by name in a checkpoint, such as model.blocks.0.mlp.down.weight.
    """
    if world.same(list(parts)):
        return dict(parts)
    own = {name: [str(part.local.dtype).removeprefix("torch."), part.shape] for name, part in parts.items()}
    known: dict[str, list[object]] = {}
    for found in world.gathered(own):
        known = {**found, **known}
    groups = list(dict.fromkeys(name.partition(".")[0] for name in parts))
    order = sorted(known, key=lambda name: _position(name, groups))
    return {name: parts.get(name) or _nothing(*known[name]) for name in order}  # type: ignore[arg-type]


def _position(name: str, groups: list[str]) -> tuple[int, int, int]:
    """Which group a tensor is in, and where there: before the blocks, in one, or after them."""
    group, _, rest = name.partition(".")
    block = place(rest)[0]
    if block is not None:
        return groups.index(group), 1, block
    return groups.index(group), 0 if rest.startswith("embedding.") else 2, 0


def _nothing(dtype: str, shape: list[int]) -> TensorPart:
    """No number of a tensor."""
    local = torch.empty((0, *shape[1:]) if shape else (), dtype=getattr(torch, dtype))
    return TensorPart(local, tuple(shape), (0,) * len(shape), is_writer=False)
