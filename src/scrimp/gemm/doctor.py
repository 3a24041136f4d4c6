"""`scrimp doctor`: run every recipe, GEMM and back end on a device; what works, what is wrong, what is slow.

Method   Per recipe and GEMM every back end that does not refuse is judged at small sizes, one of them ragged, all
         elements against float64 (probe.py), then at typical sizes, some rows of the result. It is timed there with
         quantization of both operands counted, against a bf16 product of the same sizes, in turns, so
         that a disturbance meets both. A GPU's time is the median of the rounds, a CPU's the best.
CPU      torch's FP8 kernel for CPUs needs 30 s for a GEMM of 2048 x 1024 x 1024, and Triton's interpreter
         more. Both are tried and timed at 64 x 64 x 64 only, and the report says so; they never count as fastest.
Limits   One set of typical sizes stands for all: `benchmarks/gemm.py` measures many. Times vary by some
         percent, so "slower" begins at 2 % more.
Checked  tests/gemm/test_doctor.py
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from scrimp.gemm.backends import BACKENDS, Backend
from scrimp.gemm.doctor_report import (
    MISSING,
    SLOWER,
    WORKS,
    WRONG,
    DoctorReport,
    Measurement,
    keep_report,
    load_report,
    surroundings_of,
)
from scrimp.gemm.probe import Exact, Sizes, Trial, exact_result, make_trial, random_matrix, try_out
from scrimp.precision import GEMMS, HIGH_PRECISION, RECIPES
from scrimp.timing import seconds_of

SMALL = (Sizes(256, 256, 256), Sizes(200, 136, 264))
TINY = Sizes(64, 64, 64)
TYPICAL = {"cuda": Sizes(4096, 3584, 18944), "cpu": Sizes(512, 1024, 1024)}
"""On a GPU the up-projection of a 7B model (Qwen2.5), on a CPU a layer of a small one."""
_SAMPLED_ROWS = 32
_NOISE_OF_TIMES = 1.02
_TIMING_SECONDS, _MOST_ROUNDS = 0.25, 16
Tell = Callable[[str], None]


def examine(
    device: torch.device,
    *,
    fresh: bool = False,
    tell: Tell = lambda message: None,
    progress: Callable[[float], None] = lambda share: None,
) -> DoctorReport:
    """The report on a device: the kept one, or a new one that is kept.

    Args:
        fresh: measure even if a report is kept.
        tell: hears what the user should know.
        progress: hears the share that is done, 0 to 1.
    """
    surroundings = surroundings_of(device)
    if not fresh and (kept := load_report(surroundings, tell)) is not None:
        return kept
    typical = TYPICAL.get(device.type, TYPICAL["cpu"])
    measurements: list[Measurement] = []
    for index, recipe in enumerate(RECIPES):
        for number, gemm in enumerate(GEMMS):
            progress((index * len(GEMMS) + number) / (len(RECIPES) * len(GEMMS)))
            measurements += _examine_gemm(recipe, gemm, typical, device)
    progress(1.0)
    random_matrix.cache_clear()
    report = DoctorReport(surroundings, str(typical), tuple(measurements))
    keep_report(report, tell)
    return report


def is_for_probes_only(backend: Backend, recipe: str, device: torch.device) -> bool:
    """Whether a back end is so slow here that only tiny GEMMs may run on it."""
    is_native = backend.name in ("torch", "triton")
    return device.type == "cpu" and is_native and recipe not in HIGH_PRECISION


def _seconds(backend: Backend, trial: Trial, sizes: Sizes, device: torch.device) -> tuple[float, float]:
    """Seconds of a GEMM with its quantization, and of the bf16 product alone, measured in turns."""
    plain = make_trial(trial.gemm, "bf16", sizes, device, torch.bfloat16)
    calls = (
        lambda: trial.run(backend, torch.bfloat16),
        lambda: plain.run(BACKENDS["torch"], torch.bfloat16),
    )
    # Some in a row on a GPU, so that it computes while the next are launched, as in training.
    in_a_row, pick = (4, statistics.median) if device.type == "cuda" else (1, min)
    seconds_of(calls[1], device, in_a_row=in_a_row)
    times: tuple[list[float], list[float]] = [], []
    end = time.perf_counter() + _TIMING_SECONDS
    while len(times[0]) < 2 or (len(times[0]) < _MOST_ROUNDS and time.perf_counter() < end):
        for found, call in zip(times, calls, strict=True):
            found.append(seconds_of(call, device, in_a_row=in_a_row))
    return pick(times[0]), pick(times[1])


def _examine_gemm(recipe: str, gemm: str, typical: Sizes, device: torch.device) -> list[Measurement]:
    """All back ends on one recipe and GEMM; trials and exact results are shared by them."""
    made: dict[Sizes, tuple[Trial, Exact]] = {}

    def case(sizes: Sizes) -> tuple[Trial, Exact]:
        if sizes not in made:
            dtype = torch.float32 if recipe == "fp32" else torch.bfloat16
            trial = make_trial(gemm, recipe, sizes, device, dtype)
            made[sizes] = trial, exact_result(trial, _SAMPLED_ROWS if sizes == typical else None)
        return made[sizes]

    return [_examine_backend(backend, recipe, gemm, typical, device, case) for backend in BACKENDS.values()]


def _examine_backend(
    backend: Backend,
    recipe: str,
    gemm: str,
    typical: Sizes,
    device: torch.device,
    case: Callable[[Sizes], tuple[Trial, Exact]],
) -> Measurement:
    refusal = backend.refusal(gemm, recipe, None, device)
    if refusal is not None:
        return Measurement(recipe, gemm, backend.name, MISSING, refusal)
    is_tiny = is_for_probes_only(backend, recipe, device)
    timed = TINY if is_tiny else typical
    error, reasons = 0.0, []
    for sizes in (TINY,) if is_tiny else (*SMALL, typical):
        refusal = backend.refusal(gemm, recipe, sizes.shape(gemm), device)
        if refusal is not None:
            reasons.append(refusal)
            continue
        # A bf16 result hides small errors, so small GEMMs give fp32.
        out = torch.bfloat16 if sizes == typical or recipe == "bf16" else torch.float32
        found, wrong, has_run = try_out(backend, *case(sizes), out)
        if wrong is not None:
            status = WRONG if has_run else MISSING
            return Measurement(recipe, gemm, backend.name, status, wrong, found if has_run else None)
        error = max(error, found)
    if backend.refusal(gemm, recipe, timed.shape(gemm), device) is not None:
        return Measurement(recipe, gemm, backend.name, MISSING, reasons[-1])
    seconds, bf16_seconds = _seconds(backend, case(timed)[0], timed, device)
    if is_tiny:
        reasons.append(f"measured at {TINY.shape(gemm)} only: for probes, too slow for more")
    is_slow = recipe != "bf16" and seconds > bf16_seconds * _NOISE_OF_TIMES
    status = SLOWER if is_slow else WORKS
    return Measurement(
        recipe, gemm, backend.name, status, "; ".join(reasons), error, seconds, bf16_seconds, str(timed)
    )
