"""8 to 64 ranks in one process: what each holds of a model, and DTensors that are clipped and updated.

What a rank holds follows from its number: each lays the model out, in a group of which it is the only one that is there
(torch's fake one). And `LocalTensorMode` runs every operator on the pieces of all ranks, collectives too.
"""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from parity import Case, made
from torch import Tensor, nn
from torch.distributed._local_tensor import LocalTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from scrimp.config import Architecture, OptimizerConfig
from scrimp.config.pipeline import ONE_STAGE, pipeline_of
from scrimp.config.resolved import ResolvedLayout
from scrimp.models.model import build_model
from scrimp.optim import AdamW
from scrimp.parts import part_of, set_cut
from scrimp.runtime.parallel import RankMesh, parallelise, part_of_rank
from scrimp.world import World

DENSE = {
    "8, dp fsdp tp": {"dp": 2, "fsdp": 2, "tp": 2},
    "24, fsdp tp": {"fsdp": 12, "tp": 2},
    "64, fsdp": {"fsdp": 64},
    "64, dp fsdp tp": {"dp": 2, "fsdp": 8, "tp": 4},
    "64, pp fsdp tp": {"pp": 8, "fsdp": 4, "tp": 2},
    "64, interleaved": {"pp": 4, "dp": 16, "virtual": 2, "schedule": "interleaved"},
    "64, dualpipev": {"pp": 4, "fsdp": 8, "tp": 2, "virtual": 2, "schedule": "dualpipev"},
    "64, cp fsdp": {"cp": 8, "fsdp": 8},
}
ROUTED = {
    "8, ep": {"fsdp": 8, "ep": 4},
    "48, ep etp": {"dp": 3, "fsdp": 8, "tp": 2, "ep": 4, "etp": 2},
    "64, ep etp": {"dp": 2, "fsdp": 16, "tp": 2, "ep": 8, "etp": 4},
    "64, ep beside cp": {"cp": 4, "fsdp": 16, "ep": 8},
}
SIZES = {"model.num_layers": 8, "model.num_kv_heads": 4}


@contextmanager
def one_of(ranks: int, rank: int = 0) -> Iterator[World]:
    """A group of so many ranks, of which this process is one and none other is there."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        yield World(rank, ranks)
    finally:
        dist.destroy_process_group()


Box = tuple[str, tuple[slice, ...], bool]
"""What lies on a rank of a weight, and whether that rank writes it."""


def boxes_of(rank: int, architecture: Architecture, layout: ResolvedLayout) -> list[Box]:
    """What a rank holds of a model's weights, none of which has memory."""
    with one_of(layout.ranks, rank) as world:
        mesh = RankMesh(layout, world)
        pipeline = pipeline_of(layout, architecture.num_layers) if layout.pp > 1 else None
        part = None if pipeline is None else part_of_rank(pipeline, mesh.pipeline_rank)
        model = build_model(architecture, device="meta", part=part)
        cuts = parallelise(model, mesh)
        found: list[Box] = []
        for name, parameter in model.named_parameters():
            if name in cuts:
                set_cut(parameter, cuts[name])
            found += [(name, box.place, box.is_writer) for box in part_of(parameter).boxes()]
        return found


def check_parts(case: Case, degrees: dict[str, Any]) -> None:
    """Every number of every weight is written by one rank."""
    architecture = made(case, World(), 1)[0].architecture
    model = build_model(architecture, device="meta")
    times = {name: torch.zeros(p.shape, dtype=torch.int16) for name, p in model.named_parameters()}
    virtual = 1 if degrees.get("schedule", "1f1b") in ONE_STAGE else 2
    layout = ResolvedLayout(**{"dp": 1, "fsdp": 1, "schedule": "1f1b", "virtual": virtual, **degrees})
    # Each rank in a process of its own: torch keeps what it has found for a mesh, whatever rank asked.
    look = partial(boxes_of, architecture=architecture, layout=layout)
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        for found in pool.map(look, range(layout.ranks), chunksize=1):
            for name, place, is_writer in found:
                times[name][place] += is_writer
    for name, written in times.items():
        assert (written == 1).all(), name


@pytest.mark.slow
@pytest.mark.parametrize("name", DENSE)
def test_every_number_of_a_model_is_written_by_one_rank(name: str) -> None:
    check_parts(Case(settings=SIZES), DENSE[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTED)
def test_every_number_of_experts_is_written_by_one_rank(name: str) -> None:
    check_parts(Case(settings={**SIZES, "model.num_layers": 2}, preset="mixtral-8m"), ROUTED[name])


# -- DTensors of all ranks at once --------------------------------------------------------------

SHAPES = {"even": (64, 24), "uneven": (37, 12), "few rows": (5, 8), "vector": (70,), "one": (1,)}
ADAMW = OptimizerConfig(lr=0.01, master_weights=False, moments="fp32", weight_decay=0.0, beta2=0.95)
MESHES: dict[str, tuple[tuple[int, ...], tuple[Placement, ...]]] = {
    "8": ((8,), (Shard(0),)),
    "64": ((64,), (Shard(0),)),
    "16 x 4": ((16, 4), (Shard(0), Shard(1))),
}


def tensors(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize(
    "name", ["8", *(pytest.param(one, marks=pytest.mark.slow) for one in ("64", "16 x 4"))]
)
def test_shards_are_clipped_by_the_global_norm_and_updated_as_the_whole(name: str) -> None:
    """Three steps of all ranks' pieces, beside torch's own optimizer of the whole tensors."""
    sizes, placements = MESHES[name]
    wholes = {name: nn.Parameter(x) for name, x in tensors(0).items() if len(sizes) == 1 or x.dim() > 1}
    reference = torch.optim.AdamW(
        wholes.values(), lr=0.01, betas=(ADAMW.beta1, 0.95), eps=ADAMW.eps, weight_decay=0.0
    )
    steps = [tensors(step + 1) for step in range(3)]  # inside, each rank would draw numbers of its own
    with one_of(math.prod(sizes)), LocalTensorMode(math.prod(sizes)):
        mesh = init_device_mesh("cpu", sizes)
        shared = {n: nn.Parameter(distribute_tensor(x.detach(), mesh, placements)) for n, x in wholes.items()}
        optimizer = AdamW(shared, ADAMW)
        for gradients in steps:
            for key, gradient in gradients.items():
                if key in wholes:
                    wholes[key].grad = gradient.clone()
                    shared[key].grad = distribute_tensor(gradient, mesh, placements)
            expected = nn.utils.clip_grad_norm_(wholes.values(), 0.5)
            assert expected > 0.5
            norm = optimizer.gradient_norm()
            assert norm == pytest.approx(float(expected), rel=1e-6)
            optimizer.clip(norm, 0.5)
            optimizer.step(0.01)
            optimizer.zero_grad()
            reference.step()
        for key, whole in wholes.items():
            # `reconcile` fails where ranks gather other numbers.
            assert torch.allclose(shared[key].full_tensor().reconcile(), whole, rtol=1e-5, atol=1e-7), key


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES.values(), ids=str)
def test_a_rank_of_a_mesh_of_64_knows_its_box_and_whether_it_writes(shape: tuple[int, ...]) -> None:
    """Each rank by itself, since what it decides is its own: copies over the first axis, shards over the second."""
    whole, times = torch.arange(math.prod(shape)).view(shape), torch.zeros(shape, dtype=torch.int16)
    with one_of(64):
        for rank in range(64):
            with LocalTensorMode(frozenset({rank})):
                mesh = init_device_mesh("cpu", (4, 16))
                shard = distribute_tensor(whole, mesh, (Replicate(), Shard(0)), src_data_rank=None)
                part = part_of(shard)
            assert torch.equal(part.local.reconcile(), whole[part.place])
            times[part.place] += part.is_writer
    assert (times == 1).all()
