"""A model that learns from the average of its own weights (`objective.teachers = "ema"`): what goes with it.

Limits   What is not carried out beside it is refused here, by name.
Checked  tests/config/test_own_average.py
"""

from __future__ import annotations

from scrimp.config.layout import degrees_in_model, off_device
from scrimp.config.schema import Config, ObjectiveConfig
from scrimp.errors import ConfigError

EMA = "ema"
"""The word in `objective.teachers`; a folder of that name is ./ema."""


def learns_from_average(settings: ObjectiveConfig) -> bool:
    """Whether the teacher is the average of the model's own weights."""
    return (settings.teachers or "").strip() == EMA


def check_own_average(config: Config) -> None:
    """Refuse what the average of weights does not follow.

    Args:
        config: with layout and formats decided.

    Raises:
        ConfigError: with the setting to change.
    """
    if not learns_from_average(config.objective):
        momentum = config.objective.teacher_momentum
        if momentum != ObjectiveConfig().teacher_momentum:
            raise ConfigError(
                f"objective.teacher_momentum has no effect without objective.teachers {EMA}",
                got=f"{momentum:g}",
                do=f"leave it out, or set objective.teachers {EMA}",
            )
        return
    refused = degrees_in_model(config.layout)
    refused += [("outer.every", f"{config.outer.every:,}")] * (config.outer.every > 0)
    refused += [("adapter.rank", f"{config.adapter.rank:,}")] * (config.adapter.rank > 0)
    # Factors that are made anew are others than those that were averaged.
    every = config.optimizer.refactor_every
    refused += [("optimizer.refactor_every", f"{every:,}")] * (every > 0)
    refused += [("objective.written", f"{config.objective.written:g}")] * (config.objective.written > 0)
    refused += off_device(config.memory)
    for key, value in refused:
        raise ConfigError(
            f"{key} {value} is not carried out beside objective.teachers {EMA}",
            got=f"objective.teachers {EMA}",
            do=f"change {key}, or name runs or folders as teachers",
        )
