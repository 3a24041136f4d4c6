"""A checkpoint's state is refused by key, before anything is built, whatever stands in it."""

from __future__ import annotations

import copy
import dataclasses
import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.config import Architecture, preset
from scrimp.errors import CheckpointError
from scrimp.json_files import as_typed
from scrimp.planner.build_plan import model_fingerprint
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training.checkpoint import STATE, Checkpoint
from scrimp.training.precision.formats_in_plan import read_saved_cycle
from scrimp.training.run_state import read_state

SNIP = ("--precision=snip", "--train.steps=6", "--snip.first=1", "--snip.every=2", "--snip.delay=1")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("state")
    more = ("--snip.probe-every=0", "--checkpoint.every=4", "--checkpoint.keep-every=4")
    assert main(flags(write_corpus(folder), folder / "run", *SNIP, *more)) == 0
    shutil.rmtree(folder / "run/checkpoints/step-00000006")
    return folder / "run"


def checkpoint_of(run: Path) -> Checkpoint:
    return Checkpoint(4, run / "checkpoints/step-00000004")


def test_a_state_is_read_as_it_was_written(run: Path) -> None:
    state = read_state(checkpoint_of(run))
    assert state.to_json() == checkpoint_of(run).state
    assert (state.position.step, state.position.updates) == (4, 4)
    cycle, analysis, plan = read_saved_cycle(state.precision)
    assert state.precision is not None
    assert analysis is not None
    plans = {"plan": plan.to_json(), "analysis": analysis.to_json()}
    assert json.loads(json.dumps(dataclasses.asdict(cycle) | plans)) == state.precision


def at(state: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    *parents, last = path.split(".")
    for name in parents:
        state = state[name]
    return state, last


WRONG = [
    ("position.step", "4"),
    ("position.step", 5),
    ("position.step", -1),
    ("position.updates", 5),
    ("position.updates", 1.5),
    ("position", None),
    ("sequence", 0),
    ("data_digest", 7),
    ("run_digest", []),
    ("architecture.width", "wide"),
    ("precision", None),
    ("precision.recipes", [["fp8"]]),
    ("precision.guard.losses", {"a": 1}),
    ("precision.waiting", {"at": 9, "plan": None}),
    ("precision.waiting", {"at": "9", "plan": "{}"}),
    ("precision.previous", [["a"]]),
    ("precision.plan", None),
    ("precision.plan", "{}"),
    ("precision.analysis", 3),
    ("precision.recipes", {}),
    ("precision.guard.losses", [1.0]),
    ("precision.guard.penalties", {"blocks.0.mlp.down": [2.0]}),
    ("precision.previous_formats", ["fp3"]),
    ("sequence", 100_000),
    ("base", "0" * 64),
    ("architecture.adapter", {"rank": 4, "alpha": 8.0, "targets": "all"}),
]


@pytest.mark.parametrize(("path", "value"), WRONG, ids=[f"{path}={value!r}" for path, value in WRONG])
@pytest.mark.every(3)
def test_a_forged_state_is_refused_by_key(
    run: Path, tmp_path: Path, path: str, value: object, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(run, tmp_path / "run")
    forged = checkpoint_of(tmp_path / "run")
    state = copy.deepcopy(forged.state)
    parent, key = at(state, path)
    parent[key] = value
    (forged.folder / STATE).write_text(json.dumps(state))
    _cover(forged.folder)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()}
    assert main(["verify", str(forged.folder)]) == 2
    capsys.readouterr()
    assert main(["train", "--run.dir", str(tmp_path / "run"), "--resume"]) == 2
    said = capsys.readouterr().err
    assert "Traceback" not in said
    assert any(origin in said for origin in ("state.json", "the checkpoint's precision", "plan.json"))
    assert path.split(".")[1 if path.startswith("precision.") else 0] in said
    assert {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file()} == before


def _cover(folder: Path) -> None:
    """Make the manifest say that the forged file is the right one."""
    path = folder / manifests.MANIFEST
    manifest = json.loads(path.read_text())
    content = (folder / STATE).read_bytes()
    manifest["files"][STATE] = {
        "bytes": len(content),
        "sha256": hashlib.sha256(content).hexdigest(),
    }
    path.write_text(json.dumps(manifest))


def test_a_state_of_a_version_without_digests_is_read(run: Path) -> None:
    state = checkpoint_of(run)
    old = {key: value for key, value in state.state.items() if key != "run_digest"}
    state.__dict__["state"] = old
    assert read_state(state).run_digest is None
    state.__dict__["state"] = {**old, "surprise": 1}
    with pytest.raises(CheckpointError, match="unknown surprise"):
        read_state(state)


def test_options_of_a_family_are_read_as_they_were_written_and_none_leave_no_trace() -> None:
    plain = preset("llama-3m")
    assert "options" not in plain.to_json()
    gemma = dataclasses.replace(preset("gemma3-8m"), options=(("full_every", 3.0), ("rope_factor", 8.0)))
    for architecture in (plain, gemma, preset("mixtral-8m")):
        values = json.loads(json.dumps(architecture.to_json()))
        assert values == architecture.to_json()
        read = as_typed(values, Architecture, origin="x", error=CheckpointError, do="y")
        assert read == architecture
        assert model_fingerprint(read) == model_fingerprint(architecture)
