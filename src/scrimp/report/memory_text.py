"""A memory decision on the terminal: the account, what blocks do, predicted seconds, what more memory would give."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

from rich.table import Table

from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.frontier import Alternative, Searches, binding, frontier
from scrimp.planner.memory.room import Budgets
from scrimp.planner.memory.search_space import Split
from scrimp.planner.memory.timeline import Timeline
from scrimp.report.tables import account_table, key_value_table
from scrimp.report.units import format_bytes, format_duration, format_percent


def memory_tables(
    decision: MemoryDecision,
    copy_bytes: int,
    *,
    budgets: Budgets,
    split: Split | None = None,
    waits: bool = False,
    alternatives: bool = True,
) -> Iterator[Table]:
    """What is shown of a decision, top to bottom.

    Args:
        copy_bytes: host memory that writing a checkpoint takes: a copy of the state.
        budgets: the memory that there is, as the user knows it.
        split: the placement of states, where the user decided; None: the plan did.
        waits: training waits for the checkpoint, so that there is no copy.
        alternatives: what more memory would give, too: it is searched for, which takes seconds where blocks are many.
    """
    account = decision.account
    yield account_table(
        account.device,
        title=f"predicted bytes on the device, {format_bytes(account.peak)} of "
        f"{_there_is(budgets)}, in the {account.moment.name}",
    )
    name = "no copy for a checkpoint, training waits" if waits else "copy for a checkpoint"
    host = [*account.host, (name, copy_bytes)]
    yield account_table(host, title="predicted bytes on the host")
    rows = list(_rows(decision))
    if alternatives:
        rows += _alternatives(decision, budgets, split)
    yield key_value_table(rows, title="how it fits")


def _there_is(budgets: Budgets) -> str:
    """The device's memory, and what of it a step does not get."""
    kept = [f"{format_bytes(budgets.copy)} for a checkpoint's copy"] if budgets.copy else []
    kept += [f"{format_percent(1 - budgets.share, 0)} for the allocator's gaps"] if budgets.share < 1 else []
    part = "" if budgets.free is None else f" ({format_bytes(budgets.free)} free, less what a run leaves)"
    return format_bytes(budgets.device) + part + (f" less {' and '.join(kept)}" if kept else "")


def _rows(decision: MemoryDecision) -> Iterator[tuple[str, str]]:
    yield "activations", runs_of(decision.placement.activations)
    yield "states", str(decision.placement.states)
    yield "why", decision.reason
    if decision.step_seconds is None:
        return
    origin = (
        "from blocks that were timed here" if decision.costs.seconds_origin == "measured" else "from its work"
    )
    yield (
        "step",
        f"{format_duration(decision.timeline.seconds)} (predicted {origin}), {_waiting(decision.timeline)}",
    )


def _alternatives(
    decision: MemoryDecision, budgets: Budgets, split: Split | None
) -> Iterator[tuple[str, str]]:
    if not decision.is_searched:
        return
    searches = Searches(decision, split)
    bound, gain = binding(searches)
    if gain:
        yield "bound by", f"{bound}: a quarter more of it saves {format_percent(gain)} of the step"
    for other in frontier(searches):
        more = budgets.device_for(other.more_bytes)
        yield f"with {format_bytes(more)} more", _alternative(other)


def runs_of(activations: Sequence[str]) -> str:
    """Blocks of equal choice together: "blocks 0-11 block, 12-23 keep"."""
    parts, start = [], 0
    for choice, run in groupby(activations):
        stop = start + len(list(run)) - 1
        parts.append(f"{start}-{stop} {choice}" if stop > start else f"{start} {choice}")
        start = stop + 1
    return f"{'blocks' if len(activations) > 1 else 'block'} {', '.join(parts)}"


def _waiting(timeline: Timeline) -> str:
    exposed = sum(timeline.exposed.values())
    if not exposed and not any(timeline.hidden.values()):
        return "no copies to and from the host"
    hidden = sum(timeline.hidden.values())
    return f"{format_duration(exposed)} of copies and updates not hidden, {format_duration(hidden)} hidden"


def _alternative(other: Alternative) -> str:
    placement = other.plan.placement
    return f"{format_percent(other.faster)} faster: {runs_of(placement.activations)}; {placement.states}"
