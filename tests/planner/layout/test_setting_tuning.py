"""Tuning by a few trials, beside brute force over all settings, where the model that ranks them is wrong."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from published_settings import GPT_22B, LLAMA_8B, ROUTED, setting

from scrimp.models.shapes import ModelShape
from scrimp.planner.hardware import Cluster
from scrimp.planner.layout.predict import predict
from scrimp.planner.layout.questions import Question, layouts, micro_batches, setting_of
from scrimp.planner.layout.setting import FULL, NONE, SELECTIVE, Setting
from scrimp.planner.layout.stage_memory import peak_bytes
from scrimp.planner.layout.tuning import Failure, Option, Outcome, Tuned, tune

SHARE = 0.15
"""Share of brute force's trials that tuning may take."""


@dataclasses.dataclass(frozen=True)
class Case:
    """All settings of a question: what a wrong model says of them, and what is true."""

    options: list[Option]
    seconds: list[float]
    bytes: list[float]
    limit: float

    @property
    def best(self) -> float:
        """By brute force."""
        return min(one for one, size in zip(self.seconds, self.bytes, strict=True) if size <= self.limit)

    def evaluate(self, seed: int) -> Callable[[int, float], Outcome]:
        """Trials whose seconds are off by up to 3 % where they are short."""

        def run(number: int, fidelity: float) -> Outcome:
            if self.bytes[number] > self.limit:
                return Failure.MEMORY
            digest = hashlib.sha256(f"{seed} {number} {fidelity}".encode()).digest()
            noise = int.from_bytes(digest[:4]) / 2**31 - 1
            return self.seconds[number] * math.exp(0.04 * (1 - fidelity) * noise)

        return run


def moved(cluster: Cluster, *, links: float = 1.0, peak: float = 1.0) -> Cluster:
    """The same devices as a model with wrong constants believes them to be."""

    def link(one: Any) -> Any:
        return dataclasses.replace(one, bytes_per_second=one.bytes_per_second * links)

    groups = []
    for group in cluster.groups:
        node, device = group.node, group.node.device
        device = dataclasses.replace(
            device, peak=dataclasses.replace(device.peak, bf16=device.peak.bf16 * peak)
        )
        tiers = dataclasses.replace(node.link, inside=link(node.link.inside), outside=link(node.link.outside))
        node = dataclasses.replace(node, device=device, link=tiers)
        groups.append(dataclasses.replace(group, node=node))
    return dataclasses.replace(cluster, groups=tuple(groups), between=link(cluster.between))


def case(like: Setting, *, memory: float = 1.0, room: float = 1.0, **constants: float) -> Case:
    """All layouts, micro-batches and recomputation.

    Args:
        memory: by which predicted bytes are off.
        room: share of the device's memory that there really is.
        constants: by which those of the model are off.
    """
    asked = Question(
        model=like.model,
        cluster=like.cluster,
        sequence=like.sequence,
        global_batch=like.global_batch,
        software=like.software,
    )
    believed, limit = moved(like.cluster, **constants), like.device.memory_bytes
    found = Case([], [], [], limit * room)
    for layout in layouts(asked):
        for size, recompute in itertools.product(micro_batches(asked, layout), (NONE, SELECTIVE, FULL)):
            one = dataclasses.replace(setting_of(asked, layout, size), recompute=recompute)
            needs = max(rank.total for rank in peak_bytes(one))
            if size > 16 or needs * memory > 1.25 * limit:
                continue
            names = ("tp", "pp", "cp", "ep", "fsdp", "zero", "virtual")
            degrees = {name: getattr(layout, name) for name in names}
            wrong = predict(dataclasses.replace(one, cluster=believed))
            found.options.append(
                Option(
                    factors={**degrees, "micro_batch": size, "recompute": recompute},
                    seconds=wrong.step_seconds,
                    bytes=needs * memory,
                    causes=wrong.seconds,
                    alike=tuple(degrees.values()),
                )
            )
            found.seconds.append(predict(one).step_seconds)
            found.bytes.append(needs)
    return found


def check(one: Case, seed: int) -> Tuned:
    trials = int(SHARE * len(one.options))
    found = tune(one.options, trials, one.evaluate(seed))
    assert found.cost <= len(found.trials) <= trials  # each counted whole, however short
    assert found.best is not None
    assert one.bytes[found.best] <= one.limit
    assert one.seconds[found.best] <= 1.02 * one.best
    return found


SMALL = dataclasses.replace(LLAMA_8B, layers=8)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "constants",
    [{"links": 2.0}, {"peak": 0.8}, {"links": 2.0, "peak": 1.25}, {"links": 0.5, "peak": 1.25}],
    ids=str,
)
@pytest.mark.every(4)
def test_a_wrong_model_and_few_trials_come_near_brute_force(constants: dict[str, float], seed: int) -> None:
    like = setting(SMALL, "4xl40s", global_batch=16)
    check(case(like, memory=0.8, room=0.75, **constants), seed)


QUESTIONS: list[tuple[ModelShape, str, dict[str, int]]] = [
    (LLAMA_8B, "8xh100", {"global_batch": 64}),
    (LLAMA_8B, "16xa100-40", {"global_batch": 64}),
    (LLAMA_8B, "8xl40s", {"global_batch": 32}),
    (GPT_22B, "16xh100", {"global_batch": 64, "sequence": 2048}),
    (dataclasses.replace(ROUTED, layers=8), "8xh100", {"global_batch": 32}),
]


@pytest.mark.slow
@pytest.mark.parametrize("room", [1.0, 0.75])
@pytest.mark.parametrize("memory", [0.8, 1.2])
@pytest.mark.parametrize("constants", [{"links": 2.0, "peak": 0.8}, {"links": 0.25}], ids=str)
@pytest.mark.parametrize("question", QUESTIONS, ids=lambda one: one[1])
def test_on_larger_questions(
    question: tuple[ModelShape, str, dict[str, int]], constants: dict[str, float], memory: float, room: float
) -> None:
    shape, hardware, more = question
    one = case(setting(shape, hardware, **more), memory=memory, room=room, **constants)
    assert len(one.options) >= 300
    for seed in range(2):
        check(one, seed)


@pytest.mark.slow
def test_trials_beat_the_prediction_alone() -> None:
    """Where the model is most wrong, its first choice is a fifth slower than what trials find."""
    one = case(setting(LLAMA_8B, "8xl40s", global_batch=32), links=4.0)
    found = check(one, 0)
    fits = [number for number, size in enumerate(one.bytes) if size <= one.limit]
    first = min(fits, key=lambda number: one.options[number].seconds)
    assert one.seconds[first] > 1.2 * one.seconds[found.best or 0]


@st.composite
def lists(draw: st.DrawFn) -> tuple[list[Option], list[Outcome]]:
    """Settings with any predictions, and what becomes of their trials."""
    degrees = draw(st.lists(st.sampled_from([1, 2, 4, 8]), min_size=1, max_size=30))
    options = [
        Option(
            factors={"tp": degree, "recompute": draw(st.sampled_from(["none", "full"]))},
            seconds=draw(st.floats(0.01, 100.0)),
            bytes=draw(st.integers(1, 20)),
            alike=degree,
        )
        for degree in degrees
    ]
    outcomes: list[Outcome] = [
        draw(st.one_of(st.floats(0.01, 100.0), st.sampled_from(list(Failure)))) for _ in options
    ]
    return options, outcomes


@given(lists(), st.integers(1, 20))
def test_no_trial_is_wasted(drawn: tuple[list[Option], list[Outcome]], most: int) -> None:
    options, outcomes = drawn
    found = tune(options, most, lambda number, fidelity: outcomes[number])
    assert len(found.trials) <= most
    assert len({(one.number, one.fidelity) for one in found.trials}) == len(found.trials)
    ran: set[int] = set()
    for at, later in enumerate(found.trials):
        for failed in found.trials[:at]:
            assert later.number not in ran or not isinstance(outcomes[later.number], Failure)
            if later.number in ran or not isinstance(failed.outcome, Failure):
                continue
            if failed.outcome is Failure.MEMORY:
                assert options[later.number].bytes < options[failed.number].bytes
            else:
                assert options[later.number].alike != options[failed.number].alike
        ran.add(later.number)
    works = {one.number for one in found.trials if not isinstance(one.outcome, Failure)}
    assert (found.best is None) == (not works)
    if works:
        assert found.best in works
    assert found == tune(options, most, lambda number, fidelity: outcomes[number])


@given(lists())
def test_with_trials_enough_the_best_is_found(drawn: tuple[list[Option], list[Outcome]]) -> None:
    options, outcomes = drawn
    options = [dataclasses.replace(one, alike=None, bytes=1.0) for one in options]
    outcomes = [Failure.OTHER if one is Failure.MEMORY else one for one in outcomes]
    works = [one for one in outcomes if not isinstance(one, Failure)]
    found = tune(options, 3 * len(options) + 3, lambda number, fidelity: outcomes[number])
    assert found.best is not None if works else found.best is None
    if works:
        assert outcomes[found.best or 0] == min(works)


def test_importance_is_the_share_of_the_variance() -> None:
    """On a full grid of factors that multiply, shares are those of their logarithms' variances."""
    grid = list(itertools.product([1, 2, 4], ["none", "full"], [1, 2]))
    options = [
        Option(factors={"tp": tp, "recompute": again, "zero": zero}, seconds=1.0, bytes=1.0)
        for tp, again, zero in grid
    ]
    seconds = [tp**0.5 * (1.3 if again == "full" else 1.0) for tp, again, _ in grid]
    found = tune(options, 100, lambda number, fidelity: seconds[number])
    by_degree = 0.25 * math.log(2) ** 2 * 2 / 3
    again = math.log(1.3) ** 2 / 4
    assert found.importance == pytest.approx(
        {"tp": by_degree / (by_degree + again), "recompute": again / (by_degree + again), "zero": 0.0}
    )
    assert next(iter(found.importance)) == "tp"
    assert found.seconds == pytest.approx(seconds)


def test_what_was_not_tried_is_corrected_by_what_was() -> None:
    """Links half as fast as believed: settings are slower by what they exchange."""
    options = [
        Option(
            factors={"tp": tp},
            seconds=1.0,
            bytes=1.0,
            causes={"compute": 1.0 - 0.1 * tp, "communication_exposed": 0.1 * tp},
        )
        for tp in range(1, 8)
    ]
    found = tune(options, 7, lambda number, fidelity: 1.0 + 0.1 * (number + 1))
    untried = set(range(7)) - {one.number for one in found.trials}
    assert untried
    for number in untried:
        assert found.seconds[number] == pytest.approx(1.1 + 0.1 * number, rel=0.1)
    assert found.best == 0
