"""What is found out about the ranks of a run while it trains: an event, and a line for the user."""

from __future__ import annotations

from scrimp import health
from scrimp.training.callbacks.base import Callback
from scrimp.training.run import Run


class RankFindings(Callback):
    """Tells of ranks that are slow, and that all were started again."""

    def __init__(self, run: Run) -> None:
        self._run = run

    def before_step(self) -> None:
        """Tell what was found meanwhile."""
        findings = health.record().findings
        while findings:
            self._run.tell(*findings.popleft())
