"""Parts of tensors: the whole, the box of a DTensor on each rank of a mesh, and what is no box."""

from __future__ import annotations

import itertools
import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard
from torch.testing._internal.distributed.fake_pg import FakeStore

from scrimp.parts import Cut, TensorPart, part_of, parts_of, set_cut

STRIDED = _StridedShard(0, split_factor=2)


def parts_on_mesh(
    whole: torch.Tensor, mesh_shape: tuple[int, ...], placements: tuple[Placement, ...], holding: Any = None
) -> list[TensorPart]:
    """The part of every rank of a mesh, each seen by a process that is that rank of a group without others.

    Args:
        holding: by rank what it holds; unset: what torch gives it of `whole`.
    """
    found = []
    for rank in range(math.prod(mesh_shape)):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=math.prod(mesh_shape))
        try:
            mesh = init_device_mesh("cpu", mesh_shape)
            if holding is None:
                local = whole
                for dimension, placement in enumerate(placements):
                    if isinstance(placement, (Shard, _StridedShard)):
                        local = shard_of(
                            local, mesh.size(dimension), mesh.get_coordinate()[dimension], placement
                        )
            else:
                local = holding[rank]
            tensor = DTensor.from_local(
                local, mesh, placements, run_check=False, shape=whole.shape, stride=whole.stride()
            )
            found.append(part_of(tensor))
        finally:
            dist.destroy_process_group()
    return found


def shard_of(whole: torch.Tensor, count: int, index: int, placement: Any) -> torch.Tensor:
    """By the definition: torch.chunk; a strided shard is of each of the pieces that later ones have made before."""
    dimension, split = placement.dim, getattr(placement, "split_factor", 1)
    pieces = []
    for piece in whole.tensor_split(split, dimension) if split > 1 else (whole,):
        chunks = piece.chunk(count, dimension)
        empty = piece.narrow(dimension, 0, 0)
        pieces.append(chunks[index] if index < len(chunks) else empty)
    return torch.cat(pieces, dimension)


def test_a_plain_tensor_is_the_part_that_is_the_whole() -> None:
    parameter = torch.nn.Parameter(torch.zeros(3, 4))
    part = part_of(parameter)
    assert (part.shape, part.offsets, part.is_writer) == ((3, 4), (0, 0), True)
    assert part.local.data_ptr() == parameter.data_ptr()
    assert not part.local.requires_grad
    assert part.whole_nbytes == 48
    assert part_of(torch.tensor(1.0)).shape == ()
    named = parts_of({"a": parameter, "b": part}, writes_whole=False)
    assert not named["a"].is_writer
    assert named["b"] is part


@pytest.mark.parametrize("shape", [(8, 6), (7, 5), (2, 3), (1, 1), (0, 3)])
@pytest.mark.parametrize(
    ("mesh", "placements"),
    [
        ((4,), (Shard(0),)),
        ((4,), (Shard(1),)),
        ((4,), (Replicate(),)),
        ((2, 2), (Replicate(), Shard(0))),
        ((2, 2), (Shard(0), Replicate())),
        ((2, 2), (Shard(0), Shard(0))),
        ((2, 2), (Shard(0), Shard(1))),
        ((2, 2), (Shard(1), Shard(0))),
    ],
    ids=str,
)
def test_the_parts_of_all_ranks_are_the_whole_each_number_written_once(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> None:
    whole = torch.arange(math.prod(shape)).reshape(shape)
    times = torch.zeros(shape, dtype=torch.int64)
    for part in parts_on_mesh(whole, mesh, placements):
        box = tuple(slice(at, at + size) for at, size in zip(part.offsets, part.local.shape, strict=True))
        assert torch.equal(whole[box], part.local)
        times[box] += part.is_writer
    assert (times == 1).all()


def test_a_strided_shard_is_a_box_where_it_divides_evenly() -> None:
    """The order of FSDP over TP: split by the second mesh dimension first."""
    whole = torch.arange(24).reshape(8, 3)
    parts = parts_on_mesh(whole, (2, 2), (STRIDED, Shard(0)))
    assert [part.offsets for part in parts] == [(0, 0), (4, 0), (2, 0), (6, 0)]
    for part in parts:
        assert torch.equal(part.local, whole[part.offsets[0] :][:2])


@pytest.mark.parametrize(
    ("rows", "placements"),
    [
        (7, (STRIDED, Shard(0))),
        (8, (STRIDED, Replicate())),
        (8, (_StridedShard(0, split_factor=4), Shard(0))),
        (8, (Partial(), Shard(0))),
        (8, (Replicate(), Partial("max"))),
    ],
    ids=str,
)
def test_what_is_no_box_is_refused(rows: int, placements: tuple[Placement, ...]) -> None:
    holding = itertools.repeat(torch.zeros(2, 3), 4)
    with pytest.raises(ValueError, match="is no box on each rank"):
        parts_on_mesh(torch.zeros(rows, 3), (2, 2), placements, list(holding))


def test_a_rank_outside_of_the_mesh_holds_nothing() -> None:
    with patch("torch.distributed.device_mesh.DeviceMesh.get_coordinate", lambda mesh: None):
        for shape, empty in (((8, 3), (0, 3)), ((), ())):
            placements = (Shard(0),) if shape else (Replicate(),)
            local = torch.zeros(shape)
            first, *_ = parts_on_mesh(torch.zeros(shape), (1,), placements, [local])
            assert tuple(first.local.shape) == empty
            assert not first.is_writer


@pytest.mark.parametrize(
    ("shape", "offsets"), [((3, 4), (1, 0)), ((3, 4), (0, -1)), ((3,), (0,)), ((3, 4), (0,))]
)
def test_a_box_that_does_not_lie_in_its_whole_is_refused(
    shape: tuple[int, ...], offsets: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="does not lie in"):
        TensorPart(torch.zeros(3, 4), shape, offsets, is_writer=True)


@pytest.mark.parametrize("shards", [1, 2, 3, 7])
@pytest.mark.parametrize("pieces", [2, 4])
def test_a_shard_of_a_fused_piece_is_boxes_of_the_whole(pieces: int, shards: int) -> None:
    """Queries, keys and values of a rank, one below the other, and of these the rows of one rank of FSDP2."""
    queries, keys, width = 16, 8, 3
    whole = torch.arange((queries + 2 * keys) * width).reshape(-1, width)
    times = torch.zeros_like(whole)
    for piece in range(pieces):
        ranges = [
            range(first + size * piece // pieces, first + size * (piece + 1) // pieces)
            for first, size in ((0, queries), (queries, keys), (queries + keys, keys))
        ]
        cut = Cut(tuple(whole.shape), tuple(ranges))
        fused = torch.cat([whole[one.start : one.stop] for one in ranges])
        assert tuple(fused.shape) == cut.local_shape
        size = -(-len(fused) // shards)
        for first in range(0, size * shards, size):
            local = fused[first : first + size]
            offset = min(first, len(fused))
            part = cut.placed(TensorPart(local, tuple(fused.shape), (offset, 0)))
            assert sum(box.local.numel() for box in part.boxes()) == local.numel()
            for box in part.boxes():
                assert torch.equal(whole[box.place], box.local)
                times[box.place] += 1
    assert (times == 1).all()


def test_a_noted_cut_says_where_columns_lie_and_which_copy_is_written() -> None:
    whole = torch.arange(24).reshape(4, 6)
    columns = whole[:, 3:].clone()
    set_cut(columns, Cut((4, 6), (range(3, 6),), dimension=1))
    assert torch.equal(whole[part_of(columns).place], columns)
    copy = torch.ones(5)
    set_cut(copy, Cut((5,), (range(5),), is_writer=False))
    assert part_of(copy).is_whole
    assert not part_of(copy).is_writer
