"""Layers that ranks compute together, on gloo: losses, norms, every gradient and weights of one process."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from distributed import spawn
from parity import (
    ROWS,
    SEQUENCE,
    SMALL,
    Case,
    Trained,
    alone,
    batch_of,
    check_parity,
    made,
    on_ranks,
    trained,
)

from scrimp.profiler.collectives import Collectives, counting_collectives
from scrimp.world import World

TP = {"tp": 2}
QUICK_BLOCKS = 2
QUICK = Case(TP, settings={"model.num_layers": QUICK_BLOCKS}, with_documents=True, steps=2)
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
BF16 = {"precision": "bf16", "train.parameters": "fp32"}
LOW = {
    "bf16": Case(TP, settings=BF16, steps=1),
    "bf16, no norm before products": Case(TP, settings=BF16, preset="olmo2-1b", steps=1),
    "bf16 weights with masters": Case(TP, settings={**BF16, "train.parameters": "bf16"}, steps=1),
}
"""Partial sums are rounded once more before they are added up."""
COMPILED = {
    "kept": Case(TP, compiled=True, steps=1),
    "recomputed": Case(TP, compiled=True, activations="block", preset="olmo2-1b", steps=1),
}
EIGHT = {"dp 2 x fsdp 2 x tp 2": Case({"dp": 2, "fsdp": 2, "tp": 2}, with_documents=True)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    return on_ranks(2, TWO | LOW, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
@pytest.mark.slow
def test_two_ranks_train_as_one_process(name: str, two: dict[str, list[Trained]]) -> None:
    check_parity(two[name], alone(2, TWO[name]))


@pytest.mark.parametrize("name", LOW)
@pytest.mark.slow
def test_bf16_differs_by_what_it_rounds(name: str, two: dict[str, list[Trained]]) -> None:
    check_parity(two[name], alone(2, LOW[name]), gradients=5e-2, later=2e-3, first=1e-4)


@pytest.mark.parametrize(
    ("ranks", "cases"), [(2, COMPILED), (4, FOUR), (8, EIGHT)], ids=["compiled", "four", "eight"]
)
@pytest.mark.slow
def test_ranks_train_as_one_process(ranks: int, cases: dict[str, Case], tmp_path: Path) -> None:
    found = on_ranks(ranks, cases, tmp_path)
    for name, case in cases.items():
        check_parity(found[name], alone(ranks, case))


def cheapest(rank: int) -> tuple[Trained, Collectives]:
    """One step of one block, its micro-batch after one that laid FSDP2's groups out."""
    case = dataclasses.replace(QUICK, micro_batches=1, steps=1)
    _, executable, _, _ = made(case, World(rank, 2), 1)
    for _ in range(2):
        with counting_collectives() as counted:
            executable.loss(batch_of(case, 0, 0)).total.backward()
    return trained(rank, 2, QUICK), counted


@pytest.mark.slow
def test_ranks_send_what_the_formula_says_and_train_as_one_process(tmp_path: Path) -> None:
    found = spawn(2, cheapest, tmp_path)
    check_parity([one for one, _ in found], alone(2, QUICK))
    width, tokens = SMALL["width"], ROWS * SEQUENCE
    stream = 4 * tokens * width // 2  # what a ring of two sends of it
    for _, counted in found:
        # Of each block 8 B T D e (n - 1) / n, and twice the embedding's, and what the head reads.
        sent = {kind: counted.sent(kind) for kind in ("all-gather", "reduce-scatter", "all-reduce")}
        own = [one for one in counted.calls if one.ranks == 2]
        passes = 4 * QUICK_BLOCKS + 2
        assert sum(one.operation == "all-gather" for one in own) == passes
        assert sum(one.operation == "reduce-scatter" for one in own) == passes
        assert sent["all-gather"] == sent["reduce-scatter"] == passes * stream
        # Norms of width D: two of each block and the last; three numbers of each token for the loss.
        assert sent["all-reduce"] == 4 * ((2 * QUICK_BLOCKS + 1) * width + 3 * tokens)
