"""Each axis of the mesh has its own back end, seen by one that says which groups it made."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from distributed import spawn

from scrimp.config import axis_backends
from scrimp.config.resolved import ResolvedLayout
from scrimp.runtime.parallel.mesh import RankMesh
from scrimp.world import World


def by_backend(rank: int) -> tuple[list[str], float]:
    """Axes whose group is of the back end that was named for dp, and a sum over them."""
    made: list[dist.ProcessGroupGloo] = []

    def make(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
        made.append(dist.ProcessGroupGloo(store, rank, size, timeout))
        return made[-1]

    dist.Backend.register_backend("named", make, devices=["cpu"])
    axis_backends._KNOWN = (*axis_backends._KNOWN, "named")  # type: ignore[assignment]
    layout = ResolvedLayout(dp=2, fsdp=2, backends="dp=named")
    mesh = RankMesh(layout, World(rank=rank, size=4))
    cpu, found = torch.device("cpu"), []
    for axes in (mesh.devices, mesh.copies_and_shards):
        for axis in axes.mesh_dim_names or ():
            group = axes.get_group(axis)
            if dist.get_backend(group) == "named":
                assert group._get_backend(cpu) in made
                found.append(axis)
    total = torch.tensor(float(rank))
    dist.all_reduce(total, group=mesh.devices.get_group("dp"))
    return found, float(total)


def test_the_axis_that_is_named_alone_has_it(tmp_path: Path) -> None:
    assert os.environ.get("RANK") is None
    results = spawn(4, by_backend, tmp_path)
    assert [axes for axes, _ in results] == [["dp", "dp"]] * 4
    assert [total for _, total in results] == [2.0, 4.0, 2.0, 4.0]
