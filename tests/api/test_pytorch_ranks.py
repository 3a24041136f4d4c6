"""The library door on two ranks: one profile and one plan, training as if never measured, other plans refused."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from small_nets import LAYERS, adamw, batch, loss, net
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import scrimp
from scrimp.api.applied import put_in_force
from scrimp.api.modules import unwrap
from scrimp.errors import PlanError, TrainingError
from scrimp.gemm import LinearPrecision
from scrimp.gemm.backends import ReferenceBackend
from scrimp.precision import GEMMS

RANKS = 2


def copied(model: nn.Module) -> nn.Module:
    return nn.parallel.DistributedDataParallel(model)


def sharded(model: nn.Module) -> nn.Module:
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block)
    return fully_shard(model)


def cut(model: nn.Module) -> nn.Module:
    mesh = init_device_mesh("cpu", (RANKS,))
    for block in model.blocks:  # type: ignore[union-attr]
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def digest(model: nn.Module) -> str:
    """A digest of what this rank holds of all parameters, to the last bit."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        here = getattr(parameter, "to_local", lambda parameter=parameter: parameter)()
        found.update(here.detach().numpy().tobytes())
    return found.hexdigest()


def steps(model: nn.Module, optimizer: Any, rank: int, first: int) -> None:
    for step in range(first, first + 2):
        loss(model, batch(10 * step + rank)).backward()
        optimizer.step()
        optimizer.zero_grad()


def run(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> dict[str, Any]:
    """Two runs, of which one is measured; then a plan, and another one on the second rank."""
    digests, model = [], nn.Module()
    for is_measured in (False, True):
        model = wrap(net())
        optimizer = adamw(model)
        steps(model, optimizer, rank, 0)
        if is_measured:
            with torch.no_grad():
                loss(model, batch(0))  # evaluated, which leaves whole parameters behind
            profile = scrimp.measure(model, optimizer, [batch(100 + rank), batch(200 + rank)], loss)
        steps(model, optimizer, rank, 2)
        digests.append(digest(model))
    plan = scrimp.plan(profile, 0.5)
    planned = scrimp.apply(model, plan)
    steps(model, optimizer, rank, 4)
    before = planned.layers["blocks.0.up"].precision
    said = ""
    try:
        scrimp.apply(model, scrimp.plan(profile, 0.75 if rank else 0.25))
    except PlanError as error:
        said = str(error)
    return {
        "digests": digests,
        "profile": [vars(b) for b in profile.batches],
        "names": profile.layers,
        "plan": plan.precisions,
        "is_applied": planned.layers["blocks.0.up"].precision == before == plan.precisions["blocks.0.up"],
        "said": said,
    }


@pytest.fixture(
    scope="module", params=[pytest.param(one, marks=pytest.mark.slow) for one in (copied, sharded)]
)
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return spawn(RANKS, run, tmp_path_factory.mktemp("ranks"), request.param)


@pytest.mark.slow
def test_a_measured_run_goes_on_as_if_it_had_not_been_measured(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        never, measured = of_rank["digests"]
        assert never == measured


def test_all_ranks_get_one_profile_and_make_one_plan(found: list[dict[str, Any]]) -> None:
    first, second = found
    for a, b in zip(first["profile"], second["profile"], strict=True):
        assert all((a[name] == b[name]).all() if name != "loss" else a[name] == b[name] for name in a)
    assert first["profile"][0]["loss"] != first["profile"][1]["loss"]
    assert first["plan"] == second["plan"]
    assert len({precision.fprop for precision in first["plan"].values()} | {"bf16"}) > 1


def test_plans_that_differ_between_ranks_are_refused_and_change_nothing(found: list[dict[str, Any]]) -> None:
    for of_rank in found:
        assert "the ranks were given different plans" in of_rank["said"]
        assert of_rank["is_applied"]


# -- the proof of a plan -----------------------------------------------------------------------

LIAR = "blocks.1.up"


class Large(ReferenceBackend):
    """Results are 5 % too large."""

    def multiply(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> Tensor:
        return super().multiply(gemm, a, b, out) * 1.05


def prove_each(rank: int, wrap: Callable[[nn.Module], nn.Module]) -> list[dict[str, Any]]:
    """An honest run, and one that lies in each GEMM."""
    return [prove(rank, wrap, lying) for lying in (None, *GEMMS)]


def prove(rank: int, wrap: Callable[[nn.Module], nn.Module], lying: str | None) -> dict[str, Any]:
    """Steps by a plan, of which the second rank breaks one GEMM where asked."""
    model = wrap(net())
    optimizer, inner = adamw(model), unwrap(model)
    precisions = dict.fromkeys(LAYERS, LinearPrecision.of("fp8_tensor"))
    planned = put_in_force(inner, precisions)
    honest = planned.layers[LIAR].choose
    if rank == 1 and lying is not None:
        planned.layers[LIAR].choose = lambda recipe, gemm, *site: (
            Large() if gemm == lying else honest(recipe, gemm, *site)
        )
    taken, said = 0, ""
    try:
        for step in range(4):
            loss(model, batch(step if wrap is cut else 10 * step + rank)).backward()
            optimizer.step()
            optimizer.zero_grad()
            taken += 1
    except TrainingError as error:
        said = str(error)
    dist.barrier()  # nobody waits for a rank that stopped
    assert planned.proof is not None
    return {"taken": taken, "said": said, "proven": set(planned.proof.proven)}


@pytest.mark.slow
@pytest.mark.parametrize("wrap", [copied, sharded, cut])
def test_a_lie_on_one_rank_stops_all_of_them_by_name(
    wrap: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    every = {(layer, gemm) for layer in LAYERS for gemm in GEMMS}
    for rank, (honest, *liars) in enumerate(spawn(RANKS, prove_each, tmp_path, wrap)):
        assert honest == {"taken": 4, "said": "", "proven": every}
        for gemm, liar in zip(GEMMS, liars, strict=True):
            assert liar["taken"] == 1
            assert (
                f"{LIAR}.{gemm} did not run in fp8_tensor on the reference back end of rank 1" in liar["said"]
            )
            assert liar["proven"] == every - ({(LIAR, gemm)} if rank == 1 else set())
