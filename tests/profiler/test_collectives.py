"""Bytes of collectives on gloo: those of the formulas, for plain calls and for whole steps of FSDP2."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import spawn
from parity import ROWS, SEQUENCE, Case, batch_of, made

from scrimp.profiler.collectives import counting_collectives
from scrimp.world import World

pytestmark = pytest.mark.slow

RANKS = 2
CASES = {
    "zero 3": (Case({"zero": 3}, micro_batches=1), 2, 1),
    "zero 2": (Case({"zero": 2}, micro_batches=1), 1, 1),
    "zero 3, two micro-batches": (Case({"zero": 3}, micro_batches=2), 4, 2),
    "zero 1, two micro-batches": (Case({"zero": 1}, micro_batches=2), 2, 1),
}
"""Case, how often the blocks' weights are gathered in a step, how often gradients are reduced."""


def plain(rank: int) -> list[tuple[str, int, float]]:
    with counting_collectives() as found:
        dist.all_reduce(torch.ones(6))
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
    dist.all_reduce(torch.ones(6))  # no longer counted
    return [(one.operation, one.num_bytes, one.sent) for one in found.calls]


def steps(rank: int) -> dict[str, tuple[float, float, int, int]]:
    found = {}
    for name, (case, _, _) in CASES.items():
        _, executable, _, _ = made(case, World(rank, RANKS), RANKS)
        for number in range(2):  # the first pass lays FSDP2's groups out
            with counting_collectives() as counted:
                for micro_batch in range(case.micro_batches):
                    last = micro_batch == case.micro_batches - 1
                    executable.begin(number, micro_batch * ROWS * SEQUENCE, is_last=last)
                    executable.loss(batch_of(case, number, micro_batch)).total.backward()
        blocks = sum(p.numel() for block in executable.model.blocks for p in block.parameters())
        whole = sum(p.numel() for p in executable.model.parameters())
        sent = counted.sent("all-gather"), counted.sent("reduce-scatter")
        found[name] = (*sent, blocks, whole)
    return found


def test_calls_send_what_a_ring_sends(tmp_path: Path) -> None:
    expected = [("all-reduce", 24, 24.0), ("all-gather", 32, 16.0), ("reduce-scatter", 32, 16.0)]
    assert spawn(RANKS, plain, tmp_path) == [expected] * RANKS


def test_a_step_of_fsdp_sends_what_the_formula_says(tmp_path: Path) -> None:
    for rank in spawn(RANKS, steps, tmp_path):
        for name, (case, gathers, reductions) in CASES.items():
            gathered, reduced, blocks, whole = rank[name]
            # Embedding, final norm and head are gathered once per micro-batch. FSDP2 rounds rows up.
            numbers = gathers * blocks + case.micro_batches * (whole - blocks)
            assert gathered == pytest.approx(4 * numbers * (RANKS - 1) / RANKS, rel=0.01), name
            assert reduced == pytest.approx(4 * reductions * whole * (RANKS - 1) / RANKS, rel=0.01), name
