"""What `scrimp doctor` found on a device, as typed data, and the file that keeps it.

The file lies in the user's cache, one per device, driver and versions of torch, triton, numba and Scrimp: any
of them may change which kernel runs, how fast, and whether it is right.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from scrimp.errors import DeviceError, StorageError
from scrimp.files import make_folder, read_bounded, user_cache, write_whole
from scrimp.gemm.backends.triton import is_interpreted
from scrimp.json_files import decode_json, finite

WORKS, SLOWER, WRONG, MISSING = "works", "slower than bf16", "wrong", "not available"
STATUSES = (WORKS, SLOWER, WRONG, MISSING)
_FORMAT = 1
"""Raised whenever the meaning of the file changes."""
MAX_FILE_BYTES = 2**24


@dataclass(frozen=True)
class Measurement:
    """One recipe, GEMM and back end."""

    recipe: str
    gemm: str
    backend: str
    status: str
    reason: str = ""
    error: float | None = None
    """Relative distance from float64; None where it did not run."""
    seconds: float | None = None
    """Time of one GEMM with its quantization."""
    bf16_seconds: float | None = None
    """Time of the bf16 product at the same sizes."""
    sizes: str = ""
    """Where it was timed."""

    @property
    def speedup(self) -> float | None:
        """Over bf16; None where it was not timed."""
        return self.bf16_seconds / self.seconds if self.seconds and self.bf16_seconds else None


@dataclass(frozen=True)
class Surroundings:
    """All that a measurement depends on."""

    device: str
    driver: str
    torch: str
    triton: str
    scrimp: str
    numba: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """Every recipe, GEMM and back end on one device."""

    surroundings: Surroundings
    typical: str
    """Sizes of the layer that was timed."""
    measurements: tuple[Measurement, ...]

    def fastest(self, recipe: str, gemm: str) -> Measurement | None:
        """The fastest right one at the typical sizes; None where there is none."""
        return next(iter(self._right(recipe, gemm)), None)

    def order(self, recipe: str, gemm: str) -> list[str]:
        """Names of the back ends that were right at the typical sizes, fastest first."""
        return [measurement.backend for measurement in self._right(recipe, gemm)]

    def _right(self, recipe: str, gemm: str) -> list[Measurement]:
        found = [
            m
            for m in self.measurements
            if (m.recipe, m.gemm, m.sizes) == (recipe, gemm, self.typical)
            and m.status in (WORKS, SLOWER)
            and m.seconds is not None
        ]
        return sorted(found, key=lambda m: m.seconds or 0.0)

    def is_wrong(self, recipe: str, gemm: str, backend: str) -> bool:
        """Whether a back end gave wrong numbers at any size."""
        return any((m.recipe, m.gemm, m.backend) == (recipe, gemm, backend) for m in self.wrong)

    @property
    def wrong(self) -> list[Measurement]:
        """Those that ran and gave wrong numbers."""
        return [m for m in self.measurements if m.status == WRONG]

    def to_json(self) -> str:
        """The JSON text that `scrimp doctor --json` prints."""
        return json.dumps({"format": _FORMAT, **finite(asdict(self))}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, *, origin: str = "the doctor's report") -> DoctorReport:
        """Read `to_json` back; `origin` names the file in errors.

        Raises:
            DeviceError: not such a text.
        """
        do = "run `scrimp doctor` again"
        version = ("format", _FORMAT)
        report = decode_json(text, cls, origin=origin, error=DeviceError, do=do, version=version)
        for number, measurement in enumerate(report.measurements):
            if measurement.status not in STATUSES:
                what = f"{origin}: $.measurements[{number}].status is not known"
                raise DeviceError(what, got=repr(measurement.status), expected=" or ".join(STATUSES), do=do)
        return report


def surroundings_of(device: torch.device) -> Surroundings:
    """What is here now."""
    if device.type == "cuda":
        name, driver = torch.cuda.get_device_name(device), _driver()
    else:
        name, driver = f"{_cpu_name()}, {torch.get_num_threads()} threads", ""
    triton = _version("triton") + (" (interpreted)" if is_interpreted() else "")
    return Surroundings(name, driver, torch.__version__, triton, _version("scrimp"), _version("numba"))


def cache_file(surroundings: Surroundings) -> Path:
    """Where the report of these surroundings lies."""
    key = json.dumps(asdict(surroundings), sort_keys=True).encode()
    return user_cache() / "doctor" / f"{hashlib.sha256(key).hexdigest()[:16]}.json"


def load_report(surroundings: Surroundings, tell: Callable[[str], None] | None = None) -> DoctorReport | None:
    """The kept report; None where there is none, or none that can be read, and then `tell` hears why."""
    file = cache_file(surroundings)
    if not file.exists():
        return None
    try:
        do = "delete it"
        content = read_bounded(file, error=DeviceError, do=do, at_most=MAX_FILE_BYTES)
        report = DoctorReport.from_json(content, origin=str(file))
        if report.surroundings != surroundings:
            raise DeviceError(f"{file} is of another device", do=do)
    except DeviceError as error:
        if tell is not None:
            tell(f"{error}: measuring again")
        return None
    return report


def keep_report(report: DoctorReport, tell: Callable[[str], None]) -> None:
    """Write the report to the cache; where that is not possible, say so and go on."""
    file = cache_file(report.surroundings)
    try:
        make_folder(file.parent)
        write_whole(file, report.to_json(), shared=True)
    except StorageError as error:
        tell(f"the report is not kept: {error}")


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _driver() -> str:
    try:
        text = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"\d+\.\d+(\.\d+)?", text)
    if found:
        return found[0]
    ask = getattr(torch._C, "_cuda_getDriverVersion", None)  # in builds for CUDA only
    return "" if ask is None else str(ask())


def _cpu_name() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    return found[1] if found else f"CPU with {torch.backends.cpu.get_cpu_capability()}"
