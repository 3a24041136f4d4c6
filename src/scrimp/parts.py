"""What one rank holds of a tensor: boxes of the whole, as checkpoints write them and read them.

Problem  Under a layout a rank holds a shard of each weight and optimizer state. A checkpoint is of whole tensors, and
         must come out the same whatever the layout, so that a run can go on under another one.
Method   A part is a local tensor and where it lies in the whole: element i of the local one is element `offsets + i`.
         Of a DTensor both follow from its placements, by torch's `compute_local_shape_and_global_offset`. Where several
         ranks hold equal copies, one of them writes: the one with coordinate 0 along every mesh dimension that
         replicates. A plain tensor is the part that is the whole.
         Ranks that share layers cut weights before FSDP2 sees them, and a fused one into several ranges of rows on
         each rank, which no placement describes: what lies here is noted on the parameter (`set_cut`), and of its rows
         a rank of FSDP2 then has some. Such a part is several boxes, one below the other in the local tensor.
Limits   Several boxes differ in their rows alone. DTensors that FSDP2 made of DTensors of the same dimension
         (`_StridedShard`) are one box only where the dimension divides evenly by all ranks that share it; else they are
         refused, as are partial sums. A mesh knows its own ranks only: copies outside of it have no writer of their
         own, so that a DTensor must lie on the mesh of all ranks that hold it, or its copies be noted as a cut.
Checked  tests/test_parts.py (no process group), tests/training/test_checkpoint_layouts.py and
         tests/runtime/parallel/test_cut_parts.py (gloo); 64 ranks in test_many_ranks.py there
"""

from __future__ import annotations

import dataclasses
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Placement


@dataclasses.dataclass(frozen=True)
class TensorPart:
    """What this rank holds of a tensor.

    Raises:
        ValueError: the box does not lie in the whole.
    """

    local: Tensor
    """The plain tensor of this rank; it may have no element."""
    shape: tuple[int, ...]
    """Shape of the whole."""
    offsets: tuple[int, ...]
    """Where the box begins, per dimension of the whole; the first of several."""
    is_writer: bool = True
    """Whether it is this rank's that is written, of equal copies on several."""
    rows: tuple[range, ...] = ()
    """Rows of the whole that lie here, in rising order, where they are several boxes; empty: one box."""

    def __post_init__(self) -> None:
        box = tuple(self.local.shape)
        fits = len(box) == len(self.shape) == len(self.offsets) and all(
            0 <= offset <= whole - size
            for size, whole, offset in zip(box, self.shape, self.offsets, strict=True)
        )
        if not fits:
            raise ValueError(
                f"a box of shape {box} at {self.offsets} does not lie in a tensor of shape {self.shape}"
            )

    @property
    def is_whole(self) -> bool:
        """Whether all of the tensor lies here."""
        return tuple(self.local.shape) == self.shape

    def boxes(self) -> Iterator[TensorPart]:
        """The boxes, which are parts of their own."""
        if not self.rows:
            yield self
        first = 0
        for rows in self.rows:
            local, offsets = self.local[first : first + len(rows)], (rows.start, *self.offsets[1:])
            yield TensorPart(local, self.shape, offsets, self.is_writer)
            first += len(rows)

    @property
    def place(self) -> tuple[slice, ...]:
        """One box as an index into the whole."""
        assert not self.rows, "several boxes have no one place"
        sizes = zip(self.offsets, self.local.shape, strict=True)
        return tuple(slice(first, first + size) for first, size in sizes)

    @property
    def whole_numel(self) -> int:
        """Numbers of the whole tensor."""
        return math.prod(self.shape)

    @property
    def whole_nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.whole_numel * self.local.element_size()


@dataclasses.dataclass(frozen=True)
class Cut:
    """What a rank has of a tensor that was cut, or copied, before anything else shared it out."""

    shape: tuple[int, ...]
    """Shape of the whole."""
    ranges: tuple[range, ...]
    """Indices of the whole along `dimension` that lie here, in rising order."""
    dimension: int = 0
    """0 where there are several ranges."""
    is_writer: bool = True
    """Whether it is this rank's that is written, of equal copies on several."""
    columns: range | None = None
    """Columns that lie here of a matrix that is cut along dimension 0; None: all."""

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of what lies here."""
        size = sum(map(len, self.ranges))
        if self.columns is not None:
            return size, len(self.columns)
        return (*self.shape[: self.dimension], size, *self.shape[self.dimension + 1 :])

    def placed(self, part: TensorPart) -> TensorPart:
        """A part of what lies here, as one of the whole."""
        first, size = part.offsets[self.dimension], part.local.shape[self.dimension]
        found, passed = [], 0
        for one in self.ranges:
            here = one[max(0, first - passed) : max(0, first + size - passed)]
            found += [here] if here else []
            passed += len(one)
        offsets = list(part.offsets)
        offsets[self.dimension] = found[0].start if found else 0
        if self.columns is not None:
            offsets[1] += self.columns.start
        rows = tuple(found) if len(found) > 1 else ()
        return TensorPart(part.local, self.shape, tuple(offsets), part.is_writer and self.is_writer, rows)


def set_cut(parameter: Tensor, cut: Cut) -> None:
    """Note of a parameter, or of the DTensor that holds its shard, that it is a piece of a larger one."""
    parameter.scrimp_cut = cut  # type: ignore[attr-defined]


def cut_of(parameter: Tensor) -> Cut | None:
    """What was noted; None: it is whole."""
    return getattr(parameter, "scrimp_cut", None)


def part_of(tensor: Tensor, *, writes_whole: bool = True) -> TensorPart:
    """What this rank holds of a tensor; the local tensor shares its storage, without a gradient.

    Args:
        writes_whole: whether this rank writes a plain tensor, of which every rank has a copy.

    Raises:
        ValueError: a DTensor that is a partial sum, or whose share here is not one box.
    """
    # Whoever holds a DTensor has imported it.
    tensors = sys.modules.get("torch.distributed.tensor")
    if tensors is not None and isinstance(tensor, tensors.DTensor):
        part = _of_dtensor(tensor)
    else:
        part = TensorPart(tensor.detach(), tuple(tensor.shape), (0,) * tensor.dim(), writes_whole)
    cut = cut_of(tensor)
    return part if cut is None else cut.placed(part)


def parts_of(
    tensors: Mapping[str, Tensor | TensorPart], *, writes_whole: bool = True
) -> dict[str, TensorPart]:
    """Parts by name: those that are parts already, and `part_of` the others."""
    return {
        name: value if isinstance(value, TensorPart) else part_of(value, writes_whole=writes_whole)
        for name, value in tensors.items()
    }


def _of_dtensor(tensor: DTensor) -> TensorPart:
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
    from torch.utils._python_dispatch import _disable_current_modes

    shape, mesh, placements = tuple(tensor.shape), tensor.device_mesh, tensor.placements
    _refuse_other_than_boxes(shape, mesh, placements)
    local, coordinate = tensor.to_local().detach(), mesh.get_coordinate()
    if coordinate is None:  # a rank outside of its mesh
        nothing = local.new_empty((0, *shape[1:]) if shape else ())
        return TensorPart(nothing, shape, (0,) * len(shape), is_writer=False)
    with _disable_current_modes():  # it reads numbers of small tensors, which fake ones have not
        box, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    if tuple(local.shape) != tuple(box):
        raise ValueError(f"a DTensor holds {tuple(local.shape)} where its placements give {tuple(box)}")
    is_writer = all(
        place == 0 or not placement.is_replicate()
        for place, placement in zip(coordinate, placements, strict=True)
    )
    return TensorPart(local, shape, tuple(offsets), is_writer)


def _refuse_other_than_boxes(
    shape: tuple[int, ...], mesh: DeviceMesh, placements: Sequence[Placement]
) -> None:
    """Refuse what no box describes. A strided shard is one where the ranks that share its dimension divide it evenly,
    and it was split before by just those that come after it in the mesh: then each has an equal range."""
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    for number, placement in enumerate(placements):
        if isinstance(placement, _StridedShard):
            sharing = [
                mesh.size(other)
                for other, also in enumerate(placements)
                if isinstance(also, (Shard, _StridedShard)) and also.dim == placement.dim
            ]
            later = [
                mesh.size(other)
                for other, also in enumerate(placements)
                if other > number and isinstance(also, (Shard, _StridedShard)) and also.dim == placement.dim
            ]
            is_even = shape[placement.dim] % math.prod(sharing) == 0
            if is_even and placement.split_factor == math.prod(later):
                continue
        elif isinstance(placement, Shard) or placement.is_replicate():
            continue
        raise ValueError(
            f"a DTensor of shape {shape} with placements {tuple(placements)} is no box on each rank"
        )
