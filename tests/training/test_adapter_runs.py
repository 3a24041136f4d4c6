"""Runs with adapters: the base stays as it is, checkpoints hold what is trained, and whoever reads a run reads both."""

from __future__ import annotations

import dataclasses
import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import flags, losses, records, scrimp, write_corpus

from scrimp.cli import main
from scrimp.errors import CheckpointError
from scrimp.models import spec_of
from scrimp.models.initialise import initial_value
from scrimp.models.model import Model, build_model
from scrimp.planner.precision.stored import weight_bytes
from scrimp.precision import stored_in
from scrimp.report.units import format_bytes
from scrimp.training.checkpoint import Checkpoint, CheckpointStore
from scrimp.training.run_state import read_state
from scrimp.training.trained_weights import (
    architecture_of_weights,
    fill_from_weights,
    finite_tensors,
    finite_weights,
    open_target,
)

STEPS = [
    "--train.steps=4",
    "--checkpoint.every=2",
    "--checkpoint.keep-last=3",
    "--evaluation.every=0",
    "--train.micro-batch=2",
]
ADAPTERS = [*STEPS, "--adapter.rank=4", "--optimizer.lr=2e-2", "--schedule.warmup-steps=1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base, as a run and as a Hugging Face folder, and a run with adapters from each."""
    found = tmp_path_factory.mktemp("adapters")
    corpus = write_corpus(found)
    assert (
        main(flags(corpus, found / "base", "--train.steps=6", "--evaluation.every=0", "--optimizer.lr=1e-2"))
        == 0
    )
    assert main(["export", str(found / "base"), str(found / "folder")]) == 0
    for name, base in (("run", "base"), ("from a folder", "folder")):
        assert main(flags(corpus, found / name, *ADAPTERS, f"--model.weights={found / base}")) == 0
    return found


def at(run: Path, step: int) -> Checkpoint:
    return CheckpointStore(run, keep_last=1, keep_every=0).at(step)


def evaluated(run: Path) -> float:
    """The last loss on what was held out."""
    return float([one["loss"] for one in records(run, "events.jsonl") if one["kind"] == "evaluation"][-1])


def adapters_on(run: Path) -> Model:
    """The model as it was trained: the base's weights, and the checkpoint's adapters beside them."""
    checkpoint = at(run, 4)
    model = build_model(read_state(checkpoint).architecture)
    fill_from_weights(model, run.parent / "base")
    tensors = dict(finite_tensors(checkpoint))
    with torch.no_grad():
        for name, parameter in model.trained().items():
            parameter.copy_(tensors.pop(name))
    assert not tensors
    return model


def test_a_checkpoint_holds_adapters_their_states_and_the_digest_of_the_base(folder: Path) -> None:
    checkpoint = at(folder / "run", 4)
    spec = spec_of(read_state(checkpoint).architecture)
    assert spec.trained_parameters < spec.parameters / 3
    sizes = {name: tensor.nbytes for name, tensor in checkpoint.tensors()}
    of_model = {name for name in sizes if name.startswith("model.")}
    assert all(name.endswith((".lora_a", ".lora_b")) for name in of_model)
    assert sum(size for name, size in sizes.items() if name in of_model) == 4 * spec.trained_parameters
    states = sum(size for name, size in sizes.items() if name.startswith("optimizer."))
    assert states == 8 * spec.trained_parameters
    assert read_state(checkpoint).base is not None
    b = dict(finite_tensors(checkpoint))["blocks.0.attention.qkv.lora_b"]
    assert b.abs().max() > 0, "it has learnt"
    a = dict(finite_tensors(checkpoint))["blocks.0.attention.qkv.lora_a"]
    assert 0 < (a - initial_value("blocks.0.attention.qkv.lora_a", a.shape, 0)).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("base", [[], ["--adapter.base=nvfp4"]])
def test_the_account_has_what_a_run_holds(base: list[str], folder: Path, tmp_path: Path) -> None:
    """In a process of its own, where nothing else lies."""
    more = ["--train.steps=3", "--checkpoint.every=0", f"--model.weights={folder / 'folder'}"]
    run = tmp_path / "run"
    assert scrimp(*flags(folder / "corpus.txt", run, *ADAPTERS, *more, *base)).returncode == 0
    predicted, full = (
        json.loads((one / "plan.json").read_text())["predicted"]["peak_device_bytes"]
        for one in (run, folder / "base")
    )
    measured = max(one.get("tensor_peak_bytes") or 0 for one in records(run))
    assert measured <= predicted <= 1.05 * measured
    assert predicted < full


def test_merged_weights_give_the_logits_of_adapters_beside_their_base(folder: Path, tmp_path: Path) -> None:
    model, merged = adapters_on(folder / "run"), build_model(architecture_of_weights(folder / "run"))
    fill_from_weights(merged, folder / "run")
    exported = build_model(merged.architecture)
    assert main(["export", str(folder / "run"), str(tmp_path / "out")]) == 0
    fill_from_weights(exported, tmp_path / "out")
    base = build_model(merged.architecture)
    fill_from_weights(base, folder / "base")
    tokens = torch.arange(64).view(1, 64)
    with torch.no_grad():
        beside, *others = (one.logits(one(tokens)) for one in (model, merged, exported, base))
    torch.testing.assert_close(others[0], beside, rtol=1e-4, atol=1e-4)
    assert torch.equal(others[0], others[1])
    assert (others[2] - beside).abs().max() > 1e-2
    for name, parameter in base.named_parameters():
        if not name.endswith(("qkv.weight", "out.weight", "gate_up.weight", "down.weight")):
            assert torch.equal(parameter, dict(merged.named_parameters())[name]), name


def test_evaluation_text_and_chat_read_both(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, shown = tmp_path / "some.txt", {}
    corpus.write_text((folder / "corpus.txt").read_text(encoding="utf-8")[:4096], encoding="utf-8")
    for name in ("run", "base", "from a folder"):
        assert main(["eval", str(folder / name), f"--data={corpus}", "--device=cpu"]) == 0
        told = capsys.readouterr().out
        shown[name] = float(re.findall(r"nats per token\)\s+([0-9.]+)", told)[0])
    assert shown["run"] == shown["from a folder"] < shown["base"]
    assert evaluated(folder / "run") < evaluated(folder / "base")
    words = ["generate", str(folder / "run"), "--prompt=def ", "--tokens=4", "--device=cpu"]
    assert main(words) == 0
    assert main(["verify", str(folder / "run")]) == 0
    assert "beside" in capsys.readouterr().out


def test_a_run_goes_on_bit_for_bit_and_from_any_kind_of_base(folder: Path, tmp_path: Path) -> None:
    assert losses(folder / "run") == losses(folder / "from a folder")
    again = tmp_path / "again"
    shutil.copytree(folder / "run", again)
    assert main(["train", f"--run.dir={again}", "--resume-from=2"]) == 0
    assert losses(again) == losses(folder / "run")
    found, expected = dict(at(again, 4).tensors()), dict(at(folder / "run", 4).tensors())
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_a_run_with_adapters_teaches(folder: Path, tmp_path: Path) -> None:
    """Its weights are merged while the student's products are counted."""
    corpus = folder / "corpus.txt"
    distill = ("--objective.name=distill", f"--objective.teachers={folder / 'run'}")
    assert main(flags(corpus, tmp_path / "student", "--train.steps=2", *distill)) == 0
    assert len(losses(tmp_path / "student")) == 2


def test_adapters_beside_a_run_with_adapters(folder: Path, tmp_path: Path) -> None:
    """The base is what that run came to; and all weights may be trained from there too."""
    corpus = folder / "corpus.txt"
    base = f"--model.weights={folder / 'run'}"
    assert main(flags(corpus, tmp_path / "second", *ADAPTERS, base, "--adapter.rank=2")) == 0
    assert main(flags(corpus, tmp_path / "full", *STEPS, base)) == 0
    assert losses(tmp_path / "second")[1] == losses(tmp_path / "full")[1]
    assert losses(tmp_path / "second")[1] < losses(folder / "run")[1]
    assert "adapter" not in at(tmp_path / "full", 4).state["architecture"]
    weights = dict(finite_weights(at(tmp_path / "second", 4)))
    assert weights.keys() == dict(finite_weights(at(tmp_path / "full", 4))).keys()


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param(["--precision=bf16"], marks=pytest.mark.slow),
        pytest.param(["--precision=fp8,blocks.0.*=bf16"], marks=pytest.mark.slow),
        pytest.param(["--precision=fp8", "--memory.activations=block"], marks=pytest.mark.slow),
        pytest.param(["--precision=nvfp4,head=fp8"], marks=pytest.mark.slow),
        pytest.param(["--memory.activations=norms+offload"], marks=pytest.mark.slow),
        pytest.param(["--memory.activations=attention"], marks=pytest.mark.slow),
        pytest.param(["--adapter.targets=mlp.gate_up", "--train.loss-chunk=64"], marks=pytest.mark.slow),
        pytest.param(["--precision=bf16", "--optimizer.name=nadamw"], marks=pytest.mark.slow),
        ["--adapter.base=nvfp4,*.mlp.down=fp8,blocks.0.*=bf16"],
        pytest.param(["--precision=bf16", "--adapter.base=mxfp8"], marks=pytest.mark.slow),
        pytest.param(
            ["--precision=nvfp4", "--adapter.base=nvfp4", "--adapter.targets=mlp.down"],
            marks=pytest.mark.slow,
        ),
        pytest.param(["--adapter.base=mxfp4", "--memory.activations=block+offload"], marks=pytest.mark.slow),
        pytest.param(["--optimizer.moments=8bit"], marks=pytest.mark.slow),
    ],
)
def test_formats_and_memory_are_proven_and_something_is_learnt(
    settings: list[str], folder: Path, tmp_path: Path
) -> None:
    """Each run proves by a probe, and planned ones in their first step too, which products run in which format."""
    run = tmp_path / "run"
    more = ["--train.steps=8", f"--model.weights={folder / 'folder'}", *settings]
    assert main(flags(folder / "corpus.txt", run, *ADAPTERS, *more)) == 0
    assert evaluated(run) < evaluated(folder / "base") - 0.01
    state = read_state(at(run, 8))
    assert {tensor.dtype for _, tensor in finite_tensors(at(run, 8))} == {torch.float32}
    low = any(one.startswith("--precision=") for one in settings)
    parameters = torch.bfloat16 if low else torch.float32
    assert {tensor.dtype for _, tensor in finite_weights(at(run, 8))} == {parameters}
    assert state.architecture.adapter is not None
    again = tmp_path / "again"
    shutil.copytree(run, again)
    assert main(["train", f"--run.dir={again}", "--resume-from=6"]) == 0
    assert losses(again) == losses(run)


@pytest.mark.slow
def test_formats_of_a_base_are_chosen_under_a_budget(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is printed is what a run takes, and a budget that cannot be kept is refused."""
    corpus = folder / "corpus.txt"
    words = ["choose-base", str(folder / "base"), f"--data={corpus}", "--sequence=64", "--device=cpu"]
    assert main([*words, "--budget=0.4", "--tokens=512"]) == 0
    rules = capsys.readouterr().out.strip().splitlines()[-1].removeprefix("--adapter.base ")
    spec = spec_of(read_state(at(folder / "base", 6)).architecture)
    layers = {name: one for name, one in spec.layers().items() if name != "head"}
    formats = {name: stored_in(rules, name) or "bf16" for name in layers}
    sizes = {name: (one.outputs, one.inputs) for name, one in layers.items()}
    whole = sum(weight_bytes(shape, "bf16") for shape in sizes.values())
    assert sum(weight_bytes(sizes[name], formats[name]) for name in layers) <= 0.4 * whole
    assert len(set(formats.values())) > 1
    base = f"--model.weights={folder / 'base'}"
    assert main(flags(corpus, tmp_path / "run", *ADAPTERS, base, f"--adapter.base={rules}")) == 0
    capsys.readouterr()
    assert main([*words, "--budget=0.2"]) == 2
    assert "can be reached" in capsys.readouterr().err
    assert main([*words, "--budget=0.4", "--formats=nf4"]) == 2
    assert "stores no weights" in capsys.readouterr().err
    assert main([*words, "--budget=0.4", "--sequence=99999"]) == 2
    assert "context" in capsys.readouterr().err


def test_the_base_is_not_changed_by_a_bit(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Looked at in the process that trains, when it is done."""
    from scrimp.training import session

    executables = []
    real = session._realised

    def realised(*arguments):  # type: ignore[no-untyped-def]
        executables.append(real(*arguments))
        return executables[-1]

    monkeypatch.setattr(session, "_realised", realised)
    more = [f"--model.weights={folder / 'folder'}", "--optimizer.weight-decay=1"]
    assert main(flags(folder / "corpus.txt", tmp_path / "run", *ADAPTERS, *more)) == 0
    (executable,) = executables
    base = build_model(architecture_of_weights(folder / "base"))
    fill_from_weights(base, folder / "base")
    frozen = executable.model.of_base()
    assert frozen.keys() == dict(base.named_parameters()).keys()
    for name, weight in base.named_parameters():
        assert torch.equal(weight, frozen[name]), name
        assert frozen[name].grad is None


def copied(folder: Path, to: Path) -> Path:
    """The base's folder and a run beside it, as if both were trained there."""
    shutil.copytree(folder / "folder", to / "folder")
    corpus = folder / "corpus.txt"
    assert main(flags(corpus, to / "run", *ADAPTERS, f"--model.weights={to / 'folder'}")) == 0
    return to / "run"


def test_without_its_base_a_run_is_refused_by_name(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = copied(folder, tmp_path)
    base, away = tmp_path / "folder", tmp_path / "away"
    whole = load_file(base / "model.safetensors")
    base.rename(away)
    commands = (
        ["train", f"--run.dir={run}", "--resume"],
        ["eval", str(run), f"--data={folder / 'corpus.txt'}"],
        ["export", str(run), str(tmp_path / "out")],
        ["verify", str(run)],
    )
    for words in commands:
        assert main(words) == 2
        shown = capsys.readouterr()
        assert "the base model that adapters were trained beside is not there" in shown.err + shown.out, words
    assert not (tmp_path / "out").exists()
    away.rename(base)
    from safetensors.torch import save_file

    save_file({name: one + 1e-3 for name, one in whole.items()}, base / "model.safetensors", {"format": "pt"})
    for words in commands:
        assert main(words) == 2
        shown = capsys.readouterr()
        assert "is not the one that adapters were trained beside" in shown.err + shown.out, words


@pytest.mark.slow
def test_a_base_that_trained_on_is_found_at_the_step_it_had(folder: Path, tmp_path: Path) -> None:
    base, run = tmp_path / "base", tmp_path / "run"
    corpus = folder / "corpus.txt"
    assert main(flags(corpus, base, "--train.steps=2", "--checkpoint.every=1", "--evaluation.every=0")) == 0
    assert (
        main(flags(corpus, run, *ADAPTERS, f"--model.weights={base / 'checkpoints' / 'step-00000001'}")) == 0
    )
    assert main(flags(corpus, tmp_path / "newest", *ADAPTERS, f"--model.weights={base}")) == 0
    before = dict(finite_weights(at(tmp_path / "newest", 4)))
    newer = base / "checkpoints" / "step-00000003"
    shutil.copytree(base / "checkpoints" / "step-00000001", newer)
    manifest = json.loads((newer / "manifest.json").read_text())
    (newer / "manifest.json").write_text(json.dumps(manifest | {"step": 3}))
    after = dict(finite_weights(at(tmp_path / "newest", 4)))
    assert all(torch.equal(before[name], after[name]) for name in before)
    shutil.rmtree(base / "checkpoints" / "step-00000002")
    with pytest.raises(CheckpointError, match="is not the one"):
        next(finite_weights(at(tmp_path / "newest", 4)))
    assert open_target(run).architecture == dataclasses.replace(
        read_state(at(run, 4)).architecture, adapter=None
    )


def test_adapters_alone_are_exported_for_peft(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["export", str(folder / "from a folder"), str(tmp_path / "out"), "--adapter"]) == 0
    config = json.loads((tmp_path / "out" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(folder / "folder")
    numbers = load_file(tmp_path / "out" / "adapter_model.safetensors")
    spec = spec_of(read_state(at(folder / "run", 4)).architecture)
    assert sum(one.numel() for one in numbers.values()) == spec.trained_parameters
    assert (tmp_path / "out" / "tokenizer.json").is_file()
    capsys.readouterr()
    assert main(["export", str(folder / "run"), str(tmp_path / "other"), "--adapter"]) == 0
    assert "export" in capsys.readouterr().out
    assert main(["export", str(folder / "base"), str(tmp_path / "third"), "--adapter"]) == 2
    assert "has no adapters" in capsys.readouterr().err


def test_a_plan_shows_what_is_trained_and_its_states(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, base = folder / "corpus.txt", folder / "folder"
    words = [f"--data.source={corpus}", f"--model.weights={base}", "--adapter.rank=4", "--device=cpu"]
    assert main(["plan", *words, "--train.sequence=64", "--train.batch-tokens=256"]) == 0
    shown = capsys.readouterr().out
    trained = spec_of(read_state(at(folder / "run", 4)).architecture).trained_parameters
    assert re.search(rf"trained +{trained:,}", shown)
    assert re.search(rf"optimizer states +{re.escape(format_bytes(8 * trained))}", shown)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp8"])
def test_attention_beside_experts_has_adapters_and_experts_none(
    precision: str, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The probe counts their products: experts have no wgrad."""
    corpus, base = folder / "corpus.txt", tmp_path / "base"
    assert main(flags(corpus, base, "--train.steps=1", "--model.preset=mixtral-8m")) == 0
    words = [*ADAPTERS, f"--model.weights={base}", f"--precision={precision}"]
    only = "--adapter.targets=attention.qkv,attention.out"
    assert main(flags(corpus, tmp_path / "run", *words, only)) == 0
    assert dict(finite_tensors(at(tmp_path / "run", 4)))["blocks.0.attention.qkv.lora_b"].abs().max() > 0
    capsys.readouterr()
    assert main(flags(corpus, tmp_path / "other", *words)) == 2
    assert "of experts" in capsys.readouterr().err


def test_layers_that_are_not_there_are_refused_before_a_run_begins(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = [f"--model.weights={folder / 'base'}", "--adapter.targets=q_proj"]
    assert main(flags(folder / "corpus.txt", tmp_path / "run", *ADAPTERS, *more)) == 2
    assert "attention.qkv" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
