"""How sure a plan is, and when a new one is worth a change.

Statistics are of a few batches; another few would give other costs. Three answers::

    certainty    batches are drawn with replacement and the program is solved again: the share of draws in which a GEMM
                 gets the same format
    switching    leaving a GEMM's current format costs `DOUBT` standard errors (over batches) of the difference that
                 it would make: decisions whose intervals overlap are not flipped
    hysteresis   the whole plan changes only if the old one, re-scored, costs `WORTH` more than the new one, or no
                 longer keeps its budget

Start    Of the first plan the old one is that of `RULE`, which needs no statistics and trains as well where they have
         little to add (docs/snip.md): measured costs must be worth leaving it. Budgets that the rule does not know, and
         layers whose GEMMs go together, have no such start.
Checked  tests/planner/precision/test_stability.py
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from scrimp.config.snip import keeps_budget
from scrimp.planner.precision.choose import (
    Choice,
    Question,
    choose,
    harm_of,
    is_low,
    is_solved,
    is_within,
    priced,
    share_in_4_bits,
)
from scrimp.planner.precision.policies import costs_of, is_per_gemm
from scrimp.precision import GEMMS

Array = NDArray[np.float64]
RULE = "backward-first"
WORTH = 0.05
DOUBT = 1.0
DRAWS = 16


def certainty(question: Question, choice: Choice, *, draws: int = DRAWS) -> Array | None:
    """[L, 3], from 0 to 1; None where one batch says nothing of its neighbours, or where nothing was solved."""
    batches = question.profile.batches
    if len(batches) < 2 or choice.solution is None:
        return None
    generator = np.random.default_rng(0)
    same = np.zeros(choice.formats.shape)
    for _ in range(draws):
        drawn = generator.integers(len(batches), size=len(batches))
        profile = replace(question.profile, batches=tuple(batches[i] for i in drawn))
        same += choose(replace(question, profile=profile)).formats == choice.formats
    return same / draws


def switching_costs(question: Question) -> Array | None:
    """[L, 3, P]; None without a current plan or with fewer than two batches."""
    profile = question.profile
    if question.current is None or len(profile.batches) < 2:
        return None
    samples = []
    for batch in profile.batches:
        one = replace(profile, batches=(batch,))
        costs = costs_of(question.policy, one, weights=question.weights, method=question.method)
        if is_per_gemm(question.policy):
            samples.append(costs.reshape(len(profile.layers), len(GEMMS), -1))
        else:
            spread = np.zeros((len(profile.layers), len(GEMMS), costs.shape[-1]))
            spread[:, 0] = costs
            samples.append(spread)
    now = question.current[:, :, None]
    differences = np.stack([sample - np.take_along_axis(sample, now, axis=2) for sample in samples])
    errors: Array = DOUBT * differences.std(axis=0, ddof=1) / np.sqrt(len(samples))
    return errors


def settle(question: Question) -> tuple[Choice, str]:
    """The choice to go on with, and why it is the new or the old one."""
    if not is_solved(question):
        without = "" if keeps_budget(question.policy) else ", which keeps no budget"
        return choose(question), f"policy {question.policy}{without}"
    if question.current is not None:
        choice, changed, why = _instead_of_current(question)
        if changed:
            return choice, f"{changed} GEMMs changed: the old plan {why}"
        return choice, f"kept: {why}" if why else "the same plan again"
    rule = _by_rule(question)
    if rule is None:
        return choose(question), "first plan"
    choice, changed, why = _instead_of_current(replace(question, current=rule))
    if changed:
        return choice, f"first plan: {changed} GEMMs differ from {RULE}, which {why}"
    return choice, f"first plan: that of {RULE}" + (f"; {why}" if why else "")


def _by_rule(question: Question) -> NDArray[np.int64] | None:
    """[L, 3], where the first plan starts from; None where the rule has no plan."""
    if question.policy != "snip" or question.budget.fp4_flops is None or question.together is not None:
        return None
    profile, rule = question.profile, choose(replace(question, policy=RULE)).formats
    # It says what runs in 4 bits; of wider formats the budget asks for none, so that each takes its best.
    costs = costs_of(question.policy, profile, weights=question.weights, method=question.method)
    low = is_low(profile.formats)
    wide = np.where(low, np.inf, priced(question, costs.reshape(*rule.shape, -1)))
    return np.where(low[rule] | np.isinf(wide).all(axis=2), rule, wide.argmin(axis=2))


def _instead_of_current(question: Question) -> tuple[Choice, int, str]:
    """The choice to go on with, how many GEMMs it changes, and why; "" where nothing else was found."""
    current = question.current
    assert current is not None
    choice = choose(replace(question, switching=switching_costs(question)))
    changed = int((choice.formats != current).sum())
    if not changed:
        return choice, 0, ""
    if not is_within(question, current):
        return choice, changed, "no longer keeps the budget"
    before, after = harm_of(choice.costs, current), harm_of(choice.costs, choice.formats)
    gain = (before - after) / before if before > 0 else 0.0
    if gain < WORTH:
        share = share_in_4_bits(question.profile, current)
        kept = replace(choice, formats=current, fp4_flops=share)
        return kept, 0, f"a new plan would cost {gain:.1%} less, under {WORTH:.0%}"
    more = f"{before / after - 1:.0%} more" if after > 0 else "more than nothing"
    return choice, changed, f"costs {more}"
