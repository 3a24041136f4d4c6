"""Which back end runs each GEMM on a device: one that was seen to work there, the fastest of them.

Method   Back ends stand in the order of `scrimp doctor`'s kept report where there is one, else on CUDA torch, triton,
         reference, on a CPU numba, reference. The first is taken that refuses neither the recipe nor the
         shapes and whose probe, one small GEMM run here and compared with float64, is right. Nothing is
         inferred from a capability number. Probes and choices are kept for the process.
Recorded A run that has begun keeps to the back ends that it began with, whatever a later report says: a selection with
         a record tries what is recorded for a layer's features first, then what is recorded for other layers,
         then the usual order, and never asks a report which is fastest. So sizes that were not recorded (the head's
         last chunk, an evaluation) go the same way before and after a resume.
Shapes   Some kernels take multiples of 16 only: each shape is chosen for on its own, once.
Checked  tests/gemm/test_select.py
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from scrimp.errors import PlanError
from scrimp.gemm.backends import BACKENDS, Backend
from scrimp.gemm.doctor import SMALL, TINY, is_for_probes_only
from scrimp.gemm.doctor_report import DoctorReport, load_report, surroundings_of
from scrimp.gemm.probe import exact_result, make_trial, try_out
from scrimp.gemm.problem import Shape, features_of, shape_of
from scrimp.precision import GEMMS, RECIPES, LinearPrecision
from scrimp.precision import recipe as lookup_recipe


@dataclass(frozen=True)
class Recorded:
    """Who ran a GEMM when the run began."""

    recipe: str
    gemm: str
    inputs: int
    outputs: int
    """Features of the layer."""
    backend: str


Record = tuple[Recorded, ...]


class BackendSelection:
    """Back ends of one device; call it with a recipe and a GEMM."""

    def __init__(self, device: torch.device, only: str | None = None, record: Record = ()) -> None:
        for name in (*([] if only is None else [only]), *(one.backend for one in record)):
            if name not in BACKENDS:
                raise PlanError("there is no such back end", got=repr(name), expected=", ".join(BACKENDS))
        self.device, self.only, self.record = device, only, record
        self._probed: dict[tuple[str, str, str], str | None] = {}
        self._chosen: dict[tuple[str, str, tuple[Shape, ...]], Backend] = {}

    def __call__(self, recipe: str, gemm: str, shape: Shape, device: torch.device) -> Backend:
        """The back end for a GEMM where it runs: a model may have moved since its layers were planned."""
        if device != self.device:
            return backends_for(device, self.only, self.record).choose(recipe, gemm, (shape,))
        return self.choose(recipe, gemm, (shape,))

    def choose(self, recipe: str, gemm: str, shapes: tuple[Shape, ...]) -> Backend:
        """The first back end that runs a GEMM in all shapes.

        Raises:
            PlanError: none does; only where one back end was demanded.
        """
        key = (recipe, gemm, shapes)
        if key not in self._chosen:
            reasons = []
            for backend in self._candidates(recipe, gemm, shapes):
                reason = self.refusal(backend, recipe, gemm, shapes)
                if reason is None:
                    self._chosen[key] = backend
                    break
                reasons.append(f"{backend.name}: {reason}")
            else:
                raise PlanError(f"{gemm} cannot run in {recipe} on {self.device}", got="; ".join(reasons))
        return self._chosen[key]

    def refusal(self, backend: Backend, recipe: str, gemm: str, shapes: tuple[Shape, ...]) -> str | None:
        """Why a back end cannot run a GEMM; it is probed if nothing else speaks against it."""
        for shape in shapes:
            reason = backend.refusal(gemm, recipe, shape, self.device)
            if reason is not None:
                return reason
        # Triton's interpreter may be demanded, for tests. torch's kernel would stop a CPU for minutes.
        if backend.name == "torch" and is_for_probes_only(backend, recipe, self.device):
            return "torch's FP8 kernel for CPUs is thousands of times slower than bf16"
        if (
            self.only is None
            and self._report is not None
            and self._report.is_wrong(recipe, gemm, backend.name)
        ):
            return "`scrimp doctor` found its numbers wrong here"
        return self._probe(backend, recipe, gemm)

    @property
    def _report(self) -> DoctorReport | None:
        return _kept_report(self.device) if self.device.type == "cuda" else None

    def _candidates(self, recipe: str, gemm: str, shapes: tuple[Shape, ...]) -> Iterator[Backend]:
        if self.only is not None:
            yield BACKENDS[self.only]
            return
        usual = list(BACKENDS) if self.device.type == "cuda" else ["numba", "reference"]
        if self.record:
            ours = [one for one in self.record if (one.recipe, one.gemm) == (recipe, gemm)]
            features = {features_of(gemm, shape) for shape in shapes}
            ours.sort(key=lambda one: (one.inputs, one.outputs) not in features)
            first = [one.backend for one in ours]
        else:
            first = [] if self._report is None else self._report.order(recipe, gemm)
        for name in dict.fromkeys((*first, *usual)):
            yield BACKENDS[name]

    def _probe(self, backend: Backend, recipe: str, gemm: str) -> str | None:
        if backend.name == "reference":
            return None  # it is what others are compared with
        key = (backend.name, recipe, gemm)
        if key not in self._probed:
            is_tiny = is_for_probes_only(backend, recipe, self.device)
            dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
            out = torch.bfloat16 if recipe == "bf16" else torch.float32
            trial = make_trial(gemm, recipe, TINY if is_tiny else SMALL[0], self.device, dtype)
            _, wrong, _ = try_out(backend, trial, exact_result(trial), out)
            self._probed[key] = None if wrong is None else f"its probe failed ({wrong})"
        return self._probed[key]


def backends_for(device: torch.device, only: str | None = None, record: Record = ()) -> BackendSelection:
    """The back ends of a device, probed once per process.

    Args:
        only: torch, triton, numba or reference, and no other; unset: the fastest that works.
        record: what a run began with, and goes on with; empty: none.

    Raises:
        PlanError: `only`, or one of the record, is no back end.
    """
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    return _selection(device, only, record)


def refuse_unrunnable(
    precisions: Mapping[str, LinearPrecision],
    shapes: Mapping[str, tuple[int, int]],
    tokens: int,
    device: torch.device,
    only: str | None = None,
    record: Record = (),
) -> None:
    """Refuse a plan with a GEMM that no back end runs here, before anything runs.

    Args:
        precisions: by layer.
        shapes: inputs and outputs of each layer.
        tokens: in one forward pass on this device.
        only: the back end that must run everything; unset: any.
        record: as of `backends_for`.

    Raises:
        PlanError: names the layer, the reason and the nearest recipe that runs.
    """
    selection = backends_for(device, only, record)
    for layer, precision in precisions.items():
        for gemm in GEMMS:
            recipe, shape = precision.gemm(gemm), shape_of(gemm, tokens, *shapes[layer])
            try:
                selection.choose(recipe, gemm, (shape,))
            except PlanError as error:
                near = _nearest(selection, recipe, gemm, shape)
                other = f"plan {near}, the nearest that it runs" if near else ""
                free = "let any back end run it (--backend auto)" if only else ""
                raise PlanError(
                    f"{layer}: {gemm} cannot run in {recipe} on {device}" + (f" by {only}" if only else ""),
                    got=error.got,
                    do=", or ".join(way for way in (free, other) if way),
                ) from error


def _nearest(selection: BackendSelection, recipe: str, gemm: str, shape: Shape) -> str | None:
    """The recipe nearest in width that runs, wider before narrower."""
    bits = lookup_recipe(recipe).bits
    others = (name for name in RECIPES if name != recipe)
    for name in sorted(others, key=lambda name: (abs(RECIPES[name].bits - bits), -RECIPES[name].bits)):
        try:
            selection.choose(name, gemm, (shape,))
        except PlanError:
            continue
        return name
    return None


@functools.cache
def _selection(device: torch.device, only: str | None, record: Record) -> BackendSelection:
    return BackendSelection(device, only, record)


@functools.cache
def _kept_report(device: torch.device) -> DoctorReport | None:
    return load_report(surroundings_of(device))
