"""One of several processes joins the others, notices when one of them is gone, and leaves.

Problem  A rank that is killed answers nothing any more. The others find out in whatever collective they are in, by an
         exception of gloo that names an address, by one of NCCL, or not at all; and the process that another one waits
         for must not end before what it has to say is said.
Method   `join` meets the others (`scrimp.meeting`), and makes the default process group: gloo for CPU tensors, NCCL for
         CUDA's where CUDA is used. Beside the work a thread, the `Lookout` of `scrimp.health`, looks into the store
         twice a second.

         - A rank whose connection breaks closes its own connections, so that the others notice too, and leaves a note
           in the store. Every lookout answers the note, whatever its main thread does. Who does not answer is gone:
           "rank 1 is gone".
         - From then on the process has `LEAVE_S` seconds to unwind: a thread that waits inside of NCCL or gloo cannot
           be interrupted, so the process is then ended.
         - A store that is gone means the same, of rank 0 or of torchrun's agent.
         - A rank whose connection holds, and that is stopped or hangs, is named by the judge of `scrimp.health`.

Order    Ranks may get other numbers than the launcher's (`SCRIMP_RANK_ORDER`), after they have met: a rank's number is
         its place in every layout, so this decides which axis crosses which link (`scrimp.planner.rank_placement`).

Errors   `Joined.explained` says what an exception means for all, and whether this rank shows it: one that all ranks
         know is shown by rank 0, a bug by the first rank that has it, a lost rank by the first that is left, and what
         only this rank knows by this rank.
Leaving  Other ranks wait until rank 0 has spoken: torchrun ends all processes as soon as one ends in an error. Rank 0
         waits for all, since it runs the store.
Checked  tests/cli/test_command_on_ranks.py, tests/cli/test_launch.py
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import threading
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Final

from scrimp.errors import ConfigError, DeviceError, RanksError, ScrimpError, TrainingError
from scrimp.health import HANG_S, HANG_TIMEOUT, record
from scrimp.health.lookout import ANSWER_S, LEAVE_S, NOTE, Lookout, end_process
from scrimp.launchers import Place, seconds_in
from scrimp.meeting import JOIN_TIMEOUT, Meeting, speaks_without_rank_0, wait_until
from scrimp.world import World, is_lost_connection, is_own_failure, ranks_text, told_by

JOIN_S: Final = 300.0
COLLECTIVE_TIMEOUT: Final = "SCRIMP_COLLECTIVE_TIMEOUT"
"""Environment variable: seconds that a rank waits for the others in a collective."""
COLLECTIVE_S: Final = 3600.0
"""Long, since all wait while one prepares a corpus; ranks that are killed are noticed at once."""
JUDGED_FIRST_S: Final = 60.0
"""How much longer gloo waits than the judge of `scrimp.health`, who can say for whom."""
DESTROY_S: Final = 3.0
NCCL_PRESETS: Final = (
    (("NCCL_DEBUG",), "WARN"),
    (("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"), "2000"),
    (("TORCH_NCCL_DUMP_ON_TIMEOUT",), "1"),
)
"""Variable, after it the name that it had before, and its value (docs/ranks.md says why)."""
TRACES: Final = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")

Tell = Callable[[ScrimpError], None]


def join(
    place: Place,
    papers: Mapping[str, str],
    *,
    device: str,
    failure: ScrimpError | None,
    say: Callable[[str], None],
    tell: Tell,
    order: Sequence[int] | None = None,
    traces: str | None = None,
) -> Joined:
    """Meet the other ranks, and make the default process group with them.

    Args:
        papers: what has to be the same on all ranks, by the name that an error gives it.
        device: auto, cpu, cuda or cuda:N, as the user wrote it.
        failure: why this rank cannot take part, which it tells the others.
        say: shows a sentence.
        tell: shows an error from the lookout's thread, just before it ends the process.
        order: the launcher's ranks by the numbers that they have from then on.
        traces: what the names of NCCL's traces begin with.

    Raises:
        ScrimpError: the ranks do not meet, are not equal, or one of them cannot take part, as where a limit in its
            environment is no number.
    """
    limits, wrong = _limits()
    failure, uses_cuda = failure or wrong, False
    try:
        uses_cuda = failure is None and _take_device(place, device)
    except DeviceError as error:
        failure = error
    meeting = Meeting(place, limits[JOIN_TIMEOUT], say)
    meeting.compare({**papers, "the kind of device": "cuda" if uses_cuda else "cpu"}, failure)
    if order is not None:
        meeting.place = replace(place, rank=order.index(place.rank))
    if uses_cuda:
        prepare_nccl(os.environ, traces)
    _make_group(meeting, "cpu:gloo,cuda:nccl" if uses_cuda else "cpu:gloo", limits[COLLECTIVE_TIMEOUT])
    return Joined(meeting, tell, limits[HANG_TIMEOUT], limits[COLLECTIVE_TIMEOUT])


def _limits() -> tuple[dict[str, float], ConfigError | None]:
    """Seconds that the environment sets, by variable, and what is wrong in it: then what stands there is the
    default, since the other ranks have to hear of the mistake."""
    found, wrong = {}, None
    for name, default in (
        (JOIN_TIMEOUT, JOIN_S),
        (HANG_TIMEOUT, HANG_S),
        (COLLECTIVE_TIMEOUT, COLLECTIVE_S),
    ):
        try:
            found[name] = seconds_in(os.environ, name, default)
        except ConfigError as error:
            found[name], wrong = default, wrong or error
    return found, wrong


def _take_device(place: Place, name: str) -> bool:
    """Make the CUDA device of the local rank the current one, before NCCL asks for it; whether CUDA is used."""
    import torch

    if name == "cpu" or not torch.cuda.is_available():
        return False
    if name.startswith("cuda:"):  # taken, or refused, where the device is resolved
        return True
    count = torch.cuda.device_count()
    # A launcher may show each process its own device alone, which is then the first. Where that is the same one,
    # it is found out when the device is resolved.
    if place.local_rank >= count > 1:
        raise DeviceError(
            "this node has more ranks than CUDA devices",
            got=f"{place.local_size or place.local_rank + 1} ranks, {count} devices",
            expected="a device for each rank",
            do="start as many ranks as there are devices, or give --device cpu",
        )
    torch.cuda.set_device(place.local_rank % count)
    return True


def prepare_nccl(environ: MutableMapping[str, str], traces: str | None) -> None:
    """Set what NCCL and torch's recorder of collectives read when the group is made, but for what the user has set.

    Args:
        traces: what the names of its files begin with, the rank follows; None: as torch decides.
    """
    for names, value in (*NCCL_PRESETS, (TRACES, traces)):
        if value is not None and not any(name in environ for name in names):
            environ[names[0]] = value


def _make_group(meeting: Meeting, backend: str, limit: float) -> None:
    """The default process group."""
    import torch.distributed as dist

    place = meeting.place
    try:
        dist.init_process_group(
            backend,
            store=dist.PrefixStore("group", meeting.store),  # type: ignore[attr-defined]
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=limit + JUDGED_FIRST_S),
        )
    except RuntimeError as error:
        raise RanksError(
            f"rank {place.rank} has met the others, and cannot connect to them",
            got=(str(error).splitlines() or [""])[0],
            do="name the network interface that connects the nodes in GLOO_SOCKET_IFNAME (for CUDA also in "
            "NCCL_SOCKET_IFNAME)",
        ) from None


class Joined:
    """This rank among the others, from joining to leaving."""

    def __init__(self, meeting: Meeting, tell: Tell, hang: float, collective: float) -> None:
        self.world = World.current()
        self._meeting, self._place, self._tell = meeting, meeting.place, tell
        self._is_explained = False
        self._record = record()
        self._recording = contextlib.ExitStack()
        self._recording.enter_context(self._record.recording())
        self._lookout = Lookout(meeting, self._record, hang, collective, self._last_words, tell)
        self._lookout.start()

    @property
    def rank(self) -> int:
        """Its number among those that work together."""
        return self._place.rank

    @property
    def is_again(self) -> bool:
        """Whether these ranks were started again, as far as this one knows."""
        return self._place.restarts > 0 or self._meeting.round > 1

    def explained(self, error: BaseException) -> tuple[BaseException, bool]:
        """What an exception that ends the command means, and whether this rank shows it, with its rank if it is the
        only one to know of it."""
        self._is_explained = True
        first = first_failure(error)
        if self._lookout.has_judged:
            return first, False
        told = told_by(first)
        if told is not None:
            return first, (0 if isinstance(first, ScrimpError) else told) == self._place.rank
        _ignore_signals()  # of a launcher that ends all ranks where one is gone: what was found is still to be said
        if is_lost_connection(first):
            self._destroyed()  # closes this rank's connections: others that wait for it notice
            return self._loss(_first_line(first))
        # Nobody else knows. A signal, which the command answers by its exit code, needs no words.
        self._leave_note(own=True)
        if isinstance(first, ScrimpError):
            first.what = f"rank {self._place.rank}: {first.what}"
        return first, isinstance(first, Exception) or self._place.rank == 0

    def leave(self, code: int) -> None:
        """End the work with the others; every rank leaves, however its command ended.

        Args:
            code: exit code of the process, which ends here where something still waits in the process group.
        """
        rank, store, lookout = self._place.rank, self._meeting.store, self._lookout
        self._record.ended = True  # from now on its silence is none
        with contextlib.suppress(RuntimeError):  # the store is gone, and with it who would listen
            store.set(f"health/{rank}", json.dumps(self._record.statement()))
            store.set(f"end/{rank}", "")
            if rank == 0 and self._place.hosts_store:
                if self._is_explained and lookout.sees_note:
                    # Whoever has not read the note yet would say that this rank is gone, and the store with it.
                    alive = [f"end/{other}" for other in self._answering()]
                    wait_until(lambda: store.check(alive), ANSWER_S)
                ends = [f"end/{other}" for other in range(self._place.size)]
                wait_until(lambda: lookout.sees_note or store.check(ends), COLLECTIVE_S)
            elif code != 0:
                wait_until(lambda: lookout.sees_note or store.check(["end/0"]), COLLECTIVE_S)
        if not lookout.sees_note:
            lookout.stop()
        if not (self._destroyed() and lookout.is_settled()):
            end_process(code)
        self._recording.close()

    def _loss(self, saw: str) -> tuple[ScrimpError, bool]:
        """Another rank is gone: which one, if that can be found out, and whether this rank says so."""
        place, note = self._place, self._leave_note(own=False)
        do = "see its output, or the system's log: it may have been killed for want of memory; go on with --resume"
        if note is None:
            host = "torchrun's agent" if place.agent_hosts_store else "rank 0"
            return TrainingError(f"{host} is gone", got=saw, do=do), speaks_without_rank_0(place)
        alive = self._answering()
        gone = [rank for rank in range(place.size) if rank not in alive]
        if note["own"]:  # who left the note shows why
            return TrainingError(f"rank {note['rank']} has left", got=saw, do="see its output"), False
        if gone:
            what = f"{ranks_text(gone)} {'is' if len(gone) == 1 else 'are'} gone"
        else:
            what = f"rank {note['rank']} has lost its connection to another rank, and all ranks still run"
            do = "see the network between their machines (scrimp doctor --ranks measures it); go on with --resume"
        return TrainingError(what, got=saw, do=do), place.rank == min(alive)

    def _last_words(self) -> None:
        """In the lookout's thread, where the main thread has not come out of what it waits for."""
        if not self._is_explained:
            error, shows = self._loss(f"no end of this rank's wait for it within {LEAVE_S:g} s")
            if shows:
                self._tell(error)

    def _leave_note(self, *, own: bool) -> dict[str, int | bool] | None:
        """The first note of a rank that gives up: this one's where there was none; None where the store is gone.

        Args:
            own: this rank has a failure of its own, which it shows.
        """
        self._lookout.sees_note = True
        mine = json.dumps({"rank": self._place.rank, "own": own})
        try:
            found: dict[str, int | bool] = json.loads(self._meeting.store.compare_set(NOTE, "", mine))
        except RuntimeError:
            return None
        return found

    def _answering(self) -> list[int]:
        """Ranks whose lookouts answer the note, this one's among them."""
        store, silent = self._meeting.store, set(range(self._place.size)) - {self._place.rank}

        def all_answered() -> bool:
            silent.difference_update({rank for rank in silent if store.check([f"alive/{rank}"])})
            return not silent

        with contextlib.suppress(RuntimeError):
            wait_until(all_answered, ANSWER_S)
        return sorted(set(range(self._place.size)) - silent)

    def _destroyed(self) -> bool:
        """Leave the process group; False where something still waits in it."""
        import torch.distributed as dist

        if not dist.is_initialized():
            return True
        thread = threading.Thread(target=_destroy_group, name="scrimp-destroy", daemon=True)
        thread.start()
        thread.join(DESTROY_S)
        return not thread.is_alive()


def first_failure(error: BaseException) -> BaseException:
    """The exception that made a command fail, of those that came of one another.

    A rank that cannot tell the others of its failure, since they are gone, gets a second exception by that; what is
    thrown while a lost connection is handled comes of the loss.
    """
    if told_by(error) is not None:
        return error
    chain = [error]
    while (before := chain[-1].__context__) is not None and before not in chain:
        chain.append(before)
    own = [one for one in chain if is_own_failure(one)]
    lost = [one for one in chain if is_lost_connection(one)]
    return (own or lost or chain[:1])[-1]


def _destroy_group() -> None:
    import torch.distributed as dist

    with contextlib.suppress(RuntimeError, ValueError, AssertionError):  # of a group that is broken
        dist.destroy_process_group()


def _ignore_signals() -> None:
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
            signal.signal(number, signal.SIG_IGN)


def _first_line(error: BaseException) -> str:
    """Gloo's sentence without the place in its sources."""
    line = (str(error).splitlines() or [type(error).__name__])[0]
    return re.sub(r"^\[[^\]]*/gloo/[^\]]*\] ", "", line).partition(". This is typically")[0]
