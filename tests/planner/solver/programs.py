"""Programs to test solvers with, and an oracle that tries every plan."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from scrimp.planner.solver.program import Limit, Program

Floats = NDArray[np.float64]

SHAPES = {
    "TinyLlama": (22, 2048, 256, 5632),
    "3B": (26, 3200, 3200, 8640),
    "7B": (32, 4096, 4096, 11008),
    "70B": (80, 8192, 1024, 28672),
}
"""Layers, width, width of k and v, FFN width."""


def linear_sizes(model: str) -> Floats:
    """Weights of all q, k, v, o, gate, up, down of a model, layer by layer."""
    layers, width, kv, ffn = SHAPES[model]
    return np.tile(np.array([width, kv, kv, width, ffn, ffn, ffn]) * float(width), layers)


def share_limit(
    sizes: Floats, low: list[bool], least: float, among: NDArray[np.bool_] | None = None
) -> Limit:
    """At least a share of the weights (of some decisions) in the formats marked low."""
    among = np.ones(len(sizes), dtype=bool) if among is None else among
    shares = np.where(among, sizes / sizes[among].sum(), 0.0)
    name = "the FP4 share" if among.all() else f"the FP4 share of the stage from {int(among.argmax())}"
    return Limit(name, shares[:, None] * np.array(low, dtype=float), least=least)


def stages(num_decisions: int, count: int) -> list[NDArray[np.bool_]]:
    """Masks of equal parts."""
    stage = np.arange(num_decisions) * count // num_decisions
    return [stage == number for number in range(count)]


def large_program(seed: int, *, count: int = 80, seconds: bool = False) -> Program:
    """Four formats, four stages with a least FP4 share each, and one over all; with seconds per stage too."""
    random = np.random.default_rng(seed)
    sizes = random.choice([1.0, 8.0, 28.0], count)
    harm = random.lognormal(0.0, 1.5, count)
    factors = random.lognormal(0.0, 0.3, (count, 4)) * [0.0, 0.02, 1.0, 1.3]
    limits = [share_limit(sizes, [False, False, True, True], 0.7)]
    for stage in stages(count, 4):
        limits.append(share_limit(sizes, [False, False, True, True], 0.5, stage))
        if seconds:
            times = sizes[:, None] * random.lognormal(0.0, 0.05, (count, 4)) * [4.0, 2.1, 1.2, 1.1]
            times[~stage] = 0.0
            limits.append(
                Limit(f"seconds of stage {len(limits)}", times, most=1.25 * times.min(axis=1).sum())
            )
    return Program(harm[:, None] * factors, tuple(limits))


def tangled_program(seed: int) -> Program:
    """30 decisions under 4 limits that overlap everywhere: a solver has to search."""
    random = np.random.default_rng(seed)
    amounts = random.lognormal(0.0, 1.0, (4, 30, 3))
    limits = [
        Limit(f"limit {k}", one, most=0.5 * one.mean(axis=1).sum() + 0.5 * one.min(axis=1).sum())
        for k, one in enumerate(amounts)
    ]
    return Program(random.lognormal(0.0, 1.0, (30, 3)), tuple(limits))


def all_plans(program: Program) -> Iterator[tuple[NDArray[np.int64], float]]:
    """Every plan that holds all limits, with its cost; sums by `math.fsum`."""
    num_decisions, num_formats = np.shape(program.costs)
    for plan in itertools.product(range(num_formats), repeat=num_decisions):
        cost = math.fsum(program.costs[n, p] for n, p in enumerate(plan))
        if math.isfinite(cost) and all(holds(limit, plan) for limit in program.limits):
            yield np.array(plan), cost


def holds(limit: Limit, plan: tuple[int, ...] | NDArray[np.int64]) -> bool:
    """A limit, to 1e-9 of it."""
    total = math.fsum(limit.amounts[n, p] for n, p in enumerate(plan))
    return limit.least - 1e-9 * abs(limit.least) <= total <= limit.most + 1e-9 * abs(limit.most)


def cheapest(program: Program) -> float | None:
    """The least cost of all plans; None if there is no plan."""
    return min((cost for _, cost in all_plans(program)), default=None)


@st.composite
def small_programs(draw: st.DrawFn, *, nested: bool = False, missed: float = 0.1) -> Program:
    """Up to 5 decisions, 3 formats and 5 limits.

    Costs may span ten powers of ten; limits lie inside each other in proportion, or (not `nested`) overlap.
    A limit is met by some plan, except for a share `missed` of them.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    num_decisions, num_formats = draw(st.integers(1, 5)), draw(st.integers(1, 3))
    shape = (num_decisions, num_formats)
    wide = draw(st.booleans())
    costs = 10.0 ** random.uniform(-7, 3, shape) if wide else random.integers(0, 6, shape).astype(float)
    allowed = random.random(shape) < 0.8
    allowed[np.arange(num_decisions), random.integers(0, num_formats, num_decisions)] = True
    costs[~allowed] = math.inf
    whole = draw(st.booleans())
    amounts = random.integers(0, 9, shape).astype(float) if whole else random.lognormal(0.0, 1.0, shape)
    amounts *= 10.0 ** draw(st.integers(-6, 12))
    stage = random.integers(0, 3, num_decisions)
    limits = [_limit(random, "all", amounts, allowed, missed)]
    for number in range(draw(st.integers(0, 3))):
        factor = random.uniform(0.1, 5.0)
        part = np.where((stage == number)[:, None], factor * amounts, 0.0)
        limits.append(_limit(random, f"stage {number}", part, allowed, missed))
    if not nested and draw(st.booleans()):
        limits.append(_limit(random, "other", random.lognormal(0.0, 1.0, shape), allowed, missed))
    return Program(costs, tuple(limits))


def _limit(
    random: np.random.Generator, name: str, amounts: Floats, allowed: NDArray[np.bool_], missed: float
) -> Limit:
    """A limit around the sum of a random plan, now and then beside it."""
    plan = [random.choice(np.flatnonzero(row)) for row in allowed]
    total = math.fsum(amounts[n, p] for n, p in enumerate(plan))
    total += (random.random() < missed) * random.normal() * amounts.max()
    limit = Limit(name, amounts)
    kind = random.integers(0, 3)
    if kind != 1:
        limit = dataclasses.replace(limit, least=total)
    if kind != 0:
        limit = dataclasses.replace(limit, most=total * (1.0 + 0.2 * (kind == 2)) if total > 0.0 else total)
    return limit


def least_cost(costs: Floats, units: NDArray[np.int64], least: int) -> float:
    """The least cost of plans of many decisions whose units [N, P] add up to `least`, by a table.

    After each decision the table holds the least cost by the units so far; more than `least` count as `least`.
    """
    best = np.full(least + 1, math.inf)
    best[0] = 0.0
    reached = np.arange(least + 1)
    for prices, adds in zip(costs, units, strict=True):
        new = np.full(least + 1, math.inf)
        for price, more in zip(prices, adds, strict=True):
            np.minimum.at(new, np.minimum(reached + more, least), best + price)
        best = new
    return float(best[least])
