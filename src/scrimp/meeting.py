"""Ranks find one another, and make sure that they are about to do the same.

Problem  Ranks that were started apart may never all come; the port may be another program's; and on one node the
         package, the settings file or the command may be another version. Collectives would hang, or a model would
         silently train by two plans.
Method   One `TCPStore` of torch, run by rank 0 (or by torchrun's agent). Every rank leaves its papers there: versions,
         digests, command line, or the error because of which it cannot take part. Rank 0 waits for all, compares, and
         leaves one verdict, by which all go on or all end. Nobody waits inside of torch: each looks again and again,
         so that a signal ends a rank that waits.
Again    The store of torchrun's agent outlives the ranks that it starts again, with all that they left there, and how
         often it did differs between agents: one that came later has restarted nothing. Ranks therefore meet in rounds.
         Rank 0 opens the next one; each of the others takes a number, under which rank 0 leaves the round.
Errors   An error that the verdict names is known to all, and rank 0 shows it. One that a rank has alone (it cannot
         reach the store, the port is in use) says who is to show it: `shown_by`.
Limits   Whoever has the right job's name and reaches the port is believed. Two jobs that meet at one port notice, by
         the prefix of their keys, but cannot both run there. Rounds rely on torchrun, which starts ranks when all of
         the last start have ended: a rank 0 of that one would still answer.
Checked  tests/cli/test_command_on_ranks.py
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from scrimp.errors import RanksError, ScrimpError
from scrimp.launchers import Place
from scrimp.world import differences_text, error_of, failure_of, ranks_text, set_told, told_by

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

JOIN_TIMEOUT: Final = "SCRIMP_JOIN_TIMEOUT"
"""Environment variable: seconds within which all ranks have to come."""
NOTE_AFTER_S: Final = 10.0
RESOLVE_S: Final = 30.0
"""Where nodes start together, a name may be known somewhat later than its first user is up."""
ANSWER_S: Final = 10.0
"""Within which a store that accepts connections answers."""
MARGIN_S: Final = 30.0
"""How much longer than rank 0 the others wait for its verdict."""
_LOOK_S: Final = 0.05
_CONNECTING: Final = "scrimp-connect"


class Meeting:
    """The store where the ranks of one start meet.

    Args:
        place: this rank's.
        limit: seconds within which all have to come.
        say: shows a sentence to the user.

    Raises:
        RanksError: the port is in use, the host is unknown, or rank 0 cannot be reached.
    """

    def __init__(self, place: Place, limit: float, say: Callable[[str], None]) -> None:
        self.place, self._limit, self._say = place, limit, say
        self._ends = time.monotonic() + limit
        self._server = _host(place, limit) if place.hosts_store else None
        if self._server is None:
            _reach(place, limit)
        store = self._connected()
        self._lobby = _under(f"scrimp/{place.job}", store)
        self._admitted = 0
        with _lost_store(place):
            self.round = self._next_round()
        """Which meeting of the job it is at this store, from 1 on."""
        self.store = _under(f"{self.round}", self._lobby)

    def connection(self) -> Store:
        """A connection of its own to the store, under this job's prefix: one thread's waiting holds up no other."""
        return _under(f"scrimp/{self.place.job}/{self.round}", self._connected())

    def _next_round(self) -> int:
        if not self.place.agent_hosts_store:
            return 1  # rank 0's store is as new as the rank
        if self.place.rank == 0:
            return self._lobby.add("rounds", 1)
        number = self._lobby.add("numbers", 1)
        return int(self._awaited(self._lobby, f"round/{number}"))

    def _admit(self) -> None:
        """Leave the round for all who have taken a number; nobody waits any more for those of earlier rounds."""
        if self.place.agent_hosts_store:
            taken = self._lobby.add("numbers", 0)
            for number in range(self._admitted + 1, taken + 1):
                self._lobby.set(f"round/{number}", str(self.round))
            self._admitted = taken

    def _connected(self) -> Store:
        # Rank 0 need not leave the machine to meet itself. A port that its launcher opened is open at one address.
        is_own = self._server is not None and self.place.listener is None
        host = "localhost" if is_own else self.place.address
        patience = self._limit if self.place.holds_port else min(self._limit, ANSWER_S)
        try:
            return _client(host, self.place, patience)
        except RuntimeError as error:
            # Rank 0 says so itself: it cannot open the port.
            raise shown_by(
                RanksError(
                    f"what answers at {self.place.address}:{self.place.port} is not rank 0",
                    got=_first_line(error),
                    do="see the output of rank 0; choose another MASTER_PORT",
                ),
                self.place.rank == 0,
            ) from None

    def compare(self, papers: Mapping[str, str], failure: ScrimpError | None) -> None:
        """Wait for all ranks, and go on where they are equal.

        Args:
            papers: what has to be the same on all ranks, as a sentence names it, to this rank's value.
            failure: why this rank cannot take part.

        Raises:
            ScrimpError: on every rank that came: the failure of one, ranks that are missing, or that differ.
        """
        rank = self.place.rank
        own = None if failure is None else failure_of(failure)
        with _lost_store(self.place):
            if self.store.add(f"came/{rank}", 1) > 1:
                self.store.set("twice", str(rank))
            self.store.set(f"papers/{rank}", json.dumps({"papers": papers, "failure": own}))
            if rank == 0:
                self.store.set("verdict", json.dumps(self._judge()))
        verdict = json.loads(self._awaited(self.store, "verdict"))
        if verdict is None:
            return
        self._wait_for_readers()
        error: Exception
        if verdict["rank"] == rank and failure is not None:
            error = failure
        else:
            error = error_of(None if verdict["rank"] is None else verdict["rank"], verdict["failure"])
        set_told(error, 0)
        raise error from None

    def _judge(self) -> dict[str, Any] | None:
        """What rank 0 finds: None where all is well, else a failure, and the rank that has it."""
        missing = self._missing()
        came = [rank for rank in range(self.place.size) if rank not in missing]
        found = {rank: json.loads(self.store.get(f"papers/{rank}")) for rank in came}
        for rank, one in found.items():
            if one["failure"] is not None:
                return {"rank": rank, "failure": one["failure"]}
        error = self._refusal(missing, [one["papers"] for one in found.values()])
        return None if error is None else {"rank": None, "failure": failure_of(error)}

    def _refusal(self, missing: list[int], papers: list[dict[str, str]]) -> RanksError | None:
        place = self.place
        if self.store.check(["twice"]):
            twice = int(self.store.get("twice"))
            return RanksError(
                f"two processes say that they are rank {twice}", do="give each one its own RANK"
            )
        if missing:
            return RanksError(
                f"{ranks_text(missing)} did not come",
                got=f"{place.size - len(missing)} of {place.size} ranks at {place.address}:{place.port} within "
                f"{self._limit:g} s",
                do=f"see why in their output; {JOIN_TIMEOUT} sets the seconds",
            )
        differing = [key for key in papers[0] if len({one.get(key) for one in papers}) > 1]
        if not differing:
            return None
        return RanksError(
            f"ranks differ in {' and '.join(differing)}",
            got="; ".join(
                f"{key}: {differences_text([one.get(key) for one in papers])}" for key in differing
            ),
            expected="the same on all ranks",
            do="start all ranks by one command, with the same versions and files on all nodes",
        )

    def _missing(self) -> list[int]:
        """Ranks that have not come within the limit; says after a while for whom rank 0 waits."""
        waits_for, note_at = set(range(self.place.size)), time.monotonic() + NOTE_AFTER_S
        while waits_for:
            self._admit()
            waits_for -= {rank for rank in waits_for if self.store.check([f"papers/{rank}"])}
            now = time.monotonic()
            if now > self._ends or not waits_for or self.store.check(["twice"]):
                break
            if now > note_at:
                note_at = float("inf")
                self._say(f"waiting for {ranks_text(sorted(waits_for))}, {self._limit:g} s at most")
            time.sleep(_LOOK_S)
        return sorted(waits_for)

    def _awaited(self, store: Store, key: str) -> str:
        """What rank 0 leaves under a key."""
        while time.monotonic() < self._ends + MARGIN_S:
            with _lost_store(self.place):
                if store.check([key]):
                    return store.get(key).decode()
            time.sleep(_LOOK_S)
        raise shown_by(
            RanksError(
                f"rank 0 did not answer at {self.place.address}:{self.place.port}",
                expected=f"it, within {self._limit:g} s",
                do=f"see its output; {JOIN_TIMEOUT} sets the seconds",
            ),
            speaks_without_rank_0(self.place),
        )

    def _wait_for_readers(self) -> None:
        """Keep the store until all that came have read the verdict."""
        self.store.set(f"read/{self.place.rank}", "")
        if not self.place.hosts_store:
            return
        came = [rank for rank in range(self.place.size) if self.store.check([f"papers/{rank}"])]
        wait_until(lambda: self.store.check([f"read/{rank}" for rank in came]), ANSWER_S)


def is_connecting() -> bool:
    """Whether a thread still waits inside of torch for a store. It may come back while the interpreter ends, where
    Python ends a thread that wants to run by unwinding it, and C++ ends the process by SIGABRT for that."""
    return any(thread.name == _CONNECTING for thread in threading.enumerate())


def wait_until(is_so: Callable[[], bool], seconds: float) -> bool:
    """Look again and again, so long at most; whether it came to be so."""
    ends = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() > ends:
            return False
        time.sleep(_LOOK_S)
    return True


def speaks_without_rank_0(place: Place) -> bool:
    """Whether this rank shows an error where rank 0 is gone and nobody can ask the others: the first of its node."""
    return place.rank == 1 or place.local_rank == 0


_SHOWN = "scrimp_shown_by_this_rank"


def shown_by(error: ScrimpError, this_rank: bool) -> ScrimpError:
    """The same error, which this rank shows or leaves to others."""
    setattr(error, _SHOWN, this_rank)
    return error


def is_shown_here(error: BaseException, place: Place) -> bool:
    """Whether this rank shows an error because of which the ranks did not meet."""
    if told_by(error) is not None:
        return place.rank == 0
    found: bool = getattr(error, _SHOWN, True)
    return found


@contextlib.contextmanager
def _lost_store(place: Place) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        host = "torchrun's agent" if place.agent_hosts_store else "rank 0"
        raise shown_by(
            RanksError(
                f"{host} is gone from {place.address}:{place.port}",
                got=_first_line(error),
                do="see its output",
            ),
            speaks_without_rank_0(place),
        ) from None


def _host(place: Place, limit: float) -> Store:
    """The store itself, in this process."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = _listener(place)
    _resolved(place, min(limit, RESOLVE_S))
    return TCPStore(
        "localhost",
        place.port,
        place.size,
        is_master=True,
        timeout=timedelta(seconds=limit),
        wait_for_workers=False,
        master_listen_fd=listener.detach(),
    )


def _client(host: str, place: Place, limit: float) -> Store:
    """A connection to the store; RuntimeError where nothing answers that is one.

    In a thread of its own: torch waits without end for the answer of a program that accepts connections and is silent.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    found: list[Store | RuntimeError] = []

    def connect() -> None:
        seconds = timedelta(seconds=limit)
        try:
            found.append(
                TCPStore(
                    host, place.port, place.size, is_master=False, timeout=seconds, wait_for_workers=False
                )
            )
        except RuntimeError as error:
            found.append(error)

    thread = threading.Thread(target=connect, name=_CONNECTING, daemon=True)
    thread.start()
    thread.join(limit + 1)
    if not found:
        raise RuntimeError(f"no answer within {limit:g} s")
    if isinstance(found[0], RuntimeError):
        raise found[0]
    return found[0]


def _under(prefix: str, store: Store) -> Store:
    from torch.distributed import PrefixStore  # type: ignore[attr-defined]

    return PrefixStore(prefix, store)


def _listener(place: Place) -> socket.socket:
    """The open port; bound here and not by torch, whose message would have to be parsed."""
    try:
        if place.listener is not None:
            return socket.socket(fileno=place.listener)
        if socket.has_dualstack_ipv6():
            return socket.create_server(
                ("", place.port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=1024
            )
        return socket.create_server(("", place.port), backlog=1024)
    except OSError as error:
        what = f"port {place.port} of {socket.gethostname()}, where the ranks would meet, "
        raise shown_by(
            RanksError(
                what + ("is in use" if error.errno == errno.EADDRINUSE else "cannot be opened"),
                got=None if error.errno == errno.EADDRINUSE else error.strerror,
                do="set MASTER_PORT to a free one on all ranks (torchrun: --master-port)",
            ),
            True,
        ) from None


def _resolved(place: Place, limit: float) -> None:
    """Wait until the host's name is known."""
    ends = time.monotonic() + limit
    while True:
        try:
            socket.getaddrinfo(place.address, place.port)
            return
        except OSError as error:
            if time.monotonic() > ends:
                raise shown_by(
                    RanksError(
                        f"the host of rank 0, {place.address}, is not known",
                        got=error.strerror,
                        do="set MASTER_ADDR to a name or an address that this machine can reach",
                    ),
                    place.local_rank == 0,
                ) from None
        time.sleep(10 * _LOOK_S)


def _reach(place: Place, limit: float) -> None:
    """Wait until the port of rank 0 is open."""
    ends = time.monotonic() + limit
    _resolved(place, min(limit, RESOLVE_S))
    while True:
        try:
            socket.create_connection((place.address, place.port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > ends:
                host = "the launcher" if place.agent_hosts_store else "rank 0"
                raise shown_by(
                    RanksError(
                        f"{host} cannot be reached at {place.address}:{place.port}",
                        got=os.strerror(error.errno) if error.errno else str(error),
                        expected=f"it, within {limit:g} s",
                        do=f"see its output, and whether a firewall is between; {JOIN_TIMEOUT} sets the seconds",
                    ),
                    speaks_without_rank_0(place),
                ) from None
        time.sleep(_LOOK_S)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
