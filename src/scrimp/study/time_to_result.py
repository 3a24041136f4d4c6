"""Time to result: from times to a target, by workload and submission, to ratios, performance profiles and a score.

Problem  One submission is fast on one workload and fails on the next. Means of times are those of the slowest workload,
         and no mean at all where a target was never reached.
Method   A workload fixes data, model, batch, most steps, and a loss that is to be reached; a submission is how it is
         trained. Of submission s on workload w, over seeds:

             t(s, w) = median over seeds of the fastest trial of the seed, infinite where it never reached the target

         so that a submission which fails on most seeds never got there. With several trials for each seed (external
         tuning) the settings are chosen by looking, with as many looks for each submission; with one it has to do
         without (self-tuning). A submission is credited with t(s, w) only if it also reaches the target of the held-out
         variants of w, within `MOST` times the fastest one there:

             1. on a held-out variant h of w:  t(s, h) = inf  where t(s, w) = inf
             2. anywhere:                      t(s, w) = inf  where t(s, w) > MOST min_s t(s, w)
             3. on a workload w:               t(s, w) = inf  where t(s, h) = inf

         Of n workloads, held-out variants not counted among them:

             r(s, w) = t(s, w) / min_s t(s, w)          infinite where t(s, w) is: nobody is best where all fail
             rho_s(tau) = |{w: r(s, w) <= tau}| / n     the performance profile, a staircase
             score_s = 1 / (MOST - 1) * integral of rho_s from 1 to MOST
                     = mean over w of max(0, MOST - r(s, w)) / (MOST - 1)

         1 is the fastest everywhere, ties included; 0 is never within `MOST` times the fastest.
Limits   A score is one beside these submissions: another one that is faster somewhere lowers it. Medians of an even
         number of seeds are means of the middle two. AlgoPerf's own script integrates 100 points of the profile by the
         trapezoidal rule, where this is exact: each workload differs by at most 1/198.
Source   Dahl et al., arXiv 2306.07179 (AlgoPerf); profiles: Dolan & Moré, Math. Programming 91 (2002). The order of
         steps 1 to 3, and that ratios are taken after them, as in mlcommons/algorithmic-efficiency, `scoring/`.
Checked  tests/study/test_time_to_result.py: by hand, figures of AlgoPerf's script, integrals on a grid, properties
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping
from typing import Final

MOST: Final = 4.0
"""Times the fastest submission: who is slower than that gets nothing, and the end of profiles."""
Times = Mapping[str, Mapping[str, float]]
"""By workload, then by submission; infinite: the target was never reached."""


def time_of(trials_by_seed: Collection[Collection[float]]) -> float:
    """The time of a submission on a workload: of each seed that of its fastest trial, of the seeds the median."""
    return statistics.median(min(trials) for trials in trials_by_seed)


def ratios(times: Times, held_out_of: Mapping[str, str]) -> dict[str, dict[str, float]]:
    """Times of workloads as multiples of the fastest one that is credited.

    Args:
        times: of all submissions on each workload, held-out variants among them.
        held_out_of: held-out variant to its workload.
    """
    found = {workload: dict(row) for workload, row in times.items()}
    for variant, workload in held_out_of.items():
        _fail(found[variant], {name for name, time in found[workload].items() if time == math.inf})
    for row in found.values():
        best = min(row.values(), default=math.inf)
        _fail(row, {name for name, time in row.items() if time > MOST * best})
    for variant, workload in held_out_of.items():
        _fail(found[workload], {name for name, time in found[variant].items() if time == math.inf})
    return {name: _by_best(row) for name, row in found.items() if name not in held_out_of}


def _fail(row: dict[str, float], names: Collection[str]) -> None:
    row.update(dict.fromkeys(names, math.inf))


def _by_best(row: Mapping[str, float]) -> dict[str, float]:
    best = min(row.values(), default=math.inf)
    return {name: time / best if time < math.inf else math.inf for name, time in row.items()}


def profile(ratios_of_one: Collection[float], tau: float) -> float:
    """The share of workloads on which a submission takes no more than `tau` times the fastest one's time."""
    return sum(ratio <= tau for ratio in ratios_of_one) / len(ratios_of_one)


def score(ratios_of_one: Collection[float]) -> float:
    """The area below a submission's profile from 1 to `MOST`, as a share of all of it."""
    return statistics.fmean(max(0.0, MOST - ratio) / (MOST - 1) for ratio in ratios_of_one)
