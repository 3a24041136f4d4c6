"""What more memory would give, and what binds.

Each question is a search of its own, unless its answer is known: no step is shorter than its blocks' least computing
(`bound.least_seconds`), so that nothing is asked once less than `WORTH` is left to be gained.

Searches that both questions ask for are run once (`Searches`).

Checked  tests/planner/memory/test_frontier.py
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from scrimp.errors import PlanError
from scrimp.planner.memory.bound import least_seconds
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.search import search
from scrimp.planner.memory.search_space import Split
from scrimp.planner.memory.states import Floor, device_peak

Binding = Literal["device memory", "host memory", "link", "computing"]
MORE = (1.25, 1.5, 2.0)
WORTH = 0.005
_MORE_OF_ONE = 1.25
_ROUNDED = 1e-6
"""What sums of seconds may lose to rounding."""


@dataclass(frozen=True)
class Alternative:
    """A faster plan on a larger device."""

    more_bytes: int
    """On the device, above what there is."""
    faster: float
    """Share of the seconds that it saves."""
    plan: MemoryDecision


class Searches:
    """The fastest plans of other machines for the same step.

    Args:
        plan: from `search`.
        split: the placement of states, where the user decided; None: any.
    """

    def __init__(self, plan: MemoryDecision, split: Split | None = None) -> None:
        self.plan = plan
        self._split = split
        self._known: dict[Machine, MemoryDecision] = {}
        self._floors: dict[States, Floor] = {}

    def on(self, machine: Machine) -> MemoryDecision:
        """The fastest plan on that machine."""
        if machine not in self._known:
            self._known[machine] = search(
                self.plan.costs, machine, self.plan.setup, self._split, self._floors
            )
        return self._known[machine]


def frontier(searches: Searches, budgets: Iterable[int] | None = None) -> list[Alternative]:
    """The fastest plans that need a larger device, each faster than the one before by at least `WORTH`.

    Args:
        budgets: bytes of the devices; None: some multiples, and what everything resident needs.
    """
    plan = searches.plan
    costs, machine, seconds = plan.costs, plan.machine, plan.seconds
    least = least_seconds(costs, plan.setup)
    if budgets is None:
        resident = resident_bytes(costs, plan.setup)
        budgets = {*(int(machine.device_bytes * by) for by in MORE), max(resident, machine.device_bytes)}
    found: list[Alternative] = []
    fastest = seconds
    for budget in sorted(budget for budget in budgets if budget > machine.device_bytes):
        if fastest * (1 - WORTH) < least * (1 - _ROUNDED):
            break
        other = searches.on(replace(machine, device_bytes=budget))
        more = other.account.peak - machine.device_bytes
        if more > 0 and other.seconds < fastest * (1 - WORTH):
            found.append(Alternative(more, 1 - other.seconds / seconds, other))
            fastest = other.seconds
    return found


def binding(searches: Searches) -> tuple[Binding, float]:
    """What the plan would gain most from having a quarter more of, and the share of its seconds.

    "computing" where none of device memory, host memory and link gives `WORTH`.
    """
    plan = searches.plan
    costs, machine = plan.costs, plan.machine
    if plan.seconds * (1 - WORTH) < least_seconds(costs, plan.setup) * (1 - _ROUNDED):
        return "computing", 0.0
    wider: dict[Binding, Machine] = {
        "device memory": replace(machine, device_bytes=int(machine.device_bytes * _MORE_OF_ONE)),
        "host memory": replace(
            machine,
            host_bytes=int(machine.host_bytes * _MORE_OF_ONE),
            pinned_bytes=None if machine.pinned_bytes is None else int(machine.pinned_bytes * _MORE_OF_ONE),
        ),
        "link": replace(
            machine,
            upload=machine.upload * _MORE_OF_ONE,
            download=machine.download * _MORE_OF_ONE,
            upload_together=machine.upload_together * _MORE_OF_ONE,
            download_together=machine.download_together * _MORE_OF_ONE,
        ),
    }
    gains = {name: 1 - searches.on(other).timeline.seconds / plan.seconds for name, other in wider.items()}
    best = max(gains, key=lambda name: gains[name])
    return (best, gains[best]) if gains[best] >= WORTH else ("computing", 0.0)


def resident_bytes(costs: StepCosts, setup: Setup) -> int:
    """Bytes of the device with everything on it and every block's fastest choice that does not offload."""
    names = []
    for kind in costs.classes:
        kept = {name: cost for name, cost in kind.choices.items() if not cost.host}
        if not kept:
            raise PlanError("a block has no choice without offload", got=", ".join(kind.choices))
        names.append(
            min(kept, key=lambda n: (kept[n].forward_seconds + kept[n].backward_seconds, kept[n].kept))
        )
    activations = tuple(names[number] for number in costs.blocks)
    return device_peak(costs, Placement(activations, States.split(len(activations))), setup.accumulates)
