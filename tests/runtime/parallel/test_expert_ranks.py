"""Routed experts on several ranks, on gloo: losses, norms, every gradient and weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from distributed import spawn
from parity import SMALL, Case, Trained, alone, batch_of, check_parity, made, on_ranks

from scrimp.models.expert_ranks import ExpertRanks, Journey
from scrimp.profiler.collectives import counting_collectives
from scrimp.world import World

MIXTRAL, QWEN = "mixtral-8m", "qwen3-moe-8m"
STRONG = {"objective.z_loss": 1e-3}
FIXED = 10.0
"""With so large a router no choice is near a tie."""
TWO = {
    "sharded over all": Case(preset=MIXTRAL, with_documents=True, routers=FIXED),
    "shared": Case({"ep": 2}, preset=MIXTRAL, with_documents=True, routers=FIXED),
    "shared, by copies": Case({"dp": 2, "ep": 2}, preset=QWEN, settings=STRONG, routers=FIXED),
    "in pieces": Case({"etp": 2}, preset=MIXTRAL, routers=FIXED),
    "recomputed": Case({"ep": 2}, preset=MIXTRAL, activations="block", routers=FIXED),
    "recomputed MLP, zero 1": Case({"ep": 2, "zero": 1}, preset=QWEN, activations="mlp", routers=FIXED),
    "beside cut layers": Case({"tp": 2}, preset=QWEN, routers=FIXED),
    "shared beside cut layers": Case({"tp": 2, "ep": 2}, preset=MIXTRAL, routers=FIXED),
    "beside shared rows": Case({"cp": 2, "ep": 2}, preset=MIXTRAL, with_documents=True, routers=FIXED),
}
FOUR = {
    "ep 2 x fsdp": Case({"ep": 2}, preset=MIXTRAL, with_documents=True, routers=FIXED),
    "tp 2 x dp 2, ep 4": Case(
        {"tp": 2, "dp": 2, "ep": 4}, preset=MIXTRAL, with_documents=True, routers=FIXED
    ),
    "tp 2 x dp 2, ep 2 x etp 2": Case({"tp": 2, "dp": 2, "ep": 2, "etp": 2}, preset=MIXTRAL, routers=FIXED),
    "fsdp 2 x cp 2, ep 2, zero 2": Case({"fsdp": 2, "cp": 2, "ep": 2, "zero": 2}, preset=QWEN, routers=FIXED),
    "etp 4": Case({"etp": 4}, preset=QWEN, routers=FIXED),
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


def counted(rank: int, layout: dict[str, int | str]) -> tuple[float, float, int]:
    """Bytes that left in all-to-alls of one micro-batch, those that the formula gives, and the number of calls."""
    case = Case(layout, preset=MIXTRAL, micro_batches=1, steps=1)
    _, executable, _, _ = made(case, World(rank, 2), 2)
    journeys: list[Journey] = []
    begin = ExpertRanks.journey

    def journey(ranks: ExpertRanks, *arguments: object) -> Journey:
        journeys.append(begin(ranks, *arguments))  # type: ignore[arg-type]
        return journeys[-1]

    ExpertRanks.journey = journey  # type: ignore[method-assign,assignment]
    with counting_collectives() as found:
        executable.loss(batch_of(case, 0, rank)).total.backward()
    away = 1 - rank
    rows = sum(int(one.own_nE[away].sum() + one.come_nE[away].sum()) for one in journeys)
    experts = executable.model.spec.routing.experts * int(layout.get("etp", 1))
    expected = 2 * rows * SMALL["width"] * 4 + len(journeys) * experts * 8 / 2
    return found.sent("all-to-all"), expected, sum(one.operation == "all-to-all" for one in found.calls)


@pytest.mark.parametrize("layout", [{"ep": 2}, {"etp": 2}], ids=str)
@pytest.mark.slow
def test_ranks_send_what_the_formula_says(layout: dict[str, int | str], tmp_path: Path) -> None:
    for sent, expected, calls in spawn(2, counted, tmp_path, layout):
        assert sent == pytest.approx(expected)
        assert calls == 5 * SMALL["num_layers"], "counts, and tokens there and back, forward and backward"
