"""Which options of `scrimp eval` go together: with tasks, and without.

Checked  tests/cli/test_eval_options.py
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from scrimp.errors import ConfigError

if TYPE_CHECKING:
    from scrimp.cli.model_commands import Evaluate


def refuse_options_of_others(command: Evaluate) -> None:
    """Refuse what would be ignored, and a loss without a text.

    Raises:
        ConfigError: by the options' names.
    """
    if command.tasks is None:
        _refuse({"--checkpoints": command.checkpoints, "--beside": bool(command.beside)}, "needs --tasks")
        if command.data is None:
            raise ConfigError(
                "scrimp eval: --data is missing",
                expected="a text, or --tasks NAME",
                do="see scrimp eval --help",
            )
        return
    _refuse(
        {"--sequence": command.sequence is not None, "--conversations": command.conversations},
        "has no effect with --tasks",
    )


def _refuse(given: dict[str, bool], why: str) -> None:
    names = [name for name, is_given in given.items() if is_given]
    if names:
        raise ConfigError(f"{names[0]} {why}", got=", ".join(names), do="leave that out")
