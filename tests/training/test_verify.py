"""`scrimp verify`: every altered byte that has a checksum is named, and what is sound is found."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import flags, write_corpus

from scrimp.cli import main
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training.checkpoint import Checkpoint


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One folder of each kind."""
    root = tmp_path_factory.mktemp("verify")
    corpus = write_corpus(root)
    assert main(["prepare", str(corpus), str(root / "corpus"), "--tokenizer=bytes"]) == 0
    more = ("--train.steps=6", "--checkpoint.every=3", "--evaluation.every=0")
    assert main(flags(corpus, root / "run", *more)) == 0
    assert main(["export", str(root / "run"), str(root / "model")]) == 0
    checkpoint = root / "run" / "checkpoints" / "step-00000006"
    return {name: root / name for name in ("corpus", "run", "model")} | {"checkpoint": checkpoint}


@pytest.mark.parametrize("kind", ["corpus", "run", "checkpoint", "model"])
def test_what_is_sound_is_said_to_be(
    folders: dict[str, Path], kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = {path: path.read_bytes() for path in folders[kind].rglob("*") if path.is_file()}
    assert main(["verify", str(folders[kind])]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"{kind} {folders[kind]}")
    if kind == "run":
        assert f"newest sound checkpoint: {folders['checkpoint']}\n" in shown
    assert {path: path.read_bytes() for path in folders[kind].rglob("*") if path.is_file()} == before


CHANGEABLE = {"report.html", ".lock", "config.toml", "plan.json", "metrics.jsonl", "events.jsonl"}
"""What a user may edit of a run, and what grows."""


@pytest.mark.parametrize("kind", ["corpus", "run", "checkpoint", "model"])
@pytest.mark.parametrize("damage", ["flipped", "truncated", "emptied"])
def test_every_damaged_file_is_noticed(
    folders: dict[str, Path], tmp_path: Path, kind: str, damage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(shutil.copytree(folders[kind], tmp_path / "copy"))
    files = [path for path in sorted(copy.rglob("*")) if path.is_file() and "tensorboard" not in path.parts]
    for path in files:
        if kind == "run" and path.parent == copy and path.name in CHANGEABLE:
            continue
        whole = path.read_bytes()
        middle = len(whole) // 2
        flipped = whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :]
        path.write_bytes({"flipped": flipped, "truncated": whole[:middle], "emptied": b""}[damage])
        assert main(["verify", str(copy)]) == 2, path
        shown = capsys.readouterr()
        assert "Traceback" not in shown.err
        assert path.name in shown.out + shown.err or path.parent.name in shown.out + shown.err, path
        path.write_bytes(whole)
    assert main(["verify", str(copy)]) == 0


def test_the_newest_sound_checkpoint_is_named(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(folders["run"], tmp_path / "run"))
    newest = run_dir / "checkpoints" / "step-00000006"
    os.truncate(newest / "model.safetensors.index.json", 100)
    assert main(["verify", str(run_dir)]) == 2
    shown = capsys.readouterr().out
    assert "step-00000006/model.safetensors.index.json is truncated" in shown
    assert f"newest sound checkpoint: {run_dir}/checkpoints/step-00000003\n" in shown
    shutil.rmtree(run_dir / "checkpoints")
    assert main(["verify", str(run_dir)]) == 2
    assert "newest sound checkpoint: none\n" in capsys.readouterr().out


def test_numbers_that_are_not_finite_are_found_whatever_the_manifest_says(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    checkpoint = Path(shutil.copytree(folders["checkpoint"], tmp_path / "checkpoint"))
    file = checkpoint / "model-00002-of-00003.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("exp_avg"))
    tensors[name].view(-1)[5] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    manifests.seal(checkpoint, 6, not_finite=(), skipped_steps=0)
    assert main(["verify", str(checkpoint)]) == 2
    assert name in capsys.readouterr().out


def test_a_model_without_a_seal_is_looked_through_as_far_as_can_be(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(folders["model"], tmp_path / "model"))
    (model / "scrimp.json").unlink()
    assert main(["verify", str(model)]) == 0
    shown = capsys.readouterr().out
    assert "no checksums to compare with" in shown
    assert shown.endswith("\nwhat can be checked is sound\n")
    file = model / "model.safetensors"
    tensors = load_file(file)
    tensors["model.norm.weight"][0] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(["verify", str(model)]) == 2
    assert "model.norm.weight" in capsys.readouterr().out


def test_a_corpus_without_a_digest_is_not_called_sound_altogether(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = Path(shutil.copytree(folders["corpus"], tmp_path / "corpus"))
    content = json.loads((corpus / "corpus.json").read_text(encoding="utf-8"))
    del content["digest"]
    (corpus / "corpus.json").write_text(json.dumps(content), encoding="utf-8")
    assert main(["verify", str(corpus)]) == 0
    assert "what can be checked is sound: corpus.json has no digest" in capsys.readouterr().out


def test_a_missing_file_of_a_model_is_said_to_be_missing(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = Path(shutil.copytree(folders["model"], tmp_path / "model"))
    (model / "tokenizer_config.json").unlink()
    assert main(["verify", str(model)]) == 2
    shown = capsys.readouterr().out
    assert "tokenizer_config.json is missing" in shown
    assert "export the run again" in shown
    assert "older checkpoint" not in shown
    assert "is altered" not in shown


@pytest.mark.parametrize("log", ["metrics.jsonl", "events.jsonl"])
@pytest.mark.every(2)
def test_a_missing_log_is_named(
    folders: dict[str, Path], tmp_path: Path, log: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(folders["run"], tmp_path / "run"))
    (run_dir / log).unlink()
    assert main(["verify", str(run_dir)]) == 2
    assert f"{run_dir}/{log} is missing" in capsys.readouterr().out
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0


def test_a_checkpoint_that_the_run_removes_meanwhile_is_not_called_bad(
    folders: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run_dir = Path(shutil.copytree(folders["run"], tmp_path / "run"))
    verified = Checkpoint.verify

    def prune_then_verify(self: Checkpoint) -> None:
        if self.step == 2:
            shutil.rmtree(self.folder)
        verified(self)

    monkeypatch.setattr(Checkpoint, "verify", prune_then_verify)
    assert main(["verify", str(run_dir)]) == 0
    shown = capsys.readouterr().out
    assert "step-00000002" not in shown
    assert "everything is sound" in shown


def test_edits_that_are_allowed_are_named(
    folders: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = Path(shutil.copytree(folders["run"], tmp_path / "run"))
    path = run_dir / "plan.json"
    plan = json.loads(path.read_text(encoding="utf-8"))
    plan["blocks"]["1"]["activations"] = "block"
    path.write_text(json.dumps(plan), encoding="utf-8")
    assert main(["verify", str(run_dir)]) == 0
    assert "edited since it was written: blocks" in capsys.readouterr().out
    text = (run_dir / "config.toml").read_text(encoding="utf-8")
    (run_dir / "config.toml").write_text(text.replace("seed = 0", "seed = 3"), encoding="utf-8")
    assert main(["verify", str(run_dir)]) == 2
    assert "run.seed = 3 (the checkpoint has 0)" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["folder", "file", "nothing"])
def test_what_is_none_of_these_is_refused(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / kind
    if kind == "folder":
        path.mkdir()
    if kind == "file":
        path.touch()
    assert main(["verify", str(path)]) == 2
    assert "is nothing that can be verified" in capsys.readouterr().err
