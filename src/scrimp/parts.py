"""What one rank holds of a tensor that several ranks hold together.

A tensor is an ordinary one, of which every rank that has it has all, or torch's `DTensor`, cut along its axes over a
mesh of ranks. Whoever fills, saves or updates a tensor asks `part_of` for the box that lies here.

Limits   One box per rank. Partial sums are no part of a tensor; neither are the strided pieces that FSDP makes of what
         tensor parallelism has cut along the same axis: both are refused.
Checked  tests/test_parts.py
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from scrimp.errors import ModelError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor."""

    local: Tensor
    """The numbers that lie here; writing them changes the tensor."""
    shape: tuple[int, ...]
    """Of the whole."""
    offsets: tuple[int, ...]
    """Of the box in it, along each axis."""
    is_writer: bool = True
    """Whether this rank stands for the box: of ranks that hold the same one, one does."""

    @property
    def is_whole(self) -> bool:
        """Whether all of the tensor lies here."""
        return tuple(self.local.shape) == self.shape

    @property
    def place(self) -> tuple[slice, ...]:
        """The box as an index into the whole."""
        return tuple(
            slice(first, first + size) for first, size in zip(self.offsets, self.local.shape, strict=True)
        )


def part_of(tensor: Tensor) -> TensorPart:
    """What lies here of a tensor.

    Raises:
        ModelError: a DTensor whose pieces are no boxes.
    """
    if not hasattr(tensor, "device_mesh"):
        return TensorPart(tensor.detach(), tuple(tensor.shape), (0,) * tensor.ndim)
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    sharded = cast(Any, tensor.detach())
    mesh, placements = sharded.device_mesh, sharded.placements
    if any(type(placement) not in (Shard, Replicate) for placement in placements):
        raise ModelError(
            "a tensor is divided over ranks in pieces that are no boxes",
            got=f"placements {list(placements)} on {mesh}",
            expected="Shard or Replicate along every axis of the mesh",
        )
    shape = tuple(sharded.shape)
    _, offsets = compute_local_shape_and_global_offset(shape, mesh, placements)
    coordinate = mesh.get_coordinate()
    is_writer = all(
        coordinate[axis] == 0 for axis, placement in enumerate(placements) if placement.is_replicate()
    )
    return TensorPart(sharded.to_local(), shape, tuple(offsets), is_writer)
