"""The account of a step: what lies where at its largest moment, by category, and what waits on the host.

The categories add up to the peak that `states.device_peak` predicts.

Checked  tests/planner/memory/test_account.py
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.planner.memory.costs import StepCosts, chosen_costs
from scrimp.planner.memory.placement import CLASSES, Placement
from scrimp.planner.memory.states import Floor, Moment, class_of, moments


@dataclass(frozen=True)
class StepAccount:
    """Bytes by category."""

    device: tuple[tuple[str, int], ...]
    """At the largest moment; they add up to `peak`."""
    host: tuple[tuple[str, int], ...]
    """All that waits in host memory."""
    moment: Moment

    @property
    def peak(self) -> int:
        """Most bytes on the device."""
        return self.moment.bytes

    @property
    def host_peak(self) -> int:
        """Most bytes in host memory."""
        return sum(nbytes for _, nbytes in self.host)


def account_step(
    costs: StepCosts, placement: Placement, *, accumulates: bool, floor: Floor | None = None
) -> StepAccount:
    """The account of a placement; arguments and errors as of `moments`."""
    every, states = moments(costs, placement, accumulates, floor), placement.states
    moment = max(every, key=lambda one: one.bytes)
    kinds = [class_of(costs, i) for i in range(len(costs.blocks))]
    here = {name: sum(getattr(kind, name) for kind in (costs.ends, *kinds)) for name in CLASSES}
    away = {
        name: sum(getattr(k, name) for k, leaves in zip(kinds, getattr(states, name), strict=True) if leaves)
        for name in CLASSES
    }
    rows = [
        ("weights", here["weights"] - away["weights"] + moment.weights),
        ("gradients", moment.gradients),
        ("optimizer states", here["optimizer"] - away["optimizer"]),
        ("activations", moment.activations),
        (
            "tokens, tables and copies",
            costs.resident - (costs.tables if moment.phase == "update" else 0),
        ),
    ]
    rows.append((moment.name, moment.bytes - sum(nbytes for _, nbytes in rows)))
    at_home = (kind.weights for i, kind in enumerate(kinds) if states.weights[i] or states.on_cpu(i))
    host = (
        ("weights", sum(at_home)),
        ("gradients", away["gradients"]),
        ("optimizer states", away["optimizer"]),
        ("activations", sum(block.host for block in chosen_costs(costs, placement.activations))),
    )
    return StepAccount(tuple(rows), tuple(row for row in host if row[1]), moment)
