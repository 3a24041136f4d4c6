"""Maps of which ranks have parts, each made whole on one rank for a moment.

Problem  Muon orthogonalises whole matrices, GaLore projects them, and under FSDP2 and `layout.tp` a rank has some rows
         or columns of each.
Method   Updates move number by number, and stay where the parameter is. Only what an update is made of travels: of Muon
         in the bf16 that Newton-Schulz computes in, of GaLore the gradient in fp32. The largest maps come first, as
         many in a round as ranks share the model, and each has an owner of its own, one that has much of it already::

             all-to-all    each rank's parts of all maps of the round to their owners
                           owners put theirs together and make its update
             all-to-all    its parts back to all that have them

         So every map is worked on once, beside others, whatever the number of ranks, and always by the same rank, which
         can keep states of it.
Bytes    With N numbers of b bytes in all maps and F ranks that have equal parts of each, a rank sends

             2 * b N / F * (F - 1) / F

         in an update: parts of maps that it owns itself go nowhere. Of a fused matrix a rank of FSDP2 often has whole
         maps, which then need not travel at all. Of parts that several ranks have alike one sends.
Memory   Three copies of the largest map beside the parameters, or what making its update takes.
Layout   Which rank has what follows from `TensorPart`, which ranks tell one another once.
Source   Liu et al., arXiv 2502.16982 (Moonlight), gathers momentum of shards; Ahn et al., arXiv 2504.05295 (Dion),
         divides the work over ranks
Checked  tests/optim/test_muon_on_ranks.py: one process, bit for bit, with the bytes counted;
         tests/optim/test_galore_on_ranks.py
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from scrimp.config.experts import has_experts
from scrimp.models import ModelSpec, place
from scrimp.parts import TensorPart
from scrimp.runtime import Executable

Box = tuple[int, int, int, int]
"""First row, rows, first column, columns; of a whole matrix."""


@dataclass(frozen=True)
class Map:
    """Rows of a weight matrix that are updated as a matrix of their own."""

    name: str
    """The parameter's name."""
    first: int
    rows: int
    columns: int


Move = Callable[[str, slice], Tensor]
"""From a parameter's name and rows that lie here to what an update is made of."""
Follow = Callable[[Map, slice, Tensor], None]
"""Takes what was made of it: the map, rows that lie here, and their update."""
Make = Callable[[Map], Callable[[Tensor], Tensor]]
"""Says for a map how what its ranks have for it, put together, becomes its update, both whole; the former may go."""


def stacked_rows(spec: ModelSpec, name: str) -> tuple[int, ...] | None:
    """Rows of each map that is stacked in a block's weight matrix; None: AdamW has this parameter."""
    block, inside = place(name)
    if block is None or not inside.endswith(".weight"):
        return None
    layer = inside.removesuffix(".weight")
    linear, whole = spec.shapes.get(layer), spec.shapes.get(layer[: -len(".A")])
    if linear is None and whole is not None and whole.made_of is not None:
        return (whole.made_of.rank,) if layer.endswith(".A") else whole.stacked
    return None if linear is None else linear.stacked


def sharing_group(executable: Executable) -> dist.ProcessGroup | None:
    """The ranks that have parts of the same matrices as this one; None: they lie here whole."""
    mesh = executable.mesh
    if mesh.is_trivial:
        return None
    # Routed experts are cut over all ranks of a stage, everything else over those that share a copy of it.
    layout, routed = mesh.layout, has_experts(executable.model.spec.architecture)
    if (layout.ranks // layout.pp if routed else layout.shards * layout.tp) == 1:
        return None
    return (mesh.of_experts if routed else mesh.of_stage).get_group()


def maps_of(rows: Mapping[str, Sequence[int]], columns: Mapping[str, int]) -> list[Map]:
    """The maps of some matrices.

    Args:
        rows: of the maps that are stacked in each.
    """
    return [
        Map(name, first, end - first, columns[name])
        for name, sizes in rows.items()
        for first, end in pairwise(accumulate(sizes, initial=0))
    ]


class WholeMaps:
    """Maps that lie here whole.

    Args:
        dtype: of what updates are made of.
    """

    def __init__(self, maps: Sequence[Map], dtype: torch.dtype) -> None:
        self.owned, self._dtype = list(maps), dtype

    def update(self, names: Collection[str], move: Move, make: Make, follow: Follow) -> None:
        """Make the updates of some parameters' maps, one after the other."""
        for one in self.owned:
            if one.name in names:
                rows = slice(one.first, one.first + one.rows)
                follow(one, rows, make(one)(move(one.name, rows).to(self._dtype)))


@dataclass(frozen=True)
class _Piece:
    """What a rank has of a map, one box."""

    box: Box
    """In the map."""
    here: slice
    """Rows of the rank's own tensor."""

    @property
    def numel(self) -> int:
        return self.box[1] * self.box[3]

    def of(self, whole: Tensor) -> Tensor:
        """Its place in the map."""
        first, rows, left, columns = self.box
        return whole[first : first + rows, left : left + columns]


Pieces = list[_Piece]


class SharedMaps:
    """Maps of which each rank of a group has parts; making it is a collective.

    Args:
        parts: what this rank has of the matrices, by name.
        group: ranks that together have all of them; None: all ranks.
        dtype: of what travels.

    Raises:
        ValueError: they do not.
    """

    def __init__(
        self,
        maps: Sequence[Map],
        parts: Mapping[str, TensorPart],
        group: dist.ProcessGroup | None,
        dtype: torch.dtype,
    ) -> None:
        self._group, self._size = group, dist.get_world_size(group)
        self._rank, self._dtype = dist.get_rank(group), dtype
        self._device = next(iter(parts.values())).local.device
        told: list[dict[str, list[Box]]] = [{}] * self._size
        own = {name: [_box(one) for one in part.boxes()] for name, part in parts.items()}
        dist.all_gather_object(told, own, group=group)
        maps = sorted(maps, key=lambda one: -one.rows * one.columns)
        self._held = {one: [_pieces(one, boxes[one.name]) for boxes in told] for one in maps}
        """What each rank has of a map."""
        self._given = {one: _without_copies(held) for one, held in self._held.items()}
        """The same, of equal ones that of the first rank."""
        for one, given in self._given.items():
            found = sum(piece.numel for pieces in given for piece in pieces)
            if found != one.rows * one.columns:
                raise ValueError(f"{one}: ranks have {found:,} of its numbers")
        self._rounds = [
            self._owners(maps[start : start + self._size]) for start in range(0, len(maps), self._size)
        ]
        mine = (owned[self._rank] for owned in self._rounds)
        self.owned = [own_map for own_map in mine if own_map is not None]
        """The maps whose updates this rank makes."""

    def update(self, names: Collection[str], move: Move, make: Make, follow: Follow) -> None:
        """Make the updates of the maps of all parameters; a collective."""
        for owned in self._rounds:
            mine, whole = owned[self._rank], self._to_owners(owned, move)
            self._from_owners(owned, None if mine is None or whole is None else make(mine)(whole), follow)

    def _owners(self, maps: Sequence[Map]) -> list[Map | None]:
        """What each rank owns of the maps of a round: whoever has most of one first."""
        wishes = [
            (-_numel(self._given[one][rank]), n, rank)
            for n, one in enumerate(maps)
            for rank in range(self._size)
        ]
        owned: list[Map | None] = [None] * self._size
        for _, number, rank in sorted(wishes):
            if owned[rank] is None and maps[number] not in owned:
                owned[rank] = maps[number]
        return owned

    def _to_owners(self, owned: Sequence[Map | None], move: Move) -> Tensor | None:
        """The map that this rank owns, whole."""
        mine = owned[self._rank]
        sent = [[] if one is None else self._given[one][self._rank] for one in owned]
        due = [] if mine is None else self._given[mine]
        out = self._buffer(sent)
        places = _places(out, sent)
        for one, given in zip(owned, sent, strict=True):
            for piece in self._here(one):  # momentum moves in copies too
                part = move(one.name, piece.here)  # type: ignore[union-attr]
                if given:
                    next(places).copy_(part)
        found = self._exchanged(out, sent, due)
        del out
        if mine is None:
            return None
        whole = found.new_empty(mine.rows, mine.columns)
        for piece, part in zip(chain.from_iterable(due), _places(found, due), strict=True):
            piece.of(whole).copy_(part)
        return whole

    def _from_owners(self, owned: Sequence[Map | None], made: Tensor | None, follow: Follow) -> None:
        """Hand the parts of what was made to all that have them."""
        mine = owned[self._rank]
        sent = [] if mine is None else self._held[mine]
        due = [self._here(one) for one in owned]
        out = self._buffer(sent)
        if made is not None:
            for piece, part in zip(chain.from_iterable(sent), _places(out, sent), strict=True):
                part.copy_(piece.of(made))
            del made
        places = _places(self._exchanged(out, sent, due), due)
        for one, pieces in zip(owned, due, strict=True):
            for piece in pieces:
                follow(one, piece.here, next(places))  # type: ignore[arg-type]

    def _here(self, one: Map | None) -> Pieces:
        return [] if one is None else self._held[one][self._rank]

    def _buffer(self, parts: Sequence[Pieces]) -> Tensor:
        return torch.empty(sum(map(_numel, parts)), dtype=self._dtype, device=self._device)

    def _exchanged(self, out: Tensor, sent: Sequence[Pieces], due: Sequence[Pieces]) -> Tensor:
        """What the other ranks have for this one, in their order."""
        found = self._buffer(due)
        dist.all_to_all_single(
            found,
            out,
            output_split_sizes=self._sizes(due),
            input_split_sizes=self._sizes(sent),
            group=self._group,
        )
        return found

    def _sizes(self, parts: Sequence[Pieces]) -> list[int]:
        """Numbers for each rank, or of each; none where there is no map for it in this round."""
        return [*map(_numel, parts), *[0] * (self._size - len(parts))]


def _box(part: TensorPart) -> Box:
    (first, left), (rows, columns) = part.offsets, part.local.shape
    return first, rows, left, columns


def _pieces(one: Map, boxes: Sequence[Box]) -> Pieces:
    """What a rank has of a map whose parameter it has in these boxes, one below the other."""
    found, passed = [], 0
    for first, rows, left, columns in boxes:
        start, stop = max(first, one.first), min(first + rows, one.first + one.rows)
        if start < stop and columns:
            here = slice(passed + start - first, passed + stop - first)
            found.append(_Piece((start - one.first, stop - start, left, columns), here))
        passed += rows
    return found


def _without_copies(held: Sequence[Pieces]) -> list[Pieces]:
    """The first rank's, where several have the same."""
    seen = set[tuple[Box, ...]]()
    found = []
    for pieces in held:
        boxes = tuple(piece.box for piece in pieces)
        found.append([] if boxes in seen else pieces)
        seen.add(boxes)
    return found


def _numel(pieces: Pieces) -> int:
    return sum(piece.numel for piece in pieces)


def _places(buffer: Tensor, parts: Sequence[Pieces]) -> Iterator[Tensor]:
    """Where each piece lies in a buffer."""
    start = 0
    for piece in chain.from_iterable(parts):
        _, rows, _, columns = piece.box
        yield buffer[start : start + piece.numel].view(rows, columns)
        start += piece.numel
