"""A plan of precision with the analysis behind it: what `scrimp.plan` gives, and what a report shows.

Stored as JSON beside the run's plan (``plans/step-00000400.precision.json``): for every GEMM the chosen format,
what each candidate would have cost (harm, and its parts in loss and update), and how sure the choice is::

    scrimp_precision   version
    step, measured_at  when it began, and when its statistics were taken
    model, device      fingerprints of what was measured
    layers             layer -> flops_share, stage, gemms -> choice, harm, loss, update, certainty
    predicted          fp4_flops; saved_bytes, what is kept of inputs as a share of its bytes in bf16 (none where
                       another trainer runs the plan); loss_divergence, relative change of the loss, and
                       weight_divergence, relative change of the update (root sums of squares over GEMMs);
                       step_seconds of the planned GEMMs, and of what a step takes beside them where that is known
    batches, intervals how many were measured, and from their spread 95 % intervals of the divergences, low and high
    budget             as its user gave it; empty where the policy keeps none
    measured           the same divergences, of the plan as a whole, where a probe has measured them

Checked  tests/planner/precision/test_precision_plan.py
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scrimp.config.snip import keeps_budget
from scrimp.errors import PlanError
from scrimp.files import read_bounded, write_whole
from scrimp.json_files import decode_json, finite
from scrimp.planner.precision.choose import (
    Choice,
    Question,
    share_in_4_bits,
    share_of_saved_bytes,
    without_statistics,
)
from scrimp.planner.precision.divergence import gemm_parts, mean_divergence
from scrimp.planner.precision.interval import intervals
from scrimp.planner.precision.policies import is_per_gemm
from scrimp.planner.precision.profile import PrecisionProfile
from scrimp.planner.precision.stability import certainty, settle
from scrimp.planner.solver import Solution, UnreachableError
from scrimp.precision import GEMMS, RECIPES, LinearPrecision

VERSION = 1
MAX_FILE_BYTES = 2**26
_MAKE = "make one with scrimp.plan"


@dataclass(frozen=True)
class PlannedGemm:
    """One decision, and what the candidates cost."""

    choice: str
    harm: dict[str, float]
    """Candidate to predicted cost, of the whole plan's scale."""
    loss: dict[str, float]
    update: dict[str, float]
    certainty: float | None = None


@dataclass(frozen=True)
class PlannedLinearLayer:
    """The three GEMMs of one layer."""

    flops_share: float
    stage: int
    gemms: dict[str, PlannedGemm]


@dataclass(frozen=True)
class PrecisionPlan:
    """Formats of all planned layers; see the module."""

    model: str
    device: str
    policy: str
    formats: tuple[str, ...]
    budget: dict[str, float]
    layers: dict[str, PlannedLinearLayer]
    predicted: dict[str, float | None]
    reason: str = ""
    step: int = 0
    measured_at: int = 0
    measured: dict[str, float] | None = None
    certainty: float | None = None
    """Mean over the GEMMs."""
    solver: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    batches: int = 0
    """That were measured; 0: not known."""
    intervals: dict[str, list[float]] = field(default_factory=dict)
    """Predicted divergence to (low, high); none from one batch."""
    granularity: str = ""
    """gemm or layer: what has one format."""

    @property
    def precisions(self) -> dict[str, LinearPrecision]:
        """Layer to its recipes; what is saved of the input is what wgrad reads."""
        found = {}
        for layer, planned in self.layers.items():
            fprop, dgrad, wgrad = (planned.gemms[gemm].choice for gemm in GEMMS)
            found[layer] = LinearPrecision(fprop, dgrad, wgrad, wgrad)
        return found

    def to_json(self) -> str:
        """The plan as JSON text, one line per layer."""
        facts = dataclasses.asdict(self)
        layers = facts.pop("layers")
        rows = ",\n".join(f"    {json.dumps(name)}: {json.dumps(row)}" for name, row in layers.items())
        head = {"scrimp_precision": VERSION, **finite(facts)}
        lines = [f"  {json.dumps(key)}: {json.dumps(value)}" for key, value in head.items()]
        return "{\n" + ",\n".join([*lines, f'  "layers": {{\n{rows}\n  }}']) + "\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "the plan") -> PrecisionPlan:
        """Read what `to_json` wrote.

        Raises:
            PlanError: not JSON, another version, or values that are none.
        """
        version = ("scrimp_precision", VERSION)
        plan = decode_json(text, cls, origin=origin, error=PlanError, do=_MAKE, version=version)
        for layer, row in plan.layers.items():
            if set(row.gemms) != set(GEMMS):
                what = f"{origin}: $.layers.{layer}.gemms has the wrong keys"
                raise PlanError(what, got=", ".join(row.gemms), expected=", ".join(GEMMS), do=_MAKE)
        for layer, precision in plan.precisions.items():
            for gemm in GEMMS:
                if precision.gemm(gemm) not in RECIPES:
                    raise PlanError(
                        f"{origin}: {layer}.{gemm} has an unknown recipe", got=precision.gemm(gemm)
                    )
        return plan

    def write(self, path: Path | str) -> None:
        """Store, whole or not at all."""
        write_whole(Path(path), self.to_json())

    @classmethod
    def read(cls, path: Path | str) -> PrecisionPlan:
        """Read a file; PlanError where that cannot be done."""
        content = read_bounded(Path(path), error=PlanError, do=_MAKE, at_most=MAX_FILE_BYTES)
        return cls.from_json(content, origin=str(path))


def make_plan(question: Question, *, step: int = 0, draws: int | None = None) -> PrecisionPlan:
    """Solve a question, keep what is not worth a change, and say how sure that is.

    Args:
        step: at which the plan will begin.
        draws: resampled solutions behind the certainty; None: the usual number.

    Raises:
        PlanError: the budget cannot be reached.
    """
    unknown = without_statistics(question)
    try:
        choice, reason = settle(question)
    except UnreachableError as error:
        if not unknown:
            raise
        what = f"{error.what}: {unknown}"
        raise UnreachableError(what, got=error.got, expected=error.expected, do=error.do) from None
    reason += f"; {unknown}" if unknown else ""
    sure = certainty(question, choice) if draws is None else certainty(question, choice, draws=draws)
    return describe(question, choice, reason, sure, step=step)


def describe(
    question: Question,
    choice: Choice,
    reason: str,
    sure: NDArray[np.float64] | None = None,
    *,
    step: int = 0,
) -> PrecisionPlan:
    """A choice with everything that is known of it."""
    profile, solution = question.profile, choice.solution
    stages = [0] * len(profile.layers) if question.stages is None else list(question.stages)
    found = mean_divergence(profile, question.method)
    loss, update, curvature = gemm_parts(profile, found, question.weights)

    def gemm(i: int, j: int) -> PlannedGemm:
        by_loss = loss[i] + curvature[i] if j == 0 else np.zeros_like(loss[i])
        harm = by_loss + update[i, j]
        name = profile.formats[choice.formats[i, j]]
        return PlannedGemm(
            choice=name,
            harm=_named(profile, harm),
            loss=_named(profile, by_loss),
            update=_named(profile, update[i, j]),
            certainty=None if sure is None else float(sure[i, j]),
        )

    layers = {
        layer: PlannedLinearLayer(
            float(profile.flops[i]), int(stages[i]), {name: gemm(i, j) for j, name in enumerate(GEMMS)}
        )
        for i, layer in enumerate(profile.layers)
    }
    return PrecisionPlan(
        model=profile.model,
        device=profile.device,
        policy=question.policy,
        formats=profile.formats,
        budget=question.budget.given if keeps_budget(question.policy) else {},
        layers=layers,
        predicted=predict(question, choice),
        reason=reason,
        step=step,
        measured_at=profile.step,
        certainty=None if sure is None else float(sure.mean()),
        solver=_solver(solution, without_statistics(question)),
        batches=len(profile.batches),
        intervals=intervals(question, choice.formats),
        granularity="gemm" if is_per_gemm(question.policy) else "layer",
    )


def _solver(solution: Solution | None, unknown: str) -> dict[str, Any]:
    """How a plan was found, and what it could not take into account."""
    if solution is None:
        return {"note": unknown} if unknown else {}
    return {
        "name": "HiGHS",
        "gap": solution.gap,
        "seconds": solution.seconds,
        "note": "; ".join(part for part in (solution.note, unknown) if part),
    }


def predict(question: Question, choice: Choice) -> dict[str, float | None]:
    """Share in 4 bits, of bytes that are kept of inputs, divergences of the plan as a whole, seconds of its GEMMs."""
    profile = question.profile
    found = mean_divergence(profile, question.method)
    rows = np.arange(len(profile.layers))
    loss = found.loss[rows, choice.formats[:, 0]]
    update = np.take_along_axis(found.update, choice.formats[:, :, None], axis=2)
    size = np.sqrt(np.mean([(batch.update**2).sum() for batch in profile.batches]))
    seconds = question.seconds
    spent = None if seconds is None else np.take_along_axis(seconds, choice.formats[:, :, None], axis=2).sum()
    return {
        "fp4_flops": share_in_4_bits(profile, choice.formats),
        "saved_bytes": share_of_saved_bytes(question, choice.formats),
        "loss_divergence": float(np.sqrt(np.nansum(loss**2))),
        "weight_divergence": float(np.sqrt(np.nansum(update**2)) / size) if size > 0 else 0.0,
        "step_seconds": None if spent is None else float(spent) + question.other_seconds,
    }


def _named(profile: PrecisionProfile, values: NDArray[np.float64]) -> dict[str, float]:
    finite = np.nan_to_num(values, nan=0.0, posinf=0.0)  # of a layer whose statistics are no numbers
    return {name: float(value) for name, value in zip(profile.formats, finite, strict=True)}
