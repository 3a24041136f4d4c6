"""Gradients of whole copies, added up by two ranks, beside sums in one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from torch import Tensor, nn

from scrimp.config import OptimizerConfig
from scrimp.optim import AdamW
from scrimp.runtime.parallel import GradientSums

MICRO_BATCHES, STEPS = 3, 2
SMALLEST, ONE_BUCKET = 1, 2**20
KINDS = ("fp32", "bf16 with masters", "bf16")


class Branches(nn.Module):
    """Ranks run its branches in different orders; rank 1 alone runs `rare`, and nobody `never`."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("first", "second", "rare", "never"):
            weight = torch.randn(6, 5, generator=generator).to(dtype)
            self.register_parameter(name, nn.Parameter(weight))

    def forward(self, x: Tensor, rank: int) -> Tensor:
        names = ("first", "second") if rank == 0 else ("second", "rare", "first")
        parts = [
            (x @ self.get_parameter(name).t()).float().sin().sum() * 2**-n for n, name in enumerate(names)
        ]
        return torch.stack(parts).sum()


def made(kind: str) -> tuple[Branches, AdamW]:
    model = Branches(torch.float32 if kind == "fp32" else torch.bfloat16)
    settings = OptimizerConfig(master_weights=kind == "bf16 with masters", moments="fp32")
    return model, AdamW(dict(model.named_parameters()), settings)


def loss(model: Branches, rank: int, step: int, number: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * rank + 10 * step + number)
    x = torch.randn(4, 5, generator=generator).to(model.first.dtype)
    found: Tensor = model(x, rank)
    return found


def on_rank(rank: int, kind: str, bucket_bytes: int) -> list[dict[str, Tensor]]:
    model, optimizer = made(kind)
    sums = GradientSums(dist.group.WORLD, bucket_bytes=bucket_bytes)
    sums.follow(model, optimizer.slot)
    found = []
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            sums.begin(is_last=number == MICRO_BATCHES - 1)
            loss(model, rank, step, number).backward()
        sums.finish()
        found.append({name: one.clone() for name, one in optimizer.gradients().items()})
        optimizer.zero_grad()
    return found


def all_kinds(rank: int) -> dict[tuple[str, int], list[dict[str, Tensor]]]:
    return {(kind, size): on_rank(rank, kind, size) for kind in KINDS for size in (SMALLEST, ONE_BUCKET)}


def alone(kind: str, rank: int) -> list[dict[str, Tensor]]:
    """One rank's own sums, by the optimizer without any ranks."""
    model, optimizer = made(kind)
    found = []
    for step in range(STEPS):
        for number in range(MICRO_BATCHES):
            loss(model, rank, step, number).backward()
        found.append({name: one.clone() for name, one in optimizer.gradients().items()})
        optimizer.zero_grad()
    return found


@pytest.mark.slow
def test_copies_have_the_sums_of_all_bit_for_bit(tmp_path: Path) -> None:
    ranks = spawn(2, all_kinds, tmp_path)
    for kind in KINDS:
        each = [alone(kind, rank) for rank in range(2)]
        for step in range(STEPS):
            wanted: dict[str, Tensor] = {}
            for own in (one[step] for one in each):
                for name, gradient in own.items():
                    wanted[name] = wanted.get(name, torch.zeros(())).float() + gradient.float()
            assert wanted.keys() == {"first", "second", "rare"}
            for found in (rank[kind, size][step] for rank in ranks for size in (SMALLEST, ONE_BUCKET)):
                assert found.keys() == wanted.keys()
                for name, gradient in found.items():
                    assert gradient.dtype == (torch.bfloat16 if kind == "bf16" else torch.float32)
                    assert torch.equal(gradient, wanted[name].to(gradient.dtype)), (kind, name)
