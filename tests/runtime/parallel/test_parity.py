"""Layouts on gloo: losses, norms, every gradient and weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity import Case, Trained, alone, check_parity, on_ranks

TWO = {
    "fsdp": Case(with_documents=True),
    "zero 2": Case({"zero": 2}),
    "zero 1": Case({"zero": 1}),
    "copies": Case({"dp": 2}, with_documents=True),
    "recomputed": Case(activations="block"),
    "tied": Case(preset="qwen2.5-0.5b"),
    "norms on both sides": Case(preset="gemma3-1b"),
    "ring": Case({"cp": 2}, with_documents=True),
    "striped": Case({"cp": 2, "cp_method": "striped"}),
    "ulysses": Case({"cp": 2, "cp_method": "ulysses"}, with_documents=True),
    "8-bit moments": Case(settings={"optimizer.moments": "8bit"}),
}
BF16 = {"precision": "bf16", "train.parameters": "bf16"}
LOW = {
    "bf16 with masters": Case(settings=BF16),
    "bf16 rounded": Case(settings={**BF16, "optimizer.master_weights": False}),
    "fp8": Case(settings={"precision": "fp8"}),
    "nvfp4": Case(settings={"precision": "nvfp4"}),
}
"""Step by step rounded to few bits."""
FOUR = {
    "shared rows, shards": Case({"cp": 2, "fsdp": 2}, with_documents=True),
    "shared rows, copies": Case({"cp": 2, "dp": 2, "zero": 1}),
    "fsdp": Case(with_documents=True),
    "hybrid": Case({"dp": 2, "fsdp": 2}),
    "hybrid, zero 1": Case({"dp": 2, "fsdp": 2, "zero": 1}, with_documents=True),
}


def test_shards_shared_rows_cut_layers_and_shared_experts_train_as_one_process(tmp_path: Path) -> None:
    """What `make test` sees of the matrix below."""
    sample = {
        "shards": Case(steps=2, with_documents=True),
        "ring": Case({"cp": 2, "zero": 1}, steps=2),
        "pieces, by Muon": Case({"tp": 2}, {"optimizer.name": "muon", "optimizer.lr": 1e-3}, steps=2),
        "experts": Case({"ep": 2}, {"model.num_layers": 1}, "mixtral-8m", steps=2, routers=10.0),
        "stages": Case({"pp": 2}, steps=2),
    }
    found = on_ranks(2, sample, tmp_path)
    for name, case in sample.items():
        check_parity(found[name], alone(2, case))


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    return on_ranks(2, TWO | LOW, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
@pytest.mark.slow
def test_two_ranks_train_as_one_process(name: str, two: dict[str, list[Trained]]) -> None:
    check_parity(two[name], alone(2, TWO[name]))


@pytest.mark.slow
def test_four_ranks_train_as_one_process(tmp_path: Path) -> None:
    found = on_ranks(4, FOUR, tmp_path)
    for name, case in FOUR.items():
        check_parity(found[name], alone(4, case))


@pytest.mark.parametrize("name", LOW)
@pytest.mark.slow
def test_low_formats_differ_by_what_they_round(name: str, two: dict[str, list[Trained]]) -> None:
    # FSDP2 rounds sums of bf16 gradients to bf16 once more.
    gradients = 1e-2 if "train.parameters" in LOW[name].settings else 1e-5
    check_parity(two[name], alone(2, LOW[name]), gradients=gradients, later=1e-3)
