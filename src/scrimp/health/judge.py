"""What one rank concludes from what all ranks say of themselves: who hangs, who is stopped, who is slow.

Problem  All ranks wait as soon as one does not come. Waiting itself proves nothing: rank 0 may prepare a corpus for an
         hour, a first step compiles, a disk is slow. A wrong alarm ends a good run.
Method   Rank 0 hears the `statement` of each rank (`scrimp.health.record`) twice a second. Let H be `HANG_TIMEOUT`,
         6 seconds, and a rank *steady* from the third step on.

         silent   Nothing was heard of a rank for H where it was steady, and for 5 H before. What a rank does is
                  irrelevant: its thread speaks whatever the main thread waits for. Its process is stopped, its machine
                  gone, or something keeps Python's lock. Time in which the judge itself was held up does not count.
         hangs    It is in no collective; others have entered one that it has not, and have waited for longer than the
                  limit. Of ranks that wait for one another none is the cause.
         all      All ranks of a group have entered the same collective, and none leaves for longer than the limit: the
                  communication hangs.
         slow     Over `WINDOW` steps that all ranks have taken, at least `WINDOW_S` seconds, the others waited for it:
                  the median of its lateness, (longest wait of any rank) - (its own wait), is above a quarter of the
                  median step and above four times that of every other rank, and it was the last in 9 of 10 steps. Said
                  once for each rank; nothing is done.

         The limit of *hangs* and *all* is ``max(H, 5 t)`` where the rank is steady and inside of a step (passes and
         update, without reading data), t being the longest time that any rank has yet spent between two collectives
         of a step, or in one. Everywhere else, where a rank does something for the others (`World.once`), reads,
         evaluates or writes, the limit is `SCRIMP_COLLECTIVE_TIMEOUT`.
Clocks   Those of two ranks are never compared: the judge takes times from its own clock, and waits are differences.
Limits   Which transfer is slow is not found out. In steps of CUDA collectives return before they are over: see
         `record`. A main thread that hangs where data are read, or in a checkpoint, is named after
         `SCRIMP_COLLECTIVE_TIMEOUT` only. A step of an own optimizer that suddenly takes longer than the limit, on one
         rank alone, is called a hang.
Source   C4, arXiv 2406.04594: hang or slow, in communication or outside of it, by arrival at collectives.
Checked  tests/health/test_judge.py; on real ranks tests/cli/test_hangs.py, benchmarks/drills.py
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Final

from scrimp.errors import TrainingError
from scrimp.world import ranks_text

HANG_TIMEOUT: Final = "SCRIMP_HANG_TIMEOUT"
"""Environment variable: seconds that a rank may be silent, or late within a step."""
HANG_S: Final = 6.0
BEFORE_STEPS: Final = 5
"""How many times as long a rank may be silent before its third step."""
MOST_SEEN: Final = 5
"""The limit as a multiple of the longest time that was seen."""
HELD_UP_S: Final = 1.5
"""Between two looks: above it the judge itself was held up."""
WINDOW, WINDOW_S = 32, 5.0
SLOW_SHARE, SLOW_RATIO, LAST_SHARE = 0.25, 4.0, 0.9

Statement = Mapping[str, Any]


class Judge:
    """Hears what ranks say, look by look.

    Args:
        limit: H, seconds.
        elsewhere: outside of steps, seconds.
    """

    def __init__(self, limit: float, elsewhere: float) -> None:
        self._limit, self._elsewhere = limit, elsewhere
        self._before: float | None = None
        self._heard: dict[int, float] = {}
        self._moved: dict[int, float] = {}
        self._last: dict[int, Statement] = {}
        self._named: set[int] = set()

    def look(self, now: float, said: Sequence[Statement]) -> TrainingError | None:
        """What ends the run, if anything does.

        Args:
            now: seconds, by a clock that only goes forward.
            said: by each rank, in order; empty where it has said nothing yet.
        """
        gap = 0.0 if self._before is None else now - self._before
        self._before = now
        for rank, one in enumerate(said):
            if gap > HELD_UP_S and rank in self._heard:
                self._heard[rank] += gap
                self._moved[rank] += gap
            last = self._last.get(rank, {})
            if rank not in self._heard or one.get("beat") != last.get("beat"):
                self._heard[rank] = now
            if rank not in self._moved or _motion(one) != _motion(last):
                self._moved[rank] = now
            self._last[rank] = one
        return self._silent(now) or self._hanging(now)

    @property
    def speaking(self) -> list[int]:
        """Ranks that were heard of in the last looks."""
        return [rank for rank, heard in self._heard.items() if (self._before or 0.0) - heard < HELD_UP_S]

    def slow(self) -> list[str]:
        """A sentence on each rank that is slow, once."""
        table = {
            rank: {step: times for step, *times in one.get("steps", ())} for rank, one in self._last.items()
        }
        if len(table) < 2:
            return []
        common = sorted(set.intersection(*(set(one) for one in table.values())))[-WINDOW:]
        seconds = [max(one[step][0] for one in table.values()) for step in common]
        if len(common) < WINDOW or sum(seconds) < WINDOW_S:
            return []
        late = {
            rank: [max(one[step][1] for one in table.values()) - own[step][1] for step in common]
            for rank, own in table.items()
        }
        return self._slowest(late, statistics.median(seconds))

    def _slowest(self, late: dict[int, list[float]], step: float) -> list[str]:
        medians = {rank: statistics.median(times) for rank, times in late.items()}
        rank = max(medians, key=lambda one: medians[one])
        others = max(value for one, value in medians.items() if one != rank)
        last = sum(times[rank] == max(times.values()) for times in _by_step(late))
        is_slow = (
            medians[rank] > max(SLOW_SHARE * step, SLOW_RATIO * others)
            and last >= LAST_SHARE * len(late[rank])
            and rank not in self._named
        )
        if not is_slow:
            return []
        self._named.add(rank)
        return [
            f"rank {rank} is slow: the others waited {medians[rank]:.3g} s for it in each step of {step:.3g} s "
            f"(medians of {WINDOW} steps)"
        ]

    def _silent(self, now: float) -> TrainingError | None:
        found = [
            rank
            for rank, one in self._last.items()
            if not one.get("ended") and now - self._heard[rank] > silence(one, self._limit)
        ]
        return silent_error(found, [self._last[rank] for rank in found], self._limit) if found else None

    def _hanging(self, now: float) -> TrainingError | None:
        if any(
            now - heard > HELD_UP_S
            for rank, heard in self._heard.items()
            if not self._last[rank].get("ended")
        ):
            return None  # it may be stopped, and others wait for it: the next looks show it
        for rank, one in self._last.items():
            waits = self._waiting_for(rank)
            longest = max((now - self._moved[other] for other, _ in waits), default=0.0)
            limit = self._limit_of(one)
            if not _inside(one) and min(longest, now - self._moved[rank]) > limit:
                return _hang_error(rank, one, waits, longest, self._is_short(one))
        return self._hanging_together(now)

    def _waiting_for(self, rank: int) -> list[tuple[int, str]]:
        """Ranks inside of a collective that this one has not entered, with its name."""
        own = {(name, *ranks): entered for name, ranks, entered, *_ in self._last[rank].get("groups", ())}
        found = []
        for other, one in self._last.items():
            for name, ranks, entered, left, operation in one.get("groups", ()):
                if (
                    other != rank
                    and rank in ranks
                    and left < entered
                    and own.get((name, *ranks), 0) < entered
                ):
                    found.append((other, f"{operation} {entered:,}"))
        return found

    def _hanging_together(self, now: float) -> TrainingError | None:
        """An error where all ranks of a group are in the same collective for too long."""
        for one in self._last.values():
            for name, ranks, entered, left, operation in one.get("groups", ()):
                said = [self._last[rank] for rank in ranks if rank in self._last]
                inside = [
                    [name, ranks, entered, left, operation] in other.get("groups", ()) for other in said
                ]
                limit = max(self._limit_of(other) for other in said)
                longest = min(now - self._moved[rank] for rank in ranks if rank in self._last)
                if left < entered and all(inside) and longest > limit:
                    return TrainingError(
                        "the communication hangs",
                        got=f"{ranks_text(ranks)} are all in {operation} {entered:,} for {longest:.1f} s, and none "
                        "leaves it",
                        do=f"see the network between them; {_go_on(all(self._is_short(other) for other in said))}",
                    )
        return None

    def _is_short(self, one: Statement) -> bool:
        return bool(one.get("steady") and one.get("step") is not None and one.get("doing") is None)

    def _limit_of(self, one: Statement) -> float:
        if not self._is_short(one):
            return self._elsewhere
        seen: float = max(max(other.get("longest", (0.0,))) for other in self._last.values())
        return max(self._limit, MOST_SEEN * seen)


def silence(one: Statement, limit: float) -> float:
    """Seconds that a rank may be silent after what it last said."""
    return limit if one.get("steady") else BEFORE_STEPS * limit


def silent_error(ranks: Sequence[int], said: Sequence[Statement], limit: float) -> TrainingError:
    """The error that names ranks whose processes give no sign."""
    seconds = min(silence(one, limit) for one in said)
    return TrainingError(
        f"{ranks_text(ranks)} {'is' if len(ranks) == 1 else 'are'} stopped or cut off",
        got=f"no sign of life for {seconds:g} s; last {'; '.join(map(_where, said))}",
        do=f"see whether its process and its machine still run; {_go_on(True)}",
    )


def _hang_error(
    rank: int, one: Statement, waits: Sequence[tuple[int, str]], seconds: float, is_short: bool
) -> TrainingError:
    others, calls = sorted({other for other, _ in waits}), sorted({call for _, call in waits})
    verb = "waits" if len(others) == 1 else "wait"
    return TrainingError(
        f"rank {rank} hangs outside of communication",
        got=f"{_where(one)}; {ranks_text(others)} {verb} for it in {' and '.join(calls)} for {seconds:.1f} s",
        do=_go_on(is_short),
    )


def _where(one: Statement) -> str:
    parts = [] if one.get("step") is None else [f"in step {one['step']:,}"]
    parts += [f"doing: {one['doing']}"] if one.get("doing") else []
    parts += [
        f"in {operation} {entered:,}"
        for *_, entered, left, operation in one.get("groups", ())
        if left < entered
    ]
    parts += [f"at {one['place']}"] if one.get("place") else []
    return ", ".join(parts) or "between two steps"


def _go_on(is_short: bool) -> str:
    name = HANG_TIMEOUT if is_short else "SCRIMP_COLLECTIVE_TIMEOUT"
    return f"go on with --resume; {name} sets the seconds"


def _inside(one: Statement) -> bool:
    return any(left < entered for _, _, entered, left, _ in one.get("groups", ()))


def _motion(one: Statement) -> tuple[Any, ...]:
    """What changes as long as a rank gets on."""
    counts = tuple((entered, left) for _, _, entered, left, _ in one.get("groups", ()))
    return one.get("step"), one.get("doing"), counts


def _by_step(late: dict[int, list[float]]) -> list[dict[int, float]]:
    return [dict(zip(late, times, strict=True)) for times in zip(*late.values(), strict=True)]
