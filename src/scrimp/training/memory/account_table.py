"""The account of a run's memory, as `scrimp plan` prints it and `scrimp train` before its first step.

Checked  tests/training/memory/test_account_table.py
"""

from __future__ import annotations

import io
import shutil
from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from scrimp.config.pipeline import pipeline_of
from scrimp.gemm.problem import DTYPES
from scrimp.models import spec_of
from scrimp.models.attention import fuses_attention
from scrimp.models.flash import FLASH_CAPABILITY, capability_of
from scrimp.planner.memory.search_space import Split
from scrimp.report.memory_text import memory_tables
from scrimp.report.units import format_bytes, format_duration
from scrimp.training.memory.decide import split_of
from scrimp.training.memory.stages import stages_text
from scrimp.training.setup import Decisions

WIDEST = 120


def account_tables(decisions: Decisions, *, alternatives: bool = True) -> Iterator[Table]:
    """Bytes by category on device and host, and where anything was decided, what and why.

    Args:
        alternatives: what more memory would give, too.
    """
    memory, copy = decisions.memory, decisions.copy_bytes
    split = split_of(decisions.config, decisions.architecture.num_layers)
    yield from memory_tables(
        memory,
        copy,
        budgets=decisions.budgets,
        split=None if split is None else Split.of(memory.placement.states),  # with the updater that was found
        waits=copy < memory.costs.checkpoint_copy,
        alternatives=alternatives,
    )


def attention_text(decisions: Decisions) -> str | None:
    """What attention does where a run uses no fused kernel for it on a GPU; None where it does, and on a CPU."""
    compute, architecture = decisions.config.precision_rules.compute, decisions.architecture
    if decisions.device.is_host:
        return None
    capability, sequence = (
        capability_of(decisions.device.torch_device),
        decisions.config.train.sequence,
    )
    documents = decisions.config.data.mask_documents
    plain = [
        block.attention.head_size
        for block in spec_of(architecture).equal_blocks
        if not fuses_attention(
            block.attention,
            DTYPES[compute],
            capability,
            masks=documents or (block.attention.window or sequence) < sequence,
        )
    ]
    if not plain:
        return None
    reason = f"heads of {plain[0]}"
    advice = ""
    if capability < FLASH_CAPABILITY:
        reason = f"compute capability {capability[0]}.{capability[1]}"
    elif compute == "fp32":
        reason, advice = "fp32", "; with --precision bf16 it does"
    return (
        f"scores of every pair of tokens in memory: Scrimp uses no fused kernel for {reason} on CUDA{advice}"
    )


def account_text(decisions: Decisions) -> str:
    """The tables where anything is not resident or a budget was given, without alternatives, whose search a run need
    not wait for; else one line."""
    text = _account_text(decisions)
    if not decisions.memory.rank_peaks:
        return text
    pipeline = pipeline_of(decisions.config.layout, decisions.architecture.num_layers)
    return f"{text}\nstages: {stages_text(pipeline, decisions.memory.rank_peaks)} (predicted)"


def _account_text(decisions: Decisions) -> str:
    memory, budget = decisions.memory, decisions.config.budget
    has_budget = budget.device_memory is not None or budget.host_memory is not None
    if not has_budget and memory.placement.is_resident:
        predicted = decisions.plan.predicted
        copy, seconds = decisions.copy_bytes if decisions.device.is_host else 0, memory.step_seconds
        return (
            f"memory: everything resident, predicted peak {format_bytes(predicted.peak_device_bytes)}"
            + (f", and {format_bytes(copy)} for a checkpoint's copy" if copy else "")
            + ("" if seconds is None else f", a step in {format_duration(seconds)} (predicted)")
        )
    console = Console(file=io.StringIO(), width=min(WIDEST, shutil.get_terminal_size((WIDEST, 24)).columns))
    with console.capture() as capture:
        for table in account_tables(decisions, alternatives=False):
            console.print(table)
    lines = (line.rstrip() for line in capture.get().splitlines())
    return "\n".join(line for line in lines if line)
