"""The doctor finds wrong numbers, says why a thing is missing, and keeps its report."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from scrimp.formats import fake_quantize
from scrimp.gemm import doctor
from scrimp.gemm.backends import ReferenceBackend, TorchBackend
from scrimp.gemm.doctor import examine
from scrimp.gemm.doctor_report import (
    MISSING,
    SLOWER,
    WORKS,
    WRONG,
    DoctorReport,
    Measurement,
    Surroundings,
    cache_file,
    surroundings_of,
)
from scrimp.gemm.probe import Sizes, disagreement, exact_result, make_trial
from scrimp.gemm.problem import Shape
from scrimp.precision import GEMMS, RECIPES

CPU = torch.device("cpu")
REFERENCE = ReferenceBackend()


# -- right and wrong ---------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("gemm", GEMMS)
@pytest.mark.parametrize("max_rows", [None, 7])
def test_the_reference_is_right(recipe: str, gemm: str, max_rows: int | None) -> None:
    trial = make_trial(gemm, recipe, Sizes(72, 136, 40), CPU, torch.float32)
    out = torch.bfloat16 if recipe == "bf16" else torch.float32
    error, wrong = disagreement(trial.run(REFERENCE, out), exact_result(trial, max_rows))
    assert wrong is None
    assert error < 0.005


def damaged(y: Tensor, damage: str) -> Tensor:
    y = y.clone()
    if damage == "one element":
        y[3, 5] += 0.05 * float(y.abs().max())
    elif damage == "one row":
        y[7] = 0
    elif damage == "the last column":
        y[:, -1] *= 2
    elif damage == "the scale":
        y *= 1.05
    elif damage == "a NaN":
        y[0, 0] = math.nan
    elif damage == "the shape":
        y = y[:, :-1]
    return y


DAMAGES = ["one element", "one row", "the last column", "the scale", "a NaN", "the shape"]


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("recipe", ["fp8", "fp4", "fp8_tensor"])
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16], ids=str)
def test_a_damaged_result_is_wrong(recipe: str, damage: str, out: torch.dtype) -> None:
    trial = make_trial("fprop", recipe, Sizes(64, 256, 48), CPU, torch.float32)
    exact, y = exact_result(trial), trial.run(REFERENCE, out)
    assert disagreement(y, exact)[1] is None
    assert disagreement(damaged(y, damage), exact)[1] is not None


def test_a_tile_with_a_wrong_scale_is_wrong() -> None:
    trial = make_trial("fprop", "fp8", Sizes(64, 256, 48), CPU, torch.float32)
    other = dataclasses.replace(trial, a=trial.a.clone())
    other.a[:, 128:] *= 1.125
    assert disagreement(other.run(REFERENCE, torch.float32), exact_result(trial))[1] is not None


@pytest.mark.parametrize("k", [128, 256, 1024])
@pytest.mark.parametrize("recipe", ["fp8_tensor", "fp8_row"])
def test_sums_of_14_bits_are_right(recipe: str, k: int) -> None:
    """As FP8 tensor cores are reported to make them: every addend is cut off below 2^-13 of the largest."""
    trial = make_trial("fprop", recipe, Sizes(64, k, 48), CPU, torch.float32)
    quantized = []
    for x, use in zip((trial.a, trial.b), trial.uses(), strict=True):
        assert use.operand is not None
        quantized.append(fake_quantize(x, use.operand, use.axis))
    a, b = (one.values.double() for one in quantized)
    rows, columns = (one.outer for one in quantized)
    assert rows is not None
    assert columns is not None
    total = torch.zeros(64, 48, dtype=torch.float64)
    for first in range(0, k, 32):
        products = a[:, None, first : first + 32] * b[None, :, first : first + 32]
        addends = torch.cat([products, total[..., None]], -1)
        unit = torch.exp2(torch.floor(torch.log2(addends.abs().amax(-1, keepdim=True))) - 13)
        total = (torch.trunc(addends / unit) * unit).sum(-1)
    assert disagreement((total * rows * columns.T).float(), exact_result(trial))[1] is None


# -- a whole examination, small ----------------------------------------------------------------


class Wrong(ReferenceBackend):
    name = "triton"

    def multiply(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> Tensor:
        return super().multiply(gemm, a, b, out) * 1.5


class Broken(ReferenceBackend):
    name = "triton"

    def prepare(self, x: Tensor, use: Any) -> Any:
        raise ValueError("this GPU has no such kernel\nstack")


class Even(ReferenceBackend):
    name = "triton"

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        return "K must be even" if shape is not None and shape.k % 128 else None


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Two recipes, sizes of milliseconds, and a cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(doctor, "RECIPES", {name: RECIPES[name] for name in ("bf16", "fp8_row", "fp8")})
    monkeypatch.setattr(doctor, "TYPICAL", {"cpu": Sizes(96, 128, 64)})
    monkeypatch.setattr(doctor, "SMALL", (Sizes(128, 128, 128), Sizes(24, 40, 56)))
    monkeypatch.setattr(doctor, "_TIMING_SECONDS", 0.0)


def use_backends(monkeypatch: pytest.MonkeyPatch, *more: ReferenceBackend) -> None:
    backends = (TorchBackend(), *more, ReferenceBackend())
    monkeypatch.setattr(doctor, "BACKENDS", {backend.name: backend for backend in backends})


def found(report: DoctorReport, backend: str, recipe: str = "fp8") -> list[Measurement]:
    return [m for m in report.measurements if (m.backend, m.recipe) == (backend, recipe)]


def test_every_recipe_gemm_and_back_end_has_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backends(monkeypatch)
    heard: list[float] = []
    report = examine(CPU, progress=heard.append)
    assert [(m.recipe, m.gemm, m.backend) for m in report.measurements] == [
        (recipe, gemm, backend)
        for recipe in ("bf16", "fp8_row", "fp8")
        for gemm in GEMMS
        for backend in ("torch", "reference")
    ]
    assert {m.status for m in found(report, "reference", "bf16")} == {WORKS}
    assert {m.status for m in found(report, "reference")} <= {WORKS, SLOWER}
    assert {(m.status, m.reason) for m in found(report, "torch")} == {
        (MISSING, "torch's CPU kernel takes one scale per tensor or per row")
    }
    assert heard == sorted(heard)
    assert heard[-1] == 1.0


def test_wrong_numbers_are_called_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backends(monkeypatch, Wrong())
    report = examine(CPU)
    assert {m.status for m in found(report, "triton")} == {WRONG}
    assert found(report, "triton")[0].reason == "50.0% from float64"
    assert found(report, "triton")[0].error == pytest.approx(0.5, rel=1e-3)
    assert report.wrong
    best = report.fastest("fp8", "fprop")
    assert best is not None
    assert best.backend == "reference"


def test_a_back_end_that_fails_is_not_available_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    class Elsewhere(Broken):
        def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
            return "high precision" if recipe == "bf16" else None

    use_backends(monkeypatch, Elsewhere())
    report = examine(CPU)
    assert {(m.status, m.reason) for m in found(report, "triton")} == {
        (MISSING, "ValueError: this GPU has no such kernel")
    }
    assert {m.reason for m in found(report, "triton", "bf16")} == {"high precision"}


def test_a_shape_that_is_refused_becomes_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "is_for_probes_only", lambda *args: False)
    monkeypatch.setattr(doctor, "TYPICAL", {"cpu": Sizes(128, 128, 128)})
    use_backends(monkeypatch, Even())
    entry = found(examine(CPU), "triton")[0]
    assert entry.status in (WORKS, SLOWER)
    assert entry.reason == "K must be even"


def test_torchs_fp8_kernel_meets_a_cpu_only_at_64(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()
    kernel = torch._scaled_mm

    def record(a: Tensor, b: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.add((*a.shape, b.shape[1]))
        return kernel(a, b, *rest, **options)

    monkeypatch.setattr(torch, "_scaled_mm", record)
    use_backends(monkeypatch)
    report = examine(CPU)
    assert seen == {(64, 64, 64)}
    for entry in found(report, "torch", "fp8_row"):
        assert "measured at 64 x 64 x 64" in entry.reason
        best = report.fastest("fp8_row", entry.gemm)
        assert best is not None
        assert best.backend == "reference"


# -- what is kept ------------------------------------------------------------------------------


def test_a_kept_report_is_not_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    use_backends(monkeypatch)
    first = examine(CPU)
    runs: list[str] = []
    real = doctor._examine_gemm
    monkeypatch.setattr(doctor, "_examine_gemm", lambda *args: runs.append("run") or real(*args))
    assert examine(CPU) == first
    assert not runs
    assert examine(CPU, fresh=True).surroundings == first.surroundings
    assert runs


@pytest.mark.parametrize("content", ["", "{", "[]", '{"format": 0}', '{"format": 1, "typical": ""}', "null"])
@pytest.mark.every(4)
def test_a_broken_report_is_measured_again_and_said(monkeypatch: pytest.MonkeyPatch, content: str) -> None:
    use_backends(monkeypatch)
    file = cache_file(surroundings_of(CPU))
    file.parent.mkdir(parents=True)
    file.write_text(content)
    told: list[str] = []
    report = examine(CPU, tell=told.append)
    assert len(told) == 1
    assert str(file) in told[0]
    assert "measuring again" in told[0]
    assert DoctorReport.from_json(file.read_text()) == report


def test_a_cache_that_cannot_be_written_costs_only_a_message(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    use_backends(monkeypatch)
    (tmp_path / "cache").write_text("a file in the way")
    told: list[str] = []
    assert examine(CPU, tell=told.append).measurements
    assert any("not kept" in message for message in told)


@pytest.mark.parametrize("field", ["device", "driver", "torch", "triton", "scrimp"])
def test_other_surroundings_have_another_report(field: str) -> None:
    here = surroundings_of(CPU)
    assert cache_file(dataclasses.replace(here, **{field: "other"})) != cache_file(here)


def test_a_report_survives_its_file_form() -> None:
    entries = (
        Measurement("fp8", "fprop", "torch", WORKS, "", 0.001, 0.5, 1.0, "s"),
        Measurement("fp8", "dgrad", "triton", MISSING, "no GPU"),
    )
    report = DoctorReport(Surroundings("gpu", "1", "2", "3", "4"), "s", entries)
    assert DoctorReport.from_json(report.to_json()) == report
    assert entries[0].speedup == 2.0
    assert report.fastest("fp8", "fprop") == entries[0]
    assert report.fastest("fp8", "dgrad") is None
