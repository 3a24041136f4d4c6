"""`scrimp plan --precision snip` on a run: measure its newest checkpoint, and show the plan that this gives.

The run is not touched. Its own settings count (data, batch, optimizer) but for those that the user gives now. With
another objective, or adapters, the user means a run that begins from this one's weights: that has no checkpoint yet.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch

from scrimp import objectives
from scrimp.config import Config, flatten, for_ranks, replace_values
from scrimp.config.snip import BUDGETS
from scrimp.cycle import CycleSettings
from scrimp.cycle.question import ask, formats_to_measure
from scrimp.cycle.state import CycleState
from scrimp.data import Batch, Loader
from scrimp.errors import CheckpointError, ConfigError
from scrimp.export import ExportTarget, plan_for
from scrimp.models import spec_of
from scrimp.models.model import Model
from scrimp.optim import build
from scrimp.parts import part_of
from scrimp.planner.precision import PrecisionPlan
from scrimp.runtime import realise
from scrimp.training.checkpoint import Checkpoint
from scrimp.training.precision.formats_in_plan import planned_origins, planned_recipes
from scrimp.training.precision.meter import PrecisionMeter
from scrimp.training.run_data import open_run_corpus
from scrimp.training.run_folder import saved_config
from scrimp.training.run_state import read_state
from scrimp.training.setup import Decisions, decide
from scrimp.training.start import anchored
from scrimp.training.trained_weights import checkpoint_of, is_run

_OF_ITS_OWN = frozenset({"model.weights", "run.dir"})
"""What the user gives to name the run, not to change it."""
_OF_ANOTHER_RUN = ("objective.", "adapter.")
"""What a run that was trained cannot change any more."""


@dataclass(frozen=True)
class Preview:
    """A measured plan, and the run that it is of."""

    plan: PrecisionPlan
    decisions: Decisions
    step: int


def preview(
    config: Config, given: Collection[str], target: ExportTarget | None = None, *, required: bool = False
) -> Preview | None:
    """Measure and plan; None where model.weights names no run with a checkpoint, or the settings are of another run.

    Args:
        target: the trainer that the plan is to run in; None: this one.
        required: settings of another run are refused.

    Raises:
        CheckpointError: the run has no optimizer state that fits.
        ConfigError: settings of another run where a measured plan is required.
        PlanError: the budget cannot be reached.
    """
    folder = config.model.weights
    if folder is None or not config.is_planned or not is_run(folder):
        return None
    checkpoint = checkpoint_of(folder)
    saved, now = saved_config(folder), flatten(anchored(config))
    changes = {key: now[key] for key in given if key not in _OF_ITS_OWN}
    before = flatten(saved)
    for key, value in changes.items():
        if key.startswith(_OF_ANOTHER_RUN) and value != before[key]:
            if not required:
                return None
            raise ConfigError(
                f"a run with another {key} has no checkpoint yet to measure",
                got=f"{value}, {folder} was trained with {before[key]}",
                do="leave it out, or plan without --out and --target",
            )
    if changes.get("data.tokenizer") == "auto":
        del changes["data.tokenizer"]  # the run has decided it
    if any(f"budget.{name}" in given for name in BUDGETS):
        # One budget takes the place of another, and is no second one.
        saved = dataclasses.replace(saved, budget=dataclasses.replace(saved.budget, **dict.fromkeys(BUDGETS)))
    own = replace_values(saved, changes)
    if not saved.is_planned:
        # What was decided for other formats would be taken for the user's own choice.
        own = dataclasses.replace(own, snip=config.snip, budget=config.budget)
    _refuse_seconds(own)
    decisions = decide(for_ranks(anchored(own), 1, ()), architecture=read_state(checkpoint).architecture)
    return Preview(_measured(decisions, checkpoint, target), decisions, checkpoint.step)


def _refuse_seconds(config: Config) -> None:
    """A step's other seconds are known only where steps are taken."""
    if config.budget.step_seconds is not None or config.budget.speedup is not None:
        raise ConfigError(
            "a budget in seconds needs timed steps, which a dry run has none of",
            expected="budget.fp4_flops, budget.saved_bytes or budget.divergence",
            do="train with the budget: the first plan comes after the warm-up",
        )


def _measured(decisions: Decisions, checkpoint: Checkpoint, target: ExportTarget | None) -> PrecisionPlan:
    recipes = planned_recipes(decisions.plan)
    origins = spec_of(decisions.architecture).origins
    settings = CycleSettings.of_run(decisions.config, planned_origins(recipes, origins))
    meter = _meter(settings, decisions, checkpoint)
    profile = meter.measure(checkpoint.step, formats_to_measure(settings, recipes))
    question = ask(settings, profile, CycleState(recipes), checkpoint.step)
    return plan_for(question, target, step=checkpoint.step)


def _meter(settings: CycleSettings, decisions: Decisions, checkpoint: Checkpoint) -> PrecisionMeter:
    """The model and its optimizer as they were at the checkpoint."""
    config = decisions.config
    state = read_state(checkpoint)
    corpus = open_run_corpus(config, decisions.world, digest=state.data_digest)
    if not corpus.is_that_of(state.data_digest):
        raise CheckpointError(
            "the data are not those that the run was trained on",
            do="give its source and tokenizer, as they stand in its config.toml",
        )
    executable = realise(
        decisions.plan,
        decisions.architecture,
        _unfilled,
        device=decisions.device.torch_device,
        parameters=config.train.parameters,
        compute=config.precision_rules.compute,
        seed=config.run.seed_of_rounding,
        loss_chunk=config.train.loss_chunk,
        objective=objectives.build(config.objective),
        choose=decisions.backends(),
        replans=True,
    )
    optimizer = build(config.optimizer, executable, seed=config.run.seed_of_rounding)
    optimizer.prepare(state.position.all_updates)
    parts = {f"model.{name}": part for name, part in executable.parameters()}
    parts |= {f"optimizer.{name}": part for name, part in optimizer.parts()}
    parts["random.torch"] = part_of(torch.get_rng_state())  # a copy: the process's own stays
    checkpoint.load(parts)
    optimizer.restore_updates(state.position.all_updates)

    def batches(step: int, count: int) -> Iterator[list[Batch]]:
        train = config.train
        per_step = train.sequences_per_step
        with Loader(
            corpus.train,
            sequence=train.sequence,
            sequences_per_step=per_step,
            micro_batch=train.micro_batch,
            seed=config.run.seed,
            first_sample=step * per_step,
            mask_documents=config.data.mask_documents,
        ) as loader:
            for _ in range(count):
                yield next(loader)

    return PrecisionMeter(settings, executable, optimizer, batches, device_name=decisions.device.name)


def _unfilled(model: Model) -> None:
    """Every parameter is loaded from the checkpoint."""
