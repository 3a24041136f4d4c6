"""`scrimp doctor` on the terminal: progress, then one row per recipe and back end."""

from __future__ import annotations

import sys

from rich import box
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from scrimp.cli.show import say
from scrimp.gemm.doctor import examine
from scrimp.gemm.doctor_report import MISSING, SLOWER, WORKS, WRONG, DoctorReport, Measurement
from scrimp.precision import GEMMS
from scrimp.profiler import resolve_device

_STYLES = {WORKS: "green", SLOWER: "yellow", WRONG: "bold red", MISSING: "dim"}


def show_doctor(device: str, *, as_json: bool, fresh: bool) -> int:
    """Examine a device and print what was found; 1 if a back end gives wrong numbers."""
    resolved = resolve_device(device)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as bar:
        task = bar.add_task("trying recipes and back ends", total=1.0)

        def advance(share: float) -> None:
            bar.update(task, completed=share)

        report = examine(resolved.torch_device, fresh=fresh, tell=say, progress=advance)
    if as_json:
        print(report.to_json())
    else:
        print_report(report, Console())
    return 1 if report.wrong else 0


def print_report(report: DoctorReport, console: Console) -> None:
    """The report as a table, its reasons beneath it by number."""
    here = report.surroundings
    versions = [
        ("driver", here.driver),
        ("torch", here.torch),
        ("triton", here.triton),
        ("numba", here.numba),
        ("scrimp", here.scrimp),
    ]
    console.print(
        f"{here.device}; " + ", ".join(f"{name} {version}" for name, version in versions if version)
    )
    notes: dict[str, int] = {}
    console.print(_table(report, notes))
    for reason, number in notes.items():
        console.print(f"{number:>3}  {reason}", markup=False)
    console.print(
        f"  x  speed of one GEMM with its quantization over bf16, at {report.typical}", markup=False
    )


def _table(report: DoctorReport, notes: dict[str, int]) -> Table:
    table = Table("recipe", "back end", *GEMMS, "note", box=box.SIMPLE, padding=(0, 1, 0, 0))
    rows: dict[tuple[str, str], dict[str, Measurement]] = {}
    for measurement in report.measurements:
        rows.setdefault((measurement.recipe, measurement.backend), {})[measurement.gemm] = measurement
    before = ""
    for (recipe, backend), found in rows.items():
        if before not in ("", recipe):
            table.add_row()
        cells = [_cell(found[gemm]) if gemm in found else "" for gemm in GEMMS]
        reasons = dict.fromkeys(m.reason for m in found.values() if m.reason)
        numbers = [str(notes.setdefault(reason, len(notes) + 1)) for reason in reasons]
        table.add_row("" if recipe == before else recipe, backend, *cells, " ".join(numbers))
        before = recipe
    return table


def _cell(measurement: Measurement) -> Text:
    text = measurement.status
    if measurement.speedup is not None and measurement.status in (WORKS, SLOWER):
        name = "works" if measurement.status == WORKS else "slower"
        text = f"{name} {measurement.speedup:.2f}x"
    return Text(text, style=_STYLES[measurement.status], no_wrap=True)
