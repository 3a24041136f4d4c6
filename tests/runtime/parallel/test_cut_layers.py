"""Layers that ranks compute together, on gloo: losses, norms, every gradient and weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity import Case, Trained, alone, check_parity, on_ranks

TP = {"tp": 2}
TWO = {
    "documents": Case(TP, with_documents=True),
    "z-loss in chunks": Case(TP, settings={"objective.z_loss": 1e-3, "train.loss_chunk": 24}),
    "recomputed": Case(TP, activations="block"),
    "recomputed norms": Case(TP, activations="norms"),
    "recomputed attention": Case(TP, activations="attention"),
    "kept attention": Case(TP, activations="qkv"),
    "recomputed MLP": Case(TP, activations="mlp"),
    "biases and one matrix of words": Case(TP, preset="qwen2.5-0.5b"),
    "norms of heads": Case(TP, preset="qwen3-0.6b", with_documents=True),
    "norms over all heads": Case(TP, preset="olmo2-1b"),
    "norms on both sides, windows": Case(TP, preset="gemma3-1b", with_documents=True),
}
FOUR = {
    "tp 4": Case({"tp": 4}, settings={"model.num_kv_heads": 4}, with_documents=True),
    "fsdp 2 x tp 2": Case(TP, with_documents=True),
    "fsdp 2 x tp 2, zero 1": Case({"tp": 2, "zero": 1}, preset="qwen3-0.6b"),
    "dp 2 x tp 2": Case({"dp": 2, "tp": 2}, preset="gemma3-1b"),
}
EIGHT = {"dp 2 x fsdp 2 x tp 2": Case({"dp": 2, "fsdp": 2, "tp": 2}, with_documents=True)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    return on_ranks(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
@pytest.mark.slow
def test_two_ranks_train_as_one_process(name: str, two: dict[str, list[Trained]]) -> None:
    check_parity(two[name], alone(2, TWO[name]))


@pytest.mark.parametrize(("ranks", "cases"), [(4, FOUR), (8, EIGHT)], ids=["four", "eight"])
@pytest.mark.slow
def test_more_ranks_train_as_one_process(ranks: int, cases: dict[str, Case], tmp_path: Path) -> None:
    found = on_ranks(ranks, cases, tmp_path)
    for name, case in cases.items():
        check_parity(found[name], alone(ranks, case))
