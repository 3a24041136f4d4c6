"""A rank that comes late to every collective changes no number; a link that breaks ends all ranks with one message."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from distributed import spawn
from faults import late
from parity import Case, Trained, trained
from parity.matrix import FIXED, MIXTRAL
from ranks import ended, environment, start_ranks
from tiny_run import flags, write_corpus

from scrimp.world import World

pytestmark = pytest.mark.slow

CASES = {
    "shards": Case(steps=2, counts_bytes=False),
    "ring": Case({"cp": 2}, steps=2, counts_bytes=False),
    "pieces": Case({"tp": 2}, steps=2, counts_bytes=False),
    "experts": Case({"ep": 2}, preset=MIXTRAL, steps=2, routers=FIXED, counts_bytes=False),
    "stages": Case({"pp": 2}, steps=2, counts_bytes=False),
}
LATE_S = 0.003


def twice(rank: int) -> dict[str, tuple[Trained, Trained]]:
    """Trained with all in time, and with the second rank late."""
    found = {}
    for name, case in CASES.items():
        punctual = trained(World(rank, 2), case)
        with late(LATE_S * rank):
            found[name] = punctual, trained(World(rank, 2), case)
    return found


def test_a_late_rank_changes_no_number(tmp_path: Path) -> None:
    for rank in spawn(2, twice, tmp_path):
        for name, (one, other) in rank.items():
            assert (one.losses, one.norms) == (other.losses, other.norms), name
            assert one.gradients.keys() == other.gradients.keys()
            assert all(torch.equal(one.gradients[key], other.gradients[key]) for key in one.gradients), name


OWN = """
from dataclasses import dataclass
import os
from faults import cut_links
from scrimp.health import record
from scrimp.objectives.next_token import NextToken

@dataclass(frozen=True)
class Cut(NextToken):
    "In the fifth step the second rank's links break."
    def loss(self, model, batch, *, chunk=0):
        if os.environ["RANK"] == "1" and record().step == 5:
            assert cut_links() > 0
        return super().loss(model, batch, chunk=chunk)
"""


@pytest.mark.parametrize("layout", ["fsdp", "cp"])
def test_links_that_break_in_a_step_end_all_ranks_with_one_message(layout: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    words = flags(write_corpus(tmp_path), tmp_path / "run", "--train.steps=1000", "--evaluation.every=0")
    words += [f"--objective.name={tmp_path / 'own.py'}:Cut", "--trust-code", f"--layout.{layout}=2"]
    environ = environment(tmp_path)
    environ["PYTHONPATH"] += f":{Path(__file__).parent}"
    found = ended(start_ranks(2, words, environ))
    assert [code for code, _ in found] == [1, 1], found
    told = [line for _, output in found for line in output.splitlines() if line.startswith("error:")]
    assert len(told) == 1, found
    assert "has lost its connection to another rank, and all ranks still run" in told[0]
    assert "Connection closed by peer" in found[0][1]
    assert not any("Traceback" in output for _, output in found)
