"""A run keeps the back ends that it began with, whatever a later doctor report says."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import flags, losses, records, write_corpus
from torch import Tensor

from scrimp.cli import main
from scrimp.gemm import select
from scrimp.gemm.backends import BACKENDS, ReferenceBackend
from scrimp.gemm.doctor_report import WORKS, WRONG, DoctorReport, Measurement, Surroundings
from scrimp.gemm.problem import Shape
from scrimp.gemm.select import BackendSelection
from scrimp.planner import Plan
from scrimp.precision import GEMMS

STEPS = 12


class Other(ReferenceBackend):
    """Right, with other roundings, as a back end with its sums in another order has."""

    name = "torch"

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        return "no kernel" if recipe == "nvfp4" else None

    def multiply(self, gemm: str, a: Any, b: Any, out: torch.dtype) -> Tensor:
        return (super().multiply(gemm, a, b, torch.float32) * (1 + 2.0**-12)).to(out)


class Gone(ReferenceBackend):
    """Runs nothing here."""

    name = "gone"

    def refusal(self, gemm: str, recipe: str, shape: Shape | None, device: torch.device) -> str | None:
        return "no such device"


def report(fastest: str, wrong: str = "") -> DoctorReport:
    seconds = {name: 1.0 if name == fastest else 2.0 for name in ("torch", "reference")}
    return DoctorReport(
        Surroundings("", "", "", "", ""),
        "typical",
        tuple(
            Measurement("fp8", gemm, name, WRONG if name == wrong else WORKS, seconds=took, sizes="typical")
            for name, took in seconds.items()
            for gemm in GEMMS
        ),
    )


class Machine:
    """A device with two back ends for fp8, and a report that can change."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.report = report("torch")
        monkeypatch.setitem(BACKENDS, "torch", Other())  # type: ignore[arg-type]
        monkeypatch.setattr("scrimp.gemm.backends.numba.has_numba", lambda: False)
        monkeypatch.setattr(BackendSelection, "_report", property(lambda selection: self.report))
        monkeypatch.setattr(select, "is_for_probes_only", lambda *arguments: False)
        monkeypatch.setattr(select, "_selection", BackendSelection)  # a process of its own remembers nothing


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture(scope="module")
def begun(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A finished run with a checkpoint half-way; torch ran its GEMMs."""
    corpus = write_corpus(tmp_path_factory.mktemp("recorded"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(corpus.parent / "user-cache"))
        Machine(patch)
        run_dir = corpus.parent / "run"
        more = ("--precision=fp8,*.mlp.down=nvfp4", f"--train.steps={STEPS}", "--checkpoint.every=6")
        assert main(flags(corpus, run_dir, *more)) == 0
        yield run_dir


def half_way(run: Path, copy: Path) -> Path:
    shutil.copytree(run, copy)
    shutil.rmtree(copy / "checkpoints" / f"step-{STEPS:08d}")
    return copy


def resume(run_dir: Path, *more: str) -> int:
    return main(["train", f"--run.dir={run_dir}", "--resume", *more])


@pytest.mark.slow
def test_which_back_end_ran_each_gemm_stands_in_the_plan_and_in_every_checkpoint(begun: Path) -> None:
    plan = Plan.read(begun / "plan.json")
    kinds = ("attention.qkv", "attention.out", "mlp.gate_up")
    assert set(plan.backends) == {*(f"fp8 {kind}" for kind in kinds), "nvfp4 mlp.down"}
    for row, choice in plan.backends.items():
        name = "reference" if row.startswith("nvfp4") else "torch"
        assert {choice.fprop, choice.dgrad, choice.wgrad} == {name}
    for folder in (begun / "checkpoints").iterdir():
        assert Plan.read(folder / "plan.json").backends == plan.backends


@pytest.mark.slow
@pytest.mark.parametrize("keeps_plan", [True, False], ids=["plan.json", "the checkpoint's"])
@pytest.mark.every(2)
def test_another_report_between_start_and_resume_changes_nothing(
    begun: Path, tmp_path: Path, machine: Machine, keeps_plan: bool
) -> None:
    run_dir = half_way(begun, tmp_path / "run")
    if not keeps_plan:
        (run_dir / "plan.json").unlink()
    machine.report = report("reference")
    assert resume(run_dir) == 0
    assert losses(run_dir) == losses(begun)
    assert Plan.read(run_dir / "plan.json").backends == Plan.read(begun / "plan.json").backends


@pytest.mark.slow
def test_a_run_of_before_without_a_record_resumes_by_the_report_of_today_and_records_it(
    begun: Path, tmp_path: Path, machine: Machine
) -> None:
    run_dir = half_way(begun, tmp_path / "run")
    for path in [run_dir / "plan.json", *run_dir.glob("checkpoints/*/plan.json")]:
        raw = json.loads(path.read_text(encoding="utf-8"))
        del raw["backends"]
        path.write_text(json.dumps(raw), encoding="utf-8")
        seal(path.parent, path)
    machine.report = report("reference")
    assert resume(run_dir) == 0
    names = {choice.fprop for choice in Plan.read(run_dir / "plan.json").backends.values()}
    assert names == {"reference"}
    assert losses(run_dir) != losses(begun), (
        "the other back end rounds otherwise, or no test here shows anything"
    )


def seal(folder: Path, changed: Path) -> None:
    """Make a checkpoint's manifest that of its changed file."""
    from scrimp.training import checkpoint_manifest as manifest

    if (folder / manifest.MANIFEST).exists():
        step = manifest.read_manifest(folder).step
        (folder / manifest.MANIFEST).unlink()
        manifest.seal(folder, step)


@pytest.mark.slow
def test_a_recorded_back_end_that_is_wrong_by_now_is_refused_by_name_with_what_to_do(
    begun: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = half_way(begun, tmp_path / "run")
    before = (run_dir / "plan.json").read_text(encoding="utf-8")
    machine.report = report("reference", wrong="torch")
    assert resume(run_dir) != 0
    said = " ".join(capsys.readouterr().err.split())
    assert "in fp8 began on the torch back end" in said
    assert "found its numbers wrong" in said
    assert "--backend reference" in said
    assert (run_dir / "plan.json").read_text(encoding="utf-8") == before

    assert resume(run_dir, "--backend", "reference") == 0
    names = {choice.fprop for choice in Plan.read(run_dir / "plan.json").backends.values()}
    assert names == {"reference"}
    changed = [event for event in records(run_dir, "events.jsonl") if event["kind"] == "backends-changed"]
    assert "fp8 by torch" in changed[-1]["reason"]


@pytest.mark.slow
def test_asking_for_auto_on_resume_records_anew(begun: Path, tmp_path: Path, machine: Machine) -> None:
    run_dir = half_way(begun, tmp_path / "run")
    assert resume(run_dir, "--backend", "reference") == 0

    def fp8() -> set[str | None]:
        rows = Plan.read(run_dir / "plan.json").backends
        return {choice.fprop for row, choice in rows.items() if row.startswith("fp8")}

    assert fp8() == {"reference"}
    assert resume(run_dir) == 0
    assert fp8() == {"reference"}, "what was asked for stays"
    assert resume(run_dir, "--backend", "auto") == 0
    assert fp8() == {"torch"}


@pytest.mark.slow
def test_the_back_end_that_is_advised_runs_everything_when_typed(
    begun: Path, tmp_path: Path, machine: Machine, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = half_way(begun, tmp_path / "run")
    raw = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    raw["backends"]["fp8 mlp.gate_up"]["fprop"] = "gone"
    (run_dir / "plan.json").write_text(json.dumps(raw), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BACKENDS, "gone", Gone())  # type: ignore[arg-type]
        patch.delitem(BACKENDS, "triton")  # the interpreter would run it
        assert resume(run_dir) != 0
        said = " ".join(capsys.readouterr().err.split())
        # In its place the report names torch, which has no kernel for the nvfp4 of mlp.down.
        assert "began on the gone back end" in said
        advised = said.split("--backend ")[1].split()[0]
        assert advised == "reference"
        assert resume(run_dir, "--backend", advised) == 0


@pytest.mark.parametrize(
    ("row", "name", "says"),
    [("fp8 mlp.gate_up", "cublas", "there is no such back end"), ("fp8 mlp", "torch", "a row of no layer")],
)
@pytest.mark.every(2)
@pytest.mark.slow
def test_a_record_that_was_edited_wrongly_is_refused(
    begun: Path,
    tmp_path: Path,
    machine: Machine,
    capsys: pytest.CaptureFixture[str],
    row: str,
    name: str,
    says: str,
) -> None:
    run_dir = half_way(begun, tmp_path / "run")
    raw = json.loads((run_dir / "plan.json").read_text(encoding="utf-8"))
    raw["backends"][row] = {"fprop": name}
    (run_dir / "plan.json").write_text(json.dumps(raw), encoding="utf-8")
    assert resume(run_dir) != 0
    assert says in " ".join(capsys.readouterr().err.split())
