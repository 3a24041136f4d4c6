"""Pipelines on gloo: losses, norms, every gradient and weights of one process."""

from __future__ import annotations

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


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    return on_ranks(2, TWO, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO)
@pytest.mark.slow
def test_two_ranks_train_as_one_process(name: str, two: dict[str, list[Trained]]) -> None:
    check_parity(two[name], alone(2, TWO[name]))
