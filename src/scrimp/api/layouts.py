"""What training takes on hardware that is not here, from Python: `scrimp plan --batch` and `scrimp plan --hardware`.

Arguments are the keys of a line of settings (docs/planner.md), with their checks and messages. Nothing is measured, and
no device is needed.

Checked  tests/api/test_predicted_layouts.py; tests/docs/test_planner.py runs the guide's example
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral
from pathlib import Path
from typing import Any

from scrimp.config import (
    Config,
    Range,
    check_range,
    check_values,
    nearest_word,
    parse_count,
    replace_values,
    settings_in,
)
from scrimp.errors import ConfigError
from scrimp.json_files import as_typed
from scrimp.models.shapes import ModelShape
from scrimp.planner.hardware import load_hardware
from scrimp.planner.layout.as_json import answer_json
from scrimp.planner.layout.asked import READ, question_asked
from scrimp.planner.layout.block_choices import has_room_as_planned
from scrimp.planner.layout.divisibility import objections
from scrimp.planner.layout.execution import Execution
from scrimp.planner.layout.lines import (
    PRECISIONS,
    Line,
    check_line,
    read_model,
    setting_of,
    sharded,
    sizes_of_line,
)
from scrimp.planner.layout.objectives import OBJECTIVES, Answer, Goal, Objective, Searching, answered
from scrimp.planner.layout.predict import Prediction
from scrimp.planner.layout.predict import predict as predict_setting
from scrimp.planner.layout.scaled_models import family_of
from scrimp.planner.layout.setting import BlockPlan, Offload, Setting
from scrimp.planner.layout.stage_memory import RankBytes, peak_bytes
from scrimp.planner.layout.state_formats import StateFormats
from scrimp.planner.precision.profile import PrecisionProfile

_DO = "see docs/planner.md for the keys of a line"


@dataclass(frozen=True)
class PredictedStep:
    """Seconds and bytes of a step."""

    setting: Setting
    """What is trained on what, and how: `setting.layout`, `setting.micro_batch`, `setting.recompute`."""
    step_seconds: float
    tokens_per_second_per_device: float
    seconds: Mapping[str, float]
    """By cause: compute, communication_exposed, bubble, optimizer, other."""
    peak_bytes: tuple[Mapping[str, float], ...]
    """Peak bytes of each rank of the pipeline, by category."""
    fits: bool
    """Whether devices hold these, and hosts what is sent to them."""


@dataclass(frozen=True)
class LayoutSearch:
    """The answer of a search."""

    plans: tuple[PredictedStep, ...]
    """The best first; empty: no layout fits."""
    tried: int
    """Layouts with micro-batches that there are."""
    too_large: int
    """Those of them that do not fit."""
    answer: Answer
    """All of it: the question that an objective chose, the best of each degree's values, what was tried."""
    goal: Goal

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why no layout has the degrees that are given; empty where some were tried."""
        return () if self.tried else tuple(objections(self.answer.question))

    def as_json(self) -> dict[str, Any]:
        """As `scrimp plan --hardware --json` prints it."""
        from scrimp import __version__

        return answer_json(self.answer, self.goal, __version__)


def predict(
    *,
    model: str | os.PathLike[str] | ModelShape | Mapping[str, Any],
    hardware: str | os.PathLike[str],
    sequence: int,
    global_batch: int,
    micro_batch: int,
    layout: Mapping[str, Any] | None = None,
    recompute: str | int = "none",
    recompute_parts: Sequence[str] = (),
    offload: Offload | Mapping[str, Any] | None = None,
    precision: str = "bf16",
    blocks: Sequence[BlockPlan | Mapping[str, Any]] = (),
    software: str = "scrimp",
    states: StateFormats | Mapping[str, Any] | None = None,
    attention_kernel: str = "",
    execution: Execution | Mapping[str, Any] | None = None,
) -> PredictedStep:
    """Seconds and bytes of a step::

        step = scrimp.predict(
            model="llama-3.1-8b", hardware="8xh100", sequence=8192, global_batch=128, micro_batch=1, layout={"fsdp": 8}
        )
        print(step.step_seconds, step.seconds["bubble"], step.fits)

    Args:
        model: a preset, a TOML file of a shape, or a shape.
        hardware: as 8xh100, or a TOML file.
        layout: degrees, 1 where they are not named.
        recompute_parts: what selective recomputation makes again; empty: what the software's does.
        blocks: what each block does, which then stands for `recompute`.
        states: formats of Scrimp's weights and moments, as {"moments": "bf16", "masters": False}.
        attention_kernel: torch, as of a run with train.deterministic and data.mask_documents false; empty: the
            software's own.
        execution: what users of Megatron and TorchTitan set beside the layout.

    Raises:
        ConfigError: a name, a file or a degree is wrong.
        PlanError: the parts do not fit one another.
    """
    setting = setting_of(_line(locals()))
    return _step(setting, predict_setting(setting), peak_bytes(setting))


def search(
    *,
    model: str | os.PathLike[str] | ModelShape | Mapping[str, Any],
    hardware: str | os.PathLike[str],
    sequence: int,
    global_batch: int,
    micro_batch: int | None = None,
    layout: Mapping[str, Any] | None = None,
    precision: str = "bf16",
    software: str = "scrimp",
    settings: Mapping[str, Any] | None = None,
    statistics: str | os.PathLike[str] | PrecisionProfile | None = None,
    objective: Objective = "step-time",
    tokens: float | str | None = None,
    days: float | None = None,
    keep: int = 5,
) -> LayoutSearch:
    """The best layouts of a model::

        found = scrimp.search(model="llama-3.1-8b", hardware="8xh100", sequence=8192, global_batch=128)
        print(found.plans[0].setting.layout, found.plans[0].step_seconds)

    Args:
        micro_batch, layout: what is kept as it is; all else is searched.
        precision: one recipe of all blocks' products (auto: bf16); snip: the search chooses from `snip.formats`.
        settings: of a run, by dotted key: snip.formats, budget.*, memory.*, train.parameters, optimizer.moments,
            optimizer.master_weights, train.deterministic, data.mask_documents.
        statistics: what `scrimp.measure` found, or its file; beside precision snip.
        objective: step-time, cost, smallest-cluster, longest-context or largest-model.
        tokens, days: of the whole training; tokens as a number, or as 15T.
        keep: how many plans are wanted.

    Raises:
        ConfigError: a name, a file or a number is wrong.
        PlanError: an objective has no answer.
    """
    given = {name: value for name, value in locals().items() if name in _SEARCHED}
    config = _config(precision, settings)
    given["precision"] = precision if precision in PRECISIONS else "bf16"
    line = _line(given | {"micro_batch": 1 if micro_batch is None else micro_batch})
    check_line(line, has_pp="pp" in (layout or {}))
    check_range("keep", keep, Range(1, 10**6))
    goal, wanted = _goal(objective, tokens, days), _wanted(line, layout or {})
    if micro_batch is not None:
        wanted["micro_batch"] = line.micro_batch
    question = question_asked(
        config,
        model=sizes_of_line(line),
        cluster=load_hardware(line.hardware),
        sequence=line.sequence,
        global_batch=line.global_batch,
        given=wanted,
        software=software,
        statistics=_profile(statistics),
    )
    answer = answered(question, goal, Searching(keep=keep), lambda: family_of(read_model(line.model)))
    plans = tuple(_step(one.setting, one.prediction, one.memory) for one in answer.found.best)
    return LayoutSearch(plans, answer.found.tried, answer.found.too_large, answer, goal)


_SEARCHED = ("model", "hardware", "sequence", "global_batch", "layout", "precision", "software")


def _wanted(line: Line, layout: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of a layout."""
    if not line.layout.sequence_parallel:
        raise ConfigError(
            "a search knows ranks of tp that share the tokens between layers alone",
            got="layout sequence_parallel False",
            do="leave it out, or predict one layout with it",
        )
    own = sharded(line.layout)
    names = [name for name in layout if name != "sequence_parallel"]
    if own != line.layout:
        names = ["fsdp" if name == "dp" else name for name in names]
    found = {name: getattr(own, name) for name in names}
    return {
        name: value
        for name, value in found.items()
        if value is not None and (name, value) != ("schedule", "auto")
    }


def _config(precision: str, settings: Mapping[str, Any] | None) -> Config:
    """A configuration with these settings, checked."""
    for name, given, kind in (("precision", precision, str), ("settings", settings or {}, Mapping)):
        if not isinstance(given, kind):
            raise ConfigError(f"{name} is no {kind.__name__}", got=repr(given)[:80])
    table: dict[str, Any] = {}
    for key, value in (settings or {}).items():
        if key not in READ:
            near = nearest_word(str(key), READ)
            raise ConfigError(
                f"{key} is not a setting of a search",
                expected=f"one of {', '.join(READ)}",
                do=f"did you mean {near}?" if near else "model, batch and layout are arguments of their own",
            )
        section, _, name = key.partition(".")
        table.setdefault(section, {})[name] = value
    config = replace_values(Config(), settings_in(table, "settings"))
    check_values(dataclasses.replace(config, precision="bf16" if precision in PRECISIONS else precision))
    return dataclasses.replace(config, precision=precision)


def _profile(statistics: str | os.PathLike[str] | PrecisionProfile | None) -> PrecisionProfile | None:
    if statistics is None or isinstance(statistics, PrecisionProfile):
        return statistics
    if not isinstance(statistics, str | os.PathLike):
        raise ConfigError(
            "statistics are no profile",
            got=repr(statistics)[:80],
            expected="what scrimp.measure gave, or its file",
        )
    return PrecisionProfile.read(Path(statistics))


def _step(setting: Setting, prediction: Prediction, memory: Sequence[RankBytes]) -> PredictedStep:
    return PredictedStep(
        setting,
        prediction.step_seconds,
        prediction.tokens_per_second_per_device,
        prediction.seconds,
        tuple(one.categories for one in memory),
        has_room_as_planned(setting, memory),
    )


def _line(values: Mapping[str, Any]) -> Line:
    plain = {name: _plain(value) for name, value in values.items() if value is not None}
    return as_typed(plain, Line, origin="the arguments", error=ConfigError, do=_DO)


def _plain(value: Any) -> Any:
    """As JSON would have it."""
    if isinstance(value, ModelShape | Offload | BlockPlan | Execution | StateFormats):
        return dataclasses.asdict(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Integral) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, Mapping):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list | tuple) else value


def _goal(objective: str, tokens: float | str | None, days: float | None) -> Goal:
    if objective not in OBJECTIVES:
        near = nearest_word(str(objective), OBJECTIVES)
        raise ConfigError(
            "objective is not known",
            got=objective,
            expected=f"one of {', '.join(OBJECTIVES)}",
            do=f"did you mean {near}?" if near else None,
        )
    number = parse_count(tokens, key="tokens") if isinstance(tokens, str) else tokens
    return Goal(objective=objective, tokens=number, days=days)
