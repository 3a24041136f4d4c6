"""A plan as a file for another trainer: what `scrimp export-precision` calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

from scrimp.errors import PlanError
from scrimp.export.fit import Host, Inexpressible, Triple, compute_of, summarise
from scrimp.export.layer_names import Names, is_megatron, is_own, is_routed, of_stage, rename
from scrimp.export.torchao import to_torchao, torchao_host
from scrimp.export.transformer_engine import to_transformer_engine, transformer_engine_host
from scrimp.planner import Plan
from scrimp.planner.precision import PrecisionPlan, Question, make_plan
from scrimp.precision import GEMMS, HIGH_PRECISION

ExportTarget = Literal["torchao", "transformer-engine"]
_FILES = {"torchao": "torchao_precision.py", "transformer-engine": "te_precision.yaml"}
_HOSTS: dict[str, Callable[[str], Host]] = {
    "torchao": torchao_host,
    "transformer-engine": transformer_engine_host,
}
_OWN_SCALES = (
    "q, k, v and gate, up are layers of their own here, with scales of their own where Scrimp has one for all"
)
_STAGES = (
    "single layers are named by number, which Megatron counts within a pipeline stage: "
    "with several stages export each by its blocks"
)


@dataclass(frozen=True)
class PrecisionExport:
    """A file for another trainer, and what of the plan it does not say."""

    text: str
    file_name: str
    """A usual name for it."""
    inexpressible: tuple[Inexpressible, ...] = ()
    """GEMMs that will not run as planned, each with what runs instead and why."""
    notes: tuple[str, ...] = ()
    """What the trainer computes otherwise though the recipe is the same."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that its processes need."""
    layers: tuple[str, ...] = ()
    """All that were exported, by their names there."""

    def not_as_planned(self, most: int | None = None) -> list[str]:
        """What is inexpressible, one line for all layers that share it; `most` globs in a line."""
        return summarise(self.inexpressible, self.layers, most=most)


def export_precision(
    plan: Plan | PrecisionPlan,
    target: ExportTarget,
    names: Names,
    *,
    approximate: bool = False,
    stage: tuple[int, int] | None = None,
) -> PrecisionExport:
    """A plan's precision in the terms of a trainer.

    Args:
        target: torchao gives a Python file with `convert(model)`; transformer-engine gives the YAML file for
            Megatron-Core's --te-precision-config-file.
        names: whose names the layers have in the model: "scrimp" leaves the plan's as they are. So do the
            others where the plan is of another model than Scrimp's decoder; a note then says so.
        approximate: layers that cannot run as planned take the nearest that the trainer has, with no fewer bits
            in any GEMM, instead of the compute type.
        stage: (first, last) block of one pipeline stage, counted from 0; layers are numbered within it.

    Raises:
        PlanError: an unknown target or names, layers that have no such names, a stage that is not in the plan.
    """
    precisions = plan.precisions if isinstance(plan, PrecisionPlan) else plan.gemms
    _host(target, compute_of(precisions))  # refuses what is no target
    routed = [layer for layer in precisions if is_routed(layer)]
    if routed:
        raise PlanError(
            f"formats of routed experts cannot be exported to {target} yet",
            got=f"{len(routed)} of {len(precisions)} layers, such as {routed[0]}",
            do="train with Scrimp, which runs them, or export the plan of a model without experts",
        )
    if stage is not None:
        precisions = of_stage(precisions, *stage)
    names, notes = _as_they_are(precisions, names)
    renamed = rename(precisions, names)
    if target == "torchao":
        converted = to_torchao(renamed, approximate=approximate)
        if names == "huggingface" and converted.groups:
            notes = (*notes, _OWN_SCALES)
        converted = replace(converted, notes=(*converted.notes, *notes))
        return PrecisionExport(
            converted.text, _FILES[target], converted.inexpressible, converted.notes, layers=tuple(renamed)
        )
    recipes = to_transformer_engine(renamed, approximate=approximate)
    is_numbered = any(re.search(r"\.\d+\.", pattern) for pattern, _ in recipes.matchers)
    if is_numbered and stage is None and any(map(is_megatron, renamed)):
        notes = (*notes, _STAGES)
    recipes = replace(recipes, notes=(*recipes.notes, *notes))
    return PrecisionExport(
        recipes.text,
        _FILES[target],
        recipes.inexpressible,
        recipes.notes,
        recipes.environment,
        tuple(renamed),
    )


def runs_together(target: ExportTarget, compute: str = "bf16") -> tuple[Triple, ...]:
    """(fprop, dgrad, wgrad) that a layer can have in a trainer: what a plan that is made for it chooses from.

    Args:
        compute: the plan's working type, bf16 or fp32.

    Raises:
        PlanError: an unknown target.
    """
    return tuple(_host(target, compute).runs)


def plan_for(question: Question, target: ExportTarget | None, *, step: int) -> PrecisionPlan:
    """Solve a question for a trainer; None: for Scrimp, which runs any formats together.

    Raises:
        PlanError: the budget cannot be reached there, or no candidates go together.
    """
    if target is None:
        return make_plan(question, step=step)
    if question.budget.saved_bytes is not None:
        raise PlanError(
            f"budget saved_bytes is of what Scrimp keeps of inputs, and {target} keeps them in its own way",
            got=f"{question.budget.saved_bytes:g}",
            expected="budget fp4_flops, or another one, for that target",
            do="give another budget, or leave the target out",
        )
    compute = "fp32" if set(question.profile.formats) & {"fp32", "bf16"} == {"fp32"} else "bf16"
    plan = make_plan(replace(question, together=runs_together(target, compute)), step=step)
    predicted = {**plan.predicted, "saved_bytes": None}
    return replace(plan, predicted=predicted, reason=f"{plan.reason}; only what {target} runs")


def whole_layer_recipes(plan: Plan | PrecisionPlan, target: ExportTarget) -> tuple[str, ...]:
    """Recipes that a trainer runs all three GEMMs of a layer in, those of the plan first."""
    precisions = plan.precisions if isinstance(plan, PrecisionPlan) else plan.gemms
    used = dict.fromkeys(choice.gemm(gemm) for choice in precisions.values() for gemm in GEMMS)
    whole = [row[0] for row in runs_together(target, compute_of(precisions)) if len(set(row)) == 1]
    return tuple(
        sorted((name for name in whole if name not in HIGH_PRECISION), key=lambda name: name not in used)
    )


def _host(target: ExportTarget, compute: str) -> Host:
    if target not in _HOSTS:
        raise PlanError(
            "there is no such target", got=repr(target), expected=", ".join(get_args(ExportTarget))
        )
    return _HOSTS[target](compute)


def _as_they_are(layers: Mapping[str, object], names: Names) -> tuple[Names, tuple[str, ...]]:
    """The names to take, with a note where they are another model's own.

    Names of no model that Megatron has would match nothing there: those are left to be refused.
    """
    is_other = names == "huggingface" or all(map(is_megatron, layers))
    if names == "scrimp" or not is_other or any(map(is_own, layers)):
        return names, ()
    return "scrimp", (
        f"the plan is of another model than Scrimp's: names stay as they are, {next(iter(layers))}",
    )
