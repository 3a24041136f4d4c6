"""Ranks at the store of torchrun's agent, which outlives them: each start is a round of its own."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from torch.distributed import TCPStore

from scrimp.errors import RanksError
from scrimp.launchers import Place
from scrimp.meeting import Meeting

LIMIT_S = 60.0


def meet(port: int, rank: int, delay: float = 0.0, version: str = "1") -> tuple[int, int]:
    """The round, and how many of it have come before this one to a key that all share."""
    time.sleep(delay)
    place = Place(rank, 2, rank, 2, "localhost", port, "a job", "torchrun", agent_hosts_store=True)
    meeting = Meeting(place, LIMIT_S, print)
    meeting.compare({"the version": version}, None)
    return meeting.round, meeting.connection().add("met", 1)


def test_ranks_that_are_started_again_meet_in_a_new_round_whoever_comes_first() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as threads:
        for number, delays in enumerate([(0.0, 0.2), (0.2, 0.0), (0.0, 0.0)], start=1):
            found = list(threads.map(meet, [store.port] * 2, (0, 1), delays))
            assert sorted(found) == [(number, 1), (number, 2)]


def test_a_round_in_which_ranks_differ_leaves_nothing_to_the_next_one() -> None:
    store = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    with ThreadPoolExecutor(2) as threads:
        refused = [threads.submit(meet, store.port, rank, 0.0, str(rank)) for rank in range(2)]
        for one in refused:
            with pytest.raises(RanksError, match="ranks differ in the version"):
                one.result()
        again = [threads.submit(meet, store.port, rank) for rank in range(2)]
        assert sorted(one.result() for one in again) == [(2, 1), (2, 2)]
