"""What ranks note of themselves on gloo, as one of them comes late."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from distributed import spawn

from scrimp.health import record
from scrimp.health.record import place_of_main_thread
from scrimp.world import World


def late(rank: int) -> list[dict[str, Any]]:
    """Statements after a step, inside what rank 0 does alone, and after all; the second rank is late in the step."""
    noted, said = record(), []
    alone = dist.new_group([0])
    with noted.recording(), noted.training(lambda error: None):
        for step in range(1, 5):
            with noted.in_step(step):
                time.sleep(0.3 if rank == 1 and step == 4 else 0.0)
                dist.all_reduce(torch.ones(2))
                dist.all_reduce(torch.ones(2), dist.ReduceOp.SUM, dist.group.WORLD)
                if rank == 0:
                    dist.all_reduce(torch.ones(2), group=alone)
        said.append(noted.statement())
        World(rank, 2).once("a long task", lambda: said.append(noted.statement()))
    dist.all_reduce(torch.ones(2))  # no longer noted
    said.append(noted.statement())
    return said


def passed_on(rank: int) -> list[list[Any]]:
    """What rank 0 says of its transfers while it waits for the second rank, which comes late, and both in the end."""
    noted, said = record(), []
    with noted.recording():
        for _ in range(2):
            time.sleep(0.6 * rank)
            other, found = 1 - rank, torch.empty(2)
            asked = [dist.P2POp(dist.isend, torch.ones(2), other), dist.P2POp(dist.irecv, found, other)]
            works = dist.batch_isend_irecv(asked)
            timer = threading.Timer(0.3, lambda: said.append(noted.statement()["groups"]))
            if rank == 0:
                timer.start()
            works[1].wait()
            works[0].wait()
            assert found.tolist() == [1, 1]
            timer.cancel()
        said.append(noted.statement()["groups"])
    return said


@pytest.mark.slow
def test_a_wait_for_a_transfer_shows_which_one_and_from_whom(tmp_path: Path) -> None:
    first, second = (
        [sorted(one[1:] for one in groups) for groups in said] for said in spawn(2, passed_on, tmp_path)
    )
    there, back = [0, 1], [1, 0]
    assert first == [
        [[there, number, number, "transfer"], [back, number, number - 1, "transfer"]] for number in (1, 2)
    ] + [[[there, 2, 2, "transfer"], [back, 2, 2, "transfer"]]]
    assert second == first[-1:]


class Held:
    """Something that can be referred to weakly."""


def made_and_left() -> weakref.ref[Held]:
    held = Held()
    for _ in range(50):  # time in which the other thread looks
        pass
    return weakref.ref(held)


def test_the_place_of_the_main_thread_is_read_without_keeping_anything_of_it() -> None:
    """A frame that another thread holds keeps all locals; a memory trace would count them."""
    places: list[str | None] = []
    stopped, before = threading.Event(), sys.getswitchinterval()

    def look() -> None:
        while not stopped.is_set():
            places.append(place_of_main_thread())

    thread = threading.Thread(target=look)
    sys.setswitchinterval(1e-5)
    thread.start()
    try:
        kept = 0
        while len(places) < 100:
            kept += made_and_left()() is not None
    finally:
        sys.setswitchinterval(before)
        stopped.set()
        thread.join()
    assert kept == 0
    assert any(place is not None and "test_record.py" in place for place in places)


def test_counters_are_alike_and_times_say_who_was_late(tmp_path: Path) -> None:
    first, second = spawn(2, late, tmp_path)
    for rank, said in enumerate((first, second)):
        groups = {tuple(ranks): (entered, left) for _, ranks, entered, left, _ in said[0]["groups"]}
        assert groups.pop((0, 1)) == (8, 8)
        assert groups == ({(0,): (4, 4)} if rank == 0 else {})
        assert said[0]["steady"]
        assert [step for step, *_ in said[0]["steps"]] == [1, 2, 3, 4]
    waits = [said[0]["steps"][-1][2] for said in (first, second)]
    assert waits[0] - waits[1] > 0.2
    assert second[0]["longest"][0] > 0.2
    assert first[0]["longest"][1] > 0.2
    assert first[1]["doing"] == "a long task"
    assert (first[0]["doing"], first[-1]["doing"]) == (None, None)
    assert not first[-1]["steady"]
    entered = [one[2] for one in first[-1]["groups"] if one[1] == [0, 1]]
    assert entered == [9]  # 8, and what `once` told
