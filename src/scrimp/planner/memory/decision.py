"""What is decided about a step's memory: a placement, the question that it answers, and what it takes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from scrimp.planner.memory.account import StepAccount
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.placement import Placement
from scrimp.planner.memory.timeline import Timeline, step_seconds, step_timeline
from scrimp.planner.plan import Figures


@dataclass(frozen=True)
class MemoryDecision:
    """A placement that was found, or that its user decided."""

    costs: StepCosts
    machine: Machine
    setup: Setup
    placement: Placement
    account: StepAccount
    reason: str
    is_searched: bool = False
    """Whether it is the fastest that was found; else its user decided, or everything is resident."""
    rank_peaks: tuple[int, ...] = ()
    """Predicted peak on the device of each rank of a pipeline; the account is that of the largest."""
    is_exact: bool = False
    """Whether no activations with less computing fit beside its states, as far as the search knows."""
    operands: int = 0
    """Bytes of quantized weights that stay from one micro-batch of a step to the next. The account includes them,
    searches do not. 0: none stay."""

    @cached_property
    def timeline(self) -> Timeline:
        """Predicted seconds of a step."""
        return step_timeline(self.costs, self.placement, self.setup, self.machine)

    @cached_property
    def seconds(self) -> float:
        """Those of the timeline, of which a search needs no more."""
        return step_seconds(self.costs, self.placement, self.setup, self.machine)

    @property
    def step_seconds(self) -> float | None:
        """Predicted; None where the seconds of blocks are not known, or those of communication."""
        is_known = self.costs.seconds_origin is not None and not self.costs.is_shared
        return self.seconds if is_known else None

    @property
    def fits(self) -> bool:
        """Whether the account is within the machine's memory."""
        account, machine = self.account, self.machine
        return account.peak <= machine.device_bytes and account.host_peak <= machine.host_bytes

    def predicted(self, copy_bytes: int) -> Figures:
        """The figures of its plan: tensors of a step, which a run measures, and on the host a checkpoint's copy too."""
        return Figures(
            peak_device_bytes=self.account.peak,
            peak_host_bytes=self.account.host_peak + copy_bytes,
            step_seconds=self.step_seconds,
            stage_bytes=list(self.rank_peaks) or None,
        )
