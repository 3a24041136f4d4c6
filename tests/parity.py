"""The same training on several ranks and in one process, for comparison: loss, every gradient, weights after steps.

One process takes the micro-batches that the ranks take side by side one after another, so that quantized GEMMs see
the same groups of tokens and the same rounding noise.
"""

from __future__ import annotations

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

from scrimp.config import Config, replace_values
from scrimp.config.activations import Activations
from scrimp.data import Batch
from scrimp.models.compiled import compile_blocks
from scrimp.models.initialise import initialise
from scrimp.models.model import Model
from scrimp.optim import Optimizer, build
from scrimp.parts import TensorPart, part_of
from scrimp.runtime import Executable, realise
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
    """Micro-batches of each rank."""
    with_documents: bool = False
    steps: int = 3
    routers: float = 1.0
    """Routers' first weights are so many times the usual ones: far from ties, the same experts are chosen whatever the
    order of sums."""


@dataclass(frozen=True)
class Trained:
    """What came of it."""

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    """Whole gradients of the first step."""
    weights: dict[str, Tensor]
    """After the last one, whole."""


def on_ranks(ranks: int, cases: Mapping[str, Case], folder: Path) -> dict[str, list[Trained]]:
    """By each of so many processes, which are started once for all cases."""
    found = spawn(ranks, _all, folder, ranks, cases)
    return {name: [rank[name] for rank in found] for name in cases}


def _all(rank: int, ranks: int, cases: Mapping[str, Case]) -> dict[str, Trained]:
    return {name: trained(rank, ranks, case) for name, case in cases.items()}


def alone(ranks: int, case: Case) -> Trained:
    """In this process, the work of so many ranks."""
    return trained(0, ranks, case, is_alone=True)


def trained(rank: int, ranks: int, case: Case, is_alone: bool = False) -> Trained:
    """The work of one rank, or of all."""
    world = World() if is_alone else World(rank, ranks)
    readers = ranks // math.prod(int(case.layout.get(axis, 1)) for axis in ("pp", "cp", "tp"))
    _, executable, optimizer, lr = made(case, world, readers)
    turns = range(readers) if is_alone else range(first := executable.mesh.data_rank, first + 1)
    losses, norms = [], []
    gradients: dict[str, Tensor] = {}
    for step in range(case.steps):
        numbers = [
            turn * case.micro_batches + number for turn in turns for number in range(case.micro_batches)
        ]
        batches = [batch_of(case, step, number) for number in numbers]
        targets = sum(batch_of(case, step, n).num_targets for n in range(readers * case.micro_batches))
        first_row = numbers[0] * ROWS * SEQUENCE
        sums = run_passes(executable, batches, targets, step=step, first_row=first_row)
        losses.append(sum(executable.mesh.gathered(float(sums.loss))) / targets)
        # Those that autograd sums; masters have sums of their own, in which bf16 is rounded elsewhere on ranks.
        summed = {name for name, p in executable.model.named_parameters() if p.grad is not None}
        executable.add_up_copies(optimizer.gradients())
        if not gradients:
            gradients = _gradients(executable, optimizer, world, summed)
        norms.append(optimizer.gradient_norm())
        optimizer.clip(norms[-1], 0.5)
        optimizer.step(lr)
        optimizer.zero_grad()
    executable.settle()
    weights = _wholes({name: part_of(p) for name, p in executable.model.named_parameters()}, world)
    return Trained(losses, norms, gradients, weights)


def check_parity(
    ranks: list[Trained],
    one: Trained,
    *,
    gradients: float = 1e-5,
    later: float = 1e-5,
    first: float = 1e-6,
) -> None:
    """Equal up to the order of sums, and all ranks alike.

    Args:
        gradients: most difference of a gradient of the first step, of its largest number.
        later: of losses and norms after the first step. Where numbers are rounded to few bits, one last bit of a
            gradient more or less decides what a weight is rounded to.
        first: of the first step's loss.
    """
    for rank in ranks:
        assert (rank.losses, rank.norms) == (ranks[0].losses, ranks[0].norms)
        assert rank.gradients.keys() == one.gradients.keys()
        assert rank.losses[0] == pytest.approx(one.losses[0], rel=first)
        assert rank.losses == pytest.approx(one.losses, rel=later)
        assert rank.norms == pytest.approx(one.norms, rel=10 * later)
        for name, expected in one.gradients.items():
            difference = float((rank.gradients[name] - expected).abs().max())
            assert difference <= gradients * float(expected.abs().max()) + 1e-7, name


def made(case: Case, world: World, readers: int) -> tuple[Decisions, Executable, Optimizer, float]:
    """What a run would decide, and its model and optimizer.

    Args:
        readers: ranks, or groups of them, that read rows of their own.
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
    decisions = decide(replace_values(Config(), settings), world=world)
    config = decisions.config
    executable = realise(
        decisions.plan,
        decisions.architecture,
        lambda model: filled(model, case),
        device=torch.device("cpu"),
        parameters=config.train.parameters,
        compute=config.precision_rules.compute,
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


def _gradients(
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
