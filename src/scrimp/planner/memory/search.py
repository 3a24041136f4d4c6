"""The fastest step that fits the device and the host: placement of states and activations of every block.

Problem  States of any block can leave the device, activations be kept, made again or offloaded: 8^L 14^L plans. Peaks
         are not monotone in them.
Method   A placement of states is how many blocks of each class are on the host (`States.split`) and who updates them.
         For one placement, `activation_dp` gives the activations with least computing for every amount of offload.
         Those with the least lower bound (`bound`) are simulated (`timeline`), fastest first, until the bound passes
         the best.
         Placements: first all and none of each class, CPU Adam also of parts; then, from the fastest of each
         updater, one class at a time less or more, or one less and another more, by steps L/2, L/4, ... 1, as long
         as something gets faster (or as fast with less on the host). A placement whose bound is above the plan that it
         must beat is not solved. Everything resident is the first candidate.
         Then every point of ProTrain's space (`protrain`): peaks are not monotone, so all are looked at, but for
         those that the bound or the host rules out. Of few blocks every placement is. Where nothing was found, every
         placement is judged before the run is refused (`feasible`).
What is  exact   ProTrain's space, by the simulation; the activations of one placement for least computing, as long as
exact            `is_exact`; the bounds; whether anything fits, within the limits of `feasible`
         not     the descent over placements; weights of the first, gradients and states of the last blocks only;
                 one updater for all; the choice by computing and offloaded bytes before the simulation. Regret is
                 measured against all placements of small problems by the same simulation.
Source   docs/memory.md; ProTrain's search over (persistent chunks, buffers, swapped, checkpointed blocks).
Checked  tests/planner/memory/test_search.py, test_feasible.py
"""

from __future__ import annotations

import math

from scrimp.planner.memory.account import account_step
from scrimp.planner.memory.activation_dp import Front, fastest
from scrimp.planner.memory.bound import Bound, least_passes
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.feasible import any_that_fits
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.protrain import Points
from scrimp.planner.memory.room import smallest
from scrimp.planner.memory.search_space import Split, chain, corners, diagonal, everywhere
from scrimp.planner.memory.states import Floor, device_peak, floor_of

EFFORT = 64
FINAL_EFFORT = 384
_SIMULATED = 2
_FINAL_SIMULATED = 6
_NEAR = 2e-3
_SLACK = 1.2
_FAR = 8
_ALIKE = 1e-9
_FEW = 200


def search(
    costs: StepCosts, machine: Machine, setup: Setup | None = None, split: Split | None = None
) -> MemoryDecision:
    """The fastest plan within the machine's memory.

    Args:
        split: the placement of states, where the user decided; None: any.

    Raises:
        NoRoomError: nothing fits; it says what would.
    """
    setup = setup or Setup()
    plan = find(costs, machine, setup, split)
    if plan is None:
        raise smallest(costs, machine, setup, split)
    return plan


def find(
    costs: StepCosts, machine: Machine, setup: Setup, split: Split | None = None
) -> MemoryDecision | None:
    """The same; None where nothing fits, without asking what would."""
    run = _Search(costs, machine, setup)
    if split is not None:
        run.look_at_points(split.within(len(costs.blocks)))
        if run.best is None:
            run.look_for_any(split.within(len(costs.blocks)))
        return None if run.best is None else run.finish()
    updaters = setup.updaters_on(machine)
    for corner in corners(len(costs.blocks), updaters):
        run.look_at(corner, run.best, _SLACK)
    if run.best is None:
        for link in chain(len(costs.blocks), updaters[0]):
            run.look_at(link)
    run.descend()
    run.look_at_small_spaces()
    if run.best is None and run.look_for_any():
        run.descend()
    return None if run.best is None else run.finish()


class _Search:
    """The best plan so far, and what was looked at."""

    def __init__(self, costs: StepCosts, machine: Machine, setup: Setup) -> None:
        self.costs, self.machine, self.setup = costs, machine, setup
        self.blocks, self.updaters = len(costs.blocks), setup.updaters_on(machine)
        self.least = least_passes(costs)
        small = Points(costs)
        self.points, self.names_of = list(small), small.names
        self.best: MemoryDecision | None = None
        self.seen: dict[Split, MemoryDecision | None] = {}

    def look_at(
        self, split: Split, than: MemoryDecision | None = None, slack: float = 1.0
    ) -> MemoryDecision | None:
        """The best plan of one placement; None if it does not fit, or cannot be better than `than` (times slack)."""
        if split not in self.seen:
            self._consider(split, self._plan(split, EFFORT, than, slack))
        return self.seen[split]

    def descend(self) -> None:
        """From the best placement of each updater by smaller and smaller steps."""
        for update in dict.fromkeys(("device", *self.updaters)):
            found = [
                (plan.seconds, i, split)
                for i, (split, plan) in enumerate(self.seen.items())
                if plan is not None and split.update == update
            ]
            split = min(found)[2] if found else None
            step = -(-self.blocks // 2)
            while split is not None and step:
                better = self._best_move(split, step)
                split, step = (better, step) if better is not None else (split, step // 2)

    def look_at_small_spaces(self) -> bool:
        """Every point of ProTrain's space, and where that are few, every placement; whether anything was better."""
        before = self.best
        for split in diagonal(self.blocks, self.updaters):
            self.look_at_points(split)
        if len(self.updaters) * (self.blocks + 1) ** 3 <= _FEW:
            for split in everywhere(self.blocks, self.updaters):
                self.look_at(split, self.best)
        return self.best is not before

    def look_at_points(self, split: Split) -> None:
        """The best activations of one placement, and each of ProTrain's that could be faster."""
        self.look_at(split, self.best)
        states = split.states(self.blocks)
        floor, left = self._floor(states)
        bound = Bound.of(self.costs, states, self.setup, self.machine)
        if floor is None or bound.seconds(self.least) >= self._limit():
            return
        free = self.machine.device_bytes - floor.head - self.costs.boundary
        found = (
            (bound.seconds(point.passes, point.host), k)
            for k, point in enumerate(self.points)
            if point.host <= left and point.before_head <= free
        )
        for least, k in sorted(found):
            if least >= self._limit():
                return
            placement = Placement(self.names_of(self.points[k]), states)
            if device_peak(self.costs, placement, self.setup.accumulates) <= self.machine.device_bytes:
                self._consider(split, self._plan_of(placement))

    def look_for_any(self, only: Split | None = None) -> bool:
        """Any plan that fits, whatever it takes; whether there is one."""
        found = any_that_fits(self.costs, self.machine, self.setup, only)
        if found.split is None:
            return False
        placement = Placement(found.activations, found.split.states(self.blocks))
        self._consider(found.split, self._plan_of(placement))
        return True

    def _limit(self) -> float:
        """Seconds that a plan must be below to be better."""
        return math.inf if self.best is None else self.best.seconds * (1 - _ALIKE)

    def finish(self) -> MemoryDecision:
        """The best plan, its activations once more with more labels."""
        assert self.best is not None
        if not self.best.is_exact:
            self._consider(self.best_split, self._plan(self.best_split, FINAL_EFFORT, self.best, 1.0))
        return self.best

    def _consider(self, split: Split, plan: MemoryDecision | None) -> None:
        self.seen[split] = plan
        if plan is not None and _is_better(plan, self.best):
            self.best, self.best_split = plan, split

    def _best_move(self, split: Split, step: int) -> Split | None:
        """The best neighbour that is better than the placement itself."""
        best, found = self.seen[split], None
        than = best if step * _FAR > self.blocks else self.best
        for other in split.neighbours(step, self.blocks):
            if other.optimizer and other.update not in self.updaters:
                continue
            plan = self.look_at(other, than)
            if plan is not None and _is_better(plan, best):
                best, found = plan, other
        return found

    def _plan(
        self, split: Split, effort: int, than: MemoryDecision | None, slack: float
    ) -> MemoryDecision | None:
        states = split.states(self.blocks)
        floor, left = self._floor(states)
        if floor is None:
            return None
        bound = Bound.of(self.costs, states, self.setup, self.machine)
        within = float("inf")
        if than is not None:
            limit = than.seconds * slack * (1 + _ALIKE if floor.host < than.account.host_peak else 1 - _ALIKE)
            if bound.seconds(self.least) > limit:
                return None
            within = bound.passes_within(limit)
        front = fastest(
            self.costs,
            floor,
            accumulates=self.setup.accumulates,
            device_bytes=self.machine.device_bytes,
            host_bytes=left,
            within=within,
            effort=effort,
        )
        return self._simulate(states, front, bound, is_final=effort != EFFORT)

    def _floor(self, states: States) -> tuple[Floor | None, int]:
        """What states take, None where that alone is too much, and the host's bytes for activations."""
        floor = floor_of(self.costs, states, self.setup.accumulates)
        left = min(self.machine.host_bytes - floor.host, self.machine.pinnable - floor.pinned)
        fits = left >= 0 and floor.rest <= self.machine.device_bytes
        return (floor if fits else None), left

    def _simulate(self, states: States, front: Front, bound: Bound, is_final: bool) -> MemoryDecision | None:
        """The best of a front by the simulation, those with the least bound first."""
        order = sorted(
            (bound.seconds(seconds, host), host, k)
            for k, (seconds, host) in enumerate(zip(front.seconds, front.host, strict=True))
        )
        best: MemoryDecision | None = None
        for least, _, k in order[: _FINAL_SIMULATED if is_final else _SIMULATED]:
            if best is not None and least >= best.seconds * (1.0 if is_final else 1 - _NEAR):
                break
            plan = self._plan_of(Placement(front.choices[k], states), is_exact=front.is_exact)
            best = plan if _is_better(plan, best) else best
        return best

    def _plan_of(self, placement: Placement, *, is_exact: bool = False) -> MemoryDecision:
        account = account_step(self.costs, placement, accumulates=self.setup.accumulates)
        reason = f"the fastest that was found within {self.machine.device_bytes:,} bytes"
        return MemoryDecision(
            self.costs,
            self.machine,
            self.setup,
            placement,
            account,
            reason,
            is_searched=True,
            is_exact=is_exact,
        )


def _is_better(plan: MemoryDecision, than: MemoryDecision | None) -> bool:
    """Faster; or as fast, with less on the host."""
    if than is None or plan.seconds < than.seconds * (1 - _ALIKE):
        return True
    is_as_fast = plan.seconds <= than.seconds * (1 + _ALIKE)
    return is_as_fast and plan.account.host_peak < than.account.host_peak
