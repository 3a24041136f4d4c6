"""The back end that is chosen was seen to work, takes the shapes, and is the fastest known."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from scrimp.errors import PlanError
from scrimp.gemm import select
from scrimp.gemm.backends import BACKENDS, Backend, ReferenceBackend
from scrimp.gemm.doctor_report import SLOWER, WORKS, WRONG, DoctorReport, Measurement, Surroundings
from scrimp.gemm.problem import Shape
from scrimp.gemm.select import BackendSelection, backends_for, refuse_unrunnable
from scrimp.precision import GEMMS, RECIPES, LinearPrecision

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
EVEN, ODD = (Shape(32, 32, 32),), (Shape(32, 33, 32),)


class Fake(ReferenceBackend):
    """The reference under another name, with a fault and a rule if wanted."""

    def __init__(self, name: str, fault: str = "", multiple: int = 1, recipes: tuple[str, ...] = ()) -> None:
        self.name, self.fault, self.multiple, self.recipes = name, fault, multiple, recipes
        self.runs = 0

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        if recipe not in (self.recipes or (recipe,)):
            return f"no kernel for {recipe}"
        if shape is not None and shape.n % self.multiple:
            return f"N must be a multiple of {self.multiple}"
        return None

    def multiply(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> Tensor:
        self.runs += 1
        if self.fault == "raises":
            raise RuntimeError("no kernel image is available\nand more")
        y = super().multiply(gemm, a, b, out)
        return y * 2 if self.fault == "wrong" else y


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> dict[str, Backend]:
    """A machine with a GPU, as far as the choice can see: back ends to be put in, probes on the CPU."""
    backends: dict[str, Backend] = {}
    monkeypatch.setattr(select, "BACKENDS", backends)
    monkeypatch.setattr(select, "_kept_report", lambda device: None)
    monkeypatch.setattr(select, "_selection", BackendSelection)  # not the process's: it remembers
    real = select.make_trial
    monkeypatch.setattr(select, "make_trial", lambda g, r, s, device, dtype: real(g, r, s, CPU, dtype))
    return backends


def put(backends: dict[str, Backend], *fakes: Backend) -> None:
    backends.update({fake.name: fake for fake in (*fakes, ReferenceBackend())})


def at(choose: BackendSelection, recipe: str, gemm: str, shape: Shape | None = None) -> Backend:
    return choose(recipe, gemm, shape or EVEN[0], choose.device)


def test_a_cpu_without_numba_runs_everything_in_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scrimp.gemm.backends.numba.has_numba", lambda: False)
    choose = BackendSelection(CPU)
    assert {at(choose, recipe, gemm).name for recipe in RECIPES for gemm in GEMMS} == {"reference"}


def test_selections_and_choices_are_kept() -> None:
    choose = backends_for(CPU)
    assert at(choose, "fp8", "fprop") is at(choose, "fp8_row", "wgrad")
    assert backends_for(CPU) is choose


def test_torchs_fp8_never_runs_on_a_cpu_even_if_demanded() -> None:
    choose = backends_for(CPU, only="torch")
    with pytest.raises(PlanError, match="thousands of times slower"):
        choose.choose("fp8_tensor", "fprop", EVEN)
    assert at(choose, "bf16", "fprop") is BACKENDS["torch"]


def test_an_unknown_back_end_is_refused_with_the_known_ones() -> None:
    with pytest.raises(PlanError, match="torch, triton, numba, reference"):
        backends_for(CPU, only="cublas")


def test_without_measurements_the_first_that_works_runs(gpu: dict[str, Backend]) -> None:
    put(gpu, Fake("torch"), Fake("triton"))
    assert at(BackendSelection(GPU), "fp8", "fprop").name == "torch"


@pytest.mark.parametrize("fault", ["raises", "wrong"])
def test_a_back_end_whose_probe_fails_is_not_used(gpu: dict[str, Backend], fault: str) -> None:
    put(gpu, Fake("torch", fault), Fake("triton"))
    assert at(BackendSelection(GPU), "fp8", "fprop").name == "triton"


def test_a_failed_probe_names_its_failure(gpu: dict[str, Backend]) -> None:
    put(gpu, Fake("torch", "raises"))
    with pytest.raises(PlanError, match=r"probe failed \(RuntimeError: no kernel image is available\)"):
        at(BackendSelection(GPU, only="torch"), "fp8", "fprop")


def test_a_back_end_is_probed_once(gpu: dict[str, Backend]) -> None:
    fake = Fake("torch")
    put(gpu, fake)
    choose = BackendSelection(GPU)
    for shapes in (EVEN, ODD, EVEN):
        choose.choose("fp8", "fprop", shapes)
    assert fake.runs == 1
    at(choose, "fp8", "dgrad")
    assert fake.runs == 2


def report(*measurements: tuple[str, str, float]) -> DoctorReport:
    entries = tuple(
        Measurement("fp8", "fprop", name, status, seconds=seconds, bf16_seconds=1.0, sizes="typical")
        for name, status, seconds in measurements
    )
    return DoctorReport(Surroundings("gpu", "", "", "", ""), "typical", entries)


def test_the_fastest_measured_one_runs(gpu: dict[str, Backend], monkeypatch: pytest.MonkeyPatch) -> None:
    put(gpu, Fake("torch"), Fake("triton"))
    kept = report(("torch", WORKS, 0.5), ("triton", WORKS, 0.4), ("reference", SLOWER, 3.0))
    monkeypatch.setattr(select, "_kept_report", lambda device: kept)
    assert at(BackendSelection(GPU), "fp8", "fprop").name == "triton"
    assert at(BackendSelection(GPU), "fp8", "dgrad").name == "torch", "not measured: the usual order"


def test_a_measurement_does_not_replace_the_probe(
    gpu: dict[str, Backend], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(gpu, Fake("torch"), Fake("triton", "raises"))
    kept = report(("triton", WORKS, 0.1), ("torch", WRONG, 0.01), ("reference", WORKS, 0.5))
    monkeypatch.setattr(select, "_kept_report", lambda device: kept)
    assert at(BackendSelection(GPU), "fp8", "fprop").name == "reference"


def test_a_shape_that_the_first_cannot_take_goes_to_the_next(gpu: dict[str, Backend]) -> None:
    put(gpu, Fake("torch", multiple=16), Fake("triton"))
    choose = BackendSelection(GPU)
    assert choose.choose("fp8", "fprop", EVEN).name == "torch"
    assert choose.choose("fp8", "fprop", EVEN + ODD).name == "triton"
    assert at(choose, "fp8", "fprop", ODD[0]).name == "triton"
    assert at(choose, "fp8", "fprop", EVEN[0]).name == "torch", "one odd shape decides for no other"


def test_a_layer_that_moved_runs_where_it_is(gpu: dict[str, Backend]) -> None:
    put(gpu, Fake("torch"), Fake("numba", recipes=("none of these",)))
    planned_elsewhere = backends_for(torch.device("meta"))
    assert planned_elsewhere("fp8", "fprop", EVEN[0], CPU).name == "reference"


def precision(name: str) -> LinearPrecision:
    return LinearPrecision(name, name, name, saved="bf16")


def test_a_plan_that_cannot_run_is_refused_with_reason_and_nearest(gpu: dict[str, Backend]) -> None:
    put(gpu, Fake("torch", multiple=16, recipes=("fp8", "bf16", "mxfp8")), Fake("triton", recipes=("mxfp8",)))
    plan = {"a": precision("fp8"), "b": precision("fp8")}
    shapes = {"a": (32, 32), "b": (32, 40)}
    refuse_unrunnable(plan, {"a": (32, 32), "b": (32, 48)}, 32, GPU, only="torch")
    refuse_unrunnable(plan, shapes, 32, GPU)  # the reference takes it
    with pytest.raises(PlanError) as refused:
        refuse_unrunnable(plan, shapes, 32, GPU, only="torch")
    message = str(refused.value)
    assert "b: fprop cannot run in fp8" in message
    assert "N must be a multiple of 16" in message
    with pytest.raises(PlanError, match=r"no kernel for fp8.*plan mxfp8"):
        refuse_unrunnable({"a": precision("fp8")}, {"a": (32, 32)}, 32, GPU, only="triton")


def test_the_nearest_recipe_is_the_next_in_width(gpu: dict[str, Backend]) -> None:
    put(gpu, Fake("torch", recipes=("fp32", "bf16", "fp8_row")))
    for wanted, nearest in (("fp4", "fp8_row"), ("fp8", "fp8_row")):
        with pytest.raises(PlanError, match=f"plan {nearest}, the nearest"):
            refuse_unrunnable({"a": precision(wanted)}, {"a": (32, 32)}, 32, GPU, only="torch")
    put(gpu, Fake("torch", recipes=("fp32", "bf16")))
    with pytest.raises(PlanError, match="plan bf16"):
        refuse_unrunnable(
            {"a": precision("fp8")}, {"a": (32, 32)}, 32, BackendSelection(GPU).device, only="torch"
        )


def test_one_gemm_that_cannot_run_is_enough(gpu: dict[str, Backend]) -> None:
    put(gpu, Fake("torch", recipes=("bf16",)))
    plan = {"a": dataclasses.replace(precision("bf16"), wgrad="fp8")}
    with pytest.raises(PlanError, match="a: wgrad cannot run in fp8"):
        refuse_unrunnable(plan, {"a": (32, 32)}, 32, GPU, only="torch")
