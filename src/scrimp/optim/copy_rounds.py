"""How copies of a model agree, at a store that outlives them, who takes part in an exchange and whether it counts.

Problem  Copies that train alone meet after every round. One may be gone by then, go in the middle of the exchange, or
         come back. The others have to go on without it, and no copy may apply a result that another one does not.
Method   The store's compare-and-set is the only judge: of all who write to an empty key the first one wins, and all
         read what it wrote. Attempts have numbers a = 0, 1, ...; each has three keys that decide::

             ready/a/k    copy k has done its steps, and waits
             try/a        who takes part: the copies that were ready when the first of them stopped waiting
             outcome/a    done where all members have the result in hand, failed where one of them was lost

         A copy that votes yes has the result, and applies it only when `outcome` says done. After failed all repeat
         with what they kept, as attempt a + 1. A copy that finds an attempt without itself came too late: it ends, and
         its launcher starts it again.
         Whoever is started announces itself (`waiting/k`). The living ones take it into their next attempt as one that
         joins: it gives nothing and gets their state. Where none lives those that wait make an attempt among
         themselves, and the one with the most steps gives its state.
Alive    `start/k` is the number of copy k's present start, which the launcher writes as it starts and reaps: the
         others see that a copy is gone as soon as all of its ranks have ended. They wait `PATIENCE_S` for one that
         hangs, once.
Limits   The store is the launcher's: where that is gone all end. Keys are never deleted, about 500 bytes a round.
Source   A replicated log with one arbiter; the vote is a two-phase commit whose coordinator is the store.
Checked  tests/optim/test_copy_rounds.py
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from scrimp.errors import TrainingError

PATIENCE_S = 120.0
"""Seconds that copies wait at the end of a round for one that lives: longer than an evaluation or a checkpoint of
another copy should take, since a copy that comes later is given up."""
COMING_S = 300.0
"""Seconds that copies wait for one another when all begin."""
FINISHED, ENDED = "finished", "ended"
"""Key that is set when a copy has taken all steps; the start of a copy that is not started again."""
_LOOK_S = 0.02


class Store(Protocol):
    """What is asked of a store of torch.distributed."""

    def set(self, key: str, value: str, /) -> Any: ...
    def get(self, key: str, /) -> bytes: ...
    def check(self, keys: list[str], /) -> bool: ...
    def compare_set(self, key: str, expected: str, desired: str, /) -> bytes: ...


@dataclass(frozen=True)
class Attempt:
    """Who takes part in an exchange."""

    number: int
    step: int
    """Steps that are done."""
    trained: dict[int, int]
    """Copies whose displacements are averaged, and the start of each."""
    joining: dict[int, int] = field(default_factory=dict)
    """Copies that get the state after it."""
    donor: int = 0
    """The copy that gives it."""
    receivers: list[int] = field(default_factory=list)
    """Those of them that need it: copies that all begin at the same step have the same weights."""

    @property
    def members(self) -> dict[int, int]:
        """All of them."""
        return self.trained | self.joining

    @property
    def voters(self) -> dict[int, int]:
        """Those that say whether it succeeded: where nobody has trained yet, those that begin."""
        return self.trained or self.joining

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Attempt:
        found = json.loads(text)
        for key in ("trained", "joining"):
            found[key] = {int(copy): start for copy, start in found[key].items()}
        return cls(**found)


class CopyRounds:
    """What one copy says and reads at the store.

    Args:
        copy: its number among `copies`.
        start: which start of this copy it is.
        patience: seconds that one waits for others at the end of a round, and in an exchange.
        coming: seconds that it waits for others where all begin.
    """

    def __init__(
        self,
        store: Store,
        copy: int,
        copies: int,
        start: int,
        *,
        patience: float = PATIENCE_S,
        coming: float = COMING_S,
    ) -> None:
        self._store, self._copy, self._copies, self._start = store, copy, copies, start
        self._patience, self._coming = patience, coming
        self._next = 0
        self._last: Attempt | None = None
        """The newest attempt that is done."""
        self._taken_in: set[tuple[int, int]] = set()
        """Copies and starts that ever took part: what they said as they came still stands at the store."""

    def meet(self, step: int) -> Attempt:
        """At the end of a round: who exchanges now.

        Raises:
            TrainingError: the others went on without this copy.
        """
        self._store.set(f"ready/{self._next}/{self._copy}", json.dumps([self._start, step]))

        def ready() -> dict[int, int]:
            found = {one: self._said(f"ready/{self._next}/{one}") for one in range(self._copies)}
            return {
                one: said[0]
                for one, said in found.items()
                if said is not None and said[1] == step and self._lives(one, said[0])
            }

        def all_are() -> bool:
            assert self._last is not None
            expected = {one for one, start in self._last.members.items() if self._lives(one, start)}
            return expected <= set(ready())

        self._wait(lambda: self._has(f"try/{self._next}") or all_are(), self._patience)
        trained = ready() | {self._copy: self._start}
        joining = {
            one: said[0] for one, said in self._waiting().items() if (one, said[0]) not in self._taken_in
        }
        return self._decided(
            Attempt(self._next, step, trained, joining, min(trained), receivers=sorted(joining))
        )

    def join(self, step: int) -> Attempt:
        """After a start: the attempt in which this copy gets the state that all have.

        Args:
            step: that it could go on from by itself.

        Raises:
            TrainingError: the others are done, or did not take this copy in.
        """
        self._store.set(f"waiting/{self._copy}", json.dumps([self._start, step]))
        since = time.monotonic()
        while True:
            if self._has(f"try/{self._next}"):
                attempt = self._read(self._next)
                if attempt.joining.get(self._copy) == self._start:
                    return attempt
                self.passed(attempt)
            elif self._has(FINISHED):
                raise TrainingError("the other copies have taken all steps: this one came too late")
            elif not self._any_trains() and (self._all_wait() or time.monotonic() - since > self._coming):
                return self._decided(self._beginning(self._waiting()))
            else:
                time.sleep(_LOOK_S)

    def commit(self, attempt: Attempt, has_result: bool) -> bool:
        """Whether all apply the result, which this copy has or not."""
        number, outcome = attempt.number, f"outcome/{attempt.number}"
        self._store.set(f"vote/{number}/{self._copy}", json.dumps(has_result))
        votes = {one: f"vote/{number}/{one}" for one in attempt.voters}

        def is_settled() -> bool:
            said = {one: self._said(key) for one, key in votes.items()}
            is_lost = any(
                vote is None and not self._lives(one, attempt.voters[one]) for one, vote in said.items()
            )
            return self._has(outcome) or is_lost or False in said.values() or None not in said.values()

        self._wait(is_settled, self._patience)
        all_have = all(self._said(key) is True for key in votes.values())
        is_done = self._store.compare_set(outcome, "", "done" if all_have else "failed") == b"done"
        self._next = number + 1
        if is_done:
            self._done(attempt)
        return is_done

    def finish(self) -> None:
        """All steps are taken: nobody who comes later is to begin anew."""
        self._store.set(FINISHED, str(self._copy))

    def _beginning(self, waiting: dict[int, list[int]]) -> Attempt:
        """All begin, with the state of the copy that has come farthest."""
        donor = max(waiting, key=lambda one: (waiting[one][1], -one))
        step, joining = waiting[donor][1], {one: said[0] for one, said in waiting.items()}
        behind = sorted(one for one, said in waiting.items() if said[1] < step)
        return Attempt(self._next, step, {}, joining, donor, behind)

    def _decided(self, proposed: Attempt) -> Attempt:
        found = self._store.compare_set(f"try/{proposed.number}", "", proposed.to_json())
        attempt = Attempt.from_json(found)
        if attempt.members.get(self._copy) != self._start:
            raise TrainingError(
                f"copy {self._copy} came too late to the exchange after step {proposed.step:,}",
                got=f"copies {', '.join(map(str, attempt.members))}, which go on without it",
                do="nothing: with --restarts it is started again, and gets their state",
            )
        return attempt

    def passed(self, attempt: Attempt) -> bool:
        """Wait for the end of an attempt of others; whether it counts."""
        outcome = f"outcome/{attempt.number}"

        def is_settled() -> bool:
            live = any(self._lives(one, start) for one, start in attempt.voters.items())
            return self._has(outcome) or not live

        self._wait(is_settled, float("inf"))
        is_done = self._store.compare_set(outcome, "", "failed") == b"done"
        if is_done:
            self._done(attempt)
        self._next = attempt.number + 1
        return is_done

    def _done(self, attempt: Attempt) -> None:
        self._last = attempt
        self._taken_in |= attempt.members.items()

    def _any_trains(self) -> bool:
        last = {} if self._last is None else self._last.members
        return any(self._lives(one, start) for one, start in last.items())

    def _all_wait(self) -> bool:
        starts = (self._started(one) for one in range(self._copies))
        return {one for one, start in enumerate(starts) if start != ENDED} <= set(self._waiting())

    def _waiting(self) -> dict[int, list[int]]:
        """Start and step of each copy that waits to be taken in."""
        said = {one: self._said(f"waiting/{one}") for one in range(self._copies)}
        return {one: it for one, it in said.items() if it is not None and self._lives(one, it[0])}

    def _lives(self, copy: int, start: int) -> bool:
        return self._started(copy) == str(start)

    def _started(self, copy: int) -> str:
        key = f"start/{copy}"
        return self._store.get(key).decode() if self._has(key) else ""

    def _read(self, number: int) -> Attempt:
        return Attempt.from_json(self._store.get(f"try/{number}"))

    def _said(self, key: str) -> Any:
        return json.loads(self._store.get(key)) if self._has(key) else None

    def _has(self, key: str) -> bool:
        return self._store.check([key])

    @staticmethod
    def _wait(is_so: Callable[[], bool], most: float) -> None:
        until = time.monotonic() + most
        while not is_so() and time.monotonic() < until:
            time.sleep(_LOOK_S)
