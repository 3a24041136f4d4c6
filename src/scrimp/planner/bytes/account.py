"""The account of a step: what lies where at its largest moment, by category, and what waits on the host.

The categories add up to the peak that `states.device_peak` predicts.

Checked  tests/planner/bytes/test_account.py
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from scrimp.planner.bytes.costs import StepCosts
from scrimp.planner.bytes.states import States, class_of, floor_of, host_bytes, undo_bytes
from scrimp.planner.bytes.walk import chosen_costs


@dataclass(frozen=True)
class Moment:
    """One moment of a step."""

    phase: str
    """forward, head, backward or update."""
    block: int | None
    bytes: int
    """On the device."""
    activations: int
    """Of these, what waits for its backward pass or is on its way."""
    gradients: int
    """Of these, gradients that are not being made right now."""

    @property
    def name(self) -> str:
        """For people: "backward pass of block 3"."""
        if self.phase == "head":
            return "head and loss"
        if self.phase == "update":
            return "optimizer step"
        return f"{self.phase} pass of {'the embedding' if self.block is None else f'block {self.block}'}"


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
    costs: StepCosts, states: States, activations: Sequence[str], *, accumulates: bool
) -> StepAccount:
    """The account of a plan; errors as of `device_peak`."""
    blocks = range(len(costs.blocks))
    kinds = [class_of(costs, i) for i in blocks]
    moment = max(_moments(costs, states, activations, accumulates), key=lambda one: one.bytes)
    away = {
        name: sum(
            getattr(kind, name) for kind, on_host in zip(kinds, getattr(states, name), strict=True) if on_host
        )
        for name in ("weights", "gradients", "optimizer")
    }
    largest = max((kind.weights for kind, host in zip(kinds, states.weights, strict=True) if host), default=0)
    weights = costs.ends.weights + sum(kind.weights for kind in kinds) - away["weights"]
    weights += largest * min(2, sum(states.weights))
    optimizer = costs.ends.optimizer + sum(kind.optimizer for kind in kinds) - away["optimizer"]
    rows = [
        ("weights", weights),
        ("gradients", moment.gradients),
        ("optimizer states", optimizer),
        ("activations", moment.activations),
        ("tokens, tables and copies", costs.resident),
    ]
    rows.append((moment.name, moment.bytes - sum(nbytes for _, nbytes in rows)))
    total, _ = host_bytes(costs, states, activations)
    undo = undo_bytes(costs, states)
    host = [
        ("weights", total - away["gradients"] - away["optimizer"] - undo),
        ("gradients", away["gradients"]),
    ]
    host.append(("optimizer states", away["optimizer"]))
    offloaded = sum(block.host for block in chosen_costs(costs, activations))
    host[0] = ("weights", host[0][1] - offloaded)
    host.append(("activations", offloaded))
    host.append(("copies to take early updates back from", undo))
    return StepAccount(tuple(rows), tuple(row for row in host if row[1]), moment)


def _moments(
    costs: StepCosts, states: States, activations: Sequence[str], accumulates: bool
) -> Iterator[Moment]:
    """Every moment that can be the largest, by the formulas of `states`."""
    floor = floor_of(costs, states, accumulates)
    kinds = [class_of(costs, i) for i in range(len(costs.blocks))]
    stay = [0 if host else kind.gradients for kind, host in zip(kinds, states.gradients, strict=True)]
    existing = costs.ends.gradients + sum(stay) if accumulates else 0
    at, flight, cast = costs.boundary, 0, 0
    for i, block in enumerate(chosen_costs(costs, activations)):
        live = at + flight
        yield Moment("forward", i, floor.resident + live + cast + block.forward_peak, live + cast, existing)
        backward = int(floor.backward[i])
        yield Moment(
            "backward",
            i,
            backward + live + block.peak_of_backward(accumulates),
            live,
            backward - floor.resident - costs.boundary + existing,
        )
        at, flight, cast = at + block.kept, max(flight, block.host), cast + block.cast
    live = at + flight + cast
    yield Moment("head", None, floor.head + live, live, existing)
    # `rest` is the larger of the embedding's backward pass and the update.
    everything = costs.ends.gradients + sum(stay)
    yield Moment("update", None, floor.rest, 0, everything)
