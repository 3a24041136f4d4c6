"""What is concluded from what ranks say, on a clock that the test sets."""

from __future__ import annotations

from typing import Any

import pytest

from scrimp.health import HANG_S, Judge

ELSEWHERE_S = 3600.0


def statement(beat: int, entered: int, left: int, **more: Any) -> dict[str, Any]:
    """What a rank states, by default from inside a step."""
    return {
        "beat": beat,
        "ended": False,
        "steady": True,
        "step": 7,
        "doing": None,
        "groups": [["all", [0, 1, 2], entered, left, "all-reduce"]],
        "place": None,
        "longest": [0.1, 0.1],
        "steps": [],
        **more,
    }


WAITS, COMES = (5, 4), (4, 4)
"""Entered and left, of a rank in its fifth collective and of one that has not entered it."""


def looks(
    said: list[dict[str, Any]], seconds: float, silent: tuple[int, ...] = ()
) -> tuple[float, str] | None:
    """When a judge speaks, and what it says, where ranks say the same for so long; None if it is silent."""
    judge = Judge(HANG_S, ELSEWHERE_S)
    for look in range(int(seconds * 2)):
        now = [one if rank in silent else {**one, "beat": look} for rank, one in enumerate(said)]
        error = judge.look(look / 2, now)
        if error is not None:
            return look / 2, str(error)
    return None


def test_a_rank_that_does_not_enter_is_named_with_its_place() -> None:
    said = [statement(0, *WAITS), statement(0, *COMES, place="own.py:3 in step"), statement(0, *WAITS)]
    found = looks(said, 10)
    assert found is not None
    at, text = found
    assert HANG_S < at <= HANG_S + 1
    assert "rank 1 hangs outside of communication" in text
    assert "own.py:3 in step" in text
    assert "ranks 0 and 2 wait for it in all-reduce 5" in text


def test_a_collective_that_none_leaves_is_the_communication() -> None:
    found = looks([statement(0, *WAITS)] * 3, 10)
    assert found is not None
    assert "the communication hangs" in found[1]
    assert "ranks 0, 1 and 2 are all in all-reduce 5" in found[1]


@pytest.mark.parametrize("rank", [0, 2])
def test_a_silent_rank_is_the_cause_though_others_wait_as_well(rank: int) -> None:
    said = [statement(0, *(COMES if one == rank else WAITS)) for one in range(3)]
    found = looks(said, 10, silent=(rank,))
    assert found is not None
    assert found[0] <= HANG_S + 1
    assert f"rank {rank} is stopped or cut off" in found[1]


@pytest.mark.parametrize(
    "more",
    [{"step": None}, {"doing": "preparing the corpus"}, {"steady": False}, {"longest": [4.0, 0.1]}],
    ids=["between steps", "announced", "first steps", "has taken long before"],
)
def test_what_may_take_long_is_waited_for(more: dict[str, Any]) -> None:
    said = [statement(0, *WAITS), statement(0, *COMES, **more), statement(0, *WAITS)]
    assert looks(said, 19) is None


@pytest.mark.slow
def test_where_anything_may_take_long_there_is_a_limit_too() -> None:
    said = [statement(0, *WAITS), statement(0, *COMES, doing="preparing the corpus"), statement(0, *WAITS)]
    found = looks(said, ELSEWHERE_S + 10)
    assert found is not None
    assert found[0] > ELSEWHERE_S
    assert "doing: preparing the corpus" in found[1]


def test_a_rank_that_has_ended_may_be_silent() -> None:
    said = [statement(0, *COMES), statement(0, *COMES, ended=True), statement(0, *COMES)]
    assert looks(said, 60, silent=(1,)) is None


def test_before_the_third_step_silence_may_last_longer() -> None:
    said = [statement(0, *COMES)] * 2 + [statement(0, *COMES, steady=False)]
    assert looks(said, 5 * HANG_S - 1, silent=(2,)) is None
    assert looks(said, 5 * HANG_S + 2, silent=(2,)) is not None


def test_time_in_which_the_judge_was_held_up_does_not_count() -> None:
    judge, said = Judge(HANG_S, ELSEWHERE_S), [statement(0, *COMES)] * 3
    assert judge.look(0.0, said) is None
    assert judge.look(100.0, said) is None
    assert judge.look(100.5, [{**one, "beat": 1} for one in said]) is None


def test_a_rank_of_another_group_is_not_blamed_for_it() -> None:
    """Ranks 1 and 2 wait for rank 0 in a group; rank 0 waits in another one for rank 3, which is the cause."""
    pairs = {0: (["a", [0, 3], 2, 1, "all-reduce"], ["b", [0, 1, 2], 3, 3, "all-gather"])}
    pairs[1] = pairs[2] = (["b", [0, 1, 2], 4, 3, "all-gather"],)  # type: ignore[assignment]
    pairs[3] = (["a", [0, 3], 1, 1, "all-reduce"],)  # type: ignore[assignment]
    found = looks([statement(0, 0, 0, groups=list(pairs[rank])) for rank in range(4)], 10)
    assert found is not None
    assert "rank 3 hangs" in found[1]
    assert "rank 0 waits for it" in found[1]


def slow(waits: list[list[float]], seconds: float = 0.2) -> list[str]:
    """Sentences where ranks have waited so long in each of their steps."""
    judge = Judge(HANG_S, ELSEWHERE_S)
    said = [
        statement(0, 4, 4, steps=[[step, seconds, wait] for step, wait in enumerate(own)]) for own in waits
    ]
    judge.look(0.0, said)
    return judge.slow() + judge.slow()


def test_a_rank_for_which_the_others_always_wait_is_named_once() -> None:
    found = slow([[0.08] * 40, [0.081] * 40, [0.01] * 40, [0.079] * 40])
    assert len(found) == 1
    assert "rank 2 is slow: the others waited 0.071 s for it in each step of 0.2 s" in found[0]


def test_ranks_that_are_late_in_turns_are_not_slow() -> None:
    turns = [[0.0 if step % 2 == rank else 0.1 for step in range(40)] for rank in range(2)]
    assert slow(turns) == []
    assert slow([[0.1] * 40, [0.07] * 40]) == []  # less than a quarter of a step
    assert slow([[0.08] * 20, [0.0] * 20]) == []  # too few steps
