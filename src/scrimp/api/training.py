"""A whole run from Python: what `scrimp train` does on the command line, for notebooks and scripts.

Settings are those of the command line and of settings files, by the same dotted keys; whatever is left out is decided,
and the run folder says why. A value that cannot be is refused before anything starts.
Checked  tests/api/test_training.py
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from scrimp.config import Config, check_values, leaves, read_config, replace_values, with_command_line
from scrimp.config.read_toml import convert, unknown_key
from scrimp.errors import ConfigError
from scrimp.launchers import place_of
from scrimp.world import World

if TYPE_CHECKING:
    from scrimp.training import RunSummary


def train(
    file: str | os.PathLike[str] | None = None,
    settings: Mapping[str, Any] | None = None,
    *,
    resume: bool = False,
    trust_code: bool = False,
) -> RunSummary:
    """Train a model, and leave a run folder::

        run = scrimp.train(settings={"data.source": "corpus.txt", "train.steps": 200})
        print(run.eval_loss, run.report)

    Args:
        file: TOML file with settings, or with stages of them; None: the defaults.
        settings: dotted key to value, over the file's: ``{"optimizer.lr": 1e-3}``.
        resume: go on from the newest good checkpoint of ``run.dir``.
        trust_code: run the code that settings name as FILE.py:NAME.

    Returns:
        Where the run's folder is, its last step and held-out loss, and its report; of stages those of the last one.

    Raises:
        ScrimpError: bad input (nothing was started), ranks without a process group, or a run that failed.
    """
    from scrimp import user_code
    from scrimp.training import train as train_by
    from scrimp.training import train_stages

    _refuse_copies()

    config, in_file, stages = read_config(None if file is None else Path(file))
    values = _checked({} if settings is None else settings)
    config, given = replace_values(config, values), in_file | values.keys()
    with user_code.trusting(trust_code):
        if stages:
            staged = with_command_line(config, given, stages, frozenset(values))
            return train_stages(staged, resume=resume)
        check_values(config)
        return train_by(config, resume=resume, given=given)


def _refuse_copies() -> None:
    """Refuse several ranks that have not joined: each would train a copy of its own."""
    place = place_of(os.environ)
    if place is not None and World.current().size == 1:
        raise ConfigError(
            "the ranks have not joined",
            got=f"rank {place.rank} of {place.size}, by {place.launcher}, without a process group",
            expected="a process group of all ranks, or one process",
            do="call torch.distributed.init_process_group first, or start `scrimp train` with the launcher",
        )


def _checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """The settings as the types that they have; a path may be a text."""
    known, where, values = leaves(Config), "the settings", {}
    for key, value in settings.items():
        if not isinstance(key, str):
            raise ConfigError(
                f"a key in {where} is not a string", got=repr(key), expected="such as train.steps"
            )
        if key not in known:
            raise unknown_key(key, where)
        values[key] = convert(known[key], str(value) if isinstance(value, Path) else value, where)
    return values
