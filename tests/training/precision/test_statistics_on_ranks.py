"""Statistics of ranks that have other layers, or other experts, are those of one process."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import pytest
from distributed import spawn
from hypothesis import given
from hypothesis import strategies as st
from parity import Case
from statistics_of_runs import measured

from scrimp.planner.precision import Budget, Question, make_plan
from scrimp.planner.precision.profile import BatchStatistics, PrecisionProfile
from scrimp.statistics.ranks import in_model_order
from scrimp.world import World

FP32 = {"precision": "fp32"}
CASES = {
    "stages": Case({"pp": 2}, FP32, micro_batches=3),
    "one matrix of words": Case({"pp": 2, "schedule": "gpipe"}, FP32, preset="qwen2.5-0.5b"),
    "stages in turn": Case(
        {"pp": 2, "virtual": 2, "schedule": "interleaved"}, {**FP32, "model.num_layers": 4}
    ),
    "experts": Case({"ep": 2}, {**FP32, "model.num_layers": 2}, preset="mixtral-8m", routers=3.0),
}
TOLERANCES = {"experts": {"sums": 0.15, "gains": 0.2}}
"""An expert sees the tokens of two ranks at once: others share scales, and noise is drawn in another order."""
GAINS = ("backward", "forward", "curvature")


def readers_of(case: Case) -> int:
    return 2 // int(case.layout.get("pp", 1))


def on_rank(rank: int, names: Sequence[str]) -> dict[str, PrecisionProfile]:
    return {name: measured(CASES[name], World(rank, 2), readers_of(CASES[name])) for name in names}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, PrecisionProfile]]:
    return spawn(2, on_rank, tmp_path_factory.mktemp("statistics"), list(CASES))


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_ranks_find_together_what_one_process_finds(
    found: list[dict[str, PrecisionProfile]], name: str
) -> None:
    wanted = measured(CASES[name], World(), readers_of(CASES[name]))
    for rank in found:
        check(rank[name], wanted, **TOLERANCES.get(name, {"sums": 1e-4, "gains": 1e-3}))
    assert_same(found[0][name], found[1][name])
    plans = [make_plan(Question(one, Budget(fp4_flops=0.5))) for one in (found[0][name], wanted)]
    assert plans[0].precisions == plans[1].precisions
    for key in ("loss_divergence", "weight_divergence"):
        rel = 0.05 if name in TOLERANCES else 0.01
        assert plans[0].predicted[key] == pytest.approx(plans[1].predicted[key], rel=rel)


def check(found: PrecisionProfile, wanted: PrecisionProfile, *, sums: float, gains: float) -> None:
    """Every statistic; small ones of a kind to rounding of the largest."""
    ours, theirs = (
        {field.name: getattr(p, field.name) for field in dataclasses.fields(p) if field.name != "batches"}
        for p in (found, wanted)
    )
    assert ours == theirs
    for a, b in zip(found.batches, wanted.batches, strict=True):
        for field in dataclasses.fields(BatchStatistics):
            one, other = (np.asarray(getattr(batch, field.name)) for batch in (a, b))
            largest = float(np.abs(other).max())
            assert largest > 0, field.name
            rtol = gains if field.name in GAINS else sums if field.name in ("errors", "results") else 1e-4
            atol = rtol * (0.1 if field.name in GAINS else 0.01) * largest
            np.testing.assert_allclose(one, other, rtol=rtol, atol=atol, err_msg=field.name)


def assert_same(one: PrecisionProfile, other: PrecisionProfile) -> None:
    """Bit for bit."""
    for a, b in zip(one.batches, other.batches, strict=True):
        for field in dataclasses.fields(BatchStatistics):
            assert np.array_equal(getattr(a, field.name), getattr(b, field.name)), field.name


@given(st.integers(1, 4), st.integers(1, 3), st.booleans())
def test_names_of_all_stages_are_in_the_order_of_the_model(ranks: int, virtual: int, tied: bool) -> None:
    stages = ranks * virtual
    blocks = [[f"blocks.{n}.{name}.weight" for name in ("qkv", "out")] for n in range(stages)]
    lists = [[name for n in range(rank, stages, ranks) for name in blocks[n]] for rank in range(ranks)]
    lists[0].insert(0, "embedding.weight")
    lists[-1] += ["final_norm.weight", "head.weight"]
    if tied and ranks > 1:
        lists[-1].insert(0, "embedding.weight")
    whole = [
        "embedding.weight",
        *(name for block in blocks for name in block),
        "final_norm.weight",
        "head.weight",
    ]
    assert in_model_order(lists) == whole
