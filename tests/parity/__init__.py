"""The parity call: the same training on several ranks and in one process, compared number by number.

    check_parity(2, {"tp": Case({"tp": 2})}, tmp_path)

starts two processes on gloo, trains a small model under each layout, trains it in this process too, and compares

    losses       of every step, over as many steps as the case has
    norms        of every step's gradients, before they are clipped
    gradients    every one of the first step, element by element:  max|Δ| <= 1e-5 max|g| + 1e-7
    copies       of weights on several ranks, after the last step: bit for bit
    bytes        that each rank sent in the second step, by kind of collective: what the formulas say

One process takes the micro-batches that the ranks take side by side one after another, so that quantized GEMMs see
the same groups of tokens and the same rounding noise.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from torch import Tensor

from parity.formulas import Journeys, axis_bytes, bytes_sent, spared_by_codes
from scrimp import objectives
from scrimp.config import Config, replace_values
from scrimp.config.activations import Activations
from scrimp.data import Batch
from scrimp.models.compiled import compile_blocks
from scrimp.models.initialise import initialise
from scrimp.models.model import Model
from scrimp.optim import Optimizer, build
from scrimp.parts import TensorPart, part_of
from scrimp.profiler.collectives import counting_collectives
from scrimp.runtime import Executable, realise
from scrimp.runtime.memory import HostRoom
from scrimp.runtime.parallel import RankMesh
from scrimp.runtime.passes import run_passes
from scrimp.training.setup import Decisions, decide
from scrimp.world import World

SEQUENCE, ROWS = 32, 2
"""Tokens of a row, and rows of a micro-batch."""
VOCABULARY = 259
"""Entries of a tokenizer of bytes; no multiple of any number of ranks."""
SMALL = {"num_layers": 3, "width": 64, "num_heads": 4, "num_kv_heads": 2, "ffn_width": 128}


@dataclass(frozen=True)
class Bounds:
    """Most that ranks may differ from one process."""

    gradients: float = 1e-5
    """A gradient of the first step, of its largest number."""
    later: float = 1e-5
    """Losses after the first step, of themselves; norms ten times that. Where numbers are rounded to few bits, one last
    bit of a gradient more or less decides what a weight is rounded to."""
    first: float = 1e-6
    """The first step's loss."""


@dataclass(frozen=True)
class Case:
    """One training."""

    layout: dict[str, int | str] = field(default_factory=dict)
    """Degrees; left out: fsdp over all ranks."""
    settings: dict[str, object] = field(default_factory=dict)
    """Further settings, by dotted key."""
    preset: str = "llama-3m"
    """In the sizes of `SMALL`."""
    activations: str = "keep"
    compiled: bool = False
    micro_batches: int = 2
    """Micro-batches of each rank, over which gradients are accumulated."""
    with_documents: bool = False
    """Rows are packed documents."""
    steps: int = 3
    clip: float = 0.5
    """Norm that gradients are clipped to: less than what they have."""
    routers: float = 1.0
    """Routers' first weights are so many times the usual ones: far from ties, the same experts are chosen whatever the
    order of sums."""
    bounds: Bounds = Bounds()
    counts_bytes: bool = True
    """Whether bytes are compared with their formulas, which know float32 without recomputation."""


@dataclass
class Trained:
    """What came of it, on one rank."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    """Whole gradients of the first step."""
    sent: dict[str, float] = field(default_factory=dict)
    """Bytes that left this rank in the second step, by kind of collective."""
    predicted: dict[str, float] = field(default_factory=dict)
    """By the formulas."""
    axes: list[tuple[float, float]] = field(default_factory=list)
    """Counted bytes and those of the planner's formulas, by axis of the layout."""


@dataclass(frozen=True)
class Measured:
    """How near the ranks came to one process."""

    loss: float
    """Largest difference of a step's loss, of that loss."""
    gradient: float
    """Largest difference of a gradient, of what is allowed: at most 1."""
    sent: dict[str, int]
    """Bytes that all ranks sent in a step, by kind of collective: counted, and equal to the formula on each."""


def check_parity(ranks: int, cases: Mapping[str, Case], folder: Path) -> dict[str, Measured]:
    """Train on ranks, which are started once for all cases, and in this process.

    Args:
        folder: an empty one of the test.

    Raises:
        AssertionError: they differ, or ranks sent other bytes than the formulas say.
    """
    found = on_ranks(ranks, cases, folder)
    return {name: compared(name, case, found[name]) for name, case in cases.items()}


def on_ranks(ranks: int, cases: Mapping[str, Case], folder: Path) -> dict[str, list[Trained]]:
    """What each of so many processes trained, which are started once for all cases."""
    found = spawn(ranks, all_trained, folder, ranks, cases)
    return {name: [rank[name] for rank in found] for name in cases}


def compared(name: str, case: Case, ranks: list[Trained], one: Trained | None = None) -> Measured:
    """Equal to one process up to the order of sums, and all ranks alike.

    Args:
        one: what that process did; None: the same micro-batches, here.
    """
    one, bounds, first = one or alone(len(ranks), case), case.bounds, ranks[0]
    assert one.norms[0] > case.clip, f"{name}: nothing is clipped"
    assert all((rank.losses, rank.norms) == (first.losses, first.norms) for rank in ranks), name
    assert first.losses[0] == pytest.approx(one.losses[0], rel=bounds.first), name
    assert first.losses == pytest.approx(one.losses, rel=bounds.later), name
    assert first.norms == pytest.approx(one.norms, rel=10 * bounds.later), name
    shares = {}
    for rank in ranks:
        assert rank.gradients.keys() == one.gradients.keys(), name
        for key, expected in one.gradients.items():
            allowed = bounds.gradients * float(expected.abs().max()) + 1e-7
            share = float((rank.gradients[key] - expected).abs().max()) / allowed
            shares[key] = max(share, shares.get(key, 0.0))
    largest = max(shares.values(), default=0.0)  # masters have gradients of their own
    assert largest <= 1, (name, max(shares, key=shares.__getitem__))
    for number, rank in enumerate(ranks):
        assert rank.sent == rank.predicted, f"{name}: rank {number}"
        for counted, planned in rank.axes:
            assert counted == pytest.approx(planned, rel=0.02), (
                f"{name}: the planner's formula"
            )  # it rounds no rows
    loss = max(abs(own / other - 1) for own, other in zip(first.losses, one.losses, strict=True))
    sent = {kind: round(sum(rank.sent[kind] for rank in ranks)) for kind in first.sent}
    return Measured(loss, largest, {kind: count for kind, count in sent.items() if count})


def all_trained(rank: int, ranks: int, cases: Mapping[str, Case]) -> dict[str, Trained]:
    """By name, one after the other."""
    return {name: trained(World(rank, ranks), case) for name, case in cases.items()}


def alone(ranks: int, case: Case) -> Trained:
    """In this process, the work of so many ranks."""
    readers = _readers(ranks, case)
    # However ranks share them, the micro-batches of a step are the same.
    one = dataclasses.replace(case, layout={}, micro_batches=readers * case.micro_batches, bounds=Bounds())
    key = repr(one)
    if key not in _ALONE:
        _ALONE[key] = trained(World(), one)
    return _ALONE[key]


_ALONE: dict[str, Trained] = {}


def _readers(ranks: int, case: Case) -> int:
    """Ranks, or groups of them, that read rows of their own."""
    return ranks // math.prod(int(case.layout.get(axis, 1)) for axis in ("pp", "cp", "tp"))


def trained(world: World, case: Case) -> Trained:
    """The work of one rank, or of the only one."""
    readers = _readers(world.size, case)
    decisions, executable, optimizer, lr = made(case, world, readers)
    first = executable.mesh.data_rank * case.micro_batches
    found = Trained()
    for step in range(case.steps):
        batches = [batch_of(case, step, first + number) for number in range(case.micro_batches)]
        targets = sum(batch_of(case, step, n).num_targets for n in range(readers * case.micro_batches))
        # The first step lays out what FSDP2 gathers.
        counts = step == 1 and world.size > 1 and case.counts_bytes
        with counting_collectives() if counts else contextlib.nullcontext() as sent, Journeys() as journeys:
            sums = run_passes(executable, batches, targets, step=step, first_row=first * ROWS * SEQUENCE)
            # Those that autograd sums; masters have sums of their own, in which bf16 is rounded elsewhere on ranks.
            summed = {name for name, p in executable.model.named_parameters() if p.grad is not None}
            executable.add_up_copies(optimizer.gradients)
        if sent is not None:
            found.predicted = bytes_sent(executable, batches, journeys)
            found.sent = {kind: sent.sent(kind) for kind in found.predicted}
            if not spared_by_codes(executable):  # which the planner does not know
                found.axes = list(axis_bytes(decisions, found.sent))
        found.losses.append(sum(executable.mesh.gathered(float(sums.loss))) / targets)
        if step == 0:
            found.gradients = gradients_of(executable, optimizer, world, summed)
        found.norms.append(optimizer.gradient_norm())
        optimizer.clip(found.norms[-1], case.clip)
        optimizer.step(lr)
        optimizer.zero_grad()
    executable.settle()
    _wholes({name: part_of(p) for name, p in executable.model.named_parameters()}, world)
    return found


def made(
    case: Case, world: World, readers: int, room: HostRoom | None = None
) -> tuple[Decisions, Executable, Optimizer, float]:
    """What a run would decide, and its model and optimizer.

    Args:
        readers: ranks, or groups of them, that read rows of their own.
        room: host memory, where the case has anything there.
    """
    settings = {
        "device": "cpu",
        "data.tokenizer": "bytes",
        "model.preset": case.preset,
        "model.vocab_size": VOCABULARY,
        "train.sequence": SEQUENCE,
        "train.batch_tokens": SEQUENCE * ROWS * case.micro_batches * readers,
        "train.micro_batch": ROWS,
        **{f"model.{name}": size for name, size in SMALL.items()},
        **{f"layout.{axis}": degree for axis, degree in case.layout.items() if world.size > 1},
        **case.settings,
    }
    if world.size > 1 and not {"layout.dp", "layout.fsdp", "outer.every"} & settings.keys():
        together = math.prod(case.layout.get(axis, 1) for axis in ("pp", "cp", "tp"))
        settings["layout.fsdp"] = world.size // together  # a search would choose by the machine
    decisions = decide(replace_values(Config(), settings), world=world)
    config = decisions.config
    executable = realise(
        decisions.plan,
        decisions.architecture,
        lambda model: filled(model, case),
        device=torch.device("cpu"),
        parameters=config.train.parameters,
        compute=config.precision_rules.compute,
        objective=objectives.build(config.objective),
        room=room,
        mesh=RankMesh(config.layout, world),
    )
    for block in executable.model.each_block():
        block.activations = Activations.parse(case.activations)
    if case.compiled:
        compile_blocks(executable.model)
    return decisions, executable, build(config.optimizer, executable, seed=0), config.optimizer.lr


def filled(model: Model, case: Case) -> None:
    """Initial weights."""
    initialise(model, 0)
    for name, parameter in model.named_parameters():
        if name.endswith("router.weight"):
            part_of(parameter).local.mul_(case.routers)


def batch_of(case: Case, step: int, number: int) -> Batch:
    """A micro-batch, by its number among all ranks'."""
    generator = torch.Generator().manual_seed(1000 * step + number)
    tokens = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE + 1), generator=generator)
    targets = tokens[:, 1:].clone()
    targets[0, : 3 * number] = -100  # ranks have different numbers of targets
    starts = None
    if case.with_documents:
        starts = torch.tensor([0, 5 + number, SEQUENCE, SEQUENCE + 17, 2 * SEQUENCE], dtype=torch.int32)
    return Batch.of(tokens[:, :-1].contiguous(), targets, starts)


def gradients_of(
    executable: Executable, optimizer: Optimizer, world: World, names: set[str]
) -> dict[str, Tensor]:
    """Whole gradients of some parameters, of the sums that the optimizer reads."""
    parameters = dict(executable.model.named_parameters())
    found = {name: gradient for name, gradient in optimizer.gradients().items() if name in names}
    return _wholes(
        {name: dataclasses.replace(part_of(parameters[name]), local=found[name]) for name in found}, world
    )


def _wholes(parts: Mapping[str, TensorPart], world: World) -> dict[str, Tensor]:
    """Tensors from what all ranks hold of them; where several hold the same, they must agree."""
    own = {
        name: (part.shape, part.local.dtype, [(box.place, box.local.clone()) for box in part.boxes()])
        for name, part in parts.items()
    }
    found: list[Any] = [own]
    if world.size > 1:
        found = [None] * world.size
        dist.all_gather_object(found, own)
    wholes: dict[str, Tensor] = {}
    for name, (shape, dtype, boxes) in itertools.chain.from_iterable(rank.items() for rank in found):
        whole = wholes.setdefault(name, torch.full(shape, torch.nan, dtype=dtype))
        for place, local in boxes:
            known = ~whole[place].isnan()
            assert torch.equal(whole[place][known], local[known])
            whole[place] = local
    assert not any(whole.isnan().any() for whole in wholes.values())
    return wholes
