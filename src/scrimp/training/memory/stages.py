"""What the ranks of a pipeline do so that a step fits: the same on all of them, by the largest of their peaks.

All blocks keep what their user says, or all do the same: the least recomputation with which every rank fits.
Checked  tests/runtime/pipeline/test_stage_memory.py
"""

from __future__ import annotations

from collections.abc import Sequence

from scrimp.config import ResolvedConfig
from scrimp.config.activations import assign_activations
from scrimp.config.pipeline import Pipeline, pipeline_of
from scrimp.gemm.problem import DTYPES
from scrimp.models import ModelSpec
from scrimp.planner.memory.account import StepAccount, account_step
from scrimp.planner.memory.costs import StepCosts
from scrimp.planner.memory.decision import MemoryDecision
from scrimp.planner.memory.machine import Machine, Setup
from scrimp.planner.memory.outer_costs import with_outer
from scrimp.planner.memory.placement import Placement, States
from scrimp.planner.memory.shared_costs import shared_costs
from scrimp.planner.memory.stage_costs import part_of_costs, stage_costs
from scrimp.report.units import format_bytes
from scrimp.runtime.pipeline import held_by, orders_of


def shared(costs: StepCosts, config: ResolvedConfig) -> StepCosts:
    """What the ranks leave one another of the costs of a model, or of what a rank has of it."""
    return shared_costs(
        costs,
        config.layout,
        parameter_bytes=DTYPES[config.trained_format].itemsize,
        micro_batches=config.micro_batches,
    )


def decide_stages(
    costs: StepCosts,
    machine: Machine,
    setup: Setup,
    choices: Sequence[str],
    config: ResolvedConfig,
    spec: ModelSpec,
) -> MemoryDecision:
    """The first of some ways with which every rank fits, or the last, which then does not.

    Args:
        costs: of one process that has all of the model.
        choices: of the blocks' activations, where they are left open, the least recomputation first.
    """
    setting, blocks = config.memory.activations, spec.num_blocks
    ways = [setting] if setting != "auto" else list(choices)
    for way in ways:
        placement = Placement(tuple(map(str, assign_activations(way, blocks))), States.split(blocks))
        reason = f"memory.activations {way}" if setting != "auto" else f"{way} for all blocks of every stage"
        found = of_stages(costs, machine, setup, placement, config, spec, reason)
        if found.fits:
            break
    return found


def of_stages(
    costs: StepCosts,
    machine: Machine,
    setup: Setup,
    placement: Placement,
    config: ResolvedConfig,
    spec: ModelSpec,
    reason: str,
) -> MemoryDecision:
    """A placement with the account of the rank that takes most; arguments as of `decide_stages`."""
    pipeline = pipeline_of(config.layout, spec.num_blocks)
    orders = orders_of(pipeline, config.micro_batches)
    ranks = []
    for rank, order in enumerate(orders):
        own = with_outer(shared(part_of_costs(costs, pipeline, rank, spec), config), config)
        found = [
            stage_costs(
                own,
                pipeline,
                rank,
                stage,
                held_by(order, pipeline, rank),
                placement.activations,
                spec,
                tokens=config.train.micro_batch_tokens,
                compute_bytes=DTYPES[config.precision_rules.compute].itemsize,
            )
            for stage in pipeline.stages_of(rank)
        ]
        accounts = [(account_step(one, placement, accumulates=setup.accumulates), one) for one in found]
        ranks.append(max(accounts, key=_peak))
    account, largest = max(ranks, key=_peak)
    peaks = tuple(one.peak for one, _ in ranks)
    return MemoryDecision(largest, machine, setup, placement, account, reason, rank_peaks=peaks)


def _peak(one: tuple[StepAccount, StepCosts]) -> int:
    return one[0].peak


def stages_text(pipeline: Pipeline, peaks: Sequence[int]) -> str:
    """The ranks of a pipeline with their blocks and their peaks, for people."""
    parts = []
    for rank, peak in enumerate(peaks):
        runs = [pipeline.stages[stage] for stage in pipeline.stages_of(rank)]
        blocks = " and ".join(f"{run[0]}-{run[-1]}" for run in runs)
        parts.append(f"rank {rank} blocks {blocks} {format_bytes(peak)}")
    return ", ".join(parts)
