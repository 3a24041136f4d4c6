"""The states of an optimizer as plain tensors."""

from __future__ import annotations

from torch import Tensor

from scrimp.optim import Optimizer


def states_of(optimizer: Optimizer) -> dict[str, Tensor]:
    """By their names in a checkpoint, what lies here."""
    return {name: part.local for name, part in optimizer.parts()}
