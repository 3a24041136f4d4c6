"""Which back end runs each GEMM of a plan: chosen when a run begins, recorded in its plan, kept on resume.

Problem  Back ends of one recipe differ in the order of their sums. A doctor report that was measured between start and
         resume may rank them otherwise, and the run would go on with other roundings, unsaid.
Method   A run takes what works and is fastest by the report that it finds when it begins, and writes it into its plan
         by recipe, kind of layer and GEMM. From then on the record decides, in the first process too; a recorded back
         end that does not run here any more is refused by name. On another device or torch, or where `--backend` is
         given (auto as well), the run records anew.
Limits   GEMMs in bf16 and fp32 are not recorded: every back end hands them to torch's product.
Tuning   What a back end tries at the first call of a GEMM (shapes of tiles) it tries before the model is made, for the
         sizes of the run, of the head's last chunk and of the probe; the memory is a figure of its own. A batch of
         other sizes (the last of an evaluation) may fall into a bucket that was not tried, and is tried then.
Checked  tests/training/test_recorded_backends.py, tests/runtime/test_tuning.py, tests/runtime/test_execute.py
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch

from scrimp.config import Architecture
from scrimp.errors import PlanError
from scrimp.gemm import Backend, BackendChooser, Recorded, backends_for, refuse_unrunnable
from scrimp.gemm.backends import BACKENDS
from scrimp.gemm.problem import Shape, features_of, shape_of
from scrimp.models import place, spec_of
from scrimp.planner import BackendChoice, Plan
from scrimp.precision import GEMMS, HIGH_PRECISION
from scrimp.runtime.execute import HEAD, PLANNED_PROBE_TOKENS


def choose_backends(
    plan: Plan,
    architecture: Architecture,
    device: torch.device,
    *,
    tokens: int,
    head_tokens: int = 0,
    backend: str = "auto",
) -> BackendChooser:
    """The back ends that run a plan in the shapes of its model: seen to work here; those that it records, else the
    fastest first.

    Args:
        tokens: of one micro-batch.
        head_tokens: of one chunk of the loss; 0: all.
        backend: the one that must run everything that is quantized, or auto.

    Raises:
        PlanError: no back end, or not the one that is recorded or asked for, runs a GEMM; with what to do.
    """
    only = None if backend == "auto" else backend
    record = () if only else _record_of(plan, architecture)
    quantized = {
        layer: choice for layer, choice in plan.gemms.items() if set(choice.recipes) - {*HIGH_PRECISION}
    }
    shapes = {layer: _sizes(plan, architecture, layer) for layer in quantized}
    in_blocks = {layer: choice for layer, choice in quantized.items() if layer != HEAD}
    refuse_unrunnable(in_blocks, shapes, tokens, device, only, record)
    if HEAD in quantized:
        chunk = head_tokens or tokens
        for rows in {min(chunk, tokens), tokens % chunk} - {0}:
            refuse_unrunnable({HEAD: quantized[HEAD]}, shapes, rows, device, only, record)
    if record:
        _refuse_others(plan, architecture, device, record, tokens, head_tokens)
    return preferred_backends(device, backend, record)


def preferred_backends(
    device: torch.device, backend: str = "auto", record: tuple[Recorded, ...] = ()
) -> BackendChooser:
    """What runs each GEMM if it can: of quantized ones the back end that is asked for or recorded, or the fastest."""
    selection = backends_for(device, record=record)
    if backend == "auto":
        return selection
    forced = backends_for(device, backend)

    def choose(recipe: str, gemm: str, shape: Shape, device: torch.device) -> Backend:
        return (selection if recipe in HIGH_PRECISION else forced)(recipe, gemm, shape, device)

    return choose


def recorded_backends(
    plan: Plan,
    architecture: Architecture,
    choose: BackendChooser,
    device: torch.device,
    *,
    tokens: int,
    head_tokens: int = 0,
) -> dict[str, BackendChoice]:
    """What runs the quantized GEMMs of a plan, as a plan records it; arguments as of `choose_backends`."""
    found: dict[str, dict[str, str]] = {}
    for row, recipe, gemm, shape in _quantized(plan, architecture, tokens, min(head_tokens, tokens)):
        found.setdefault(row, {})[gemm] = choose(recipe, gemm, shape, device).name
    return {row: BackendChoice(**names) for row, names in found.items()}


@dataclass(frozen=True)
class Tuned:
    """A GEMM whose back end has something to try before its first call."""

    backend: Backend
    gemm: str
    recipe: str
    shape: Shape
    out: torch.dtype
    """Type of the product: the working format of the run, or that of sums of gradients."""

    @property
    def nbytes(self) -> int:
        """Device memory that trying takes."""
        return self.backend.tuning_bytes(self.gemm, self.recipe, self.shape, self.out)


def tuned_gemms(
    plan: Plan,
    architecture: Architecture,
    choose: BackendChooser,
    device: torch.device,
    *,
    tokens: int,
    head_tokens: int = 0,
    out: torch.dtype,
    sums: torch.dtype | None = None,
) -> list[Tuned]:
    """What is to be tried for a plan before it runs: in its own sizes, in the head's last chunk, and in the probe's.

    Args:
        out: what its GEMMs multiply into. Others as of `choose_backends`.
        sums: what wgrad adds to besides (`scrimp.gemm.weight_sums`); None: nothing.
    """
    chunk = head_tokens or tokens
    # The probe computes its loss in one chunk.
    sizes = {(tokens, min(chunk, tokens)), (PLANNED_PROBE_TOKENS, PLANNED_PROBE_TOKENS)}
    sizes |= {(tokens, tokens % chunk)} if tokens % chunk else set()
    found: dict[tuple[str, str, Shape, torch.dtype], Tuned] = {}
    for rows, head_rows in sorted(sizes):
        for row, recipe, gemm, shape in _quantized(plan, architecture, rows, head_rows):
            adds = gemm == "wgrad" and rows == tokens and not row.endswith(f" {HEAD}")
            for type_ in {out, sums if adds and sums is not None else out}:
                one = Tuned(choose(recipe, gemm, shape, device), gemm, recipe, shape, type_)
                if one.nbytes:
                    found[recipe, gemm, shape, type_] = one
    return list(found.values())


def tune(gemms: Iterable[Tuned], device: torch.device) -> None:
    """Try everything, and give the memory back."""
    for one in gemms:
        one.backend.tune(one.gemm, one.recipe, one.shape, one.out, device)
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()


def describe_backends(
    plan: Plan, architecture: Architecture, choose: BackendChooser, device: torch.device, *, tokens: int
) -> str:
    """Which back end runs which recipe: "fp8 by torch, nvfp4 by reference (emulated)"."""
    chosen: dict[str, dict[str, None]] = {}
    for _, recipe, gemm, shape in _quantized(plan, architecture, tokens, 0):
        backend = choose(recipe, gemm, shape, device)
        label = backend.name + (" (emulated)" if backend.emulates(recipe) else "")
        chosen.setdefault(recipe, {})[label] = None
    return ", ".join(f"{recipe} by {' and '.join(labels)}" for recipe, labels in chosen.items())


def backends_text(recorded: Mapping[str, BackendChoice]) -> str:
    """A record in short: "fp8 by torch and triton"."""
    names: dict[str, dict[str, None]] = {}
    for row, choice in recorded.items():
        for name in (getattr(choice, gemm) for gemm in GEMMS):
            names.setdefault(row.partition(" ")[0], {}).update({name: None} if name else {})
    return ", ".join(f"{recipe} by {' and '.join(who)}" for recipe, who in names.items())


def _quantized(
    plan: Plan, architecture: Architecture, tokens: int, head_tokens: int
) -> Iterator[tuple[str, str, str, Shape]]:
    """Row of the record, recipe, GEMM and shape of every quantized GEMM; equal ones of several blocks once.

    Args:
        head_tokens: rows of the head's GEMMs; 0: as many as the others'.
    """
    seen = set()
    for layer, choice in plan.gemms.items():
        rows = (head_tokens or tokens) if layer == HEAD else tokens
        for gemm in GEMMS:
            recipe, kind = choice.gemm(gemm), _kind(layer)
            if recipe not in HIGH_PRECISION and (recipe, kind, gemm) not in seen:
                seen.add((recipe, kind, gemm))
                yield (
                    f"{recipe} {kind}",
                    recipe,
                    gemm,
                    shape_of(gemm, rows, *_sizes(plan, architecture, layer)),
                )


def _record_of(plan: Plan, architecture: Architecture) -> tuple[Recorded, ...]:
    """A plan's record by features.

    Raises:
        PlanError: a row that names no kind of layer.
    """
    found = []
    for row, choice in plan.backends.items():
        recipe, _, kind = row.partition(" ")
        if kind not in spec_of(architecture).shapes:
            raise PlanError(
                "plan.json: backends has a row of no layer",
                got=repr(row),
                expected="a recipe and one of " + ", ".join(spec_of(architecture).shapes),
                do="copy plan.json from the newest checkpoint of the run",
            )
        named = {gemm: getattr(choice, gemm) for gemm in GEMMS}
        sizes = _sizes(plan, architecture, kind)
        found += [Recorded(recipe, gemm, *sizes, name) for gemm, name in named.items() if name is not None]
    return tuple(found)


def _refuse_others(
    plan: Plan,
    architecture: Architecture,
    device: torch.device,
    record: tuple[Recorded, ...],
    tokens: int,
    head_tokens: int,
) -> None:
    """Refuse a record that does not run here as it stands: another back end would be a silent change."""
    selection = backends_for(device, record=record)
    for row, recipe, gemm, shape in _quantized(plan, architecture, tokens, min(head_tokens, tokens)):
        name = getattr(plan.backends.get(row, BackendChoice()), gemm)
        now = selection(recipe, gemm, shape, device).name
        sizes = (recipe, gemm, *features_of(gemm, shape))
        # Kinds of the same features share a choice.
        if name is None or any(one == Recorded(*sizes, now) for one in record):
            continue
        reason = selection.refusal(BACKENDS[name], recipe, gemm, (shape,))
        raise PlanError(
            f"{gemm} of {row.partition(' ')[2]} in {recipe} began on the {name} back end, which cannot run it "
            f"on {device}",
            got=reason or f"{now} runs it",
            expected="the back ends that plan.json records, so that the run goes on as it began",
            do=f"resume where {name} runs it, or without the record: "
            f"--backend {_runs_all(plan, architecture, device, tokens, head_tokens, first=now)} "
            "(the same formats, sums in another order)",
        )


def _runs_all(
    plan: Plan, architecture: Architecture, device: torch.device, tokens: int, head_tokens: int, *, first: str
) -> str:
    """A back end that runs everything quantized of a plan, `first` if it does; where none does, auto."""
    for name in dict.fromkeys([first, *BACKENDS]):
        with contextlib.suppress(PlanError):
            choose_backends(plan, architecture, device, tokens=tokens, head_tokens=head_tokens, backend=name)
            return name
    return "auto"


def _kind(layer: str) -> str:
    return place(layer)[1]


def _sizes(plan: Plan, architecture: Architecture, layer: str) -> tuple[int, int]:
    """(inputs, outputs) of what a rank has of a layer, by its name in the plan, or by its kind."""
    linear = spec_of(architecture).linear(layer)
    return linear.piece_sizes(plan.layout.tp if linear.experts == 1 else plan.layout.etp)
