"""What was decided about a step's memory, with all that was known."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from scrimp.planner.memory.account import StepAccount, account_step
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.search import MemoryPlan
from scrimp.planner.memory.states import States
from scrimp.planner.memory.timeline import Timeline, step_timeline


@dataclass(frozen=True)
class MemoryDecision:
    """What blocks do, and where their states live."""

    costs: StepCosts
    machine: Machine
    setup: Setup
    activations: tuple[str, ...]
    """By block."""
    states: States
    account: StepAccount
    reason: str
    plan: MemoryPlan | None
    """What the search found; None where the user decided."""
    seconds_origin: str | None = "predicted"
    """Where the seconds of blocks come from: measured on this device, or predicted from their work; None: nobody asked
    for them."""

    def changed(self, plan: MemoryPlan, reason: str) -> MemoryDecision:
        """The decision with another plan of the same costs."""
        account = account_step(self.costs, plan.states, plan.activations, accumulates=self.setup.accumulates)
        return replace(
            self,
            activations=plan.activations,
            states=plan.states,
            account=account,
            reason=reason,
            plan=plan,
        )

    @cached_property
    def timeline(self) -> Timeline:
        """Predicted seconds of a step."""
        return step_timeline(self.costs, self.states, self.activations, self.setup, self.machine)

    @property
    def step_seconds(self) -> float | None:
        """Predicted; None where the seconds of blocks are not known."""
        return None if self.seconds_origin is None else self.timeline.seconds

    @property
    def is_resident(self) -> bool:
        """Whether everything is kept, on the device."""
        return self.states.is_resident and set(self.activations) == {"keep"}

    @property
    def fits(self) -> bool:
        """Whether the account is within the machine's memory."""
        return (
            self.account.peak <= self.machine.device_bytes
            and self.account.host_peak <= self.machine.host_bytes
        )
