"""What every block does with its activations, and where its weights, gradients and optimizer states live.

This is the one form of the decision in memory: the search finds a placement, the account and the timeline read it, the
runtime carries it out. In plan.json it is the sections `blocks` and `states` (`scrimp.planner.plan`).

Checked  tests/planner/test_placement.py
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.config.activations import Activations
from scrimp.errors import PlanError
from scrimp.planner.memory.machine import Update

CLASSES = ("weights", "gradients", "optimizer")
_UPDATED: dict[Update, str] = {
    "device": "",
    "cpu": "; the CPU updates them after the backward pass",
}


@dataclass(frozen=True)
class States:
    """Whether each class of states lives on the host, for every block from first to last."""

    weights: tuple[bool, ...]
    gradients: tuple[bool, ...]
    optimizer: tuple[bool, ...]
    update: Update = "device"
    """Who updates the blocks whose optimizer states are on the host."""

    def __post_init__(self) -> None:
        if not len(self.weights) == len(self.gradients) == len(self.optimizer):
            raise PlanError("the classes of states have different numbers of blocks", got=str(self))
        if self.update != "device" and any(
            o and not g for o, g in zip(self.optimizer, self.gradients, strict=True)
        ):
            raise PlanError("CPU Adam needs the gradients of its blocks on the host", got=str(self))

    @classmethod
    def split(
        cls,
        blocks: int,
        *,
        weights: int = 0,
        gradients: int = 0,
        optimizer: int = 0,
        update: Update = "device",
    ) -> States:
        """Put the given number of blocks of each class on the host.

        Weights of the first blocks: the last are used again first. Gradients and optimizer states of the last: their
        gradients come first, so that least accumulates, and CPU Adam's tail is shortest.
        """
        if update != "device":
            gradients = max(gradients, optimizer)
        return cls(
            weights=tuple(i < weights for i in range(blocks)),
            gradients=tuple(i >= blocks - gradients for i in range(blocks)),
            optimizer=tuple(i >= blocks - optimizer for i in range(blocks)),
            update=update if optimizer else "device",
        )

    def on_cpu(self, block: int) -> bool:
        """Whether the CPU updates this block."""
        return self.update != "device" and self.optimizer[block]

    def streams(self, block: int) -> bool:
        """Whether the device updates this block with something that comes from the host and goes back."""
        anything = self.weights[block] or self.gradients[block] or self.optimizer[block]
        return anything and not self.on_cpu(block)

    @property
    def is_resident(self) -> bool:
        """Whether nothing lives on the host."""
        return not (any(self.weights) or any(self.gradients) or any(self.optimizer))

    def on_host(self, name: str) -> frozenset[int]:
        """Blocks of which a class, one of `CLASSES`, lives on the host."""
        return frozenset(i for i, host in enumerate(getattr(self, name)) if host)

    def __str__(self) -> str:
        counts = [f"{name} of {sum(getattr(self, name))}" for name in CLASSES if any(getattr(self, name))]
        if not counts:
            return "all states on the device"
        return f"{', '.join(counts)} blocks on the host" + _UPDATED[self.update]


@dataclass(frozen=True)
class Placement:
    """What the blocks of a model do, from first to last."""

    activations: tuple[str, ...]
    """By block, names in `scrimp.config.activations`."""
    states: States

    @classmethod
    def resident(cls, blocks: int) -> Placement:
        """Everything is kept, on the device."""
        return cls(("keep",) * blocks, States.split(blocks))

    @property
    def is_resident(self) -> bool:
        """Whether everything is kept, on the device."""
        return self.states.is_resident and set(self.activations) == {"keep"}

    @property
    def offloaded(self) -> frozenset[int]:
        """Blocks whose activations wait on the host."""
        return frozenset(i for i, name in enumerate(self.activations) if Activations.parse(name).is_offloaded)

    @property
    def uses_host(self) -> bool:
        """Whether anything of a step is in host memory."""
        return not self.states.is_resident or bool(self.offloaded)
