"""The account of a run's memory, as `scrimp plan` prints it and `scrimp train` before its first step.

Checked  tests/train/memory/test_memory_shown.py
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from scrimp.planner import account_of
from scrimp.planner.bytes.splits import Split
from scrimp.report.memory_text import memory_tables
from scrimp.report.tables import account_table
from scrimp.report.units import format_bytes, format_duration
from scrimp.train.memory.plan import split_of
from scrimp.train.setup import Decisions

WIDEST = 120


def account_tables(decisions: Decisions, *, alternatives: bool = True) -> Iterator[Table]:
    """Bytes by category on device and host, and where anything was decided, what and why.

    Args:
        alternatives: what more memory would give, too.
    """
    account, copy = account_of(decisions.config, decisions.architecture), decisions.copy_bytes
    waits = copy < account.checkpoint_copy
    if decisions.memory is not None:
        split = split_of(decisions.config, decisions.architecture.num_layers)
        # With the updater that was found.
        split = None if split is None else Split.of(decisions.memory.states)
        yield from memory_tables(
            decisions.memory,
            copy,
            budgets=decisions.budgets,
            split=split,
            waits=waits,
            alternatives=alternatives,
        )
        return
    name = "file of a checkpoint, training waits" if waits else "copy for a checkpoint"
    rows = [*account.rows(), (f"{name}, on the host", copy)]
    peak = format_bytes(decisions.plan.predicted.peak_device_bytes)
    yield account_table(rows, title=f"predicted bytes, peak on the device {peak}")


def account_text(decisions: Decisions) -> str:
    """The tables where anything is not resident or a budget was given, without alternatives, whose search a run need
    not wait for; else one line."""
    memory, budget = decisions.memory, decisions.config.budget
    has_budget = budget.device_memory is not None or budget.host_memory is not None
    if not has_budget and (memory is None or memory.is_resident):
        predicted = decisions.plan.predicted
        seconds = predicted.step_seconds
        return f"memory: everything resident, predicted peak {format_bytes(predicted.peak_device_bytes)}" + (
            "" if seconds is None else f", a step in {format_duration(seconds)} (predicted)"
        )
    console = Console(file=io.StringIO(), width=min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    with console.capture() as capture:
        for table in account_tables(decisions, alternatives=False):
            console.print(table)
    lines = (line.rstrip() for line in capture.get().splitlines())
    return "\n".join(line for line in lines if line)
