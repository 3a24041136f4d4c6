"""What was decided about a step's memory, with all that was known."""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.planner.bytes.account import StepAccount
from scrimp.planner.bytes.costs import StepCosts
from scrimp.planner.bytes.machine import Machine, Setup
from scrimp.planner.bytes.search import MemoryPlan
from scrimp.planner.bytes.states import States


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

    @property
    def fits(self) -> bool:
        """Whether the account is within the machine's memory."""
        return (
            self.account.peak <= self.machine.device_bytes
            and self.account.host_peak <= self.machine.host_bytes
        )
