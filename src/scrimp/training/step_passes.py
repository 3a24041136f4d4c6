"""What a step of a run takes above its floor, pass by pass: an event, which the report shows.

Problem  A step is slower than its products, and one figure does not say why.
Method   The account of `scrimp.planner.layout.step_account` for the run's own model, batch, format and plan on the card
         that it ran on, with Scrimp's kernels as they are today. Predicted; beside it stands the step as it was timed.
Limits   One GPU with a hardware file, AdamW, one format for all products of the blocks, and what the account knows:
         dense models in bf16, blocks that all make the same again, nothing on the host, every weight trained.
         Other runs have no such event.
Checked  tests/training/test_step_passes.py
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from scrimp.errors import PlanError
from scrimp.models import HEAD
from scrimp.planner import Plan
from scrimp.planner.hardware import Cluster, load_hardware
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.step_account import LOSS_BYTES, Above, above_floor
from scrimp.profiler.this_device import known_name
from scrimp.report.step_section import EVENT
from scrimp.training.chosen_layout import step_of_run
from scrimp.training.setup import Decisions

if TYPE_CHECKING:
    from scrimp.training.run import Run


def record_passes(run: Run, seconds: float | None) -> None:
    """Record the passes of a run's step, where there is an account of it.

    Args:
        seconds: of a step, measured.
    """
    decisions = run.decisions
    card = None if decisions.world.size > 1 else known_name(decisions.device)
    passes = None
    if card is not None:
        passes = passes_on(decisions, run.plans.plan, load_hardware(card), keeps_operands=run.keeps_operands)
    if passes is None:
        return
    rows = [
        {"name": one.taken.name, "seconds": one.taken.seconds, "floor": one.floor.seconds} for one in passes
    ]
    run.event(EVENT, f"predicted for {card}", card=card, measured_seconds=seconds, passes=rows)


def passes_on(
    decisions: Decisions, plan: Plan, cluster: Cluster, *, keeps_operands: bool = False
) -> list[Above] | None:
    """The passes of a run's step on a card, those first that take most above their floor; None: it has no account.

    Args:
        plan: in force.
        keeps_operands: weights are quantized once for all micro-batches.
    """
    config = decisions.config
    recipes = {recipe for layer, one in plan.gemms.items() if layer != HEAD for recipe in one.recipes}
    is_known = config.optimizer.name == "adamw" and config.adapter.rank == 0 and len(recipes) == 1
    setting = _setting(decisions, plan, cluster) if is_known else None
    if setting is None or config.precision_rules.compute != "bf16" or recipes != {setting.precision}:
        return None
    program = dataclasses.replace(setting.software, bytes_per_logit=LOSS_BYTES)
    try:
        return above_floor(dataclasses.replace(setting, software=program, keeps_operands=keeps_operands))
    except PlanError:
        return None


def _setting(decisions: Decisions, plan: Plan, cluster: Cluster) -> Setting | None:
    """The run as the search knows it, its blocks told all at once where all are alike."""
    setting = step_of_run(decisions.config, decisions.architecture, cluster, plan.placement.activations)
    if setting is None or len(set(setting.blocks)) > 1 or setting.blocks[0].offload:
        return None
    return dataclasses.replace(setting, blocks=(), recompute=setting.blocks[0].recompute)
