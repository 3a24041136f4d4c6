"""Peaks of a step against a list of what is live, allocation by allocation."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.errors import PlanError
from scrimp.planner.memory.costs import BlockClass, BlockCost, EndsCost, StepCosts
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.states import Moment, device_peak, host_bytes, moments

CHOICES = ("keep", "block", "block+offload")
sizes = st.integers(0, 1000)


@st.composite
def steps(draw: st.DrawFn) -> tuple[StepCosts, list[str], bool]:
    block_cost = st.builds(
        BlockCost,
        kept=sizes,
        forward_peak=sizes,
        backward_peak=sizes,
        accumulating_peak=st.none() | sizes,
        cast=sizes,
        host=st.just(0) | sizes,
    )
    block_class = st.builds(
        BlockClass,
        weights=sizes,
        gradients=sizes,
        optimizer=sizes,
        choices=st.fixed_dictionaries(dict.fromkeys(CHOICES, block_cost)),
    )
    ends = st.builds(
        EndsCost,
        weights=sizes,
        gradients=sizes,
        optimizer=sizes,
        head_peak=sizes,
        head_gradients=sizes,
        embedding_peak=sizes,
        waiting=sizes,
        accumulating_head_peak=st.none() | sizes,
        accumulating_embedding_peak=st.none() | sizes,
    )
    classes = draw(st.lists(block_class, min_size=1, max_size=3))
    blocks = draw(st.lists(st.integers(0, len(classes) - 1), min_size=1, max_size=6))
    costs = StepCosts(
        classes=tuple(classes),
        blocks=tuple(blocks),
        ends=draw(ends),
        boundary=draw(sizes),
        optimizer_peak=draw(sizes),
        resident=draw(sizes),
    )
    choices = draw(st.lists(st.sampled_from(CHOICES), min_size=len(blocks), max_size=len(blocks)))
    return costs, choices, draw(st.booleans())


class Memory:
    """Named allocations, and the most that lived in each phase."""

    def __init__(self) -> None:
        self.live: dict[str, int] = {}
        self.peaks: dict[str, int] = {}

    def moment(self, phase: str, more: int) -> None:
        self.peaks[phase] = max(self.peaks.get(phase, 0), sum(self.live.values()) + more)


def simulated(costs: StepCosts, choices: list[str], accumulates: bool) -> dict[str, int]:
    """Every tensor of a step under its own name, made and freed in order."""
    memory, ends = Memory(), costs.ends
    live, kinds = memory.live, [costs.classes[number] for number in costs.blocks]
    chosen = [kind.choices[choice] for kind, choice in zip(kinds, choices, strict=True)]

    def or_new(existing: int | None, new: int) -> int:
        return existing if accumulates and existing is not None else new

    live |= {"resident": costs.resident, "ends": ends.weights + ends.optimizer, "input of 0": costs.boundary}
    live |= {f"states of {i}": kind.weights + kind.optimizer for i, kind in enumerate(kinds)}
    if accumulates:
        live |= {f"gradients of {i}": kind.gradients for i, kind in enumerate(kinds)}
        live["gradients of ends"] = ends.gradients
    for i, block in enumerate(chosen):
        memory.moment("forward", block.forward_peak)
        live[f"kept of {i}"], live[f"casts of {i}"] = block.kept, block.cast
        live["moving"] = block.host  # to the host, during the next block
    live["moving"] = 0  # all copies are over before the head
    memory.moment("head", or_new(ends.accumulating_head_peak, ends.head_peak))
    for i in range(len(chosen)):
        del live[f"casts of {i}"]
    live["gradient of the stream"] = costs.boundary
    live["gradients of the head"] = ends.waiting if accumulates else ends.head_gradients
    for i in reversed(range(len(chosen))):
        del live[f"kept of {i}"]  # part of the block's peak
        live["moving"] = chosen[i - 1].host if i else 0  # back, for the block before
        memory.moment("backward", or_new(chosen[i].accumulating_peak, chosen[i].backward_peak))
        live[f"gradients of {i}"] = kinds[i].gradients
    del live["input of 0"]
    memory.moment("embedding", or_new(ends.accumulating_embedding_peak, ends.embedding_peak))
    del live["gradient of the stream"], live["gradients of the head"]
    live["gradients of ends"] = ends.gradients
    memory.moment("update", costs.optimizer_peak)
    return memory.peaks


@examples(200)
@given(steps())
def test_peaks_are_those_of_a_list_of_all_that_is_live(step: tuple[StepCosts, list[str], bool]) -> None:
    costs, choices, accumulates = step
    placement = Placement(tuple(choices), States.split(len(choices)))
    expected = simulated(costs, choices, accumulates)
    found = largest(moments(costs, placement, accumulates))
    assert {phase: moment.bytes for phase, moment in found.items()} == expected
    assert device_peak(costs, placement, accumulates) == max(expected.values())
    offloaded = [costs.classes[n].choices[c].host for n, c in zip(costs.blocks, choices, strict=True)]
    assert host_bytes(costs, placement) == (sum(offloaded), sum(offloaded))


def largest(found: Iterable[Moment]) -> dict[str, Moment]:
    """By phase; the first of equal ones."""
    most: dict[str, Moment] = {}
    for moment in found:
        if moment.phase not in most or moment.bytes > most[moment.phase].bytes:
            most[moment.phase] = moment
    return most


def example(choices: list[str], *, accumulates: bool = False) -> dict[str, Moment]:
    """Two equal blocks of 10 bytes of weights; the stream is 2 bytes wide."""
    keep = BlockCost(kept=20, forward_peak=25, backward_peak=40, accumulating_peak=35)
    again = BlockCost(kept=2, forward_peak=24, backward_peak=45, accumulating_peak=44, cast=1)
    block = BlockClass(weights=10, gradients=10, optimizer=20, choices={"keep": keep, "block": again})
    ends = EndsCost(weights=5, gradients=5, optimizer=10, head_peak=30, head_gradients=5, embedding_peak=5)
    costs = StepCosts((block,), (0, 0), ends, boundary=2)
    return largest(moments(costs, Placement(tuple(choices), States.split(2)), accumulates))


def test_the_largest_moments_and_their_blocks() -> None:
    found = example(["keep", "keep"])  # 75 bytes of weights and optimizer states
    assert (found["forward"].bytes, found["forward"].block) == (75 + 2 + 20 + 25, 1)
    assert (found["head"].bytes, found["head"].block) == (75 + 2 + 40 + 30, None)
    assert (found["backward"].bytes, found["backward"].block) == (75 + 5 + 2 + 20 + 2 + 40, 1)
    assert found["embedding"].bytes == 75 + 5 + 20 + 2 + 5
    assert found["update"].bytes == 75 + 25
    assert [moment.name for moment in found.values()] == [
        "forward pass of block 1",
        "backward pass of block 1",
        "head and loss",
        "backward pass of the embedding",
        "optimizer step",
    ]


def test_placement_decides_where_equal_choices_peak() -> None:
    early, late = example(["block", "keep"]), example(["keep", "block"])
    first, last = early["backward"], late["backward"]
    assert (first.bytes, last.bytes) == (75 + 15 + 2 + 2 + 45, 75 + 5 + 22 + 2 + 45)
    assert (first.block, last.block) == (0, 1)
    assert early["forward"].bytes == 75 + 4 + 1 + 25  # with the cast copies of the block before


def test_gradients_that_exist_are_there_from_the_start() -> None:
    found = example(["keep", "keep"], accumulates=True)
    assert found["forward"].bytes == example(["keep", "keep"])["forward"].bytes + 25
    assert found["backward"].bytes == 75 + 25 + 2 + 20 + 2 + 35


def test_choices_without_costs_are_refused() -> None:
    with pytest.raises(PlanError, match="block 1"):
        example(["keep", "mlp"])
    with pytest.raises(PlanError, match="one choice per block"):
        example(["keep"])
