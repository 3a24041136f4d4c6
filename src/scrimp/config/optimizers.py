"""Optimizers by name: what is known of each before torch is loaded, and settings that it cannot keep.

A new optimizer is one file in `scrimp.optim` and one entry here.

Checked  tests/config/test_optimizers.py
"""

from __future__ import annotations

from dataclasses import dataclass

from scrimp.config.schema import Config
from scrimp.errors import ConfigError
from scrimp.user_code import is_code


@dataclass(frozen=True)
class OptimizerFacts:
    """What is known of an optimizer without loading it."""

    module: str
    """Has its `build` and `memory` (`scrimp.optim.base`)."""
    moments: tuple[str, ...] = ("auto", "fp32")
    """Formats that its averages may have."""
    on_host: bool = False
    """Whether blocks' weights, gradients and states can live on the host, and the CPU can update them."""
    rounds: bool = False
    """Whether it updates bf16 parameters without master weights."""
    planned_on_ranks: bool = False
    """Whether formats can be planned by its rule where each of several ranks has some rows of a parameter."""
    low_rank: bool = False
    """Whether it has projectors (`optimizer.rank`), of which copies that train alone have no mean."""
    averages: bool = False
    """Whether what is evaluated is an average of weights that it keeps, in the place of a rate that falls."""


OPTIMIZERS: dict[str, OptimizerFacts] = {
    "adamw": OptimizerFacts(
        "scrimp.optim.adamw_run",
        moments=("auto", "fp32", "bf16", "8bit"),
        on_host=True,
        rounds=True,
        planned_on_ranks=True,
    ),
    "nadamw": OptimizerFacts("scrimp.optim.nadamw"),
    "schedule-free": OptimizerFacts("scrimp.optim.schedule_free", averages=True),
    "muon": OptimizerFacts("scrimp.optim.muon", moments=("auto", "fp32", "bf16", "8bit")),
    "galore": OptimizerFacts("scrimp.optim.galore", low_rank=True),
    "fira": OptimizerFacts("scrimp.optim.galore", low_rank=True),
}


AUTO = "auto"
"""In the place of a name: the planner chooses (`scrimp.training.chosen_optimizer`)."""
OWN = OptimizerFacts("scrimp.optim.own")
"""What is known of an optimizer from the user's own file (`scrimp.user_code`)."""


def facts_of(name: str) -> OptimizerFacts:
    """What is known of an optimizer.

    Raises:
        ConfigError: there is none of this name.
    """
    if is_code(name):
        return OWN
    if name not in OPTIMIZERS:
        raise ConfigError(
            "optimizer.name is not one of its choices",
            got=repr(name),
            expected=f"one of {', '.join(OPTIMIZERS)}, FILE.py:NAME, or {AUTO} for a run with budget.device_memory",
        )
    return OPTIMIZERS[name]


def check_choice(config: Config) -> None:
    """Refuse to choose an optimizer without a budget that asks for it, or beside settings that have chosen.

    Raises:
        ConfigError: by name.
    """
    settings = config.optimizer
    if settings.name != AUTO:
        return
    if config.budget.device_memory is None:
        raise ConfigError(
            "optimizer.name auto chooses by budget.device_memory, and there is none",
            do="set --budget.device-memory, or --optimizer.name adamw",
        )
    if settings.rank is not None:
        raise ConfigError(
            "optimizer.name auto chooses the rank too, and one is given",
            got=f"optimizer.rank {settings.rank:,}",
            do="leave optimizer.rank out, or set --optimizer.name fira",
        )
    if settings.from_weights:
        raise ConfigError(
            "optimizer.from_weights takes the states of one optimizer, and optimizer.name auto may choose another",
            do="set --optimizer.name as the run has it that the states are of, or optimizer.from_weights = false",
        )


def check_optimizer(config: Config) -> None:
    """Refuse settings that the optimizer cannot keep.

    Args:
        config: with `optimizer.moments` and `optimizer.master_weights` decided.

    Raises:
        ConfigError: by name.
    """
    settings, memory = config.optimizer, config.memory
    name, facts = settings.name, facts_of(settings.name)
    if settings.rank is not None and not facts.low_rank:
        raise ConfigError(
            f"optimizer {name} has no projectors",
            got=f"optimizer.rank {settings.rank:,}",
            do="leave optimizer.rank out, or set --optimizer.name galore or fira",
        )
    if config.trained_format == "bf16" and not settings.master_weights and not facts.rounds:
        raise ConfigError(
            f"optimizer {name} needs master weights beside bf16 parameters",
            got="optimizer.master_weights false",
            do="leave optimizer.master_weights out, or set --optimizer.name adamw",
        )
    if settings.moments not in facts.moments:
        raise ConfigError(
            f"optimizer {name} does not keep its state in that format",
            got=f"optimizer.moments {settings.moments}",
            expected=f"one of {', '.join(facts.moments)}",
            do="leave optimizer.moments out, or set --optimizer.name adamw",
        )
    if facts.on_host:
        return
    for key in ("weights", "gradients", "optimizer"):
        if getattr(memory, key) not in ("auto", "device", "0"):
            raise ConfigError(
                f"optimizer {name} updates on the device only: nothing that it reads can live on the host",
                got=f"memory.{key} {getattr(memory, key)}",
                do=f"leave memory.{key} out, or set --optimizer.name adamw",
            )
    if memory.update != "device":
        raise ConfigError(
            f"optimizer {name} has no update on the CPU",
            got=f"memory.update {memory.update}",
            do="leave memory.update out, or set --optimizer.name adamw",
        )
