"""Placements of states as numbers of blocks on the host: the points that the search moves between."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import permutations, product

from scrimp.planner.memory.machine import Update
from scrimp.planner.memory.placement import CLASSES, States

_CHAIN = 4


@dataclass(frozen=True)
class Split:
    """How many blocks of each class are on the host, and who updates them."""

    weights: int = 0
    gradients: int = 0
    optimizer: int = 0
    update: Update = "device"

    @classmethod
    def of(cls, states: States) -> Split:
        """The split with as many blocks of each class on the host as `states` has, and the same updater."""
        return cls(sum(states.weights), sum(states.gradients), sum(states.optimizer), states.update)

    def states(self, blocks: int) -> States:
        """Which blocks these are."""
        return States.split(
            blocks,
            weights=self.weights,
            gradients=self.gradients,
            optimizer=self.optimizer,
            update=self.update,
        )

    def within(self, blocks: int) -> Split:
        """The split as it is carried out: numbers from 0 to the blocks, and gradients with CPU Adam's blocks."""
        counts = {name: min(max(getattr(self, name), 0), blocks) for name in CLASSES}
        if self.update != "device":
            counts["gradients"] = max(counts["gradients"], counts["optimizer"])
        return replace(self, **counts, update=self.update if counts["optimizer"] else "device")

    def neighbours(self, step: int, blocks: int) -> list[Split]:
        """One class with so many blocks less or more on the host, or one less and another more."""
        changes = [{name: sign} for sign in (-step, step) for name in CLASSES]
        changes += [{one: -step, other: step} for one in CLASSES for other in CLASSES if one != other]
        found = []
        for change in changes:
            counts = {name: getattr(self, name) + by for name, by in change.items()}
            if self.update != "device" and "optimizer" in change and "gradients" not in change:
                found.append(replace(self, **counts, gradients=counts["optimizer"]).within(blocks))
            found.append(replace(self, **counts).within(blocks))
        return [other for other in dict.fromkeys(found) if other != self]


def corners(blocks: int, updaters: Sequence[Update] = ("device", "cpu")) -> Iterator[Split]:
    """All or none of each class, fewest first: everything on the device is the first. CPU Adam also of a part.

    Args:
        updaters: who may update blocks whose optimizer states are on the host.
    """
    for optimizer in (0, blocks) if "device" in updaters else (0,):
        for gradients in (0, blocks):
            for weights in (0, blocks):
                yield Split(weights, gradients, optimizer)
    for update in (one for one in updaters if one != "device"):
        for optimizer in sorted({-(-blocks // 4), -(-blocks // 2), blocks}):
            for gradients in sorted({optimizer, blocks}):
                for weights in (0, blocks):
                    yield Split(weights, gradients, optimizer, update)


def diagonal(blocks: int, updaters: Sequence[Update] = ("device", "cpu")) -> list[Split]:
    """The same number of blocks of every class on the host."""
    found = (Split(n, n, n, update) for update in updaters for n in range(blocks + 1))
    return list(dict.fromkeys(split.within(blocks) for split in found))


def everywhere(blocks: int, updaters: Sequence[Update] = ("device", "cpu")) -> list[Split]:
    """All placements."""
    numbers = range(blocks + 1)
    found = (Split(w, g, o, update) for w, g, o, update in product(numbers, numbers, numbers, updaters))
    return list(dict.fromkeys(split.within(blocks) for split in found))


def chain(blocks: int, update: Update = "device") -> list[Split]:
    """More and more on the host in steps of a quarter, one class after another, in any order of the classes."""
    found = []
    for order in permutations(CLASSES):
        counts = dict.fromkeys(CLASSES, 0)
        for name in order:
            for k in range(1, _CHAIN + 1):
                counts[name] = blocks * k // _CHAIN
                split = Split(counts["weights"], counts["gradients"], counts["optimizer"], update)
                found.append(split.within(blocks))
    return list(dict.fromkeys(found))
