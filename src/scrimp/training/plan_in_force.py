"""The plan that a run goes by, and its one owner.

Problem  A plan changes while a run trains: formats by the precision cycle, activations where memory is short or the
         first steps were measured. Model, memory phases, meter and files must follow, and in a fixed order.
Method   Whoever changes the plan does it here. What must act at once (the model, the run's folder) listens; what only
         reads it (the proof of a step, the figures of a step, a checkpoint) asks for it when it needs it.
"""

from __future__ import annotations

from collections.abc import Callable

from scrimp.planner import Plan

Listener = Callable[[Plan, Plan], None]
"""Told the plan of before and the one of now."""


class PlanInForce:
    """Owns the plan of a run."""

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self._listeners: list[Listener] = []
        self.doubt: str | None = None
        """Why every GEMM of the plan is proven in the next step, not only those that it changed."""

    @property
    def plan(self) -> Plan:
        """The current plan."""
        return self._plan

    def listen(self, listener: Listener) -> None:
        """Tell a listener of every change, after those that came before it."""
        self._listeners.append(listener)

    def change(self, plan: Plan) -> None:
        """Go by another plan from now on; between two steps, or two attempts at a step."""
        before, self._plan = self._plan, plan
        for listener in self._listeners:
            listener(before, plan)
