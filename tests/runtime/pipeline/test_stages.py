"""Pipelines on gloo: every product of a step is made once, whatever halves a schedule cuts backward passes into.

Losses, gradients and bytes of every schedule are rows of the matrix (`tests/parity/matrix.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from distributed import spawn
from parity import Case, batch_of, made
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.runtime.passes import run_passes
from scrimp.world import World

CASES = {
    name: Case({"pp": 2, "schedule": name}, {"model.num_layers": 4}, micro_batches=4)
    for name in ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
}


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def counted(rank: int) -> dict[str, tuple[int, int]]:
    """Products of a step, and those that this rank's blocks and head have."""
    found = {}
    for name, case in CASES.items():
        _, executable, _, _ = made(case, World(rank, 2), 1)
        batches = [batch_of(case, 0, number) for number in range(case.micro_batches)]
        with Products() as products:
            run_passes(executable, batches, 100)
        part = executable.model.part
        expected = 3 * (4 * len(part.blocks) + part.is_last) * case.micro_batches
        found[name] = products.count, expected
    return found


@pytest.mark.slow
def test_every_product_is_made_once(tmp_path: Path) -> None:
    for rank in spawn(2, counted, tmp_path):
        for name, (count, expected) in rank.items():
            assert count == expected, name
