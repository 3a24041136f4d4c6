"""`scrimp doctor` prints what was found, as a table or as JSON, and ends with 1 where numbers are wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scrimp.cli import main
from scrimp.gemm.doctor_report import (
    MISSING,
    SLOWER,
    WORKS,
    WRONG,
    DoctorReport,
    Measurement,
    Surroundings,
)

HERE = Surroundings("Some GPU", "580.1", "2.13", "3.9", "0.1")


def entry(
    backend: str, gemm: str, status: str, seconds: float | None = None, reason: str = ""
) -> Measurement:
    bf16 = None if seconds is None else 1.0
    return Measurement("fp8", gemm, backend, status, reason, 0.001, seconds, bf16, "typical")


HEALTHY = (
    entry("torch", "fprop", WORKS, 0.5),
    entry("torch", "dgrad", SLOWER, 4.0),
    entry("torch", "wgrad", MISSING, reason="ValueError: scale [3, 4] does not fit"),
)


@pytest.fixture
def doctor(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    def install(*measurements: Measurement) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def examine(device: Any, **options: Any) -> DoctorReport:
            calls.append({"device": str(device), "fresh": options["fresh"]})
            options["progress"](1.0)
            return DoctorReport(HERE, "typical", measurements)

        monkeypatch.setattr("scrimp.gemm.doctor.examine", examine)
        monkeypatch.setattr("scrimp.cli.doctor.examine", examine)
        return calls

    return install


def test_the_table_names_every_status_and_reason(doctor: Any, capsys: pytest.CaptureFixture[str]) -> None:
    calls = doctor(*HEALTHY)
    assert main(["doctor", "--device", "cpu"]) == 0
    assert calls == [{"device": "cpu", "fresh": False}]
    shown = capsys.readouterr()
    for words in (
        "Some GPU",
        "driver 580.1",
        "works 2.00x",
        "slower 0.25x",
        "not available",
        "scale [3, 4] does not fit",
    ):
        assert words in shown.out
    assert shown.err == ""


def test_wrong_numbers_end_with_1(doctor: Any, capsys: pytest.CaptureFixture[str]) -> None:
    doctor(*HEALTHY, entry("triton", "fprop", WRONG, reason="50% from float64"))
    assert main(["doctor", "--device", "cpu"]) == 1
    shown = capsys.readouterr().out
    assert "wrong" in shown
    assert "50% from float64" in shown


def test_json_is_the_whole_report(doctor: Any, capsys: pytest.CaptureFixture[str]) -> None:
    doctor(*HEALTHY)
    assert main(["doctor", "--device", "cpu", "--json", "--fresh"]) == 0
    assert DoctorReport.from_json(capsys.readouterr().out) == DoctorReport(HERE, "typical", HEALTHY)


def test_fresh_measures_again(doctor: Any) -> None:
    calls = doctor(*HEALTHY)
    main(["doctor", "--device", "cpu", "--fresh"])
    assert calls[0]["fresh"]


def test_an_unknown_device_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--device", "tpu"]) == 2
    assert "tpu" in capsys.readouterr().err


@pytest.mark.slow
def test_a_cpu_is_examined_once(tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "scrimp", "doctor", "--device", "cpu", "--json"]
    start = time.perf_counter()
    first = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    middle = time.perf_counter()
    again = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    assert time.perf_counter() - middle < (middle - start) / 2
    assert again.stdout == first.stdout
    report = DoctorReport.from_json(first.stdout)
    assert not report.wrong
    # Every recipe can be trained with, in the reference at least.
    assert all(report.fastest(m.recipe, m.gemm) for m in report.measurements)
