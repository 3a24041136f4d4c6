"""What blocks do with their activations, under FSDP2: the loss and gradients of ranks that keep everything."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from pathlib import Path
from typing import cast

import pytest
import torch
from distributed import spawn
from late_link import LateLink
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from scrimp.config import Architecture
from scrimp.config.activations import LEVELS, Activations
from scrimp.models.blocks import Block
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.runtime.memory import ActivationOffload, BlockMemory, HostArena

pytestmark = pytest.mark.slow

RANKS = 2
CPU = torch.device("cpu")
ARCHITECTURE = Architecture(
    family="qwen2",
    vocab_size=96,
    num_layers=3,
    width=64,
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    ffn_width=160,
    context=64,
    qkv_bias=True,
    tied_embeddings=True,
)
CHOICES = (*LEVELS[1:], "keep+offload", "mlp+offload", "block+offload")


@dataclass(frozen=True)
class Passed:
    """What one choice gave on one rank."""

    loss: Tensor
    gradients: dict[str, Tensor]
    """Whole."""
    arena_peak: int


def passed(choice: str, rank: int, *, is_mixed: bool, shards: bool = True) -> Passed:
    model = build_model(ARCHITECTURE)
    initialise(model, 0)
    policy = MixedPrecisionPolicy()
    if is_mixed:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if shards:
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    activations, count = Activations.parse(choice), len(model.blocks)
    arena = HostArena(1 << 22, CPU, poisons=True)
    offload = ActivationOffload(arena, LateLink(CPU), num_blocks=count, keep_last=False, min_bytes=1024)
    leaving = frozenset(range(count)) if activations.is_offloaded else frozenset[int]()
    model.run_block = BlockMemory(count, offload=offload, leaving=leaving)
    for block in model.blocks:
        cast(Block, block).activations = activations
    tokens = torch.randint(96, (2, 33), generator=torch.Generator().manual_seed(rank))
    for _ in range(2):  # the second adds to gradients that exist
        hidden = model(tokens[:, :-1])
        loss = (hidden.float() - 0.1).square().mean()
        loss.backward()
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        assert gradient is not None
        gradients[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
    return Passed(loss.detach(), gradients, arena.peak)


def on_a_rank(rank: int, is_mixed: bool) -> dict[str, Passed]:
    """Every choice, and everything kept."""
    return {choice: passed(choice, rank, is_mixed=is_mixed) for choice in ("keep", *CHOICES)}


@functools.cache
def ranks(folder: Path, is_mixed: bool) -> list[dict[str, Passed]]:
    """One group of processes runs all choices."""
    return spawn(RANKS, on_a_rank, folder, is_mixed)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("is_mixed", [False, True], ids=["fp32", "mixed"])
def test_activations_under_fsdp_change_no_bit(
    tmp_path_factory: pytest.TempPathFactory, is_mixed: bool, choice: str
) -> None:
    folder = tmp_path_factory.getbasetemp() / f"fsdp-{is_mixed}"
    folder.mkdir(exist_ok=True)
    for of_rank in ranks(folder, is_mixed):
        kept, found = of_rank["keep"], of_rank[choice]
        assert torch.equal(found.loss, kept.loss)
        for name, gradient in kept.gradients.items():
            assert torch.equal(found.gradients[name], gradient), name


def test_gathered_weights_are_not_sent_along(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What goes to the host is what goes without sharding."""
    folder = tmp_path_factory.getbasetemp() / "fsdp-False"
    folder.mkdir(exist_ok=True)
    for rank, of_rank in enumerate(ranks(folder, False)):
        alone = passed("keep+offload", rank, is_mixed=False, shards=False)
        assert of_rank["keep+offload"].arena_peak == alone.arena_peak > 0
