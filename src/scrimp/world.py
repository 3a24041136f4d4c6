"""Where a run runs: this process's rank among those that train one model together, and how they stay of one mind.

Problem  Ranks that train together must do the same next: one that stops at a signal, skips a step or takes another plan
         while the others go on leaves them waiting in a collective for ever. What a rank sees is its own: wall time,
         free memory, a signal, a NaN, a full disk.
Method   A decision that rests on something local is taken through a `World`: what each rank saw is gathered, and all
         decide by the same rule (`any`, `largest`, ...), or one rank decides and tells the others (`told`, `once`).
         Files are written by one rank (`is_writer`).
         Every question is one exchange of JSON texts: an all-gather of `BLOCK` bytes, and a second one where a text is
         longer. A text also names what was asked, so that ranks that are at different places find out, and it may say
         "I failed" in place of an answer::

             with world.together("opening the data"):     rank 3 raises here ...
                 ...                                      ... the others at their next question, or at the end

         So a failure needs no collective of its own: it answers whatever the others ask next. Nobody asks
         after that: an error that all ranks know passes through outer `together` blocks in silence. A rank whose
         failure nobody asks for leaves after `TELLING_S` seconds; that closes its connections, which the others see.
Errors   On the other ranks a failure is raised as the class of `scrimp.errors` that it belongs to there, so that
         handlers of these classes act on all ranks alike; of any other exception, as `RankFailedError`, which no
         handler takes for its own.
One rank The trivial case: no collective, no import of torch.distributed, values as they are.
Limits   A rank that waits in a model's own collectives (a backward pass) learns of a failure when the rank that
         failed has left. The default group of processes alone; every rank must ask, in
         the same order, from one thread. Tuples come back as lists.
Checked  on gloo: tests/test_world.py, tests/training/test_rank_decisions.py; whole runs in
         tests/training/test_run_on_ranks.py
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from scrimp import errors
from scrimp.errors import ScrimpError, TrainingError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

BLOCK = 256
"""Bytes that every rank sends in the first exchange; the first `HEADER` say how long its text is."""
HEADER = 8
MOST_LISTED = 16
"""Ranks that a sentence names."""
_TOLD = "scrimp_told_by"
"""Attribute of an exception that all ranks have been told of: the first that failed; None if telling them failed."""
TELLING_S = 30
"""Seconds that a rank waits for others to hear of its failure: they may wait in a collective for it to join them."""

Made = TypeVar("Made")
_doing: list[str] = []
"""What this rank does alone or together, and other ranks may wait for, the innermost last."""


class RankFailedError(Exception):
    """Another rank failed by what is no error of Scrimp."""


def _as_it_is(value: Any) -> Any:
    return value


def announced() -> str | None:
    """What this rank does at the moment that others may wait for, as the innermost `once` or `writer_first` says it."""
    return next(iter(_doing[-1:]), None)


@contextlib.contextmanager
def _announced(what: str) -> Iterator[None]:
    _doing.append(what)
    try:
        yield
    finally:
        _doing.pop()


@dataclass(frozen=True)
class World:
    """The ranks that train one model together; by default one process alone."""

    rank: int = 0
    size: int = 1

    @classmethod
    def current(cls) -> World:
        """The default process group of torch.distributed; one process where there is none."""
        dist = sys.modules.get("torch.distributed")
        if dist is None or not dist.is_available() or not dist.is_initialized():
            return cls()
        return cls(dist.get_rank(), dist.get_world_size())

    @property
    def is_writer(self) -> bool:
        """Whether this rank writes the files of the run, which all read."""
        return self.rank == 0

    # -- decisions -----------------------------------------------------------------------------

    def any(self, flag: bool) -> bool:
        """Whether it is so on any rank."""
        return True in self.gathered(bool(flag))

    def all(self, flag: bool) -> bool:
        """Whether it is so on all ranks."""
        return False not in self.gathered(bool(flag))

    def largest(self, number: float) -> float:
        """The largest of the ranks' numbers; NaN where one of them is. Whole numbers stay whole."""
        return _extreme(max, self.gathered(number))

    def smallest(self, number: float) -> float:
        """The smallest of the ranks' numbers; NaN where one of them is. Whole numbers stay whole."""
        return _extreme(min, self.gathered(number))

    def same(self, value: Any) -> bool:
        """Whether all ranks give the same value, which may be long: its digest is what they compare."""
        if self.size == 1:
            return True
        digests = self.gathered(hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest())
        return len(set(digests)) == 1

    def agree(self, what: str, value: Any, *, do: str | None = None) -> None:
        """Refuse to go on where ranks differ.

        Args:
            what: that must be the same, as a sentence names it: "the plan".
            value: of this rank.
            do: advice.

        Raises:
            TrainingError: on every rank, with the ranks and what each of them has.
        """
        if not self.same(value):
            values = self.gathered(value)
            is_short = max(len(str(one)) for one in values) <= errors.LONGEST
            where, parts = ("", values) if is_short else first_difference(values)
            found = differences_text(list(map(errors.shortened, parts)))
            raise TrainingError(
                f"ranks differ in {what}",
                got=f"{where}: {found}" if where else found,
                expected="the same on all ranks",
                do=do,
            )

    # -- what all ranks know -------------------------------------------------------------------

    def gathered(self, value: Any) -> list[Any]:
        """What each rank gives, in the order of ranks: JSON values, floats exactly as they were."""
        return [value] if self.size == 1 else self._ask("gathered", value)

    def told(self, value: Any) -> Any:
        """What rank 0 gives, on every rank: a JSON value."""
        return value if self.size == 1 else self._ask("told", value if self.is_writer else None)[0]

    def once(
        self,
        doing: str,
        make: Callable[[], Made],
        *,
        write: Callable[[Made], Any] = _as_it_is,
        read: Callable[[Any], Made] = _as_it_is,
    ) -> Made:
        """What rank 0 makes, on every rank; the others wait. What `make` raises there is raised on all.

        Args:
            doing: what it is, for errors: "timing the blocks".
            make: called on rank 0 alone; it must ask the other ranks nothing.
            write: from what is made to a JSON value.
            read: back again.
        """
        if self.size == 1:
            return make()
        try:
            with _announced(doing):
                made = write(make()) if self.is_writer else None
        except Exception as error:
            self._fail(error, doing)
            raise
        return read(self.told(made))

    def sum(self, numbers: NDArray[np.generic]) -> NDArray[Any]:
        """Sums over ranks, element by element, of float64 or int64; equal on every rank.

        Raises:
            TrainingError: on every rank, where they give arrays of different shapes or types.
        """
        if self.size == 1:
            return numbers
        import torch
        import torch.distributed as dist

        self.agree("the shape of what they add up", [str(numbers.dtype), *numbers.shape])
        if not numbers.size:
            return numbers
        total = torch.from_numpy(numbers.copy()).to(group_device())
        dist.all_reduce(total)
        return total.cpu().numpy()

    def barrier(self) -> None:
        """Wait until all ranks are here."""
        if self.size > 1:
            self._ask("barrier", None)

    @contextlib.contextmanager
    def writer_first(self, doing: str) -> Iterator[None]:
        """All ranks do the same, the others when the writer is done: it leaves files that they find."""
        with self.together(doing), _announced(doing):
            if not self.is_writer:
                self.barrier()
            yield
            if self.is_writer:
                self.barrier()

    @contextlib.contextmanager
    def together(self, doing: str) -> Iterator[None]:
        """What fails on one rank inside fails on all: at once, or where they next ask something, or at the end.

        Args:
            doing: what is being done, for the errors of other ranks: "opening the data".
        """
        if self.size == 1:
            yield
            return
        try:
            yield
            self._ask("together", doing)
        except Exception as error:
            self._fail(error, doing)
            raise

    @contextlib.contextmanager
    def meeting_elsewhere(self) -> Iterator[None]:
        """Inside, ranks meet in collectives of a model's own, where nobody would hear a question.

        One that fails there does not tell the others: its process ends, and they find that it is gone.
        """
        try:
            yield
        except Exception as error:
            setattr(error, _TOLD, None)
            raise

    def _fail(self, error: Exception, doing: str) -> None:
        """Answer with a failure what the others ask next, unless they know of it."""
        if not hasattr(error, _TOLD) and not _comes_of_loss(error):
            setattr(error, _TOLD, None)
            setattr(error, _TOLD, self._ask("failed", None, failure=failure_of(error, doing))[0])

    def _ask(self, asked: str, value: Any, *, failure: Mapping[str, Any] | None = None) -> list[Any]:
        """One exchange; the answers of all ranks. Where this rank tells of its failure: the ranks that failed."""
        message = {"asked": asked, "value": value} if failure is None else {"failure": failure}
        limit = None if failure is None else TELLING_S
        found = [json.loads(text) for text in _exchange(json.dumps(message).encode(), limit)]
        failures = {rank: one["failure"] for rank, one in enumerate(found) if "failure" in one}
        if failure is not None:
            return list(failures)
        error: Exception
        if failures:
            error = error_of(*next(iter(failures.items())))
        elif len({one["asked"] for one in found}) == 1:
            return [one["value"] for one in found]
        else:
            error = TrainingError(
                "ranks are at different places of the program",
                got=differences_text([one["asked"] for one in found]),
                do="report this: a decision was taken on one rank alone",
            )
        set_told(error, min(failures, default=0))
        raise error


ALONE = World()


def told_by(error: BaseException) -> int | None:
    """The first rank that failed by an error which all ranks know of; None: of this one they do not."""
    rank: int | None = getattr(error, _TOLD, None)
    return rank


def set_told(error: BaseException, rank: int) -> None:
    """Note that all ranks know of an error, and the first that has it."""
    setattr(error, _TOLD, rank)


def told_like(error: Exception, other: Exception) -> Exception:
    """An error that says the same as another one: the other ranks know of both, or of neither."""
    if is_own_failure(other):
        setattr(error, _TOLD, told_by(other))
    return error


def is_lost_connection(error: BaseException) -> bool:
    """Whether torch says by an exception that another rank no longer answers.

    NCCL and stores raise a `DistError`. Gloo raises a plain RuntimeError with the place in its sources, "Connection
    closed by peer" or "Timed out waiting"; so does the backward pass whose collective failed. Of a wait with a limit it
    says "Operation timed out!" alone.
    """
    if not isinstance(error, RuntimeError):
        return False
    dist = sys.modules.get("torch.distributed")
    text = str(error)
    return (
        "/gloo/" in text
        or text == "Operation timed out!"
        or (dist is not None and isinstance(error, getattr(dist, "DistError", ())))
    )


def _comes_of_loss(error: BaseException | None) -> bool:
    """Whether an exception is a lost connection, or was thrown where one was handled: nobody would hear of it."""
    while error is not None and not is_lost_connection(error):
        error = error.__context__
    return error is not None


def is_own_failure(error: BaseException) -> bool:
    """Whether the other ranks know of an error, or this one has at least tried to tell them."""
    return hasattr(error, _TOLD)


def first_difference(values: Sequence[Any]) -> tuple[str, list[Any]]:
    """Where JSON values begin to differ, as keys joined by dots, and what each of them has there; None: nothing."""
    if all(isinstance(one, dict) for one in values):
        keys = dict.fromkeys(key for one in values for key in one)
        inner = ((str(key), [one.get(key) for one in values]) for key in keys)
    elif all(isinstance(one, list) for one in values):
        longest = max(map(len, values))
        inner = ((str(at), [dict(enumerate(one)).get(at) for one in values]) for at in range(longest))
    else:
        return "", list(values)
    for key, parts in inner:
        if any(one != parts[0] for one in parts):
            where, found = first_difference(parts)
            return f"{key}.{where}".rstrip("."), found
    return "", list(values)


def differences_text(values: list[Any]) -> str:
    """Values with the ranks that have them, as a sentence lists them: "a on ranks 0 and 2; b on rank 1"."""
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(str(value), []).append(rank)
    return "; ".join(f"{value} on {ranks_text(who)}" for value, who in ranks.items())


def ranks_text(ranks: Sequence[int]) -> str:
    """Ranks as a sentence lists them: "rank 1", "ranks 0, 1 and 3"; of many the first, and how many more."""
    shown = [str(rank) for rank in ranks[:MOST_LISTED]]
    if len(ranks) > MOST_LISTED:
        shown.append(f"{len(ranks) - MOST_LISTED:,} more")
    return f"ranks {', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else f"rank {shown[0]}"


def failure_of(error: Exception, doing: str = "") -> dict[str, str | None]:
    """An exception as other ranks are told of it."""
    failed = f"{doing} failed: " if doing else ""
    if not isinstance(error, ScrimpError):
        return {"kind": None, "what": f"{failed}{type(error).__name__}: {errors.shortened(error)}"}
    family = (kind.__name__ for kind in type(error).__mro__ if kind.__module__ == errors.__name__)
    rest = {
        name: None if (part := getattr(error, name)) is None else str(part)
        for name in ("got", "expected", "do")
    }
    return {"kind": next(family), "what": f"{failed}{error.what}", **rest}


def error_of(rank: int | None, failure: Mapping[str, Any]) -> Exception:
    """The failure of another rank, or of all, as an exception here."""
    what = failure["what"] if rank is None else f"rank {rank}: {failure['what']}"
    if failure["kind"] is None:
        return RankFailedError(what)
    kind: type[ScrimpError] = getattr(errors, failure["kind"])
    return kind(what, **{name: failure[name] for name in ("got", "expected", "do")})


def framed(text: bytes) -> tuple[bytes, bytes]:
    """The first block of a text, with its length, and what is left of it for a second exchange."""
    room = BLOCK - HEADER
    first = len(text).to_bytes(HEADER, "little") + text[:room].ljust(room, b"\0")
    return first, text[room:]


def unframed(first: bytes, rest: bytes) -> bytes:
    """The text of a block and what followed it, padded or not."""
    return (first[HEADER:] + rest)[: length_of(first)]


def length_of(first: bytes) -> int:
    """Bytes of the text that a block begins."""
    return int.from_bytes(first[:HEADER], "little")


def _extreme(choose: Callable[[list[float]], float], numbers: list[float]) -> float:
    return math.nan if any(map(math.isnan, numbers)) else choose(numbers)


def _exchange(text: bytes, limit: float | None = None) -> list[bytes]:
    """The texts of all ranks; RuntimeError after so many seconds, else after those of the process group."""
    first, rest = framed(text)
    firsts = _all_gather(first, limit)
    longest = max(map(length_of, firsts)) - (BLOCK - HEADER)
    rests = _all_gather(rest.ljust(longest, b"\0"), limit) if longest > 0 else [b""] * len(firsts)
    return [unframed(*pair) for pair in zip(firsts, rests, strict=True)]


def _all_gather(block: bytes, limit: float | None) -> list[bytes]:
    """As many bytes of every rank."""
    import torch
    import torch.distributed as dist

    own = torch.frombuffer(bytearray(block), dtype=torch.uint8).to(group_device())
    found = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    if limit is None:
        dist.all_gather(found, own)
    else:
        dist.all_gather(found, own, async_op=True).wait(timedelta(seconds=limit))
    return [one.cpu().numpy().tobytes() for one in found]


def group_device() -> torch.device:
    """Where the default process group wants its tensors."""
    import torch
    import torch.distributed as dist

    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
