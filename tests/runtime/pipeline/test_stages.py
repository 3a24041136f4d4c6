"""Pipelines on gloo: losses, norms, every gradient and weights of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
from parity import Case, Trained, alone, check_parity, on_ranks

PP = {"pp": 2}
TWO = {
    "1f1b, documents": Case(PP, with_documents=True, micro_batches=4),
    "gpipe": Case({**PP, "schedule": "gpipe"}, micro_batches=3),
    "one matrix of words": Case(PP, preset="qwen2.5-0.5b", micro_batches=3),
    "interleaved": Case({**PP, "virtual": 2}, {"model.num_layers": 5}, micro_batches=4),
    "uneven stages": Case({**PP, "stages": "1,2"}, micro_batches=2),
    "zbv": Case({**PP, "schedule": "zbv"}, {"model.num_layers": 4}, micro_batches=4),
    "dualpipev": Case({**PP, "schedule": "dualpipev"}, {"model.num_layers": 4}, micro_batches=5),
}
FOUR = {
    "pp 2 x fsdp 2": Case(PP, with_documents=True, micro_batches=3),
    "pp 2 x fsdp 2, zero 2": Case({**PP, "zero": 2}, preset="qwen2.5-0.5b", micro_batches=3),
    "pp 2 x fsdp 2, zero 1, interleaved": Case(
        {**PP, "zero": 1, "virtual": 2}, {"model.num_layers": 4}, micro_batches=4
    ),
    "pp 2 x dp 2": Case({**PP, "dp": 2}, micro_batches=3),
    "pp 2 x tp 2": Case({**PP, "tp": 2}, preset="qwen2.5-0.5b", with_documents=True, micro_batches=3),
    "pp 2 x tp 2, zbv": Case({**PP, "tp": 2, "schedule": "zbv"}, {"model.num_layers": 4}, micro_batches=3),
    "pp 4": Case({"pp": 4, "stages": "1,1,2,1"}, {"model.num_layers": 5}, micro_batches=5),
    "pp 4, dualpipev": Case({"pp": 4, "schedule": "dualpipev"}, {"model.num_layers": 8}, micro_batches=9),
}
EIGHT = {"fsdp 2 x tp 2 x pp 2": Case({"pp": 2, "tp": 2, "fsdp": 2}, with_documents=True, micro_batches=3)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    return on_ranks(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
@pytest.mark.slow
def test_two_ranks_train_as_one_process(name: str, two: dict[str, list[Trained]]) -> None:
    check_parity(two[name], alone(2, TWO[name]))


@pytest.mark.parametrize(("ranks", "cases"), [(4, FOUR), (8, EIGHT)], ids=["four", "eight"])
@pytest.mark.slow
def test_ranks_train_as_one_process(ranks: int, cases: dict[str, Case], tmp_path: Path) -> None:
    found = on_ranks(ranks, cases, tmp_path)
    for name, case in cases.items():
        check_parity(found[name], alone(ranks, case))
