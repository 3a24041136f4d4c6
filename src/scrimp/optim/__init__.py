"""How weights move: one optimizer per file behind one protocol, by name.

`build` makes a run's optimizer and `memory_of` says what it takes, both by the line that names it in
`scrimp.config.optimizers`.
"""

from __future__ import annotations

import importlib
from typing import Any

from scrimp.config import Architecture, Config, OptimizerConfig, ResolvedConfig
from scrimp.config.experts import has_experts
from scrimp.config.optimizers import facts_of
from scrimp.optim.adamw import AdamW
from scrimp.optim.base import Optimizer
from scrimp.optim.copies import Copies
from scrimp.optim.moments import MomentFormat, Moments
from scrimp.optim.outer import OuterOptimizer, build_outer
from scrimp.optim.schedule_free import evaluated
from scrimp.optim.streaming import Homes, StreamedAdamW
from scrimp.optim.update import Step, update
from scrimp.profiler.memory_trace import OptimizerMemory
from scrimp.runtime import Executable
from scrimp.user_code import is_code

__all__ = [
    "AdamW",
    "Copies",
    "Homes",
    "MomentFormat",
    "Moments",
    "Optimizer",
    "OuterOptimizer",
    "Step",
    "StreamedAdamW",
    "build",
    "build_outer",
    "check",
    "evaluated",
    "memory_of",
    "update",
]


def build(settings: OptimizerConfig, executable: Executable, *, seed: int) -> Optimizer:
    """The optimizer of a run.

    Args:
        settings: decided.
        seed: of rounding noise.
    """
    made: Optimizer = _module(settings).build(executable, settings, seed=seed)
    if executable.mesh.copies_apart:
        made.ranks = executable.mesh.of_copy.get_group()
    if executable.sums is not None:
        executable.sums.follow(executable.model, made.slot)
    return made


def check(config: Config, ranks: int = 1) -> None:
    """Refuse an optimizer of the user's own file that may not run or cannot do what the settings ask.

    Args:
        ranks: of the run.

    Raises:
        ConfigError: by name.
    """
    if is_code(config.optimizer.name):
        _module(config.optimizer).check(config.optimizer, is_planned=config.is_planned, ranks=ranks)


def memory_of(config: ResolvedConfig, architecture: Architecture) -> OptimizerMemory:
    """What the optimizer of a decided configuration takes, for the memory account."""
    layout, name = config.layout, config.optimizer.name
    ranks = layout.shards * layout.tp
    if has_experts(architecture) and not is_code(name):  # which lie on all ranks of a stage
        ranks = layout.ranks // layout.pp
    found: OptimizerMemory = _module(config.optimizer).memory(
        architecture, config.optimizer, config.trained_format, ranks=ranks
    )
    return found


def _module(settings: OptimizerConfig) -> Any:
    return importlib.import_module(facts_of(settings.name).module)
