"""Routed experts on several ranks, on gloo: losses, norms, every gradient and weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity import Case, Trained, alone, check_parity, on_ranks

MIXTRAL, QWEN = "mixtral-8m", "qwen3-moe-8m"
STRONG = {"objective.z_loss": 1e-3}
TWO = {
    "sharded over all": Case(preset=MIXTRAL, with_documents=True),
    "shared": Case({"ep": 2}, preset=MIXTRAL, with_documents=True),
    "shared, by copies": Case({"dp": 2, "ep": 2}, preset=QWEN, settings=STRONG),
    "in pieces": Case({"etp": 2}, preset=MIXTRAL),
    "recomputed": Case({"ep": 2}, preset=MIXTRAL, activations="block"),
    "recomputed MLP, zero 1": Case({"ep": 2, "zero": 1}, preset=QWEN, activations="mlp"),
    "beside cut layers": Case({"tp": 2}, preset=QWEN),
    "shared beside cut layers": Case({"tp": 2, "ep": 2}, preset=MIXTRAL),
    "beside shared rows": Case({"cp": 2, "ep": 2}, preset=MIXTRAL, with_documents=True),
}
FOUR = {
    "ep 2 x fsdp": Case({"ep": 2}, preset=MIXTRAL, with_documents=True),
    "tp 2 x dp 2, ep 4": Case({"tp": 2, "dp": 2, "ep": 4}, preset=MIXTRAL, with_documents=True),
    "tp 2 x dp 2, ep 2 x etp 2": Case({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, preset=MIXTRAL),
    "fsdp 2 x cp 2, ep 2, zero 2": Case({"fsdp": 2, "cp": 2, "ep": 2, "zero": 2}, preset=QWEN),
    "etp 4": Case({"etp": 4}, preset=QWEN),
}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    return on_ranks(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
@pytest.mark.slow
def test_two_ranks_train_as_one_process(name: str, two: dict[str, list[Trained]]) -> None:
    check_parity(two[name], alone(2, TWO[name]))


@pytest.mark.slow
def test_four_ranks_train_as_one_process(tmp_path: Path) -> None:
    found = on_ranks(4, FOUR, tmp_path)
    for name, case in FOUR.items():
        check_parity(found[name], alone(4, case))
