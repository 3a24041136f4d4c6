"""What `scrimp plan --hardware` is asked, from the command line and the configuration."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scrimp.cli.show import say
from scrimp.config import (
    Architecture,
    Config,
    base_architecture,
    batches,
    flatten,
    nearest_word,
    parse_count,
)
from scrimp.errors import ConfigError
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout import asked
from scrimp.planner.layout.objectives import Goal, Objective, Searching
from scrimp.planner.layout.questions import Question
from scrimp.planner.layout.scaled_models import ModelFamily, family_of
from scrimp.planner.layout.shape_files import read_shape
from scrimp.planner.precision.profile import PrecisionProfile

READ = ("train.sequence", "train.batch_tokens", "train.micro_batch", "precision", *asked.READ)
LAYOUT = ("dp", "fsdp", "zero", "tp", "pp", "cp", "cp_method", "ep", "etp", "virtual", "schedule", "stages")
EXPLAINED = {
    **{f"layout.{name}": name for name in ("tp", "pp", "cp", "ep", "etp", "dp", "fsdp", "zero", "virtual")},
    "train.micro_batch": "micro_batch",
}
"""What --explain asks about, and its name in a layout."""
_AFTER_S = 2.0
"""Seconds after which the search says how far it is."""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Options of `scrimp plan` that go with --hardware."""

    hardware: str
    shape: Path | None = None
    objective: Objective = "step-time"
    tokens: str | None = None
    days: float | None = None
    explain: str | None = None
    what_if: bool = False
    json: bool = False
    report: Path | None = None
    save: Path | None = None
    simulate: bool = False
    statistics: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The same, read and checked."""

    question: Question
    goal: Goal
    explain: dict[str, int]
    family: ModelFamily

    def searching(self) -> Searching:
        """A search that says how far it is."""
        progress = Progress()
        return Searching(note=progress.note, about=progress.about)


def read_ask(ask: Ask, config: Config, given: Collection[str]) -> Asked:
    """What is asked.

    Args:
        given: dotted keys that the user wrote.

    Raises:
        ConfigError: a file, a name or a setting that the search does not know.
    """
    _refuse(given, ask.shape)
    tokens = None if ask.tokens is None else parse_count(ask.tokens, key="--tokens")
    goal = Goal(objective=ask.objective, tokens=tokens, days=ask.days)
    cluster = load_hardware(ask.hardware)
    family, sequence, batch = model_asked(ask.shape, config)
    question = asked.question_asked(
        config,
        model=family.member(family.given).model,
        cluster=cluster,
        sequence=sequence,
        global_batch=batch // sequence,
        given=_kept(config, given),
        statistics=None if ask.statistics is None else PrecisionProfile.read(ask.statistics),
    )
    explain = {} if ask.explain is None else _explain(ask.explain)
    return Asked(question=question, goal=goal, explain=explain, family=family)


def _kept(config: Config, given: Collection[str]) -> dict[str, Any]:
    """Fields of a layout, and `micro_batch`, that the user wrote."""
    values = flatten(config)
    found = {name: values[f"layout.{name}"] for name in LAYOUT if f"layout.{name}" in given}
    if found.get("schedule") == "auto":
        del found["schedule"]
    return found if config.train.micro_batch is None else found | {"micro_batch": config.train.micro_batch}


class Progress:
    """Says after a while what is searched, and how far it is."""

    def __init__(self) -> None:
        self._last, self._what = time.monotonic(), ""

    def about(self, what: str) -> None:
        """What is searched from now on."""
        self._what = what

    def note(self, how_far: str) -> None:
        """How far the search is now, in words."""
        if time.monotonic() - self._last > _AFTER_S:
            self._last = time.monotonic()
            say(f"{self._what + ': ' if self._what else ''}{how_far} ...")


def _refuse(given: Collection[str], shape: Path | None) -> None:
    known = {*READ, *(f"layout.{name}" for name in LAYOUT), "model.shape"}
    others = [key for key in given if key not in known and not (shape is None and key.startswith("model."))]
    if others:
        raise ConfigError(
            "a search on other hardware does not ask for this",
            got=", ".join(sorted(others)),
            expected=f"model.* (without --model.shape), layout.* and {', '.join(READ)}",
            do="leave it out, or leave --hardware out to plan for this machine",
        )


def model_asked(shape: Path | None, config: Config) -> tuple[ModelFamily, int, int]:
    """The model among others of its shape, and tokens of a sequence and of a batch.

    Raises:
        ScrimpError: a shape or a model that the search does not know, or a batch that is no whole number of sequences.
    """
    train = config.train
    if shape is not None:
        if train.sequence is None or train.batch_tokens is None:
            raise ConfigError(
                "a shape says nothing of sequences and batches",
                expected="--train.sequence and --train.batch-tokens",
                do="give both",
            )
        family, sequence, tokens = family_of(read_shape(shape)), train.sequence, train.batch_tokens
    else:
        architecture = architecture_asked(config)
        if architecture.sparse_share is not None:
            raise ConfigError(
                "a search on other hardware does not know what making layers with a sparse matrix costs",
                got=f"model.sparse_share {architecture.sparse_share:g}",
                do="leave it out, or leave --hardware out to plan for this machine",
            )
        sequence = train.sequence or batches.decide_sequence(train, architecture, 1)[0]
        known = dataclasses.replace(train, sequence=sequence)
        tokens = train.batch_tokens or batches.decide_tokens(known, architecture, 1)[0]
        family = family_of(architecture)
    if tokens % sequence:
        raise ConfigError(
            "train.batch_tokens is not a multiple of train.sequence",
            got=f"{tokens:,} tokens in sequences of {sequence:,}",
            expected=f"a multiple of {sequence:,}",
        )
    return family, sequence, tokens


def architecture_asked(config: Config) -> Architecture:
    """The decoder of `[model]`. Of a Hugging Face folder its config.json is enough: a plan needs no weights.

    Raises:
        ScrimpError: an unknown preset, sizes that contradict one another, or a folder that holds no model.
    """
    folder = config.model.weights
    if folder is None:
        return base_architecture(config, None)
    # Not at the top: they load torch, which presets and shapes need not wait for.
    from scrimp.models.huggingface.config_json import read_architecture
    from scrimp.training.trained_weights import architecture_of_weights, is_huggingface

    read = read_architecture if is_huggingface(folder) else architecture_of_weights
    return base_architecture(config, read(folder))


def _explain(text: str) -> dict[str, int]:
    """Degrees that are asked about, as layout.tp=8 or layout.tp=8,layout.pp=2."""
    found: dict[str, int] = {}
    for part in text.split(","):
        key, equals, value = (word.strip() for word in part.partition("="))
        key = key.replace("-", "_")
        if key not in EXPLAINED or not equals or not re.fullmatch(r"[1-9]\d{0,6}", value):
            near = f"layout.{key}" if f"layout.{key}" in EXPLAINED else nearest_word(key, EXPLAINED)
            raise ConfigError(
                "--explain asks about a degree and its value",
                got=repr(part),
                expected=f"as layout.tp=8; one of {', '.join(EXPLAINED)}, more than one with a comma between",
                do=f"did you mean {near}?" if near and key not in EXPLAINED else None,
            )
        if EXPLAINED[key] in found:
            raise ConfigError("--explain asks twice about a degree", got=text, expected=f"{key} once")
        found[EXPLAINED[key]] = int(value)
    return found
