"""Losses that the sources of a mixture can reach (`objective.reference_losses`): how far each is above its own says
how well it is learnt (`scrimp.training.source_weighting`).

Limits   What is not carried out beside it is refused here, by name.
Checked  tests/config/test_reference_losses.py
"""

from __future__ import annotations

import contextlib
import math

from scrimp.config.layout import degrees_in_model
from scrimp.config.mixture import labels_of
from scrimp.config.schema import Config, ObjectiveConfig
from scrimp.errors import ConfigError
from scrimp.user_code import is_code

KEY = "objective.reference_losses"


def reference_losses(text: str) -> dict[str, float]:
    """Nats a token by the name of a source, as `eval_loss/NAME` has it.

    Raises:
        ConfigError: this is no list of different sources with losses.
    """
    found: dict[str, float] = {}
    for part in text.split(","):
        name, equals, loss = (word.strip() for word in part.rpartition("="))
        nats = math.nan
        with contextlib.suppress(ValueError):
            nats = float(loss)
        if not equals or not name or name in found or not 0 <= nats < math.inf:
            raise ConfigError(
                f"{KEY} is no list of sources and losses",
                got=f"{part.strip()!r} in {text!r}",
                expected="each source once, with nats a token, as a.txt=3.1,b.txt=2.4",
            )
        found[name] = nats
    return found


def check_reference_losses(config: Config) -> None:
    """Refuse losses of other sources than the run is trained on, and what does not go with them.

    Args:
        config: with layout and formats decided.

    Raises:
        ConfigError: with the setting to change.
    """
    text = config.objective.reference_losses
    if text is None:
        scale, usual = config.objective.excess_scale, ObjectiveConfig().excess_scale
        if scale != usual:
            raise ConfigError(
                f"objective.excess_scale has no effect without {KEY}",
                got=scale,
                do="leave it out, or name losses",
            )
        return
    labels = labels_of([one.name for one in config.data.mixed])
    trained = [label for label, one in zip(labels, config.data.mixed, strict=True) if one.share]
    named = reference_losses(text)
    if len(trained) < 2 or set(named) != set(trained):
        raise ConfigError(
            f"{KEY} does not name the sources that are trained on",
            got=", ".join(named),
            expected=f"{', '.join(trained) or 'a data.mix'}: two sources of data.mix or more, none of weight 0",
            do=f"name each of them once, or leave {KEY} out",
        )
    refused = degrees_in_model(config.layout)
    refused += [("outer.every", f"{config.outer.every:,}")] * (config.outer.every > 0)
    # Its statistics are of the loss of the text.
    refused += [("precision", config.precision)] * config.is_planned
    refused += [("objective.name", config.objective.name)] * is_code(config.objective.name)
    for key, value in refused:
        raise ConfigError(
            f"{key} {value} is not carried out beside {KEY}",
            got=f"{KEY} {text}",
            do=f"change {key}, or leave {KEY} out",
        )
