"""Weights that are not finite: saved and named, never in the place of good ones, refused by all that would use them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main
from scrimp.errors import CheckpointError
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training.checkpoint import Checkpoint, CheckpointStore
from scrimp.training.step import Stepper

EVERY_TWO = ("--checkpoint.every=2", "--checkpoint.keep-last=2", "--evaluation.every=0")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("not-finite"))


def poisoned_after(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """After this step one weight is NaN, as after an overflow or a fault of the memory."""
    taken = Stepper.take

    def take(self: Stepper, loader: object) -> object:
        result = taken(self, loader)  # type: ignore[arg-type]
        if self.run.step == step:
            with torch.no_grad():
                next(iter(self.run.executable.model.parameters()))[0, 0] = torch.nan
        return result

    monkeypatch.setattr(Stepper, "take", take)


@pytest.fixture(scope="module")
def whole(corpus: Path) -> Path:
    run_dir = corpus.parent / "whole"
    assert main(flags(corpus, run_dir, "--train.steps=20", *EVERY_TWO)) == 0
    return run_dir


@pytest.fixture(scope="module")
def broken(corpus: Path) -> Path:
    """A run of 20 steps whose embedding has a NaN after step 5, so that all later ones are skipped."""
    run_dir = corpus.parent / "broken"
    with pytest.MonkeyPatch.context() as monkeypatch:
        poisoned_after(monkeypatch, 5)
        patient = "--train.nonfinite-patience=100"
        assert main(flags(corpus, run_dir, "--train.steps=20", patient, *EVERY_TWO)) == 1
    return run_dir


@pytest.fixture
def copy(broken: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(broken, tmp_path / "run"))


def steps(run_dir: Path) -> list[int]:
    return [checkpoint.step for checkpoint in CheckpointStore(run_dir, keep_last=1, keep_every=0).complete()]


def manifest(run_dir: Path, step: int) -> dict[str, object]:
    path = run_dir / "checkpoints" / f"step-{step:08d}" / "manifest.json"
    content: dict[str, object] = json.loads(path.read_text(encoding="utf-8"))
    return content


@pytest.mark.slow
def test_good_checkpoints_stay_and_of_the_others_the_newest(broken: Path) -> None:
    assert steps(broken) == [2, 4, 20]
    good, bad = manifest(broken, 4), manifest(broken, 20)
    assert (good["finite"], good["skipped_steps"]) == (True, 0)
    assert (bad["finite"], bad["skipped_steps"]) == (False, 15)
    assert "model.embedding.weight" in bad["not_finite"]  # type: ignore[operator]
    found = [e for e in records(broken, "events.jsonl") if e["kind"] == "checkpoint"]
    assert [event["step"] for event in found if not event["finite"]] == [6, 8, 10, 12, 14, 16, 18, 20]


def test_a_run_that_ends_with_such_weights_fails(broken: Path) -> None:
    last = records(broken, "events.jsonl")[-1]
    assert last["kind"] == "finish"
    assert "the weights are not finite after the last step, 20" in last["reason"]
    assert (broken / "report.html").exists()


@pytest.mark.slow
def test_a_run_that_is_stopped_by_its_guard_names_the_last_finite_checkpoint(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    poisoned_after(monkeypatch, 5)
    run_dir = tmp_path / "run"
    assert main(flags(corpus, run_dir, "--train.steps=60", *EVERY_TWO)) == 1
    assert f"the newest checkpoint with finite numbers: {run_dir}/checkpoints/step-00000004" in (
        capsys.readouterr().out.replace("\n", "")
    )
    assert steps(run_dir) == [2, 4, 8]
    assert manifest(run_dir, 8)["skipped_steps"] == 3


def test_resume_takes_the_last_finite_checkpoint_and_says_so(
    copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"--run.dir={copy}", "--resume"]) == 0
    shown = capsys.readouterr().out
    assert "passed over: " in shown
    assert "step-00000020 holds numbers that are not finite" in shown
    assert "continuing from step 4" in shown
    assert losses(copy) == losses(whole)
    assert steps(copy) == [18, 20]


@pytest.mark.slow
def test_a_resumed_run_can_be_told_the_step(
    copy: Path, whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", f"--run.dir={copy}", "--resume-from=2", "--checkpoint.keep-last=20"]) == 0
    assert "continuing from step 2" in capsys.readouterr().out
    assert losses(copy) == losses(whole)
    assert (copy / "checkpoints" / "left-step-00000020" / "manifest.json").exists()
    assert (copy / "checkpoints" / "left-step-00000004" / "manifest.json").exists()
    assert steps(copy) == list(range(2, 21, 2))


def test_a_step_whose_optimizer_is_not_finite_is_refused(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy / "checkpoints" / "step-00000002"
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        for name in (name for name in tensors if name.endswith("norm.weight.exp_avg")):
            tensors[name].view(-1)[0] = torch.nan
        save_file(tensors, file, metadata={"format": "pt"})
    bad = [name for name, tensor in Checkpoint(2, folder).tensors() if not tensor.isfinite().all()]
    assert bad
    assert all(name.startswith("optimizer.") for name in bad)
    manifests.seal(folder, 2, not_finite=bad, skipped_steps=0)
    assert main(["train", f"--run.dir={copy}", "--resume-from=2"]) == 2
    assert "exp_avg" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (["--resume-from=6"], "holds no checkpoint of step 6"),
        (["--resume-from=20"], "not finite"),
        (["--resume-from=0"], "--resume-from"),
        (["--resume-from=2", "--restart"], "--restart does not go with --resume-from"),
        (["--restart"], "--restart needs --resume"),
    ],
)
def test_a_step_that_cannot_be_gone_on_from_is_refused(
    broken: Path, more: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = (broken / "metrics.jsonl").read_bytes()
    assert main(["train", f"--run.dir={broken}", *more]) == 2
    assert words in capsys.readouterr().err
    assert (broken / "metrics.jsonl").read_bytes() == before


def commands(target: Path, corpus: Path, out: Path) -> dict[str, list[str]]:
    return {
        "eval": ["eval", str(target), f"--data={corpus}", "--device=cpu"],
        "generate": ["generate", str(target), "--prompt=def", "--device=cpu", "--tokens=4"],
        "export": ["export", str(target), str(out)],
        "train": [
            *["train", "--device=cpu", f"--model.weights={target}", f"--data.source={corpus}"],
            *[f"--run.dir={out}", "--train.steps=1"],
        ],
        "plan": ["plan", "--device=cpu", "--precision=snip", f"--model.weights={target}"],
    }


@pytest.mark.parametrize("name", ["train", "eval", "generate", "export", "plan"])
@pytest.mark.every(6)
def test_a_command_refuses_them_and_takes_the_checkpoint_that_it_names(
    name: str, broken: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert main(commands(broken, corpus, out)[name]) == 2
    refusal = capsys.readouterr().err
    sound = broken / "checkpoints" / "step-00000004"
    assert f"{broken}/checkpoints/step-00000020 holds numbers that are not finite" in refusal
    assert f"name {sound} instead" in refusal
    assert not out.exists()
    if name != "plan":
        assert main(commands(sound, corpus, out)[name]) == 0
        assert main(commands(sound.parent / "step-00000020", corpus, tmp_path / "other")[name]) == 2


@pytest.mark.parametrize("name", ["eval", "generate", "train"])
def test_a_hugging_face_folder_with_such_weights_is_refused(
    name: str, whole: Path, corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exported = tmp_path / "exported"
    assert main(["export", str(whole), str(exported)]) == 0
    file = next(exported.glob("*.safetensors"))
    tensors = load_file(file)
    tensors["model.norm.weight"][3] = torch.inf
    save_file(tensors, file, metadata={"format": "pt"})
    assert main(commands(exported, corpus, tmp_path / "out")[name]) == 2
    shown = capsys.readouterr().err
    assert "not finite" in shown
    assert "Traceback" not in shown
    assert not (tmp_path / "out").exists()


def forget(folder: Path) -> None:
    """Make a manifest one of an earlier version, which says nothing of finite numbers."""
    path = folder / "manifest.json"
    content = json.loads(path.read_text(encoding="utf-8"))
    for key in ("finite", "not_finite", "skipped_steps"):
        content.pop(key, None)
    path.write_text(json.dumps(content), encoding="utf-8")


@pytest.mark.slow
def test_a_checkpoint_of_an_earlier_version_is_looked_through(
    copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for folder in (copy / "checkpoints").iterdir():
        forget(folder)
    assert main(["export", str(copy), str(copy.parent / "out")]) == 2
    assert main(["train", f"--run.dir={copy}", "--resume"]) == 0
    assert "continuing from step 4" in capsys.readouterr().out
    assert steps(copy) == [18, 20]


def test_weights_are_looked_through_whatever_their_manifest_says(
    copy: Path, corpus: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = copy / "checkpoints" / "step-00000020"
    manifests.seal(folder, 20, not_finite=(), skipped_steps=0)
    for name in ("export", "train"):
        assert main(commands(copy, corpus, copy.parent / "out")[name]) == 2
        assert "model.embedding.weight" in capsys.readouterr().err
        assert not (copy.parent / "out").exists()


def save(store: CheckpointStore, step: int, value: float) -> None:
    store.save(
        step, {"model.x": torch.tensor([1.0, value]), "optimizer.n": torch.tensor(3)}, {}, {}, wait=True
    )


def test_the_last_finite_checkpoint_is_never_pruned(tmp_path: Path) -> None:
    for keep_last in (1, 3):
        run_dir = tmp_path / str(keep_last)
        store = CheckpointStore(run_dir, keep_last=keep_last, keep_every=0)
        for step in range(1, 6):
            save(store, step, 1.0)
        for step in range(6, 12):
            save(store, step, float("nan"))
        good = list(range(6 - keep_last, 6))
        assert steps(run_dir) == [*good, 11]
        again = CheckpointStore(run_dir, keep_last=keep_last, keep_every=0)  # another process
        save(again, 12, float("inf"))
        assert steps(run_dir) == [*good, 12]
        found, errors = again.latest(finite=True)
        assert found is not None
        assert found.step == 5
        assert [type(error) for error in errors] == [CheckpointError]


def test_an_altered_checkpoint_pushes_out_no_good_one(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_every=0)
    save(store, 1, 1.0)
    save(store, 2, 1.0)
    file = tmp_path / "checkpoints" / "step-00000002" / "state.json"
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])
    again = CheckpointStore(tmp_path, keep_last=1, keep_every=0)
    save(again, 3, float("nan"))
    assert 1 in steps(tmp_path)
    found, _ = again.latest(finite=True)
    assert found is not None
    assert found.step == 1


@pytest.mark.parametrize(
    ("dtype", "value"),
    [
        (torch.float32, "nan"),
        (torch.float32, "-inf"),
        (torch.bfloat16, "inf"),
        (torch.float16, "nan"),
        (torch.float64, "inf"),
        (torch.float8_e4m3fn, "nan"),
        (torch.float8_e5m2, "inf"),
    ],
)
def test_every_format_is_looked_through_to_its_end(tmp_path: Path, dtype: torch.dtype, value: str) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_every=0)
    numbers = torch.ones((1 << 20) + 3)
    store.save(1, {"model.x": numbers.to(dtype)}, {}, {}, wait=True)
    numbers[-1] = float(value)
    store.save(2, {"model.x": numbers.to(dtype), "model.empty": torch.empty(0)}, {}, {}, wait=True)
    assert store.not_finite == {1: (), 2: ("model.x",)}
