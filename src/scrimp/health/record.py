"""What a rank notes of itself while it works, cheaply enough to do it always.

Problem  When one rank stops, all stop, each in some collective; which one is the cause can only be told from what each
         did before.
Method   As in C4 (arXiv 2406.04594): a counter for each process group, one more at each collective that the rank
         enters, and whether it has left that one. The counter only grows, so that equal numbers on two ranks mean the
         same collective, whatever a rank forgets. Added to that: the step that it is in, what it does alone
         (`scrimp.world.announced`), and of each of the last `STEPS` steps the seconds, and those spent in collectives.
         A thread beside the work (`scrimp.joining.Lookout`) sends this as `statement` twice a second; once the counters
         stand still it adds the line of Python where the main thread is.
         Between two ranks (rings, pipelines) each direction is a group of its own: both count a transfer when they
         begin it, and are inside of it while they wait for its end.
Cost     Two readings of a clock and a few additions for each collective (`benchmarks/rank_health.py` measures it).
Limits   A collective that returns before it is over (CUDA, `async_op`) counts as left at once: a wait for it does not
         show, and its lateness neither. There NCCL's own watchdog ends what hangs. Of transfers those of
         `batch_isend_irecv` are noted.
Checked  tests/health/test_record.py
"""

from __future__ import annotations

import contextlib
import faulthandler
import re
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from scrimp import world
from scrimp.collective_calls import BESIDE, wrapped
from scrimp.errors import ScrimpError

STEPS = 64
"""Steps whose times a rank keeps."""
WARM_STEPS = 3
"""After a start or another plan, in which compiling and tuning may hold up any rank."""
STILL_S = 1.0
"""After which a statement says where the main thread is."""


@dataclass
class Count:
    """Collectives of one process group, or transfers from one rank to another."""

    name: str
    ranks: list[int]
    entered: int = 0
    left: int = 0
    operation: str = ""
    """The last that was entered."""
    waits_for: int = 0
    """The transfer that this rank waits for; 0: none. It may have begun later ones."""

    def statement(self) -> list[Any]:
        """As a JSON value."""
        entered, left = (self.waits_for, self.waits_for - 1) if self.waits_for else (self.entered, self.left)
        return [self.name, self.ranks, entered, left, self.operation]


@dataclass
class Record:
    """What this rank notes of itself."""

    steady: bool = False
    """Whether the run takes steps, the first of which are done."""
    step: int | None = None
    """That it is in."""
    ended: bool = False
    longest_work: float = 0.0
    """Seconds between two collectives of a step."""
    longest_call: float = 0.0
    """Seconds in a collective of a step."""
    findings: deque[tuple[str, str]] = field(default_factory=deque)
    """What is to be told of the ranks between two steps: the kind of an event, and its sentence."""
    on_loss: Callable[[ScrimpError], None] | None = None
    _groups: dict[str, Count] = field(default_factory=dict)
    _steps: deque[tuple[int, float, float]] = field(default_factory=lambda: deque(maxlen=STEPS))
    _moved: float = 0.0
    _waited: float = 0.0
    _warm: int = 0
    _beat: int = 0
    _is_even: bool = True

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Count the collectives of this process while the body runs."""
        self.__init__()  # type: ignore[misc]
        self._moved = time.monotonic()
        with wrapped(self._recorded):
            yield

    @contextlib.contextmanager
    def training(self, on_loss: Callable[[ScrimpError], None], *, is_even: bool = True) -> Iterator[None]:
        """Steps are taken in the body; the first of them may take long.

        Args:
            on_loss: called in the judge's thread with what ends the run, just before it does.
            is_even: every rank has as much to do, so that one for which the others wait is slow.
        """
        self.begin_anew()
        self._is_even = is_even
        self.on_loss = on_loss
        try:
            yield
        finally:
            self.steady, self.on_loss = False, None

    def begin_anew(self) -> None:
        """The next steps may take long: kernels are tuned, and blocks compiled."""
        self.steady, self._warm = False, 0

    @contextlib.contextmanager
    def in_step(self, number: int) -> Iterator[None]:
        """The body is a step's passes and its update: ranks do the same, and none has anything else to do."""
        start, waited = time.monotonic(), self._waited
        self._moved, self.step = start, number
        try:
            yield
        finally:
            self.step = None
        self._steps.append((number, time.monotonic() - start, self._waited - waited))
        self._warm += 1
        self.steady = self._warm >= WARM_STEPS

    def statement(self) -> dict[str, Any]:
        """All of it as a JSON value, asked by another thread than that which works."""
        self._beat += 1
        still = time.monotonic() - self._moved
        groups = [one.statement() for one in {id(one): one for one in list(self._groups.values())}.values()]
        return {
            "beat": self._beat,
            "ended": self.ended,
            "steady": self.steady,
            "step": self.step,
            "doing": world.announced(),
            "groups": groups,
            "place": place_of_main_thread() if still > STILL_S else None,
            "longest": [self.longest_work, self.longest_call],
            "steps": list(self._steps) if self.steady and self._is_even else [],
        }

    def _recorded(self, operation: str, call: Callable[..., Any]) -> Callable[..., Any]:
        if operation == "send":
            return self._transferring(call)

        def recorded(*arguments: Any, **named: Any) -> Any:
            if threading.current_thread().name.startswith(BESIDE):
                return call(*arguments, **named)
            group = named.get("group") or _group_in(arguments)
            # By its name: a group that something still holds cannot be destroyed in order.
            count = self._groups.get("" if group is None else group.group_name) or self._new_count(group)
            begin = self._begun()
            count.operation = operation
            count.entered += 1
            try:
                return call(*arguments, **named)
            finally:
                count.left = count.entered
                self._ended(begin)

        return recorded

    def _begun(self) -> float:
        """Now, where the work between two collectives ends."""
        begin = time.monotonic()
        if self._warm and self.step is not None:
            self.longest_work = max(self.longest_work, begin - self._moved)
        self._moved = begin
        return begin

    def _ended(self, begin: float) -> None:
        self._moved = end = time.monotonic()
        self._waited += end - begin
        if self._warm and self.step is not None:
            self.longest_call = max(self.longest_call, end - begin)

    def _transferring(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`batch_isend_irecv`, with its transfers noted."""

        def recorded(operations: list[Any]) -> list[Any]:
            begun = [self._transfer(one) for one in operations]
            works: list[Any] = call(operations)
            if len(works) != len(begun):  # NCCL's are one, for which the host does not wait
                return works
            return [
                Transfer(work, self, count, number)
                for work, (count, number) in zip(works, begun, strict=True)
            ]

        return recorded

    def _transfer(self, operation: Any) -> tuple[Count, int]:
        """The count of a transfer's direction, and its number there."""
        import torch.distributed as dist

        ends = [dist.get_rank(), operation.peer]
        if operation.op is not dist.isend:
            ends.reverse()
        group: Any = operation.group or dist.group.WORLD
        name = f"{group.group_name} from {ends[0]} to {ends[1]}"
        count = self._groups.setdefault(name, Count(name, ends, operation="transfer"))
        count.entered += 1
        count.left = count.entered
        return count, count.entered

    @contextlib.contextmanager
    def waiting(self, count: Count, number: int) -> Iterator[None]:
        """The body waits for a transfer."""
        begin, count.waits_for = self._begun(), number
        try:
            yield
        finally:
            count.waits_for = 0
            self._ended(begin)

    def _new_count(self, group: Any) -> Count:
        """The count of a group that is met for the first time; None is the default one."""
        import torch.distributed as dist

        if group is None or group is dist.group.WORLD:
            count = self._groups.setdefault("", Count("all", list(range(dist.get_world_size()))))
        else:
            count = Count(group.group_name, dist.get_process_group_ranks(group))
        return self._groups.setdefault("" if group is None else group.group_name, count)


class Transfer:
    """What `batch_isend_irecv` gives for one of its operations; waiting for it is noted."""

    def __init__(self, work: Any, noted: Record, count: Count, number: int) -> None:
        self._work, self._noted, self._count, self._number = work, noted, count, number

    def wait(self, *arguments: Any, **named: Any) -> Any:
        """As torch's own `Work.wait`."""
        with self._noted.waiting(self._count, self._number):
            return self._work.wait(*arguments, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._work, name)


def _group_in(arguments: tuple[Any, ...]) -> Any:
    """A process group that is given by its position, as after tensor and operation."""
    if len(arguments) < 3:
        return None
    import torch.distributed as dist

    return next((one for one in arguments if isinstance(one, dist.ProcessGroup)), None)


_RECORD = Record()


def record() -> Record:
    """This process's."""
    return _RECORD


_PLACE = re.compile(r'  File "(.*)", line (\d+) in (.*)')


def place_of_main_thread() -> str | None:
    """File, line and function in which the main thread is: the innermost that is no part of an installed package.

    By `faulthandler`, which reads stacks and holds nothing. Who takes a frame from another thread keeps all its local
    variables alive while looking at it: tensors would be freed later than the program says, and the memory trace of a
    run would count what another one's does not.
    """
    try:
        with tempfile.TemporaryFile() as file:
            faulthandler.dump_traceback(file)
            file.seek(0)
            text = file.read().decode(errors="replace")
    except OSError:  # no room for a file: then without a place
        return None
    _, _, own = text.partition(f"hread 0x{threading.main_thread().ident or 0:016x}")
    stack = [
        found.groups() for line in own.partition("\n\n")[0].splitlines() if (found := _PLACE.fullmatch(line))
    ]
    chosen = [one for one in stack if "site-packages" not in one[0] and not one[0].startswith("<")] or stack
    return "{}:{} in {}".format(*chosen[0]) if chosen else None
