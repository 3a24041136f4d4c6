"""The plans of a run in order, and the analyses behind them, read as far as they can be read.

Problem  Every re-plan leaves ``plans/step-00000400.json`` and beside it ``step-00000400.precision.json``,
         the harm that each format would have done. A run can die between the two, a disk can fill,
         and a file of another program can lie in the folder; the page is wanted all the same.
Method   What does not have the expected type is left out here, so that everything behind this module
         works on numbers and names. A file that is missing, torn or foreign becomes a sentence among the
         page's notes. A plan without an analysis of its own (a guard promoted layers) is shown with the
         figures of the newest analysis before it, which are still the best prediction.
Start    ``plan.json`` is the first plan where it differs from the newest in ``plans/``; else it is that one.
Limits   At most `PLANS_READ` plans: the first and the newest.
Checked  tests/report/test_precision_record.py
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from scrimp.errors import StorageError
from scrimp.files import read_bounded
from scrimp.json_files import decode_loosely
from scrimp.precision import GEMMS
from scrimp.report.units import is_number

VERSION: Final = 1
PLANS_READ: Final = 60
_NAME: Final = re.compile(r"step-(\d{1,12})(\.precision)?\.json")
_MAX_FILE_BYTES: Final = 2**26
_NOTES: Final = 8
_NAME_LIMIT: Final = 200

Three = tuple[str, str, str]
"""Recipes of fprop, dgrad and wgrad; an empty one is not known."""


@dataclass(frozen=True, kw_only=True)
class GemmAnalysis:
    """What each format would do to one GEMM; all predicted, dimensionless shares of variance."""

    choice: str
    harm: Mapping[str, float]
    loss: Mapping[str, float]
    update: Mapping[str, float]
    certainty: float | None
    """Share of resampled statistics in which the solver makes the same choice, 0 to 1."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What a re-plan knew, and what its solver said."""

    step: int
    measured_at: int | None
    policy: str
    granularity: str
    formats: tuple[str, ...]
    budget: Mapping[str, float]
    predicted: Mapping[str, float]
    measured: Mapping[str, float]
    certainty: float | None
    batches: int | None = None
    """That were measured; None: not known."""
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Predicted divergence to (low, high), 95 %, from how it differs between the batches; none from one."""
    solver: str
    solver_note: str
    gap: float | None
    seconds: Mapping[str, float]
    """Time spent on measuring and solving, and time that training stood still."""
    shares: Mapping[str, float]
    """Layer to its share of the FLOPs of all linear layers, three GEMMs together."""
    stages: Mapping[str, int]
    gemms: Mapping[tuple[str, str], GemmAnalysis]
    """(layer, GEMM) to its figures."""
    choices: Mapping[str, Three]


@dataclass(frozen=True, kw_only=True)
class PlanAt:
    """One plan of the run."""

    step: int | None
    """None: ``plan.json``, from the start."""
    choices: Mapping[str, Three]
    reasons: Mapping[str, str] = field(default_factory=dict)
    analysis: Analysis | None = None

    def recipe(self, layer: str, gemm: str) -> str:
        """What one GEMM runs in; empty where the plan does not say."""
        choice = self.choices.get(layer, ("", "", ""))
        return next((name for key, name in zip(GEMMS, choice, strict=True) if key == gemm), "")

    @property
    def has_own_analysis(self) -> bool:
        """Whether its figures were made for it, and not for a plan before it."""
        return self.analysis is not None and self.analysis.step == self.step

    @property
    def label(self) -> str:
        """For people."""
        return "plan at the start" if self.step is None else f"plan of step {self.step:,}"


def read_plans(run_dir: Path, notes: list[str]) -> tuple[PlanAt, ...]:
    """The plans in ``plans/``, oldest first; what could not be read is added to `notes`."""
    folder = run_dir / "plans"
    files: dict[int, set[str]] = {}
    try:
        names = sorted(path.name for path in folder.iterdir()) if folder.is_dir() else []
    except OSError as error:
        names = []
        notes.append(f"plans/ cannot be read ({error.strerror}); re-plans are not shown.")
    for name in names:
        if found := _NAME.fullmatch(name):
            files.setdefault(int(found[1]), set()).add(name)
    steps = sorted(files)
    if len(steps) > PLANS_READ:
        notes.append(
            f"plans/ holds {len(steps):,} plans; the first and the newest {PLANS_READ - 1} are shown."
        )
        steps = [steps[0], *steps[-(PLANS_READ - 1) :]]
    mine: list[str] = []
    plans = [_plan_at(folder, step, files[step], mine) for step in steps]
    notes += mine[:_NOTES]
    if len(mine) > _NOTES:
        notes.append(f"plans/: {len(mine) - _NOTES:,} more notes of this kind.")
    return tuple(plan for plan in plans if plan is not None)


def timeline(start: Mapping[str, Any], plans: tuple[PlanAt, ...]) -> list[PlanAt]:
    """All plans from the first to the one that holds now, each with the newest analysis known to it.

    Args:
        start: the content of ``plan.json``.
        plans: what `read_plans` found.
    """
    gemms = _object(start.get("gemms"))
    first = PlanAt(step=None, choices=choices_of(gemms), reasons=_reasons(gemms))
    found = list(plans)
    if first.choices and not (found and found[-1].choices == first.choices):
        found.insert(0, first)
    known: Analysis | None = None
    result = []
    for plan in found:
        known = plan.analysis or known
        result.append(replace(plan, analysis=known))
    return result


def choices_of(gemms: Mapping[str, Any]) -> dict[str, Three]:
    """Layer to recipes, of the `gemms` of a plan as JSON; what is no layer is left out."""
    found: dict[str, Three] = {}
    for layer, choice in gemms.items():
        names = [_object(choice).get(gemm) for gemm in GEMMS]
        if any(isinstance(name, str) for name in names):
            fprop, dgrad, wgrad = (name[:_NAME_LIMIT] if isinstance(name, str) else "" for name in names)
            found[layer] = (fprop, dgrad, wgrad)
    return found


def _reasons(gemms: Mapping[str, Any]) -> dict[str, str]:
    return {layer: str(reason) for layer, row in gemms.items() if (reason := _object(row).get("reason"))}


def _plan_at(folder: Path, step: int, names: set[str], notes: list[str]) -> PlanAt | None:
    # Both spellings of one step (with and without zeros) are the same plan: the later name wins.
    plan_name = max((name for name in names if not name.endswith(".precision.json")), default=None)
    analysis_name = max((name for name in names if name.endswith(".precision.json")), default=None)
    analysis = _analysis(folder / analysis_name, step, notes) if analysis_name else None
    plan = _plan(folder / plan_name, notes) if plan_name else {}
    gemms = _object(plan.get("gemms"))
    choices: Mapping[str, Three] = choices_of(gemms)
    if plan_name is None:
        notes.append(f"plans/{analysis_name} has no plan beside it; the choices are the analysis's own.")
    if not choices and analysis is not None:
        choices = analysis.choices
    if not choices:
        return None
    return PlanAt(step=step, choices=choices, reasons=_reasons(gemms), analysis=analysis)


def _plan(path: Path, notes: list[str]) -> Mapping[str, Any]:
    plan = _json(path, notes)
    if plan is not None and (
        plan.get("scrimp_plan") != VERSION or not choices_of(_object(plan.get("gemms")))
    ):
        notes.append(f"plans/{path.name} is not a plan of this version of Scrimp and not shown.")
        return {}
    return plan or {}


def _analysis(path: Path, step: int, notes: list[str]) -> Analysis | None:
    raw = _json(path, notes)
    if raw is None:
        return None
    layers = _object(raw.get("layers"))
    if raw.get("scrimp_precision") != VERSION or not layers:
        notes.append(f"plans/{path.name} is not an analysis of this version of Scrimp and not shown.")
        return None
    gemms: dict[tuple[str, str], GemmAnalysis] = {
        (layer, gemm): found
        for layer, row in layers.items()
        for gemm in GEMMS
        if (found := _gemm(_object(_object(row).get("gemms")).get(gemm))) is not None
    }
    if len(gemms) < len(layers) * len(GEMMS):
        notes.append(
            f"plans/{path.name}: {len(layers) * len(GEMMS) - len(gemms):,} of {len(layers) * len(GEMMS):,} "
            "GEMMs have no figures that can be shown."
        )
    solver = _object(raw.get("solver"))
    return Analysis(
        step=step,
        measured_at=_integer(raw.get("measured_at")),
        policy=_text(raw.get("policy")),
        granularity=_text(raw.get("granularity")),
        formats=tuple(_names(raw.get("formats"))),
        budget=_numbers(raw.get("budget")),
        predicted=_numbers(raw.get("predicted")),
        measured=_numbers(raw.get("measured")),
        certainty=_share(raw.get("certainty")),
        batches=_integer(raw.get("batches")) or None,
        intervals=_intervals(raw.get("intervals")),
        solver=_text(solver.get("name")),
        solver_note=_text(solver.get("note")),
        gap=_number(solver.get("gap")),
        seconds=_numbers(raw.get("seconds")),
        shares={layer: share for layer, row in layers.items() if (share := _positive(row))},
        stages={
            layer: stage
            for layer, row in layers.items()
            if (stage := _integer(_object(row).get("stage"))) is not None
        },
        gemms=gemms,
        choices=choices_of({layer: _choice_names(row) for layer, row in layers.items()}),
    )


def _json(path: Path, notes: list[str]) -> Mapping[str, Any] | None:
    try:
        found = decode_loosely(read_bounded(path, error=StorageError, do="", at_most=_MAX_FILE_BYTES))
    except StorageError as error:
        notes.append(f"plans/{path.name} cannot be read ({error.got}) and is not shown.")
        return None
    except ValueError as error:
        notes.append(f"plans/{path.name} is damaged ({str(error)[:120]}) and not shown.")
        return None
    if not isinstance(found, dict):
        notes.append(f"plans/{path.name} is not a JSON object and not shown.")
        return None
    return found


def _gemm(value: object) -> GemmAnalysis | None:
    row = _object(value)
    harm = _numbers(row.get("harm"))
    if not harm:
        return None
    return GemmAnalysis(
        choice=_text(row.get("choice")),
        harm=harm,
        loss=_numbers(row.get("loss")),
        update=_numbers(row.get("update")),
        certainty=_share(row.get("certainty")),
    )


def _choice_names(row: object) -> dict[str, Any]:
    gemms = _object(_object(row).get("gemms"))
    return {gemm: _object(gemms.get(gemm)).get("choice") for gemm in GEMMS}


def _object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _numbers(value: object) -> dict[str, float]:
    return {key: float(number) for key, number in _object(value).items() if is_number(number)}


def _intervals(value: object) -> dict[str, tuple[float, float]]:
    found = {}
    for key, pair in _object(value).items():
        if isinstance(pair, list) and len(pair) == 2 and all(map(is_number, pair)) and pair[0] <= pair[1]:
            found[key] = (float(pair[0]), float(pair[1]))
    return found


def _number(value: object) -> float | None:
    return float(value) if is_number(value) else None


def _integer(value: object) -> int | None:
    return int(value) if is_number(value) else None


def _share(value: object) -> float | None:
    return float(value) if is_number(value) and 0 <= value <= 1 else None


def _positive(row: object) -> float | None:
    value = _object(row).get("flops_share")
    return float(value) if is_number(value) and value > 0 else None


def _text(value: object) -> str:
    return value[:_NAME_LIMIT] if isinstance(value, str) else ""


def _names(value: object) -> list[str]:
    return [item[:_NAME_LIMIT] for item in value if isinstance(item, str)] if isinstance(value, list) else []
