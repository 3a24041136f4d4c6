"""Which pass each rank of a pipeline runs in which order: gpipe, 1F1B, interleaved, ZB-V and DualPipeV.

Problem  Seconds and bytes of a pipeline follow from the order of its passes, which torch's schedule classes tell; a
         planner that imported torch for it would take a second to start, and cannot be asked where torch is not.
Method   A pass is F (forward), B (backward), or half of B: I (the gradient of a stage's input, for which another rank
         waits) or W (those of its weights, for which nobody does). Of p ranks, rank r holds::

             gpipe, 1f1b    stage r
             interleaved    stages r, r + p, r + 2 p, ... (v of them)
             zbv, dualpipev stages r and 2 p - 1 - r: 0 and 1 below, the way there and back (a V)

         and of m micro-batches runs, x n for n times, with a < b for as many as both lists have::

             gpipe        F x m, then B x m
             1f1b         F x (p - 1 - r), then F B by turns, then the B that are left
             interleaved  the same in rounds of p micro-batches: F x (2 (p - 1 - r) + (v - 1) p) ahead
             zbv          F0 x (2 (p - r) - 1), F1 F0 x r, F1 I1 W1 x (p - r), then F0 I0 W0 F1 I1 W1 by turns, until
                          all F ran; I0 I1 x r, I0 W0 x (p - r), the W1 and then the W0 that are left. Of fewer than
                          2 p - 1 micro-batches the order of so many, without those that there are not
             dualpipev    F0 x 2 (p - r - 1), F0 F1 x (r + 1), I1 W F1 x (p - r - 1), F0 B1 F1 B0 x (m - 2 p + r + 1),
                          B1 F1 B0 x (p - r - 1), B1 B0 x (r + 1), of which the second half are I, W B0 x (p - r - 1)
                          with I for B where the half was reached, and W x (r + 1); W is that of the oldest I

Limits   Of DualPipeV a forward and a backward pass that the paper runs beside one another run after one another, as
         Scrimp's runtime and torch's without a compiler run them.
Source   PTD-P, arXiv 2104.04473; zero bubble, arXiv 2401.10241, section 6; DualPipe, arXiv 2412.19437, and DeepSeek's
         own code of DualPipeV; torch.distributed.pipelining.schedules, whose orders these are
Checked  tests/planner/layout/test_pass_orders.py: torch's classes
"""

from __future__ import annotations

from collections import deque
from functools import lru_cache
from typing import Literal

from scrimp.config.pipeline import V_SHAPED

PassKind = Literal["F", "B", "I", "W"]
Pass = tuple[PassKind, int, int]
"""Which pass; of which of all stages; of which micro-batch."""
KINDS: tuple[PassKind, ...] = ("F", "B", "I", "W")
SCHEDULES = ("gpipe", "1f1b", "interleaved", *V_SHAPED)


def rank_of(stage: int, ranks: int, schedule: str) -> int:
    """The rank that holds a stage."""
    if schedule in V_SHAPED:
        return min(stage, 2 * ranks - 1 - stage)
    return stage % ranks


@lru_cache(maxsize=4096)
def stages_of(rank: int, ranks: int, virtual: int, schedule: str) -> tuple[int, ...]:
    """The stages that a rank holds, in order."""
    if schedule in V_SHAPED:
        return rank, 2 * ranks - 1 - rank
    return tuple(range(rank, ranks * virtual, ranks))


def order_of(rank: int, ranks: int, virtual: int, micro_batches: int, schedule: str) -> list[Pass]:
    """The passes of a rank."""
    if schedule == "zbv":
        return _zbv(rank, ranks, micro_batches)
    if schedule == "dualpipev":
        return _DualPipeV(rank, ranks).order(micro_batches)
    places = places_of(rank, ranks, virtual, micro_batches, schedule)
    kinds_and_numbers = (divmod(place, micro_batches) for place in places)
    return [(KINDS[cost % 2], cost // 2, number) for cost, number in kinds_and_numbers]


def places_of(rank: int, ranks: int, virtual: int, micro_batches: int, schedule: str) -> list[int]:
    """The same of a schedule that splits nothing, as places among the passes of all ranks: these go by 2 stage + 1
    where backward, and then by micro-batch."""
    m, total, after = micro_batches, micro_batches * virtual, ranks - 1 - rank
    # Rounds of as many micro-batches as ranks go through one stage after another; of one stage all are one round.
    each = ranks if virtual > 1 else m
    forward, backward = (
        [
            (2 * (stage * ranks + rank) + is_backward) * m + number
            for begin in range(0, m, each)
            for stage in range(virtual)[:: -1 if is_backward else 1]
            for number in range(begin, begin + each)
        ]
        for is_backward in (False, True)
    )
    if schedule == "gpipe":
        return forward + backward
    ahead = min(after if virtual == 1 else 2 * after + (virtual - 1) * ranks, total)
    found = [0] * (2 * total)
    found[:ahead], found[ahead + 2 * (total - ahead) :] = forward[:ahead], backward[total - ahead :]
    turns = slice(ahead, ahead + 2 * (total - ahead))
    found[turns.start : turns.stop : 2] = forward[ahead:]
    found[turns.start + 1 : turns.stop : 2] = backward[: total - ahead]
    return found


def _zbv(rank: int, ranks: int, micro_batches: int) -> list[Pass]:
    count, after = max(2 * ranks - 1, micro_batches), ranks - rank
    words = ["F0"] * (2 * after - 1) + ["F1", "F0"] * rank + ["F1", "I1", "W1"] * after
    begun_there, begun_back = 2 * after - 1 + rank, ranks
    while begun_back < count:
        words += ["F0"] * (begun_there < count) + ["I0", "W0", "F1", "I1", "W1"]
        begun_there, begun_back = begun_there + 1, begun_back + 1
    words += ["I0", "I1"] * rank + ["I0", "W0"] * after
    for word in ("W1", "W0"):
        words += [word] * (count - words.count(word))
    chunks, begun = stages_of(rank, ranks, 2, "zbv"), dict.fromkeys(words, 0)
    found: list[Pass] = []
    for word in words:
        if begun[word] < micro_batches:
            found.append((word[0], chunks[int(word[1])], begun[word]))  # type: ignore[arg-type]
        begun[word] += 1
    return found


class _DualPipeV:
    """The order of one rank, as it grows."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self._stages = stages_of(rank, ranks, 2, "dualpipev")
        self._begun = {(way, chunk): 0 for way in "FB" for chunk in (0, 1)}
        self._waiting: deque[tuple[int, int]] = deque()
        self._found: list[Pass] = []

    def order(self, micro_batches: int) -> list[Pass]:
        """All of it."""
        rank, after = self.rank, self.ranks - self.rank - 1
        self._add("F0" * 2 * after + "F0F1" * (rank + 1) + "I1W.F1" * after)
        self._add("F0B1F1B0" * (micro_batches - 2 * self.ranks + rank + 1) + "B1F1B0" * after)
        # From the middle of the last ones on the gradients of weights wait.
        last = "B1B0" * (rank + 1)
        middle = 4 * ((rank + 1) // 2) + 2 * (rank % 2 == 0)
        self._add(last[:middle] + last[middle:].replace("B", "I"))
        self._add("W.I0" * after + "W." * (rank + 1))
        return self._found

    def _add(self, words: str) -> None:
        """Passes as pairs of letters: which, and of which chunk."""
        for kind, chunk in zip(words[::2], words[1::2], strict=True):
            if kind == "W":
                if self._waiting:
                    self._found.append(("W", *self._waiting.popleft()))
                continue
            way = "F" if kind == "F" else "B"
            number, stage = self._begun[way, int(chunk)], self._stages[int(chunk)]
            self._begun[way, int(chunk)] += 1
            self._found.append((kind, stage, number))  # type: ignore[arg-type]
            if kind == "I":
                self._waiting.append((stage, number))
