"""Stages of a training: tables of settings, each a run that goes on from the weights of the one before.

Problem  A model learns from much text of any kind, then from a mixture with the text that matters, then from that
         alone. Each stage has its own data, steps and rates, and nobody wants to start them by hand.
Method   `[[stages]]` in the file of a training are tables of settings, as the file itself has them:

             data.mix = "web.jsonl=1,mine.txt=0"      # what all stages have

             [[stages]]
             train.steps = 2000

             [[stages]]
             data.mix = "web.jsonl=1,mine.txt=1"
             train.steps = 500
             optimizer.lr = 3e-4

         What a stage says stands in the place of what the file says (a mixture in that of a source, and the reverse),
         and an option of the command line in the place of both, in every stage. Stage n is a run of its own in the
         folder stage-n. From the second on it begins with the weights of the stage before, and with the optimizer's
         states unless `optimizer.from_weights = false` stands there; adapters, which are new weights, begin with none.
         All that makes one model of them is refused in a stage: model.*, and the tokenizer, which is that of the first.
Limits   A stage reads its text from the beginning: one with the sources of the stage before reads them in the same
         order, unless it has a `run.seed` of its own.
Checked  tests/config/test_stage_settings.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from scrimp.config.fields import flatten, replace_values
from scrimp.config.read_toml import read_table, settings_in
from scrimp.config.schema import Config
from scrimp.errors import ConfigError

STAGES: Final = "stages"
_FOLDER: Final = "stage-"
_OF_THE_FIRST: Final = ("model.weights", "data.tokenizer", "data.vocab_size")
"""What says where the model and its tokenizer come from: of later stages, the stage before."""
_SAME: Final = (
    *(key for key in flatten(Config()) if key.startswith("model.")),
    *_OF_THE_FIRST[1:],
    "run.dir",
)
"""Settings that no stage has of its own."""
Settings = Mapping[str, Any]


@dataclass(frozen=True)
class StagedRun:
    """A training in stages, as its user wrote it."""

    common: Config
    """What the file says of all stages, and the command line."""
    given: frozenset[str]
    """Dotted keys that the user wrote there."""
    tables: tuple[Settings, ...]
    """What each stage says for itself, but for what the command line says."""

    @property
    def count(self) -> int:
        """How many stages there are."""
        return len(self.tables)

    def stage(self, number: int, root: Path) -> tuple[Config, frozenset[str]]:
        """The settings of a stage, from 1, and the dotted keys that the user wrote.

        Args:
            root: the folder of all stages.
        """
        config, given = self._as_written(number)
        values: dict[str, Any] = {"run.dir": folder_of(root, number)}
        if number > 1:
            before, _ = self._as_written(number - 1)
            unset = flatten(Config())
            values |= {key: unset[key] for key in _OF_THE_FIRST} | {
                "model.weights": folder_of(root, number - 1)
            }
            given -= set(_OF_THE_FIRST)
            if "optimizer.from_weights" not in given:
                values["optimizer.from_weights"] = not (config.adapter.rank or before.adapter.rank)
        return replace_values(config, values), given

    def _as_written(self, number: int) -> tuple[Config, frozenset[str]]:
        table = self.tables[number - 1]
        return replace_values(self.common, table), self.given | table.keys()


def folder_of(root: Path, number: int) -> Path:
    """The run of a stage."""
    return root / f"{_FOLDER}{number}"


def stage_in(name: str) -> int | None:
    """The stage that a folder of this name holds; None: none."""
    number = name.removeprefix(_FOLDER)
    return int(number) if number != name and number.isdecimal() and number[0] != "0" else None


def read_config(file: Path | None) -> tuple[Config, frozenset[str], tuple[Settings, ...]]:
    """The configuration in a TOML file, the dotted keys that it sets, and its stages, if it has any."""
    if file is None:
        return Config(), frozenset(), ()
    table, where = read_table(file), str(file)
    stages = _stages_in(table.pop(STAGES), where) if STAGES in table else ()
    values = settings_in(table, where)
    return replace_values(Config(), values), frozenset(values), stages


def with_command_line(
    common: Config, given: frozenset[str], tables: Sequence[Settings], on_line: frozenset[str]
) -> StagedRun:
    """The stages of a file under a command line.

    Args:
        common: what the file says of all stages, with what the command line says in its place.
        given: dotted keys of both.
        on_line: those of the command line, whose values count in every stage.
    """
    own = [_with_one_text(one) for one in tables]
    texts = {"data.mix", "data.source"}
    said = (
        on_line | texts if on_line & texts else on_line
    )  # one of the two is what is read, whatever stages say
    kept = tuple({key: value for key, value in one.items() if key not in said} for one in own)
    return StagedRun(common, given, kept)


def _with_one_text(table: Settings) -> Settings:
    """A stage that has a mixture has no source, and the reverse, whatever the file says of all stages."""
    for key, other in (("data.mix", "data.source"), ("data.source", "data.mix")):
        if key in table and other not in table:
            return {**table, other: flatten(Config())[other]}
    return table


def _stages_in(value: object, where: str) -> tuple[Settings, ...]:
    """Checked settings of each stage.

    Raises:
        ConfigError: no list of tables, or a setting that is wrong, or the same in all stages.
    """
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise ConfigError(
            f"{STAGES} in {where} is no list of tables",
            got=type(value).__name__ if not isinstance(value, list) else f"a list of {len(value)}",
            expected=f"[[{STAGES}]] with settings below, once for each stage, behind all other sections",
        )
    found = []
    for number, table in enumerate(value, start=1):
        settings = settings_in(table, f"stage {number} of {where}")
        same = next((key for key in settings if key in _SAME), None)
        if same is not None:
            raise ConfigError(
                f"{same} in stage {number} of {where} is the same in all stages",
                got=settings[same],
                expected="stages of one model and one tokenizer, in folders below run.dir",
                do=f"set {same} above the first [[{STAGES}]], for all stages",
            )
        found.append(settings)
    return tuple(found)
