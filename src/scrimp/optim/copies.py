"""Copies of a model that are jobs of their own, and go on without a restart where one of them is lost.

Problem  Ranks of one job share every decision and end together: where one is lost, all start again.
Method   Each copy is a job: its own ranks, `World`, health, folder and checkpoints (`scrimp launch --copies`). Between
         the rounds of `outer.every` steps copies need nobody. At the end of one, rank i of each copy adds up its
         displacement with rank i of the others over a new group of gloo, made for this attempt alone::

             d = sum over copies that came of (x - x_copy) / how many came

         Rank 0 of each copy agrees with the others on who takes part and whether it counts (`copy_rounds`), and tells
         its ranks. An attempt that fails is repeated with the displacement that was kept.
         A copy that joins gets weights, momentum and states from rank i of one that trains, after that has moved.
Groups   Gloo's, also on CUDA, through host memory: a group of which a member was killed fails within milliseconds and
         can be thrown away, beside the process's own default group. Where a peer hangs, the timeout ends it.
Limits   A copy keeps its own inner states: they are not averaged. The sum is float32. On CUDA this was not run.
Checked  tests/cli/test_copies.py: copies that are killed; tests/optim/test_copy_rounds.py: who takes part
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from scrimp.errors import TrainingError
from scrimp.launchers import CopyPlace
from scrimp.optim.copy_rounds import PATIENCE_S, Attempt, CopyRounds
from scrimp.world import World, is_lost_connection

Made = TypeVar("Made")
CONNECT_S = 20.0
"""Within which members of an attempt, who have all just said that they are there, connect."""
MOST_ATTEMPTS = 8
"""Attempts of one exchange: copies are lost one at a time, and a link that fails each time is for the user to see."""


class Copies:
    """This rank's part in the exchange between copies.

    Args:
        world: the ranks of this copy.
    """

    def __init__(self, place: CopyPlace, world: World) -> None:
        self.place, self._world = place, world
        self._store = TCPStore(
            place.address, place.port, is_master=False, timeout=timedelta(seconds=CONNECT_S)
        )
        self._rounds = CopyRounds(self._store, place.copy, place.copies, place.start)
        self._attempt: Attempt | None = None
        self.step = 0
        """Steps that are done, when a round ends."""

    @property
    def taking_part(self) -> list[int]:
        """The copies of the newest exchange."""
        return [] if self._attempt is None else sorted(self._attempt.trained)

    def mean(self, own: Tensor) -> Tensor:
        """The mean displacement of the copies that came, the same on all of them.

        Raises:
            TrainingError: the others went on without this copy, or every attempt failed.
        """
        for _ in range(MOST_ATTEMPTS):
            attempt = self._agreed("meeting the other copies", lambda: self._rounds.meet(self.step))
            found = self._sum(own, attempt)
            if self._commit(attempt, found is not None):
                assert found is not None
                self._attempt = attempt
                return (found / len(attempt.trained)).to(own.device)
        raise TrainingError(
            f"copies could not exchange in {MOST_ATTEMPTS} attempts",
            expected="a link between them that lasts for an exchange",
            do="look at the network, and at the output of the other copies",
        )

    def join(self, step: int) -> bool:
        """Begin together with the other copies; whether this one gets the state of another (`receive`).

        Raises:
            TrainingError: it came too late.
        """
        while True:
            attempt = self._agreed("waiting for the other copies", lambda: self._rounds.join(step))
            self._attempt = attempt
            is_done = self._passed(attempt) if attempt.trained else self._commit(attempt, True)
            if is_done:
                return self.place.copy in attempt.receivers

    def send(self, position: Callable[[], str], parts: Callable[[], Iterable[Tensor]]) -> None:
        """Give the state to those that joined in the newest exchange, if this copy is the one to do so.

        One that is lost meanwhile is no concern of the others.
        """
        attempt = self._attempt
        if attempt is None or attempt.donor != self.place.copy:
            return
        if attempt.receivers and self._world.is_writer:
            self._store.set(f"position/{attempt.number}", position())
        for one in attempt.receivers:
            try:
                group = self._group(f"state/{attempt.number}/{one}", 0, 2)
                for part in parts():
                    group.broadcast([_bytes_of(part)]).wait()
            except RuntimeError as error:
                if not is_lost_connection(error):
                    raise

    def receive_position(self) -> str:
        """Where the copy is whose state this one gets.

        Raises:
            TrainingError: that copy was lost before it said it.
        """
        attempt = self._attempt
        assert attempt is not None

        def said() -> str:
            try:
                return str(self._store.get(f"position/{attempt.number}").decode())
            except RuntimeError as error:
                raise self._donor_lost(error) from None

        return self._world.once("waiting for the state of another copy", said)

    def receive(self, parts: Iterable[Tensor]) -> None:
        """Take the state over, in place.

        Raises:
            TrainingError: the copy that gave it was lost meanwhile.
        """
        attempt, error = self._attempt, None
        assert attempt is not None
        try:
            # The donor serves one after another.
            before = attempt.receivers.index(self.place.copy)
            name = f"state/{attempt.number}/{self.place.copy}"
            group = self._group(name, 1, 2, connect=CONNECT_S + before * PATIENCE_S)
            for part in parts:
                got = _bytes_of(part)
                group.broadcast([got]).wait()
                part.copy_(got.view(part.dtype).view(part.shape))
        except RuntimeError as raised:
            if not is_lost_connection(raised):
                raise
            error = raised
        if not self._world.all(error is None):
            raise self._donor_lost(error)

    def finish(self) -> None:
        """All steps are taken, and the last checkpoint is written."""
        if self._world.is_writer:
            _asked(self._rounds.finish)

    def _donor_lost(self, error: RuntimeError | None) -> TrainingError:
        assert self._attempt is not None
        return TrainingError(
            f"copy {self._attempt.donor} was lost while it gave its state to copy {self.place.copy}",
            got=str(error).splitlines()[0] if error else None,
            do="nothing: with --restarts this copy is started again",
        )

    def _agreed(self, doing: str, find: Callable[[], Attempt]) -> Attempt:
        self._world.barrier()  # no rank is promised to the others that was lost on the way here
        return self._world.once(
            doing, lambda: _asked(find), write=lambda one: one.to_json(), read=Attempt.from_json
        )

    def _passed(self, attempt: Attempt) -> bool:
        return self._world.once(
            "waiting for the exchange", lambda: _asked(lambda: self._rounds.passed(attempt))
        )

    def _commit(self, attempt: Attempt, has_result: bool) -> bool:
        all_have = self._world.all(has_result)
        return self._world.once(
            "deciding on the exchange", lambda: _asked(lambda: self._rounds.commit(attempt, all_have))
        )

    def _sum(self, own: Tensor, attempt: Attempt) -> Tensor | None:
        """The displacements of the members added up, in host memory; None where one of them is gone."""
        found = own.detach().to("cpu", copy=True)
        members = sorted(attempt.trained)
        if len(members) == 1:
            return found
        try:
            group = self._group(f"mean/{attempt.number}", members.index(self.place.copy), len(members))
            group.allreduce([found]).wait()
        except RuntimeError as error:
            if not is_lost_connection(error):
                raise
            return None
        return found

    def _group(self, name: str, rank: int, size: int, *, connect: float = CONNECT_S) -> Any:
        # torch's stubs leave its collectives out
        prefix = PrefixStore(f"{name}/rank-{self._world.rank}", self._store)
        group: Any = dist.ProcessGroupGloo(prefix, rank, size, timedelta(seconds=connect))
        group._set_default_timeout(timedelta(seconds=PATIENCE_S))
        return group


def _asked(ask: Callable[[], Made]) -> Made:
    """What the store answers.

    Raises:
        TrainingError: the launcher, whose store it is, is gone.
    """
    try:
        return ask()
    except dist.DistError as error:
        raise TrainingError(
            "the launcher of the copies is gone",
            got=str(error).splitlines()[0],
            expected="the process of `scrimp launch --copies` to live as long as they do",
            do="start it again to resume the run: each copy goes on from its newest checkpoint",
        ) from None


def _bytes_of(part: Tensor) -> Tensor:
    """A copy in host memory: gloo does not know all types."""
    return part.detach().to("cpu", copy=True).contiguous().flatten().view(torch.uint8)
