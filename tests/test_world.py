"""Ranks on gloo of which one has seen something: all come to the same decision, and no one waits for ever."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import torch
from distributed import spawn
from hypothesis import given
from hypothesis import strategies as st

from scrimp import errors
from scrimp.errors import CheckpointError, ScrimpError, StorageError
from scrimp.world import (
    BLOCK,
    HEADER,
    RankFailedError,
    World,
    error_of,
    failure_of,
    first_difference,
    framed,
    unframed,
)

LONG = "ä" * 1000
"""Longer than a block, in bytes of more than one each."""


class FullDiskError(StorageError):
    """A class that other modules than `scrimp.errors` define."""


def answers(rank: int) -> dict[str, Any]:
    """What every rank is told, where each has something else."""
    world, last = World.current(), World.current().size - 1
    return {
        "world": (world.rank, world.size, world.is_writer),
        "any": (world.any(rank == last), world.any(False)),
        "all": (world.all(rank != last), world.all(True)),
        "largest": (world.largest(10 * rank), world.largest(0.1 * rank), world.largest(-(2**62) - rank)),
        "smallest": (world.smallest(10 * rank), world.smallest(0.1 * rank), world.smallest(2**62 + rank)),
        "with a NaN": (
            world.largest(math.nan if rank == last else 1.0),
            world.smallest(math.nan if rank == 0 else 1.0),
        ),
        "told": (world.told(0.1 + rank), world.told({"rank": rank, "text": LONG}), world.told(None)),
        "gathered": world.gathered([rank, 1 / 3, math.inf, LONG * rank]),
        "same": (world.same(LONG), world.same(LONG + str(rank))),
        "sum": world.sum(np.array([0.1, rank])).tolist(),
        "whole sum": world.sum(np.array([[2**60 + rank]])).tolist(),
        "once": world.once("counting", lambda: complex(rank, 1), write=repr, read=complex),
        "barrier": world.barrier(),
        "writer first": in_turn(world),
    }


class DeviceLostError(RuntimeError):
    """No error of Scrimp."""


def fails(error: Exception) -> Any:
    """What the last rank does where the others do nothing."""
    world = World.current()
    if world.rank == world.size - 1:
        raise error


def at_once() -> None:
    with World.current().together("opening the data"):
        fails(FullDiskError("no space", got="1 byte", expected="2 bytes", do="free some"))


def while_others_ask() -> None:
    world = World.current()
    with world.together("planning"):
        world.barrier()
        fails(ZeroDivisionError("by zero"))
        for _ in range(3):
            world.told(LONG)


def inside_another() -> None:
    world = World.current()
    with world.together("the run"):
        with world.together("a step"):
            fails(CheckpointError("damaged"))
        world.any(True)


def handled_on_all() -> None:
    world = World.current()
    with world.together("the run"):
        try:
            with world.together("a checkpoint"):
                fails(FullDiskError("no space"))
        except StorageError:
            world.barrier()
        else:
            raise AssertionError("not told")


def on_all() -> None:
    with World.current().together("a step"):
        raise ValueError(f"of rank {World.current().rank}")


def on_the_writer_alone() -> None:
    def make() -> Any:
        assert World.current().is_writer
        raise DeviceLostError("gone")

    World.current().once("timing", make)


def not_json() -> None:
    world = World.current()
    with world.together("telling"):
        world.gathered({1, 2} if world.rank == world.size - 1 else 1)


def at_different_places() -> None:
    world = World.current()
    with world.together("a step"):
        if world.rank == world.size - 1:
            world.any(False)
        else:
            world.told(1)


def different_values() -> None:
    world = World.current()
    world.agree("the plan", "a" if world.rank == world.size - 1 else "b", do="write one")


def equal_values() -> None:
    World.current().agree("the plan", LONG)


def different_shapes() -> None:
    world = World.current()
    world.sum(np.zeros(3 if world.rank == world.size - 1 else 2))


FAILING = (
    at_once,
    while_others_ask,
    inside_another,
    handled_on_all,
    on_all,
    on_the_writer_alone,
    not_json,
    at_different_places,
    different_values,
    equal_values,
    different_shapes,
)


def failures() -> dict[str, tuple[str, str]]:
    """Class and message of what each of `FAILING` raises here; nothing where nothing is."""
    found = {}
    for act in FAILING:
        found[act.__name__] = ("", "")
        try:
            act()
        except Exception as error:
            found[act.__name__] = type(error).__name__, str(error)
        World.current().barrier()  # nobody is left behind in anything
    return found


def in_turn(world: World) -> str:
    """What the first rank leaves in the store where ranks meet, which the others could not find before."""
    store = torch.distributed.distributed_c10d._get_default_store()
    with world.writer_first("writing"):
        if world.is_writer:
            time.sleep(0.2)
            store.set("left", "written")
        return "written" if store.check(["left"]) else "nothing"


def both(rank: int) -> tuple[dict[str, Any], dict[str, tuple[str, str]]]:
    """All that ranks are asked, in one start of their processes."""
    return answers(rank), failures()


Found = list[tuple[dict[str, Any], dict[str, tuple[str, str]]]]


@pytest.fixture(scope="module", params=[2, pytest.param(3, marks=pytest.mark.slow)])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Found:
    return spawn(request.param, both, tmp_path_factory.mktemp("world"))


def test_every_rank_gets_the_same_answers(ranks: Found) -> None:
    size = len(ranks)
    last, everyone = size - 1, range(size)
    own, shared = (
        {"world", "with a NaN"},
        {
            "any": (True, False),
            "all": (False, True),
            "largest": (10 * last, 0.1 * last, -(2**62)),
            "smallest": (0, 0.0, 2**62),
            "told": (0.1, {"rank": 0, "text": LONG}, None),
            "gathered": [[rank, 1 / 3, math.inf, LONG * rank] for rank in everyone],
            "same": (True, False),
            "sum": [sum([0.1] * size), sum(everyone)],
            "whole sum": [[2**60 * size + sum(everyone)]],
            "once": complex(0, 1),
            "barrier": None,
            "writer first": "written",
        },
    )
    for rank, (found, _) in enumerate(ranks):
        assert {key: value for key, value in found.items() if key not in own} == shared
        assert found["world"] == (rank, size, rank == 0)
        assert all(map(math.isnan, found["with a NaN"]))
        assert [type(number) for number in found["largest"]] == [int, float, int]


def test_what_fails_on_one_rank_ends_all_of_them_by_the_same_class(ranks: Found) -> None:
    last = len(ranks) - 1
    *others, (_, own) = ranks
    assert own["at_once"] == ("FullDiskError", "no space - got 1 byte, expected 2 bytes - free some")
    assert own["while_others_ask"] == ("ZeroDivisionError", "by zero")
    assert own["inside_another"] == ("CheckpointError", "damaged")
    assert own["not_json"][0] == "TypeError"
    for _, found in others:
        assert found["at_once"] == (
            "StorageError",
            f"rank {last}: opening the data failed: no space - got 1 byte, expected 2 bytes - free some",
        )
        assert found["while_others_ask"] == (
            "RankFailedError",
            f"rank {last}: planning failed: ZeroDivisionError: by zero",
        )
        assert found["inside_another"] == ("CheckpointError", f"rank {last}: a step failed: damaged")
        assert found["not_json"][0] == "RankFailedError"


def test_what_all_ranks_handle_goes_on_and_what_all_raise_stays_their_own(ranks: Found) -> None:
    for rank, (_, found) in enumerate(ranks):
        assert found["handled_on_all"] == ("", "")
        assert found["on_all"] == ("ValueError", f"of rank {rank}")


def test_what_the_writer_alone_does_fails_on_all(ranks: Found) -> None:
    (_, writer), *others = ranks
    assert writer["on_the_writer_alone"] == ("DeviceLostError", "gone")
    for _, found in others:
        sentence = "rank 0: timing failed: DeviceLostError: gone"
        assert found["on_the_writer_alone"] == ("RankFailedError", sentence)


def test_ranks_that_differ_are_named_on_all_of_them(ranks: Found) -> None:
    last = len(ranks) - 1
    first = "rank 0" if last == 1 else "ranks 0 and 1"
    for _, found in ranks:
        assert found["equal_values"] == ("", "")
        sentence = f"got b on {first}; a on rank {last}, expected the same on all ranks - write one"
        assert found["different_values"] == ("TrainingError", f"ranks differ in the plan - {sentence}")
        assert "['float64', 2]" in found["different_shapes"][1]
        kind, sentence = found["at_different_places"]
        assert kind == "TrainingError"
        assert f"got told on {first}; gathered on rank {last}" in sentence


def test_where_values_begin_to_differ_is_found_by_its_keys() -> None:
    plan = {"budget": 1, "blocks": {"0": ["keep", 2], "1": ["keep", 3]}}
    other = {"budget": 1, "blocks": {"0": ["keep", 2], "1": ["keep", 4]}}
    assert first_difference([plan, other, plan]) == ("blocks.1.1", [3, 4, 3])
    assert first_difference([plan, {"budget": 1}]) == ("blocks", [plan["blocks"], None])
    assert first_difference([[1], [1, 2]]) == ("1", [None, 2])
    assert first_difference(["a", "b"]) == ("", ["a", "b"])
    assert first_difference([{"a": 1}, [1]]) == ("", [{"a": 1}, [1]])
    assert first_difference([plan, plan]) == ("", [plan, plan])


def test_one_process_asks_nobody_and_needs_no_torch() -> None:
    script = """if True:
        import sys
        from scrimp.world import World
        world = World.current()
        marker = object()
        with world.together("nothing"):
            assert world.told(marker) is marker and world.once("x", lambda: marker) is marker
        assert world == World() and world.is_writer and world.any(True) and not world.any(False)
        assert world.all(True) and world.largest(3) == world.smallest(3) == 3 and world.same(marker)
        assert world.gathered(marker) == [marker] and world.sum(marker) is marker
        world.agree("anything", marker)
        world.barrier()
        assert "torch" not in sys.modules and "numpy" not in sys.modules
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_one_process_raises_what_was_raised() -> None:
    with pytest.raises(DeviceLostError, match=r"^gone$"), World().together("a step"):
        raise DeviceLostError("gone")


@given(st.binary(max_size=3 * BLOCK), st.integers(0, BLOCK))
def test_a_text_comes_back_from_its_blocks_whatever_pads_them(text: bytes, padding: int) -> None:
    first, rest = framed(text)
    assert len(first) == BLOCK
    assert len(rest) == max(0, len(text) - (BLOCK - HEADER))
    assert unframed(first, rest + b"\0" * padding) == text


KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, ScrimpError)]
PART = st.none() | st.text(max_size=20)


@given(st.sampled_from(KINDS), st.text(max_size=20), PART, PART, PART, st.integers(0, 9))
def test_a_failure_is_told_whole(
    kind: type[ScrimpError], what: str, got: str | None, expected: str | None, do: str | None, rank: int
) -> None:
    failure = json.loads(json.dumps(failure_of(kind(what, got=got, expected=expected, do=do), "a step")))
    error = error_of(rank, failure)
    assert isinstance(error, ScrimpError)
    assert type(error) is kind
    assert error.exit_code == kind.exit_code
    assert error.what == f"rank {rank}: a step failed: {what}"
    assert (error.got, error.expected, error.do) == (got, expected, do)


def test_a_failure_of_no_class_that_others_know_is_told_in_words() -> None:
    error = error_of(1, failure_of(DeviceLostError("gone"), "a step"))
    assert type(error) is RankFailedError
    assert str(error) == "rank 1: a step failed: DeviceLostError: gone"
