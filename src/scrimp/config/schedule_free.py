"""The schedule of the learning rate, and what does not go with an optimizer that needs none (`schedule-free`).

Method   In the place of a rate that falls, such an optimizer keeps an average of the weights, which is evaluated. The
         rate is constant after its warm-up.
Limits   What is not carried out beside it is refused here, by name.
Checked  tests/config/test_schedule_free_settings.py
"""

from __future__ import annotations

from scrimp.config.optimizers import facts_of
from scrimp.config.own_average import EMA, learns_from_average
from scrimp.config.schema import Config, Decision
from scrimp.errors import ConfigError


def decide_schedule(config: Config) -> Decision:
    """The shape of the learning rate after its warm-up."""
    name = config.optimizer.name
    if facts_of(name).averages:
        return "constant", f"{name} averages weights in the place of a rate that falls"
    return "cosine", f"falls to {config.schedule.final_lr_ratio:g} of the peak at the end"


def check_schedule_free(config: Config) -> None:
    """Refuse what an optimizer that averages weights does not go with.

    Args:
        config: with layout, formats and the schedule decided.

    Raises:
        ConfigError: with the setting to change.
    """
    name = config.optimizer.name
    if not facts_of(name).averages:
        return
    schedule, beta1, every = config.schedule.name, config.optimizer.beta1, config.optimizer.refactor_every
    refused: list[tuple[str, str]] = [("schedule.name", schedule)] * (schedule != "constant")
    # Gradients are then taken at z, which says nothing of the average.
    refused += [("optimizer.beta1", f"{beta1:g}")] * (beta1 == 0)
    # Factors that are made anew are others than those that were averaged.
    refused += [("optimizer.refactor_every", f"{every:,}")] * (every > 0)
    # Copies that move together from outside leave the average behind.
    refused += [("outer.every", f"{config.outer.every:,}")] * (config.outer.every > 0)
    # It would be an average of weights that are not evaluated.
    refused += [("objective.teachers", EMA)] * learns_from_average(config.objective)
    for key, value in refused:
        raise ConfigError(
            f"{key} {value} is not carried out beside optimizer.name {name}",
            got=f"optimizer.name {name}",
            do=f"change {key}, or choose another optimizer",
        )
