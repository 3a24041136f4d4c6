"""Bytes of a step on real ranks beside the account, as far as the threads of gloo let go of their buffers in time."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
from distributed import spawn
from parity import ROWS, SEQUENCE, Case, batch_of, made

from scrimp.profiler.tensor_peak import counting_tensors
from scrimp.world import World

pytestmark = pytest.mark.slow

LARGE = {"model.num_layers": 6, "model.width": 256, "model.ffn_width": 704, "model.num_heads": 8}
"""Weights outweigh activations."""
BF16 = {"precision": "bf16", "train.parameters": "bf16"}
CASES = {
    f"zero {zero}, {name}": Case({"zero": zero}, {**LARGE, **settings}, micro_batches=count)
    for zero in (3, 2, 1)
    for name, settings, count in (
        ("fp32", {}, 1),
        ("fp32 accumulated", {}, 3),
        ("bf16 accumulated", BF16, 3),
    )
}
CASES["gathered blocks"] = Case({"gathered": "0-1,3"}, LARGE, micro_batches=2)
CASES["copies"] = Case({"dp": 2}, LARGE)
CASES["copies, bf16 accumulated"] = Case({"dp": 2}, {**LARGE, **BF16}, micro_batches=3)
CASES["copies, bf16 without masters"] = Case(
    {"dp": 2}, {**LARGE, **BF16, "optimizer.master_weights": False}, micro_batches=2
)
CASES["cut layers"] = Case({"tp": 2}, LARGE)
CASES["muon"] = Case({}, {**LARGE, "optimizer.name": "muon"})
CASES["galore"] = Case({}, {**LARGE, "optimizer.name": "galore", "optimizer.refresh_every": 1})
CASES["recomputed"] = Case({}, {**LARGE, "memory.activations": "block"}, activations="block")


def measured(rank: int, ranks: int) -> dict[str, tuple[int, list[int]]]:
    """Predicted bytes, and those counted in each step but the first."""
    found = {}
    for name, case in CASES.items():
        gc.collect()
        with counting_tensors() as left:  # by the cases before
            pass
        readers = ranks // int(case.layout.get("tp", 1))
        decisions, executable, optimizer, lr = made(case, World(rank, ranks), readers)
        steps = []
        for step in range(4):
            with counting_tensors() as counted:
                for number in range(case.micro_batches):
                    batch = batch_of(case, step, number)
                    executable.begin(step, number * ROWS * SEQUENCE, is_last=number == case.micro_batches - 1)
                    executable.loss(batch).total.backward()
                    del batch
                executable.add_up_copies(optimizer.gradients)
                optimizer.gradient_norm()
                optimizer.step(lr)
                optimizer.zero_grad()
            assert counted.num_bytes is not None
            steps.append(counted.num_bytes - (left.num_bytes or 0))
        predicted = decisions.plan.predicted.peak_device_bytes
        assert predicted is not None
        found[name] = predicted, steps[1:]
        del executable, optimizer
    return found


def test_a_rank_takes_what_its_account_says(tmp_path: Path) -> None:
    for rank in spawn(2, measured, tmp_path, 2):
        for name, (predicted, counted) in rank.items():
            assert 0.9 * min(counted) <= predicted <= 1.2 * max(counted), (name, predicted, counted)
