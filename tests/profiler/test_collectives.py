"""Bytes of collectives on gloo: those of a ring. Of whole steps, tests/parity/ has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from distributed import spawn

from scrimp.profiler.collectives import counting_collectives

pytestmark = pytest.mark.slow


def plain(rank: int) -> list[tuple[str, int, float]]:
    leave, come = ([1, 2], [1, 3]) if rank == 0 else ([3, 4], [2, 4])
    with counting_collectives() as found:
        dist.all_reduce(torch.ones(6))
        dist.all_gather_into_tensor(torch.empty(8), torch.ones(4))
        dist.reduce_scatter_tensor(torch.empty(4), torch.ones(8))
        dist.all_to_all_single(
            torch.empty(sum(come)),
            torch.ones(sum(leave)),
            output_split_sizes=come,
            input_split_sizes=leave,
        )
    dist.all_reduce(torch.ones(6))  # no longer counted
    return [(one.operation, one.num_bytes, one.sent) for one in found.calls]


def test_calls_send_what_a_ring_sends(tmp_path: Path) -> None:
    whole = [("all-reduce", 24, 24.0), ("all-gather", 32, 16.0), ("reduce-scatter", 32, 16.0)]
    first, second = spawn(2, plain, tmp_path)
    assert first[:3] == second[:3] == whole
    # What stays here is not sent.
    assert first[3] == ("all-to-all", 12, pytest.approx(8.0))
    assert second[3] == ("all-to-all", 28, pytest.approx(12.0))
