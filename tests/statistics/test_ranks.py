"""Statistics over two ranks are those of one process that runs both ranks' micro-batches in turn, to rounding."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from distributed import spawn
from hypothesis import given
from hypothesis import strategies as st
from models import TOKENS, Bench, MlpBlock, MlpModel, batch, decoder, linear_names
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from scrimp.errors import ScrimpError
from scrimp.gemm import LinearPrecision, swap_in
from scrimp.gemm.layer import reference_only
from scrimp.models.context_parallel.division import SCHEMES, Division, Scheme
from scrimp.planner.precision.profile import BatchStatistics, PrecisionProfile
from scrimp.statistics import Probe, Ranks, SharedRows, Subject, collect, probe
from scrimp.statistics.stream import gaussian, generator_of, noise_at
from scrimp.world import World

RANKS, MICRO_BATCHES, ROWS = 2, 4, 2
FORMATS = ("fp8", "fp4", "fp8_tensor", "nvfp4")
HEADS = ("head", "body.head")
GAINS = ("backward", "forward", "curvature")


class GatedBlock(MlpBlock):
    """Two layers read one input: wrappers give each a view of its own."""

    def __init__(self, width: int) -> None:
        super().__init__(width, bias=True, dropout=0.0, inner_dropout=0.0, batch_norm=False)
        self.gate = nn.Linear(width, 2 * width)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(x)
        return x + self.down(F.silu(self.gate(hidden)) * self.up(hidden))


def gated(width: int) -> MlpModel:
    """Always the same one."""
    model = MlpModel(width=width)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model.blocks = nn.ModuleList(GatedBlock(width) for _ in range(2))
    return model


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
    width: int = 64
    """0: a decoder."""
    compute: str = "fp32"
    optimizer: Callable[..., Any] = torch.optim.AdamW
    layers_alone: bool = False
    formats: Sequence[str] = FORMATS

    def __str__(self) -> str:
        """For the test's name."""
        alone = "alone" if self.layers_alone else ""
        return f"{self.kind}-{self.gains}-{self.width or 'decoder'}-{self.optimizer.__name__}{alone}"


TENSOR_FORMATS = ("fp8_tensor", "fp8_row", "mxfp8", "nvfp4")
CASES = (
    Case("ddp", width=0),
    Case("ddp", "exact", optimizer=torch.optim.SGD),
    Case("ddp", "blocks", compute="bf16"),
    Case("fsdp", width=0),
    Case("fsdp", "exact", layers_alone=True, optimizer=torch.optim.Adam),
    Case("fsdp", width=25),  # whose shards are of unequal size
    Case("tensor", formats=TENSOR_FORMATS),
    Case("tensor", "exact", formats=TENSOR_FORMATS, optimizer=torch.optim.SGD),
    Case("tensor", "blocks", width=72, formats=("fp8_tensor", "fp8_row")),
)
GRID = Case("grid", formats=TENSOR_FORMATS)
"""Data parallel by tensor parallel, on four ranks."""


# -- one process, and the same on ranks --------------------------------------------------------


def trained(case: Case) -> tuple[nn.Module, Any]:
    """A model and its optimizer after some steps of one process: the same everywhere."""
    model = gated(case.width) if case.width else Attentive()
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


def alone(case: Case) -> tuple[PrecisionProfile, Probe]:
    """One process, all micro-batches."""
    model, optimizer = trained(case)
    subject = subject_of(bench_of(case, model, optimizer, linear_names(model, HEADS)), model)
    every = range(MICRO_BATCHES)
    return collect(subject, [every], case.formats, gains=case.gains), probe_of(subject, every, case)


def found_by(rank: int, cases: Sequence[Case]) -> list[tuple[PrecisionProfile, Probe]]:
    """By case, as this rank finds it with its own micro-batches and shards."""
    found = []
    for case in cases:
        subject, ranks = on_ranks(case)
        own = range(ranks.data_rank, MICRO_BATCHES, ranks.data_size)
        profile = collect(subject, [own], case.formats, gains=case.gains, ranks=ranks)
        found.append((profile, probe_of(subject, own, case, ranks)))
    return found


def probe_of(subject: Subject, numbers: Sequence[int], case: Case, ranks: Ranks | None = None) -> Probe:
    """A probe of a plan in the last format."""
    subject.planned.replan(LinearPrecision.of(case.formats[-1]))
    return probe(subject, numbers, ranks=ranks)


def on_ranks(case: Case) -> tuple[Subject, Ranks]:
    """The trained model, cut and wrapped."""
    model, before = trained(case)
    names = linear_names(model, HEADS)
    state = {name: (p.detach().clone(), before.state.get(p, {})) for name, p in model.named_parameters()}
    outer = distribute(model, case)
    optimizer = case.optimizer(model.parameters(), lr=3e-3)
    for name, parameter in model.named_parameters():
        for key, value in state[name][1].items():
            optimizer.state[parameter][key] = (
                value if value is None or value.ndim == 0 else like(parameter, value)
            )
    made = bench_of(case, model, optimizer, names)
    return subject_of(made, outer), Ranks.of(outer)


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
        # The second block stays whole: its statistics are copies.
        styles = {f"blocks.0.{name}": ColwiseParallel() for name in ("gate", "up")}
        styles["blocks.0.down"] = RowwiseParallel()
        parallelize_module(model, mesh["tensor"] if mesh else init_device_mesh("cpu", (RANKS,)), styles)
    if case.kind in ("fsdp", "grid"):
        how: dict[str, Any] = {"mesh": mesh["data"]} if mesh else {}
        for block in model.blocks:  # type: ignore[union-attr]
            if case.layers_alone:
                for layer in (block.gate, block.up, block.down):
                    fully_shard(layer, **how)
            fully_shard(block, **how)
        fully_shard(model, **how)
    return model


# -- equality ----------------------------------------------------------------------------------


def equal(found: PrecisionProfile, expected: PrecisionProfile) -> None:
    """Every statistic; small ones of a kind to rounding of the largest."""
    ours, theirs = (
        {field.name: getattr(p, field.name) for field in dataclasses.fields(p) if field.name != "batches"}
        for p in (found, expected)
    )
    assert ours == theirs
    for a, b in zip(found.batches, expected.batches, strict=True):
        for field in dataclasses.fields(BatchStatistics):
            one, other = (np.asarray(getattr(batch, field.name)) for batch in (a, b))
            largest = float(np.abs(other).max())
            # AdamW magnifies rounding where an embedding's rows have hardly had a gradient.
            rtol = 1e-3 if field.name in GAINS else 5e-6
            # A change of the loss is what is left of many that cancel, and a code may fall to the other side.
            atol = (0.01 if field.name == "losses" else 1e-7) * largest
            assert largest > 0, field.name
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=field.name)


def same(one: PrecisionProfile, other: PrecisionProfile) -> None:
    """Bit for bit."""
    for a, b in zip(one.batches, other.batches, strict=True):
        for field in dataclasses.fields(BatchStatistics):
            assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name


Found = list[list[tuple[PrecisionProfile, Probe]]]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    """The results of every rank, by case: one group of processes runs all."""
    return spawn(RANKS, found_by, tmp_path_factory.mktemp("ranks"), CASES)


def check(case: Case, found: Sequence[tuple[PrecisionProfile, Probe]]) -> None:
    """What all ranks have found of one case."""
    profile, probed = alone(case)
    for ours, probed_here in found:
        same(ours, found[0][0])
        equal(ours, profile)
        assert dataclasses.astuple(probed_here) == pytest.approx(
            dataclasses.astuple(probed), rel=1e-4, abs=1e-6
        )


@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
def test_ranks_find_together_what_one_process_finds(found: Found, number: int) -> None:
    check(CASES[number], [of_rank[number] for of_rank in found])


@pytest.mark.slow
def test_data_and_tensor_parallel_ranks_find_together_what_one_process_finds(tmp_path: Path) -> None:
    check(GRID, [of_rank[0] for of_rank in spawn(4, found_by, tmp_path, [GRID])])


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 6))
def test_no_two_micro_batches_of_a_batch_draw_the_same_noise(
    data_size: int, tensor_size: int, number: int
) -> None:
    world = World(size=data_size * tensor_size)
    ranks = [Ranks(world, data_size, rank) for rank in range(data_size)]
    drawn = [of_rank.draw(micro_batch) for of_rank in ranks for micro_batch in range(number)]
    assert sorted(drawn) == list(range(data_size * number))


@pytest.mark.parametrize("scheme", SCHEMES)
def test_ranks_that_share_rows_draw_the_noise_of_whole_rows(scheme: Scheme) -> None:
    division, whole = Division(scheme, 24, 3), torch.randn(2, 24, 5)
    rows = [SharedRows(3, lambda length, r=rank: division.positions(r)) for rank in range(3)]
    ranks = [Ranks(World(rank, 6), 6, 3 + rank, rows=rows[rank]) for rank in range(3)]
    alone = gaussian(whole, 0.1, "tokens", generator_of(whole.device, 7, Ranks(World(1, 2), 2, 1).draw(4)))
    for rank, of_rank in enumerate(ranks):
        generator = generator_of(whole.device, 7, of_rank.draw(4))
        found = gaussian(division.cut(whole, rank), 0.1, "tokens", generator, of_rank.rows)
        assert torch.equal(found, division.cut(alone, rank))


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 2), st.integers(1, 4))
def test_tokens_that_share_rows_draw_the_noise_of_whole_rows_between_layers(
    rows: int, each: int, data_rank: int, size: int
) -> None:
    whole = torch.randn(rows, each * size, 5)
    alone = gaussian(whole, 0.1, "tokens", generator_of(whole.device, 7))
    for rank in range(size):
        own = range(rank * each, (rank + 1) * each)
        tokens = SharedRows(size, lambda length, own=own: torch.tensor(own))
        ranks = Ranks(World(rank, 2 * size), 2, data_rank - 1, tokens=tokens)
        found = noise_at(whole[:, own], 0.1, "tokens", generator_of(whole.device, 7), ranks)
        assert torch.equal(found, alone[:, own])
        assert ranks.copies() == 1


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 5))
def test_experts_draw_alike_only_where_ranks_share_each_of_them(groups: int, etp: int, number: int) -> None:
    world = groups * etp
    drawn = [
        [Ranks(World(rank, world)).draw_of_experts(micro_batch, etp) for micro_batch in range(number)]
        for rank in range(world)
    ]
    for group in range(groups):
        assert all(one == drawn[group * etp] for one in drawn[group * etp : (group + 1) * etp])
    assert sorted(n for one in drawn[::etp] for n in one) == list(range(groups * number))


# -- refusals ----------------------------------------------------------------------------------


def message(act: Callable[[], object]) -> str:
    """What a refusal says."""
    try:
        act()
    except ScrimpError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(rank: int) -> dict[str, str]:
    """What each forbidden use is answered with; no collective hangs after it."""
    said = {"plain": message(lambda: Ranks.of(MlpModel()))}
    mesh = init_device_mesh("cpu", (RANKS,))
    styles = {"blocks.*.norm": SequenceParallel(), "blocks.*.up": ColwiseParallel()}
    said["sequence"] = message(lambda: Ranks.of(parallelize_module(MlpModel(), mesh, styles)))
    grouped = nn.parallel.DistributedDataParallel(
        MlpModel(), process_group=dist.new_group([rank], use_local_synchronization=True)
    )
    said["part"] = message(lambda: Ranks.of(grouped))
    older = FullyShardedDataParallel(MlpModel(), device_id=torch.device("cpu"))
    said["older"] = message(lambda: Ranks.of(older))
    subject, _ = on_ranks(Case("fsdp"))
    said["without ranks"] = message(lambda: collect(subject, [[rank]], ["fp8"]))
    subject, ranks = on_ranks(Case("tensor"))
    said["straddling"] = message(lambda: collect(subject, [[0]], ["nvfp4", "fp8"], ranks=ranks))
    viewing = nn.parallel.DistributedDataParallel(MlpModel(), gradient_as_bucket_view=True)
    logits_of(viewing, batch(0)[0][0]).sum().backward()
    said["views"] = message(lambda: Ranks.of(viewing))
    return said


@pytest.mark.slow
def test_ranks_that_are_joined_in_other_ways_are_refused_by_name(tmp_path: Path) -> None:
    for said in spawn(RANKS, refusals, tmp_path):
        assert said["plain"].startswith("ModelError: nothing joins the ranks")
        assert "blocks.0.norm.weight" in said["sequence"]
        assert "sequence parallel" in said["sequence"]
        assert "2 ranks: 1 of data parallel x 1 of tensor parallel" in said["part"]
        assert "got FullyShardedDataParallel" in said["older"]
        assert "give ranks=Ranks.of(model)" in said["without ranks"]
        assert said["straddling"].startswith(
            "PlanError: blocks.0.up.fprop cannot run in fp8 on ranks that share"
        )
        assert "zero_grad" in said["views"]
