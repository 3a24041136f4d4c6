"""`scrimp train` and `scrimp plan` of a file with stages: the same commands, and what they do with several runs.

They are made of the command that was parsed (`in_stages`), so that stages add no option to the command line. Options
that are of one run alone are refused by name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from dataclasses import dataclass
from typing import Final

from scrimp.cli.commands import Plan, Train
from scrimp.cli.parse import option, renamed_options
from scrimp.config import StagedRun
from scrimp.errors import ConfigError

_OF_BOTH: Final = frozenset({"file", "config", "trust_code"})


@dataclass(frozen=True, kw_only=True)
class StagedTrain(Train):
    """Train stage after stage; the same command goes on where it stopped."""

    stages: StagedRun

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.training import train_stages

        do = "go on with one stage as with any run: --run.dir RUN/stage-2 --resume-from 100"
        _refuse_options(self, Train, _OF_BOTH | {"resume"}, do)
        return train_stages(self.stages, resume=self.resume).exit_code


@dataclass(frozen=True, kw_only=True)
class StagedPlan(Plan):
    """Show what each stage would take, and start nothing."""

    stages: StagedRun

    def execute(self, given: frozenset[str]) -> int:
        from scrimp.cli.dry_run import dry_run_of_stages

        _refuse_options(self, Plan, _OF_BOTH, "ask about one stage: a file with its settings alone")
        dry_run_of_stages(self.stages)
        return 0


def in_stages(command: Train | Plan, stages: StagedRun) -> StagedTrain | StagedPlan:
    """The command that does with all stages what one does with a run."""
    values = {field.name: getattr(command, field.name) for field in dataclasses.fields(command)}
    if isinstance(command, Train):
        return StagedTrain(**values, stages=stages)
    return StagedPlan(**values, stages=stages)


def _refuse_options(
    command: Train | Plan, kind: type[Train | Plan], allowed: Collection[str], do: str
) -> None:
    """Refuse options that are of one run.

    Raises:
        ConfigError: by the option.
    """
    for field in dataclasses.fields(kind):
        if field.name not in allowed and getattr(command, field.name) != field.default:
            spelt = option(renamed_options(kind).get(field.name, field.name))
            raise ConfigError(
                f"{spelt} does not go with stages", got=f"{spelt}, and a file with stages", do=do
            )
