"""How copies agree on exchanges: threads at a store, of which some come late, are lost, or come back."""

from __future__ import annotations

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from scrimp.errors import TrainingError
from scrimp.launchers import CopyPlace
from scrimp.optim import copies as exchange
from scrimp.optim.copy_rounds import ENDED, Attempt, CopyRounds
from scrimp.world import World


class Launched:
    """A store as the launcher keeps it."""

    def __init__(self, copies: int) -> None:
        self.store, self.copies = dist.HashStore(), copies
        for copy in range(copies):
            self.start(copy, 0)

    def start(self, copy: int, start: int | str) -> None:
        self.store.set(f"start/{copy}", str(start))

    def rounds(self, copy: int, start: int = 0, patience: float = 20.0, coming: float = 20.0) -> CopyRounds:
        return CopyRounds(self.store, copy, self.copies, start, patience=patience, coming=coming)

    def begun(self, **limits: float) -> list[CopyRounds]:
        """All copies, after they have begun together."""
        all_rounds = [self.rounds(copy, **limits) for copy in range(self.copies)]

        def begin(one: CopyRounds) -> bool:
            return one.commit(one.join(0), True)

        with ThreadPoolExecutor(self.copies) as pool:
            assert all(pool.map(begin, all_rounds))
        return all_rounds


def at_once(rounds: list[CopyRounds], step: int) -> list[Attempt]:
    with ThreadPoolExecutor(len(rounds)) as pool:
        return list(pool.map(lambda one: one.meet(step), rounds))


def test_all_begin_with_the_state_of_the_copy_that_came_farthest() -> None:
    launched = Launched(3)
    with ThreadPoolExecutor(3) as pool:
        found = list(pool.map(lambda copy: launched.rounds(copy).join((10, 30, 20)[copy]), range(3)))
    assert found == [Attempt(0, 30, {}, {0: 0, 1: 0, 2: 0}, 1, [0, 2])] * 3


def test_a_copy_that_is_gone_is_left_out_and_comes_back() -> None:
    launched = Launched(2)
    stays, _ = launched.begun()
    launched.start(1, "coming")
    alone = stays.meet(5)
    assert alone.trained == {0: 0}
    assert stays.commit(alone, True)
    launched.start(1, 1)
    back = launched.rounds(1, start=1)
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(back.join, 0)
        while launched.store.get("waiting/1") != b"[1, 0]":
            time.sleep(0.001)
        attempt = stays.meet(10)
        assert stays.commit(attempt, True)
        assert joined.result() == attempt
        assert back.passed(attempt)
    assert (attempt.trained, attempt.receivers, attempt.donor) == ({0: 0}, [1], 0)
    assert [one.trained for one in at_once([stays, back], 15)] == [{0: 0, 1: 1}] * 2


def test_a_result_that_one_member_lacks_is_applied_by_none() -> None:
    launched = Launched(3)
    rounds = launched.begun()
    first = at_once(rounds, 5)[0]
    launched.start(2, "coming")  # killed within the exchange: it has not voted
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda one: one.commit(first, True), rounds[:2])) == [False, False]
    again = at_once(rounds[:2], 5)
    assert [one.trained for one in again] == [{0: 0, 1: 0}] * 2


def test_a_copy_that_was_killed_after_its_vote_counts() -> None:
    launched = Launched(2)
    rounds = launched.begun()
    attempt = at_once(rounds, 5)[0]
    with ThreadPoolExecutor(2) as pool:
        votes = [pool.submit(one.commit, attempt, True) for one in rounds]
        assert votes[1].result()
        launched.start(1, ENDED)
        assert votes[0].result()


def test_a_copy_that_hangs_finds_that_it_came_too_late() -> None:
    launched = Launched(2)
    stays, hangs = launched.begun(patience=0.1)
    attempt = stays.meet(5)
    assert attempt.trained == {0: 0}
    assert stays.commit(attempt, True)
    with pytest.raises(TrainingError, match="came too late"):
        hangs.meet(5)


def test_a_copy_that_hangs_is_not_taken_in_by_what_it_once_said() -> None:
    stays, _ = Launched(2).begun(patience=0.1)
    for step in (5, 10, 15, 20):
        attempt = stays.meet(step)
        assert attempt.members == {0: 0}  # who is expected at the next exchange
        assert stays.commit(attempt, True)


def test_a_donor_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exchange, "CONNECT_S", 0.2)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    copies = exchange.Copies(CopyPlace(0, 2, 0, "127.0.0.1", server.port), World())
    copies._attempt = Attempt(0, 5, {1: 0}, {0: 0}, 1, [0])
    with pytest.raises(TrainingError, match="copy 1 was lost while it gave its state to copy 0"):
        copies.receive_position()
    with pytest.raises(TrainingError, match="copy 1 was lost while it gave its state to copy 0"):
        copies.receive([])


def test_nobody_begins_anew_beside_a_run_that_is_over() -> None:
    launched = Launched(2)
    stays, _ = launched.begun()
    launched.start(1, 1)
    stays.finish()
    launched.start(0, ENDED)
    with pytest.raises(TrainingError, match="came too late"):
        launched.rounds(1, start=1).join(5)


@pytest.mark.parametrize("seed", range(6))
def test_survivors_apply_the_same_results_whoever_is_lost_when(seed: int) -> None:  # noqa: C901
    """Three copies, of which any but the first is lost at a random moment of a random round."""
    draw = random.Random(seed)
    launched = Launched(3)
    rounds = launched.begun()
    moments = {copy: (draw.randrange(4), draw.choice(["away", "before", "vote no"])) for copy in (1, 2)}
    applied: dict[int, list[tuple[int, ...]]] = {copy: [] for copy in range(3)}

    def train(copy: int) -> None:
        for number in range(4):
            lost_in, how = moments.get(copy, (-1, ""))
            if lost_in == number and how == "away":
                return launched.start(copy, "coming")
            while True:
                attempt = rounds[copy].meet(5 * (number + 1))
                if lost_in == number and how == "before":
                    return launched.start(copy, "coming")
                if rounds[copy].commit(attempt, not (lost_in == number and how == "vote no")):
                    break
                if lost_in == number:
                    return launched.start(copy, "coming")
            applied[copy].append(tuple(sorted(attempt.trained)))
        return None

    threads = [threading.Thread(target=train, args=(copy,)) for copy in range(3)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert len(applied[0]) == 4
    for copy in (1, 2):
        assert applied[copy] == applied[0][: len(applied[copy])]
        assert len(applied[copy]) == moments[copy][0]
        assert all(copy not in came for came in applied[0][len(applied[copy]) :])
