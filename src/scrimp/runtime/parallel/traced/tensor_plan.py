"""What of a model each of several ranks gets, as data: found by `find`, carried out by `share_layers`.

A parameter is cut along one dimension. Of each of its ranges every rank has an equal share, in order: of a fused weight
of queries, keys and values, therefore, its own queries, its own keys and its own values.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from scrimp.parts import Cut

Kind = Literal["outputs", "inputs", "gathered", "words", "replicated"]
KINDS: dict[Kind, str] = {
    "outputs": "its outputs, which stay on their rank",
    "inputs": "its inputs; results are added up",
    "gathered": "its outputs, which are gathered",
    "words": "its rows; results are added up",
    "replicated": "nothing: every rank has all of it",
}
"""How a layer can be shared out, and what is cut."""


@dataclass(frozen=True)
class ParameterCut:
    """How a parameter is shared out."""

    shape: tuple[int, ...]
    """Shape of the whole parameter."""
    dimension: int
    ranges: tuple[range, ...]
    """Stretches of the dimension, of each of which every rank has its share."""

    def of(self, rank: int, ranks: int) -> Cut:
        """What one rank has of it."""
        own = tuple(
            range(one.start + len(one) * rank // ranks, one.start + len(one) * (rank + 1) // ranks)
            for one in self.ranges
        )
        return Cut(self.shape, own, self.dimension)


@dataclass(frozen=True)
class LayerShare:
    """A linear layer or an embedding."""

    name: str
    kind: Kind
    why: str
    """What it is cut by; where it is replicated: what could not be proven."""


@dataclass(frozen=True)
class Entry:
    """Where a tensor that all ranks have goes into layers that they share: its gradients are added up."""

    module: str
    is_output: bool
    """What the module returns; else what it is given."""


@dataclass(frozen=True)
class TensorPlan:
    """A tensor-parallel plan of one model for so many ranks."""

    ranks: int
    layers: tuple[LayerShare, ...]
    """In the order of the model."""
    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all whole parameters."""
    cuts: Mapping[str, ParameterCut]
    """The parameters that are cut; every rank has the others whole."""
    sizes: Mapping[str, Mapping[str, int]]
    """Numbers that the code of modules reads, such as a count of heads, on each rank: by module and attribute."""
    entries: tuple[Entry, ...]
    draws: bool
    """Whether the model draws random numbers, of what every rank has: ranks must draw the same ones."""
    norms: tuple[str, ...]
    """Norms over all heads: their sums of squares are added up."""
    added: tuple[str, ...]
    """Parameters that every rank has and uses for its own share alone: their gradients are added up."""

    @property
    def share_cut(self) -> float:
        """Numbers in parameters that are cut, of all."""
        total = sum(map(math.prod, self.shapes.values()))
        return sum(math.prod(cut.shape) for cut in self.cuts.values()) / total if total else 0.0

    @property
    def digest(self) -> str:
        """Equal on ranks with the same plan."""
        return hashlib.sha256(repr(self).encode()).hexdigest()

    def kind(self, layer: str) -> Kind:
        """How a layer is shared out."""
        return next(one.kind for one in self.layers if one.name == layer)

    def __str__(self) -> str:
        """A table: a line for each layer, those of equal blocks together."""
        head = (
            f"{self.share_cut:.1%} of the parameters are shared out among {self.ranks} ranks; "
            f"{len(self.entries)} sums of gradients, {self._sums()} of results"
        )
        rows: dict[tuple[str, str, str], int] = {}
        for layer in self.layers:
            row = (without_numbers(layer.name), layer.kind, layer.why)
            rows[row] = rows.get(row, 0) + 1
        width = max((len(row[0]) for row in rows), default=0)
        lines = [
            f"  {name:<{width}}  {f'x {count}' if count > 1 else '':<5} {kind:<10}  {why}"
            for (name, kind, why), count in rows.items()
        ]
        return "\n".join([head, *lines])

    def _sums(self) -> int:
        return sum(layer.kind in ("inputs", "words") for layer in self.layers)


def without_numbers(name: str) -> str:
    """A layer's name without the numbers of its blocks."""
    return ".".join("#" if part.isdecimal() else part for part in name.split("."))
