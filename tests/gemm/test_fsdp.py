"""Planned layers under FSDP2: the loss and every gradient of a single process on the same batch."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from planned_cases import blocks, random, same, start, watching_gemms
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

RANKS, ROWS, WIDTH = 2, 24, 64
STEP = 3


@dataclass(frozen=True)
class Case:
    """One way to shard a planned model."""

    recipe: str
    saved: str
    is_mixed: bool = False
    planned_first: bool = True
    layers_alone: bool = False
    is_compiled: bool = False


CASES = (
    *(Case(recipe, recipe, mixed) for recipe, mixed in itertools.product(("fp8", "nvfp4"), (False, True))),
    Case("nvfp4", "nvfp4", planned_first=False),
    Case("fp8_tensor", "fp32", layers_alone=True),
    Case("mxfp4", "mxfp4", layers_alone=True, planned_first=False, is_mixed=True),
    Case("nvfp4", "nvfp4", is_compiled=True),
)


def batch(rank: int) -> Tensor:
    """The rows of one rank."""
    return random(RANKS * ROWS, WIDTH)[rank * ROWS : (rank + 1) * ROWS]


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    """The loss of one rank's rows."""
    y: Tensor = model(x)
    return (y.float() - 1).square().mean()


def shard(model: nn.Sequential, case: Case) -> None:
    """Each block, or each linear layer and then each block, and the rest."""
    policy = MixedPrecisionPolicy()
    if case.is_mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model:
        if case.layers_alone:
            fully_shard(block.up, mp_policy=policy)
            fully_shard(block.down, mp_policy=policy)
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)


def train_sharded(rank: int) -> list[tuple[float, dict[str, Tensor], int]]:
    """Per case: the mean loss, whole gradients, and how many GEMMs ran here."""
    outcomes = []
    for case in CASES:
        model = blocks(2, WIDTH)
        if not case.planned_first:
            shard(model, case)
        plan = start(model, same(case.recipe, case.saved))
        if case.planned_first:
            shard(model, case)
        if case.is_compiled:
            for block in model:
                block.compile(backend="aot_eager", fullgraph=True)
        plan.clock.begin(STEP, first_row=rank * ROWS)
        with watching_gemms() as ran:
            loss = loss_of(model, batch(rank))
            loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        gradients = {}
        for name, parameter in model.named_parameters():
            assert isinstance(parameter.grad, DTensor)
            gradients[name] = parameter.grad.full_tensor()
        outcomes.append((float(total) / RANKS, gradients, len(ran)))
    return outcomes


def train_whole(case: Case) -> tuple[float, dict[str, Tensor]]:
    """The same in one process: each rank's rows in turn, the mean of losses and gradients."""
    model = blocks(2, WIDTH)
    dtype = torch.bfloat16 if case.is_mixed else torch.float32
    model.to(dtype)
    plan = start(model, same(case.recipe, case.saved))
    losses, gradients = [], {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for rank in range(RANKS):
        plan.clock.begin(STEP, first_row=rank * ROWS)
        model.zero_grad()
        loss = loss_of(model, batch(rank).to(dtype))
        loss.backward()
        losses.append(float(loss.detach()))
        for name, parameter in model.named_parameters():
            assert parameter.grad is not None
            gradients[name] += parameter.grad.float() / RANKS
    return sum(losses) / RANKS, gradients


Outcomes = list[list[tuple[float, dict[str, Tensor], int]]]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """The results of every rank: one group of processes runs all cases."""
    return spawn(RANKS, train_sharded, tmp_path_factory.mktemp("fsdp"))


@pytest.mark.parametrize("number", range(len(CASES)), ids=str)
@pytest.mark.slow
def test_sharded_training_gives_the_loss_and_gradients_of_one_process(
    outcomes: Outcomes, number: int
) -> None:
    loss, gradients = train_whole(CASES[number])
    for of_rank in outcomes:
        found_loss, found, gemms = of_rank[number]
        assert gemms == 4 * 3
        assert found_loss == pytest.approx(loss, rel=1e-6)
        assert found.keys() == gradients.keys()
        for name, expected in gradients.items():
            assert (found[name] - expected).norm() <= 1e-6 * expected.norm(), name


@pytest.mark.slow
def test_the_place_in_the_batch_matters(outcomes: Outcomes) -> None:
    """The comparison above can fail: without `first_row` the second rank's noise would be the first's."""
    number = next(i for i, case in enumerate(CASES) if case.recipe == "nvfp4")
    model = blocks(2, WIDTH)
    plan = start(model, same("nvfp4"))
    plan.clock.begin(STEP)
    for rank in range(RANKS):
        (loss_of(model, batch(rank)) / RANKS).backward()
    found = outcomes[0][number][1]["0.up.weight"]
    assert model[0].up.weight.grad is not None
    assert (found - model[0].up.weight.grad).norm() > 1e-3 * found.norm()


def fail_on_one(rank: int) -> None:
    """The second rank fails while the first waits for it."""
    if rank == 1:
        raise ValueError("the second rank has gone wrong")
    dist.barrier()


@pytest.mark.slow
def test_an_error_of_one_rank_reaches_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"(?s)rank 1: .*the second rank has gone wrong"):
        spawn(RANKS, fail_on_one, tmp_path)
