"""Costs of a pipeline's ranks, by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from scrimp.config import preset
from scrimp.config.pipeline import Pipeline
from scrimp.models import ModelSpec, spec_of
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.planner.memory.stage_costs import Held, part_of_costs, stage_costs

BLOCK = BlockClass(100, 100, 200, {"keep": BlockCost(10, 12, 15)})
ENDS = EndsCost(1000, 1000, 2000, head_peak=70, head_gradients=50, embedding_peak=60)
COSTS = StepCosts((BLOCK,), (0, 0, 0, 0), ENDS, boundary=3, resident=20, tables=4)
LINE = Pipeline(2, "1f1b", (range(1), range(1, 4)))
BACK = Pipeline(1, "zbv", (range(2), range(2, 4)))
KEEP = ("keep",) * 4


def spec(*, tied: bool) -> ModelSpec:
    return spec_of(replace(preset("llama-3m"), num_layers=4, tied_embeddings=tied))


def running(costs: StepCosts, pipeline: Pipeline, rank: int, stage: int, held: Held) -> StepCosts:
    return stage_costs(
        costs, pipeline, rank, stage, [held], KEEP, spec(tied=False), tokens=8, compute_bytes=4
    )


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_has_the_states_of_its_blocks(rank: int) -> None:
    own = part_of_costs(COSTS, LINE, rank, spec(tied=False))
    weights = [own.classes[number].weights for number in own.blocks]
    assert weights == ([100, 0, 0, 0], [0, 100, 100, 100])[rank]
    model = spec(tied=False)
    words, width = model.head.parameters, model.architecture.width
    share = (words, words + width)[rank] / (2 * words + width)
    assert own.ends.optimizer == round(2000 * share)


def test_both_ends_have_a_copy_of_one_matrix() -> None:
    shares = [part_of_costs(COSTS, LINE, rank, spec(tied=True)).ends.weights for rank in (0, 1)]
    assert shares[1] == 1000
    assert 990 <= shares[0] <= 1000


def test_what_is_in_flight_is_resident() -> None:
    own = part_of_costs(COSTS, LINE, 0, spec(tied=False))
    found = running(own, LINE, 0, 0, Held({0: 5}, {}, 1))
    # Four more micro-batches of 10, with their tables; one boundary that arrived, and two that are sent.
    assert found.resident == 20 + 4 * 10 + 4 * 4 + 3 * 3
    assert (found.ends.head_peak, found.ends.embedding_peak) == (0, 60)
    own = part_of_costs(COSTS, LINE, 1, spec(tied=False))
    found = running(own, LINE, 1, 1, Held({1: 3}, {}, 0))
    head = spec(tied=False).head.parameters * 4
    assert found.resident == 20 + 2 * 30 + 2 * 4 + 2 * 3 + 2 * (3 + head)
    assert (found.ends.head_peak, found.ends.embedding_peak) == (70, 0)


def test_only_the_running_stage_takes_activations() -> None:
    own = part_of_costs(COSTS, BACK, 0, spec(tied=False))
    found = running(own, BACK, 0, 0, Held({0: 2, 1: 1}, {0: 1}, 0))
    kept = [found.classes[number].choices["keep"].kept for number in found.blocks]
    weights = [found.classes[number].weights for number in found.blocks]
    assert (kept, weights) == ([10, 10, 0, 0], [100, 100, 100, 100])
    linears = [linear for block in spec(tied=False).blocks[:2] for linear in block.linears]
    numbers = sum(linear.inputs + linear.outputs for linear in linears)
    assert found.resident == 20 + (2 * 20 + 20 - 20) + 2 * 4 + 2 * 3 + numbers * 8 * 4
