"""Statistics over two ranks are those of one process that runs both ranks' micro-batches in turn, to rounding."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from distributed import spawn
from models import TOKENS, Bench, MlpModel, batch, decoder, linear_names
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, parallelize_module

from scrimp.errors import ScrimpError
from scrimp.gemm import LinearPrecision, swap_in
from scrimp.gemm.layer import reference_only
from scrimp.planner.bits.profile import BatchStatistics, PrecisionProfile
from scrimp.profiler.statistics import Ranks, Subject, collect

RANKS, MICRO_BATCHES, ROWS = 2, 4, 2
FORMATS = ("fp8", "fp4", "fp8_tensor", "nvfp4")
HEADS = ("head", "body.head")
GAINS = ("backward", "forward", "curvature")


class Attentive(nn.Module):
    """Scrimp's decoder, whose forward pass gives logits: wrappers must see all of it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = decoder()
        self.blocks = self.body.blocks

    def forward(self, tokens: Tensor) -> Tensor:
        return self.body.head(self.body(tokens))


@dataclass(frozen=True)
class Case:
    """One way to train on two ranks."""

    kind: str
    gains: str = "ratios"
    make: Callable[[], nn.Module] = functools.partial(MlpModel, width=64)
    compute: str = "fp32"
    optimizer: Callable[..., Any] = torch.optim.AdamW
    layers_alone: bool = False
    formats: Sequence[str] = FORMATS

    def __str__(self) -> str:
        """For the test's name."""
        model = "mlp" if isinstance(self.make, functools.partial) else self.make.__name__
        return "-".join((self.kind, self.gains, model, self.compute, self.optimizer.__name__)) + (
            "-alone" if self.layers_alone else ""
        )


TENSOR_FORMATS = ("fp8_tensor", "fp8_row", "mxfp8", "nvfp4")
CASES = (
    Case("ddp", make=Attentive),
    Case("ddp", "exact"),
    Case("ddp", "blocks", compute="bf16"),
    Case("fsdp", make=Attentive),
    Case("fsdp", "exact", layers_alone=True),
    Case("fsdp", optimizer=torch.optim.SGD),
    Case("tensor", formats=TENSOR_FORMATS),
    Case("tensor", "exact", formats=TENSOR_FORMATS),
    Case("tensor", "blocks", compute="bf16", formats=TENSOR_FORMATS),
)
GRID = Case("grid", formats=TENSOR_FORMATS)
"""Data parallel by tensor parallel, on four ranks."""


# -- one process, and the same on ranks --------------------------------------------------------


def trained(case: Case) -> tuple[nn.Module, Any]:
    """A model and its optimizer after some steps of one process: the same everywhere."""
    model = case.make()
    optimizer = case.optimizer(model.parameters(), lr=3e-3)
    for step in range(4):
        for tokens, goal in batch(step):
            F.cross_entropy(logits_of(model, tokens), goal.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def logits_of(model: nn.Module, tokens: Tensor) -> Tensor:
    """[S, vocabulary]."""
    logits: Tensor = model(tokens)
    return logits.float().flatten(0, 1)


def bench_of(case: Case, model: nn.Module, optimizer: Any, names: Sequence[str]) -> Bench:
    """Under plan, by the reference back end."""
    planned = swap_in(model, dict.fromkeys(names, LinearPrecision.of(case.compute)), choose=reference_only)
    return Bench(model, optimizer, planned, case.compute)


def subject_of(made: Bench, outer: nn.Module) -> Subject:
    """As a loop measures that runs `outer` and says which rows it runs."""

    def losses(numbers: Sequence[int]) -> Iterator[Tensor]:
        parts = batch(500, micro_batches=MICRO_BATCHES, rows=ROWS)
        for number in numbers:
            tokens, goal = parts[number]
            made.planned.clock.begin(7, first_row=number * ROWS * TOKENS)
            with torch.autocast("cpu", torch.bfloat16, enabled=made.compute == "bf16"):
                logits = logits_of(outer, tokens)
            yield F.cross_entropy(logits, goal.flatten()) / len(numbers)

    return made.subject(losses)


def whole(case: Case) -> PrecisionProfile:
    """One process, all micro-batches."""
    model, optimizer = trained(case)
    made = bench_of(case, model, optimizer, linear_names(model, HEADS))
    return collect(subject_of(made, model), [range(MICRO_BATCHES)], case.formats, gains=case.gains)


def on_ranks(rank: int, cases: Sequence[Case]) -> list[PrecisionProfile]:
    """By case, as this rank finds it."""
    return [of_rank(rank, case) for case in cases]


def of_rank(rank: int, case: Case) -> PrecisionProfile:
    """With this rank's micro-batches and shards."""
    model, before = trained(case)
    names = linear_names(model, HEADS)
    state = {name: (p.detach().clone(), before.state.get(p, {})) for name, p in model.named_parameters()}
    outer = distribute(model, case)
    optimizer = case.optimizer(model.parameters(), lr=3e-3)
    for name, parameter in model.named_parameters():
        for key, value in state[name][1].items():
            optimizer.state[parameter][key] = value if value is None or value.ndim == 0 else like(parameter, value)
    made = bench_of(case, model, optimizer, names)
    ranks = Ranks.of(outer)
    subject = subject_of(made, outer)
    own = range(ranks.data_rank, MICRO_BATCHES, ranks.data_size)
    return collect(subject, [own], case.formats, gains=case.gains, ranks=ranks)


def like(parameter: Tensor, value: Tensor) -> Tensor:
    """A tensor cut as a parameter is."""
    if not hasattr(parameter, "device_mesh"):
        return value
    return distribute_tensor(value, parameter.device_mesh, parameter.placements)  # type: ignore[attr-defined]


def distribute(model: nn.Module, case: Case) -> nn.Module:
    """The model that the loop calls."""
    if case.kind == "ddp":
        return nn.parallel.DistributedDataParallel(model)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor")) if case.kind == "grid" else None
    if case.kind in ("tensor", "grid"):
        styles = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
        parallelize_module(model, mesh["tensor"] if mesh else init_device_mesh("cpu", (RANKS,)), styles)
    if case.kind in ("fsdp", "grid"):
        how: dict[str, Any] = {"mesh": mesh["data"]} if mesh else {}
        for block in model.blocks:  # type: ignore[union-attr]
            if case.layers_alone:
                for layer in (block.up, block.down):
                    fully_shard(layer, **how)
            fully_shard(block, **how)
        fully_shard(model, **how)
    return model


# -- equality ----------------------------------------------------------------------------------


def equal(found: PrecisionProfile, expected: PrecisionProfile, *, tolerance: float, of_gains: float) -> None:
    """Every statistic, elements against the largest of their kind."""
    ours, theirs = (
        {field.name: getattr(p, field.name) for field in dataclasses.fields(p) if field.name != "batches"}
        for p in (found, expected)
    )
    assert ours == theirs
    for a, b in zip(found.batches, expected.batches, strict=True):
        for field in dataclasses.fields(BatchStatistics):
            one, other = np.asarray(getattr(a, field.name)), np.asarray(getattr(b, field.name))
            rtol = of_gains if field.name in GAINS else tolerance
            assert np.abs(other).max() > 0, field.name
            assert np.allclose(one, other, rtol=rtol, atol=rtol * 0.01 * np.abs(other).max()), (
                field.name,
                float(np.max(np.abs(one - other) / np.maximum(np.abs(other), 1e-12))),
            )


def same(one: PrecisionProfile, other: PrecisionProfile) -> None:
    """Bit for bit."""
    for a, b in zip(one.batches, other.batches, strict=True):
        for field in dataclasses.fields(BatchStatistics):
            assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> list[list[PrecisionProfile]]:
    """Of every rank, by case: one group of processes runs all."""
    return spawn(RANKS, on_ranks, tmp_path_factory.mktemp("ranks"), CASES)


@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_ranks_find_together_what_one_process_finds(
    profiles: list[list[PrecisionProfile]], number: int
) -> None:
    case = CASES[number]
    first, second = (of_rank[number] for of_rank in profiles)
    same(first, second)
    loose = case.compute == "bf16" and case.kind == "tensor"
    equal(first, whole(case), tolerance=2e-2 if loose else 1e-5, of_gains=5e-2 if loose else 1e-4)
