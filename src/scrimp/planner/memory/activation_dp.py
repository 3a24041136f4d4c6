"""The fastest activations for a given placement of states: a dynamic program over blocks with Pareto labels.

Problem  Each of L blocks takes one of up to 14 choices, so that every moment of the walk (`states`) stays under the
         device's bytes, all offloaded bytes under the host's, and the blocks compute least. With offload, least
         computing is not fastest: whoever asks wants all combinations of (offloaded bytes, seconds) of which none is
         worse in both.
Method   What later blocks see of earlier ones are five figures: the sums of kept, cast and offloaded bytes and of
         seconds, and the last block's bytes in flight. Less of each can only help: a label (one such five) that is
         not below another in any of them is dropped. Nothing else is lost, so that the labels after the last block
         are exact, up to seconds being counted in billionths of a step.
         Bytes in flight count as nothing where any choice of the next block has room beside them.
         A label is dropped too when no rest could bring it home: least kept bytes against the tightest later
         moment, least seconds against `within`. Where every block can have its fastest choice without offload,
         that is the answer.
Limits   Labels multiply. Above `effort` of them, the range of kept and offloaded bytes is cut into cells and the
         cheapest of each cell stays (and those with least of each): still plans that fit, but
         maybe not the fastest; `Front.is_exact` says which. Measured: tests/planner/memory/test_search.py.
Source   docs/memory.md; the multiple-choice knapsack's dynamic program (Kellerer, Pferschy, Pisinger, chapter 11).
Checked  tests/planner/memory/test_activation_dp.py: all placements of small problems.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from scrimp.planner.memory.costs import BlockClass, StepCosts
from scrimp.planner.memory.states import Floor

Array = NDArray[np.float64]
KEPT, FLIGHT, CAST, HOST, SECONDS = range(5)
TICK = 1e-9
_CHUNK = 512
_HOST_CELLS = 8
_AT_ONCE = 4
_EARLIER = np.triu(np.ones((_CHUNK, _CHUNK), np.bool_), 1)
"""[N, N] whether the first stands before the second."""


@dataclass(frozen=True)
class Front:
    """Combinations of which none is worse in offloaded bytes and in seconds."""

    host: Array
    """[N]"""
    seconds: Array
    """[N], of all blocks, forward and backward, one micro-batch."""
    choices: list[tuple[str, ...]]
    """[N][L] names."""
    is_exact: bool


@dataclass(frozen=True)
class _Table:
    """One class's choices that are not worse than another in everything."""

    names: list[str]
    figures: Array
    """[5, C] in the order of the labels; seconds in ticks, of which all blocks have at most 1 / TICK."""
    forward: Array
    """[C] peaks."""
    backward: Array

    def of(self, which: Sequence[int] | NDArray[np.int64]) -> _Table:
        """Some of the choices."""
        names = [self.names[k] for k in which]
        index = np.asarray(which, np.int64)
        return _Table(names, self.figures[:, index], self.forward[index], self.backward[index])

    def plain(self) -> _Table:
        """The fastest choice alone, if it does not offload; nothing otherwise."""
        first = int(np.lexsort(self.figures[[KEPT, HOST, SECONDS]])[0])
        return self.of([first] if self.figures[HOST, first] == 0 else [])


def fastest(
    costs: StepCosts,
    floor: Floor,
    *,
    accumulates: bool,
    device_bytes: int,
    host_bytes: int,
    within: float = float("inf"),
    effort: int = 128,
    free: Sequence[int] = (),
) -> Front:
    """All best combinations of one placement of states.

    Args:
        floor: bytes that the states take.
        device_bytes: for everything on the device.
        host_bytes: for offloaded activations.
        within: seconds of all blocks above which nobody is interested.
        effort: labels per block above which they are thinned.
        free: figures (HOST, SECONDS) that count as nothing: fewer labels where only feasibility is asked.
    """
    tick = TICK * max(_most_seconds(costs), 1e-30)
    tables = [_table(kind, accumulates, free, tick) for kind in costs.classes]
    limits = _Limits(floor, device_bytes, host_bytes, within / tick + len(costs.blocks))
    plain = [table.plain() for table in tables]
    if SECONDS not in free and all(table.names for table in plain):
        front = _run(costs, plain, limits, effort, tick)
        if len(front.host):
            return front
    return _run(costs, tables, limits, effort, tick)


@dataclass(frozen=True)
class _Limits:
    floor: Floor
    device_bytes: int
    host_bytes: int
    within: float


def _run(costs: StepCosts, tables: Sequence[_Table], limits: _Limits, effort: int, tick: float) -> Front:
    """The dynamic program."""
    steps = [tables[number] for number in costs.blocks]
    needs = _needs(costs.blocks, tables, limits.floor)
    room, ever = _room(costs.blocks, tables, needs, limits)
    least = [table.figures[SECONDS].min() for table in tables]
    rest = np.cumsum([0.0, *(least[number] for number in reversed(costs.blocks))])[::-1]
    labels = np.array([[costs.boundary], [0.0], [0.0], [0.0], [0.0]])
    if costs.boundary > ever[0] or limits.floor.rest > limits.device_bytes:
        labels = labels[:, :0]
    history: list[NDArray[np.int64]] = []
    is_exact = True
    for i, table in enumerate(steps):
        if not labels.shape[1]:
            return Front(np.zeros(0), np.zeros(0), [], is_exact)
        labels, fits = _extend(labels, table, needs[i], limits.device_bytes)
        _forget_flight(labels, needs[i + 1] if i + 1 < len(needs) else None, limits.device_bytes)
        fits &= labels[KEPT] + labels[FLIGHT] <= room[i + 1]
        fits &= labels[KEPT] <= ever[i + 1]
        fits &= labels[HOST] <= limits.host_bytes
        fits &= labels[SECONDS] + rest[i + 1] <= limits.within
        keep, thinned = _prune(labels, fits.nonzero()[0], effort)
        is_exact &= not thinned
        labels = labels.take(keep, axis=1)
        history.append(keep)
    last = labels[KEPT] + labels[CAST] + limits.floor.head <= limits.device_bytes
    ends = _staircase(labels, np.flatnonzero(last))
    return Front(labels[HOST, ends], labels[SECONDS, ends] * tick, _trace(steps, history, ends), is_exact)


def _most_seconds(costs: StepCosts) -> float:
    """Seconds of all blocks, each at its slowest."""
    slowest = [max(c.forward_seconds + c.backward_seconds for c in k.choices.values()) for k in costs.classes]
    return sum(slowest[number] for number in costs.blocks)


def _table(kind: BlockClass, accumulates: bool, free: Sequence[int], tick: float) -> _Table:
    names, items = list(kind.choices), list(kind.choices.values())
    seconds = [round((c.forward_seconds + c.backward_seconds) / tick) for c in items]
    bytes_ = [[c.kept, c.host, c.cast, c.host] for c in items]
    figures = np.column_stack([np.array(bytes_, np.float64), np.array(seconds, np.float64)]).T
    figures[list(free)] = 0.0
    forward = np.array([c.forward_peak for c in items], np.float64)
    backward = np.array([c.peak_of_backward(accumulates) for c in items], np.float64)
    return _Table(names, figures, forward, backward).of(_undominated(np.vstack([figures, forward, backward])))


@dataclass(frozen=True)
class _Needs:
    """[C] bytes of a block's passes beside kept and in flight, by its choices."""

    forward: Array
    """Its casts come on top."""
    backward: Array

    @cached_property
    def least(self) -> float:
        """Least bytes that both passes fit into: those of the most frugal choice."""
        return float(np.maximum(self.forward, self.backward).min())

    @cached_property
    def most(self) -> tuple[float, float]:
        """Most bytes that the forward and the backward pass take, each of any choice."""
        return float(self.forward.max()), float(self.backward.max())


def _needs(blocks: Sequence[int], tables: Sequence[_Table], floor: Floor) -> list[_Needs]:
    """What each block needs; blocks of one class beside as many bytes share theirs."""
    known: dict[tuple[int, ...], _Needs] = {}
    found = []
    for key in zip(blocks, floor.forward.tolist(), floor.backward.tolist(), floor.sent.tolist(), strict=True):
        if key not in known:
            table, (forward, backward, sent) = tables[key[0]], map(float, key[1:])
            known[key] = _Needs(table.forward + forward, np.maximum(table.backward + backward, sent))
        found.append(known[key])
    return found


def _room(
    blocks: Sequence[int], tables: Sequence[_Table], needs: Sequence[_Needs], limits: _Limits
) -> tuple[Array, Array]:
    """[L + 1] bytes before a block above which no rest fits: kept and in flight, for the block; kept, for all later."""
    room = limits.device_bytes - np.array([*(need.least for need in needs), -np.inf])
    ever = np.append(room[:-1], float(limits.device_bytes - limits.floor.head))
    figures = [table.figures for table in tables]
    kept = [one[KEPT].min() for one in figures]
    both = [(one[KEPT] + one[FLIGHT]).min() for one in figures]
    for i in reversed(range(len(blocks))):
        ever[i] = min(room[i], ever[i + 1] - kept[blocks[i]], room[i + 1] - both[blocks[i]])
    return room, ever


def _extend(
    labels: Array, table: _Table, needs: _Needs, device_bytes: int
) -> tuple[Array, NDArray[np.bool_]]:
    """[5, N * C] each label with each choice, and whether its block's passes leave room for that."""
    at = labels[KEPT] + labels[FLIGHT]
    fits = (at + labels[CAST])[:, None] + needs.forward <= device_bytes
    fits &= at[:, None] + needs.backward <= device_bytes
    new = labels[:, :, None] + table.figures[:, None, :]
    new[FLIGHT] = table.figures[FLIGHT]
    return new.reshape(len(new), -1), fits.ravel()


def _forget_flight(labels: Array, needs: _Needs | None, device_bytes: int) -> None:
    """What is in flight counts as nothing where any choice of the next block has room beside it."""
    if needs is None:  # the head waits for it
        labels[FLIGHT] = 0.0
        return
    at = labels[KEPT] + labels[FLIGHT]
    forward, backward = needs.most
    tight = at + labels[CAST] > device_bytes - forward
    tight |= at > device_bytes - backward
    labels[FLIGHT] *= tight


def _prune(labels: Array, alive: NDArray[np.int64], effort: int) -> tuple[NDArray[np.int64], bool]:
    """Those of the alive that stay, and whether labels that nothing is better than had to go."""
    some = labels.take(alive, axis=1)
    thinned = len(alive) > _AT_ONCE * effort
    if thinned:
        stays = _thin(some, effort)
        alive, some = alive[stays], some.take(stays, axis=1)
    keep = _undominated(some)
    if len(keep) > effort:
        return alive[keep[_thin(some.take(keep, axis=1), effort)]], True
    return alive[keep], thinned


def _undominated(figures: Array) -> NDArray[np.int64]:
    """[D, N]: columns for which no other is at most the same in everything; the first of equal ones."""
    number = figures.shape[1]
    if number < 2:
        return np.arange(number)
    varying = (figures != figures[:, :1]).any(axis=1).nonzero()[0]
    if not len(varying):
        return np.arange(1)
    figures = figures[varying]
    order = np.lexsort(figures)
    sorted_ = figures.take(order, axis=1)
    kept = np.zeros(0, np.int64)
    for start in range(0, number, _CHUNK):
        part = np.arange(start, min(start + _CHUNK, number))
        if len(kept):
            part = part[~_are_beaten(sorted_[:, part], sorted_[:, kept])]
        here = sorted_[:, part] if start else sorted_[:, : len(part)]
        kept = np.concatenate([kept, part[~_are_beaten(here, here, _EARLIER[: len(part), : len(part)])]])
    return np.sort(order[kept])


def _are_beaten(rows: Array, by: Array, may: NDArray[np.bool_] | None = None) -> NDArray[np.bool_]:
    """Which columns of `rows` have one in `by` that is at most the same in everything; the last row is sorted.

    Args:
        may: [columns of `by`, columns of `rows`] pairs that are compared; None: all.
    """
    beaten: NDArray[np.bool_] = np.ones((by.shape[1], rows.shape[1]), np.bool_) if may is None else may.copy()
    for row, other in zip(rows[:-1], by[:-1], strict=True):
        np.logical_and(beaten, other[:, None] <= row, out=beaten)
    found: NDArray[np.bool_] = np.asarray(beaten.any(axis=0), np.bool_)
    return found


def _thin(labels: Array, effort: int) -> NDArray[np.int64]:
    """The cheapest of each cell of kept and offloaded bytes, about `effort` in all.

    Bytes cost what they save between the label with least of them and the fastest: within a cell more would win.
    """
    kept, host, seconds = labels[KEPT] + labels[FLIGHT], labels[HOST], labels[SECONDS]
    frugal, fast = _least(kept, seconds), _least(seconds, kept)
    at_home = _least(host, seconds)
    cost = seconds + _price(kept, seconds, frugal, fast) * kept + _price(host, seconds, at_home, fast) * host
    host_cells = _HOST_CELLS if host[host.argmax()] > host[at_home] else 1
    cells = _cells(kept, kept[frugal], max(effort // host_cells, 1))
    if host_cells > 1:
        cells = cells * host_cells + _cells(host, host[at_home], host_cells)
    # Of what is assigned to a cell, the last stays: the cheapest, of equal ones the first.
    order = cost.argsort(kind="stable")[::-1]
    cheapest = np.full(effort + _HOST_CELLS, fast)
    cheapest[cells[order]] = order
    stays = np.zeros(len(cost), np.bool_)
    stays[cheapest] = stays[[frugal, at_home, fast]] = True
    return stays.nonzero()[0]


def _price(amount: Array, seconds: Array, least: int, fast: int) -> float:
    """Seconds that one byte saves."""
    more = float(amount[fast] - amount[least])
    return max(float(seconds[least] - seconds[fast]), 0.0) / more if more > 0 else 0.0


def _least(first: Array, second: Array) -> int:
    """Index of the least; of equal ones, that with the least second value."""
    ties = (first == first[first.argmin()]).nonzero()[0]
    return int(ties[second[ties].argmin()])


def _cells(values: Array, low: float, count: int) -> NDArray[np.int64]:
    """Which of `count` cells; the least value, `low`, has one of its own."""
    high = values[values.argmax()]
    if high <= low or count < 2:
        return np.zeros(len(values), np.int64)
    cells: NDArray[np.int64] = ((values - low) * ((count - 1) / (high - low))).astype(np.int64)
    np.minimum(cells, count - 2, out=cells)
    cells += values > low
    return cells


def _staircase(labels: Array, which: NDArray[np.int64]) -> NDArray[np.int64]:
    """Those of which no other has fewer offloaded bytes and fewer seconds; most seconds last."""
    found: NDArray[np.int64] = which[_undominated(labels[[HOST, SECONDS]][:, which])]
    return found


def _trace(
    steps: Sequence[_Table], history: Sequence[NDArray[np.int64]], labels: NDArray[np.int64]
) -> list[tuple[str, ...]]:
    """The names that these labels chose.

    Args:
        history: of each block, label * choices + choice of the labels that stayed.
    """
    names = []
    for table, kept in zip(reversed(steps), reversed(history), strict=True):
        labels, chosen = np.divmod(kept[labels], len(table.names))
        names.append([table.names[choice] for choice in chosen.tolist()])
    return list(zip(*reversed(names), strict=True))
