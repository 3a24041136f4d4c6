"""Which source of a mixture each sample of a run comes from: computed, exact, and even in every stretch of the run.

Problem  Samples of k sources with whole shares a_s are to follow one another so that every step sees nearly the mixture
         that was asked for. Ranks and resumed runs begin in the middle: which sample comes at a position must not need
         the ones before it. Drawing sources at random misses the shares by about sqrt(n) samples after n.
Method   With D = a_1 + ... + a_k and w_s = a_s / D, sample j (from 0) of source s has the window of positions

             floor(j / w_s) <= position < ceil((j + 1) / w_s)

         and each position goes to the source whose next window is open and ends first, of equals to the first. Such a
         schedule is never late (fluid shares w_s fill all windows, and the earliest deadline first is optimal for jobs
         of one unit), so that after any n samples each source has had n w_s of them, off by less than one.
         After D positions every source has had exactly a_s, and the order begins again: one round is a table.
Cost     Five bytes for each of D positions, D at most 100,000; made once, in D k steps.
Limits   Which source comes at a position does not depend on the seed; which of its samples does.
Source   Tijdeman, The chairman assignment problem (Discrete Mathematics 32, 1980); Baruah, Cohen, Plaxton and Varvel,
         Proportionate progress (Algorithmica 15, 1996)
Checked  tests/data/test_interleave.py
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import numpy.typing as npt


class Interleave:
    """`interleave[i]` is the source of sample i of a run, and how many samples of it came before.

    Args:
        shares: samples of each source in a round; of none where it is 0.
    """

    def __init__(self, shares: tuple[int, ...]) -> None:
        if not any(shares) or min(shares) < 0:
            raise ValueError("no share of a mixture is negative, and one is above 0")
        self.shares, self._round = shares, sum(shares)
        self._sources, self._before = _one_round(shares)

    def __getitem__(self, position: int) -> tuple[int, int]:
        if position < 0:
            raise IndexError("positions count from 0")
        rounds, place = divmod(position, self._round)
        source = int(self._sources[place])
        return source, rounds * self.shares[source] + int(self._before[place])

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples come from each source."""
        rounds, rest = divmod(samples, self._round)
        begun = np.bincount(self._sources[:rest], minlength=len(self.shares))
        return [rounds * share + int(more) for share, more in zip(self.shares, begun, strict=True)]


@lru_cache(maxsize=16)
def _one_round(shares: tuple[int, ...]) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int32]]:
    """The source of each position of a round, and its samples before it."""
    length, taken = sum(shares), [0] * len(shares)
    ends = [-(-length // share) if share else 0 for share in shares]
    sources, before = np.empty(length, dtype=np.uint8), np.empty(length, dtype=np.int32)
    for position in range(length):
        ready = [s for s, share in enumerate(shares) if taken[s] * length < (position + 1) * share]
        chosen = min(ready, key=ends.__getitem__)
        sources[position], before[position] = chosen, taken[chosen]
        taken[chosen] += 1
        ends[chosen] = -(-(taken[chosen] + 1) * length // shares[chosen])
    return sources, before
