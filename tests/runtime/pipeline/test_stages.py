"""Pipelines on gloo: losses, norms, every gradient and weights of one process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

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
)
from torch.utils._python_dispatch import TorchDispatchMode

from scrimp.config.pipeline import ONE_STAGE, pipeline_of
from scrimp.config.resolved import ResolvedLayout
from scrimp.profiler.collectives import counting_collectives
from scrimp.runtime.passes import run_passes
from scrimp.world import World

PP = {"pp": 2}
TWO = {
    "1f1b, documents": Case(PP, with_documents=True, micro_batches=4),
    "gpipe": Case({**PP, "schedule": "gpipe"}, micro_batches=3),
    "one matrix of words": Case(PP, preset="qwen2.5-0.5b", micro_batches=3),
    "interleaved": Case({**PP, "virtual": 2}, {"model.num_layers": 5}, micro_batches=4),
    "uneven stages": Case({**PP, "stages": "1,2"}, micro_batches=2),
    "zbv": Case({**PP, "schedule": "zbv"}, {"model.num_layers": 4}, micro_batches=4),
    "dualpipev": Case({**PP, "schedule": "dualpipev"}, {"model.num_layers": 4}, micro_batches=5),
    "zbv, recomputed": Case(
        {**PP, "schedule": "zbv"}, {"model.num_layers": 4}, activations="block", micro_batches=4
    ),
    "dualpipev, recomputed in part": Case(
        {**PP, "schedule": "dualpipev"},
        {"model.num_layers": 4},
        preset="qwen2.5-0.5b",
        activations="qkv",
        micro_batches=4,
    ),
}
FIXED = 10.0
"""With so large a router no choice is near a tie."""
EXPERTS = {
    "experts": Case(PP, preset="mixtral-8m", with_documents=True, micro_batches=4, routers=FIXED),
    "experts, interleaved, recomputed": Case(
        {**PP, "virtual": 2},
        {"model.num_layers": 4},
        preset="qwen3-moe-8m",
        activations="block",
        micro_batches=4,
        routers=FIXED,
    ),
    "experts, zbv": Case(
        {**PP, "schedule": "zbv"},
        {"model.num_layers": 4},
        preset="mixtral-8m",
        micro_batches=3,
        routers=FIXED,
    ),
}
LOW = {
    "bf16 with masters": Case(
        PP, {"precision": "bf16", "train.parameters": "bf16"}, micro_batches=3, steps=2
    ),
    "bf16 with masters, zbv": Case(
        {**PP, "schedule": "zbv"},
        {"precision": "bf16", "train.parameters": "bf16", "model.num_layers": 4},
        micro_batches=3,
        steps=2,
    ),
}
FOUR = {
    "pp 2 x fsdp 2": Case(PP, with_documents=True, micro_batches=3),
    "pp 2 x fsdp 2, zero 2": Case({**PP, "zero": 2}, preset="qwen2.5-0.5b", micro_batches=3),
    "pp 2 x fsdp 2, zero 1, interleaved": Case(
        {**PP, "zero": 1, "virtual": 2}, {"model.num_layers": 4}, micro_batches=4
    ),
    "pp 2 x fsdp 2, zbv": Case(
        {**PP, "schedule": "zbv"}, {"model.num_layers": 4}, with_documents=True, micro_batches=4
    ),
    "pp 2 x fsdp 2, zero 2, dualpipev": Case(
        {**PP, "schedule": "dualpipev", "zero": 2},
        {"model.num_layers": 5},
        preset="qwen2.5-0.5b",
        micro_batches=5,
    ),
    "pp 2 x fsdp 2, zero 1, zbv": Case(
        {**PP, "schedule": "zbv", "zero": 1}, {"model.num_layers": 4}, micro_batches=3
    ),
    "pp 2 x dp 2, zbv": Case(
        {**PP, "dp": 2, "schedule": "zbv"}, {"model.num_layers": 4}, preset="qwen2.5-0.5b", micro_batches=3
    ),
    "pp 2 x fsdp 2, zbv, recomputed": Case(
        {**PP, "schedule": "zbv"}, {"model.num_layers": 4}, activations="mlp", micro_batches=3
    ),
    "pp 2 x dp 2": Case({**PP, "dp": 2}, micro_batches=3),
    "pp 2 x tp 2": Case({**PP, "tp": 2}, preset="qwen2.5-0.5b", with_documents=True, micro_batches=3),
    "pp 2 x tp 2, zbv": Case({**PP, "tp": 2, "schedule": "zbv"}, {"model.num_layers": 4}, micro_batches=3),
    "pp 4": Case({"pp": 4, "stages": "1,1,2,1"}, {"model.num_layers": 5}, micro_batches=5),
    "pp 4, dualpipev": Case({"pp": 4, "schedule": "dualpipev"}, {"model.num_layers": 8}, micro_batches=9),
}
OTHERS = {
    "pp 2 x ep 2": Case(
        {**PP, "ep": 2}, preset="mixtral-8m", with_documents=True, micro_batches=3, routers=FIXED
    ),
    "pp 2 x fsdp 2, experts": Case({**PP, "zero": 1}, preset="qwen3-moe-8m", micro_batches=3, routers=FIXED),
    "pp 2 x ep 2, zbv": Case(
        {**PP, "ep": 2, "schedule": "zbv"},
        {"model.num_layers": 4},
        preset="mixtral-8m",
        micro_batches=3,
        routers=FIXED,
    ),
    "pp 2 x tp 2, experts": Case({**PP, "tp": 2}, preset="mixtral-8m", micro_batches=2, routers=FIXED),
    "pp 2 x tp 2, etp 2": Case(
        {**PP, "tp": 2, "etp": 2}, preset="qwen3-moe-8m", micro_batches=2, routers=FIXED
    ),
    "pp 2 x cp 2": Case({**PP, "cp": 2}, with_documents=True, micro_batches=3),
    "pp 2 x cp 2, striped, zbv": Case(
        {**PP, "cp": 2, "cp_method": "striped", "schedule": "zbv"}, {"model.num_layers": 4}, micro_batches=3
    ),
    "pp 2 x cp 2, ulysses, ep 2": Case(
        {**PP, "cp": 2, "cp_method": "ulysses", "ep": 2},
        preset="mixtral-8m",
        with_documents=True,
        micro_batches=3,
        routers=FIXED,
    ),
}
EIGHT = {"fsdp 2 x tp 2 x pp 2": Case({"pp": 2, "tp": 2, "fsdp": 2}, with_documents=True, micro_batches=3)}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Trained]]:
    return on_ranks(2, TWO | EXPERTS | LOW, tmp_path_factory.mktemp("two"))


@pytest.mark.parametrize("name", TWO | EXPERTS)
@pytest.mark.slow
def test_two_ranks_train_as_one_process(name: str, two: dict[str, list[Trained]]) -> None:
    check_parity(two[name], alone(2, (TWO | EXPERTS)[name]))


@pytest.mark.parametrize("name", LOW)
@pytest.mark.slow
def test_low_formats_are_those_of_one_process(name: str, two: dict[str, list[Trained]]) -> None:
    check_parity(two[name], alone(2, LOW[name]), gradients=1e-2, later=1e-3, first=1e-5)


class Products(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func.overloadpacket.__name__ in ("mm", "addmm")
        return func(*args, **(kwargs or {}))


def counted(rank: int, ranks: int) -> dict[str, tuple[float, int]]:
    """Bytes that a rank sends to other stages in a step, and its products."""
    found = {}
    for name, case in COUNTED.items():
        _, executable, _, _ = made(case, World(rank, ranks), 1)
        batches = [batch_of(case, 0, number) for number in range(case.micro_batches)]
        with Products() as products, counting_collectives() as sent:
            run_passes(executable, batches, 100)
        found[name] = sent.sent("send"), products.count
    return found


COUNTED = {
    name: Case({"pp": 2, "schedule": name}, {"model.num_layers": 4}, micro_batches=4)
    for name in ("gpipe", "1f1b", "interleaved", "zbv", "dualpipev")
}


@pytest.mark.slow
def test_ranks_send_what_the_formula_says_and_multiply_once(tmp_path: Path) -> None:
    boundary = 4 * ROWS * SEQUENCE * SMALL["width"]
    for rank, found in enumerate(spawn(2, counted, tmp_path, 2)):
        for name, (sent, products) in found.items():
            case = COUNTED[name]
            schedule: Any = case.layout["schedule"]
            virtual = 1 if schedule in ONE_STAGE else 2
            pipe = pipeline_of(ResolvedLayout(dp=1, fsdp=1, pp=2, virtual=virtual, schedule=schedule), 4)
            last = 0
            passed = 0
            for stage in pipe.stages_of(rank):
                last = max(last, stage)
                passed += stage + 1 < pipe.num_stages and pipe.rank_of(stage + 1) != rank
                passed += stage > 0 and pipe.rank_of(stage - 1) != rank
            assert sent == passed * case.micro_batches * boundary, (rank, name)
            has_head = last == pipe.num_stages - 1
            assert products == 3 * (4 * len(pipe.blocks_of(rank)) + has_head) * case.micro_batches


def reduced(rank: int) -> dict[str, tuple[float, int]]:
    """Bytes that a rank sends to reduce gradients in a step, and its products."""
    found = {}
    for name, case in REDUCED.items():
        _, executable, _, _ = made(case, World(rank, 4), 2)
        batches = [
            batch_of(case, 0, 2 * number + executable.mesh.data_rank) for number in range(case.micro_batches)
        ]
        with Products() as products, counting_collectives() as sent:
            run_passes(executable, batches, 100)
        found[name] = sent.sent("reduce-scatter"), products.count
    return found


REDUCED = {
    f"{schedule}, zero {zero}, {level}": Case(
        {"pp": 2, "schedule": schedule, "zero": zero},
        {"model.num_layers": 4},
        preset="llama-1b",  # two matrices of words
        activations=level,
        micro_batches=4,
    )
    for schedule in ("interleaved", "zbv", "dualpipev")
    for zero, level in ((1, "keep"), (3, "keep"), (3, "block"))
}


@pytest.mark.slow
def test_split_backward_passes_multiply_and_reduce_as_others_do(tmp_path: Path) -> None:
    ranks = spawn(4, reduced, tmp_path)
    for name in REDUCED:
        _, _, rest = name.partition(", ")
        reduces, products = (sum(rank[name][at] for rank in ranks) for at in range(2))
        wanted = [sum(rank[f"interleaved, {rest}"][at] for rank in ranks) for at in range(2)]
        assert products == wanted[1], name
        if "zero 1" in rest:
            assert reduces == wanted[0], "once a step"
        else:  # gradients of vectors are reduced with those of the weights that come next
            assert 0.97 * wanted[0] <= reduces <= wanted[0], name


@pytest.mark.parametrize(
    ("ranks", "cases"), [(4, FOUR), (4, OTHERS), (8, EIGHT)], ids=["four", "others", "eight"]
)
@pytest.mark.slow
def test_ranks_train_as_one_process(ranks: int, cases: dict[str, Case], tmp_path: Path) -> None:
    found = on_ranks(ranks, cases, tmp_path)
    for name, case in cases.items():
        check_parity(found[name], alone(ranks, case))
