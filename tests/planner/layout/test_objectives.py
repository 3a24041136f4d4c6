"""What each objective answers, beside all sizes, sequences and models one by one."""

from __future__ import annotations

import dataclasses
import functools
import math

import pytest
from published_settings import LLAMA_8B, setting

from scrimp.errors import PlanError
from scrimp.models.shapes import ModelShape
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.cluster_sizes import resized, sizes_like
from scrimp.planner.layout.format_budget import FormatBudget
from scrimp.planner.layout.objectives import (
    DAY,
    Answer,
    Goal,
    Objective,
    Searching,
    answered,
    cost_of,
    days_of,
    price_of,
)
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.scaled_models import family_of
from scrimp.planner.layout.search import fits, search

SMALL = dataclasses.replace(LLAMA_8B, layers=8)


def question(shape: ModelShape, hardware: str, *, sequence: int = 4096, global_batch: int = 32) -> Question:
    like = setting(shape, hardware, global_batch=1024, sequence=sequence)
    return Question(
        model=like.model,
        cluster=like.cluster,
        sequence=sequence,
        global_batch=global_batch,
        software=like.software,
    )


def ask(asked: Question, goal: Goal, shape: ModelShape = SMALL) -> Answer:
    return answered(asked, goal, Searching(keep=1), lambda: family_of(shape))


def test_days_and_cost() -> None:
    asked = question(SMALL, "8xh100")
    step = 32 * 4096
    assert days_of(asked, 2.0, 43_200 * step) == pytest.approx(1.0)
    price = 8 * load_hardware("h100").groups[0].node.device.price_per_hour
    assert price_of(asked.cluster) == pytest.approx(price)
    assert cost_of(asked, 2.0, 43_200 * step) == pytest.approx(24 * price)


def test_the_fastest_step_is_that_of_the_search() -> None:
    asked = question(SMALL, "4xh100")
    assert ask(asked, Goal()).found.best == search(asked, keep=1).best


@pytest.mark.slow
def test_the_cheapest_tokens_are_those_of_the_best_size() -> None:
    asked = question(LLAMA_8B, "2x8xh100")
    costs = {}
    for cluster in sizes_like(asked.cluster, 16):
        one = dataclasses.replace(asked, cluster=cluster)
        found = search(one, keep=1)
        if found.best:
            costs[cluster.devices] = cost_of(one, found.best[0].seconds, 1.0)
    answer = ask(asked, Goal(objective="cost"), LLAMA_8B)
    assert answer.question.cluster.devices == min(costs, key=lambda size: costs[size])
    assert {one.question.cluster.devices for one in answer.trials if one.best} == set(costs)
    assert {one.note for one in answer.trials if not one.best} <= {"does not fit"}


@pytest.mark.slow
def test_the_cheapest_in_time_is_not_slower_than_asked() -> None:
    asked = question(SMALL, "2x8xh100")
    seconds = {
        one.devices: search(dataclasses.replace(asked, cluster=one)) for one in sizes_like(asked.cluster, 16)
    }
    tokens = 1e9
    limit = 1.01 * days_of(asked, seconds[8].best[0].seconds, tokens)
    answer = ask(asked, Goal(objective="cost", tokens=tokens, days=limit))
    assert answer.question.cluster.devices >= 8
    assert {one.note for one in answer.trials if one.question.cluster.devices < 8} == {"too slow"}
    with pytest.raises(PlanError, match="in time"):
        ask(asked, Goal(objective="cost", tokens=tokens, days=limit / 100))


def test_hardware_without_a_price_has_no_cheapest_tokens() -> None:
    asked = question(SMALL, "2xh100")
    group = asked.cluster.groups[0]
    free = dataclasses.replace(group.node.device, price_per_hour=0.0)
    node = dataclasses.replace(group.node, device=free)
    cluster = dataclasses.replace(asked.cluster, groups=(dataclasses.replace(group, node=node),))
    with pytest.raises(PlanError, match="has no price"):
        ask(dataclasses.replace(asked, cluster=cluster), Goal(objective="cost"))


SIZES = [*((1, used) for used in range(1, 9)), (2, 8), (3, 8)]
"""Nodes, and devices of each."""


@functools.cache
def days_on(nodes: int, devices: int) -> float:
    """Days that 1e10 tokens of the small model take."""
    asked = question(SMALL, "h100", global_batch=48)
    one = dataclasses.replace(asked, cluster=resized(asked.cluster, nodes, devices))
    found = search(one, keep=1)
    return days_of(one, found.best[0].seconds, 1e10) if found.best else float("inf")


@pytest.mark.parametrize(
    "wanted", [1, 3, *(pytest.param(size, marks=pytest.mark.slow) for size in (4, 8, 24))]
)
def test_the_smallest_cluster_is_the_first_in_time(wanted: int) -> None:
    asked = question(SMALL, "h100", global_batch=48)
    sizes = [size for size in SIZES if math.prod(size) <= wanted]
    tokens, days = 1e10, {math.prod(size): days_on(*size) for size in sizes}
    limit = 1.001 * days[wanted]
    answer = ask(asked, Goal(objective="smallest-cluster", tokens=tokens, days=limit))
    assert answer.question.cluster.devices == min(size for size, needs in days.items() if needs <= limit)
    assert days_of(answer.question, answer.found.best[0].seconds, tokens) <= limit
    assert [one.note for one in answer.trials][-1] == ""
    assert all(one.note for one in answer.trials[:-1])


@pytest.mark.slow
def test_sizes_between_two_are_tried_until_none_is_left() -> None:
    """Every second size from 32 to 48 nodes is tried first: the smallest in time may lie beside those."""
    asked = question(SMALL, "h100", global_batch=8 * 33 * 34)
    tokens = 1e12
    exact = dataclasses.replace(asked, cluster=resized(asked.cluster, 33, 8))
    days = 1.001 * days_of(exact, search(exact, keep=1).best[0].seconds, tokens)
    answer = ask(asked, Goal(objective="smallest-cluster", tokens=tokens, days=days))
    assert answer.question.cluster.nodes == 33


def test_what_no_cluster_trains_in_time_names_the_fastest() -> None:
    asked = question(dataclasses.replace(LLAMA_8B, layers=1), "h100", global_batch=2)
    with pytest.raises(PlanError, match="trains so many tokens in time") as wrong:
        ask(asked, Goal(objective="smallest-cluster", tokens=1e13, days=30))
    assert "the fastest that was tried" in str(wrong.value.got)
    with pytest.raises(PlanError, match="trains so many tokens in time") as wrong:
        ask(asked, Goal(objective="smallest-cluster", tokens=1e13, days=1e-4))
    assert "too slow at its peak rate" in str(wrong.value.got)
    huge = dataclasses.replace(LLAMA_8B, width=2**17, heads=2**10, kv_heads=1, vocab_size=127_999)
    with pytest.raises(PlanError, match="no cluster of these devices trains the model"):
        ask(
            question(huge, "rtx4060ti", global_batch=1, sequence=100),
            Goal(objective="smallest-cluster", tokens=1e9, days=1e5),
        )


def test_the_longest_context_is_the_longest_that_fits() -> None:
    asked = question(LLAMA_8B, "2xl40s", global_batch=256)
    answer = ask(asked, Goal(objective="longest-context"), LLAMA_8B)
    lengths = [2**power for power in range(7, 21)]
    held = [
        length
        for length in lengths
        if fits(dataclasses.replace(asked, sequence=length, global_batch=2**20 // length))
    ]
    assert answer.question.sequence == max(held) < max(lengths)
    assert answer.question.sequence * answer.question.global_batch == 2**20
    short = dataclasses.replace(LLAMA_8B, layers=2, learned_positions=2048)
    limited = question(short, "4xl40s", sequence=1024, global_batch=64)
    assert ask(limited, Goal(objective="longest-context"), short).question.sequence == 2048


def test_the_largest_model_is_the_largest_that_fits() -> None:
    asked = question(SMALL, "4xl40s", global_batch=16)
    answer = ask(asked, Goal(objective="largest-model"))
    family = family_of(SMALL)
    held = [
        number
        for number in range(1, 13)
        if fits(dataclasses.replace(asked, model=family.member(number).model))
    ]
    assert held == list(range(1, max(held) + 1))
    assert answer.question.model == family.member(max(held)).model
    assert [bool(one.best) for one in answer.trials].count(True) == 1


def test_where_nothing_fits_nothing_is_answered() -> None:
    asked = question(LLAMA_8B, "rtx4060ti", sequence=2**20, global_batch=1)
    wide = dataclasses.replace(LLAMA_8B, vocab_size=2**22)
    for objective in ("largest-model", "cost"):
        model = dataclasses.replace(asked, model=wide.sizes)
        assert not ask(model, Goal(objective=objective), wide).found.best  # type: ignore[arg-type]
    assert DAY == 24 * 3600


@pytest.mark.parametrize(
    "objective", ["step-time", "longest-context", pytest.param("largest-model", marks=pytest.mark.slow)]
)
def test_a_budget_that_no_formats_keep_is_named(objective: Objective) -> None:
    asked = question(SMALL, "4xb200", global_batch=16)
    asked = dataclasses.replace(asked, formats=FormatBudget(names=("nvfp4", "mxfp4"), share=0.5))
    with pytest.raises(PlanError, match=r"keeps to budget\.fp4_flops") as wrong:
        ask(asked, Goal(objective=objective))
    assert "nvfp4, mxfp4, which take 1 at least" in str(wrong.value.got)
    enough = dataclasses.replace(asked, formats=FormatBudget(names=("nvfp4", "mxfp4"), share=1.0))
    assert ask(enough, Goal()).found.best
