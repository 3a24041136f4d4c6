"""Runs whose GEMMs are quantized: they learn, resume bit for bit, and stop where their plan is not followed."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_run import TINY, flags, losses, records, write_corpus

from scrimp.cli import main
from scrimp.cli.trained import load_executable
from scrimp.config import load_config
from scrimp.gemm import Clock, LinearPrecision
from scrimp.gemm.backends import Backend, ReferenceBackend
from scrimp.planner import Plan
from scrimp.precision import GEMMS
from scrimp.runtime import Executable, prove
from scrimp.training import session, setup
from scrimp.training.evaluation import evaluate
from scrimp.training.run_data import open_run_corpus
from scrimp.training.trained_weights import open_target
from scrimp.world import ALONE

STEPS = 12
MIXED = "fp4,*.wgrad=bf16,*.mlp.down.saved=recompute"
PRECISIONS = ("bf16", MIXED, "fp8", "nvfp4,head=fp8")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("planned"))


@pytest.fixture(scope="module", autouse=True)
def _private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("user-cache")))
        yield


class Runs(dict[str, Path]):
    """A finished run of each precision that is asked for, from the same parameters over the same data."""

    def __init__(self, corpus: Path) -> None:
        self.corpus = corpus

    def __missing__(self, name: str) -> Path:
        folder = self.corpus.parent / f"run-{len(self)}"
        more = ("--checkpoint.every=4", "--checkpoint.keep-last=3", "--train.loss-chunk=64")
        words = flags(self.corpus, folder, f"--precision={name}", f"--train.steps={STEPS}", *more)
        assert main(words) == 0
        self[name] = folder
        return folder


@pytest.fixture(scope="module")
def runs(corpus: Path) -> Runs:
    return Runs(corpus)


# ---- learning


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_loss_falls_in_every_precision(runs: dict[str, Path], precision: str) -> None:
    by_step = losses(runs[precision])
    assert sorted(by_step) == list(range(1, STEPS + 1))
    assert by_step[1] == pytest.approx(math.log(320), rel=0.03)
    assert by_step[STEPS] < by_step[1] - 0.4


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.every(3)
@pytest.mark.slow
def test_a_quantized_run_is_near_the_bf16_run_and_not_the_same(runs: dict[str, Path], precision: str) -> None:
    plain, found = losses(runs["bf16"]), losses(runs[precision])
    assert all(found[step] != plain[step] for step in range(2, STEPS + 1))
    assert all(found[step] == pytest.approx(plain[step], rel=0.05) for step in plain)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_speed_is_measured_against_both_peaks(runs: dict[str, Path], precision: str) -> None:
    for record in records(runs[precision]):
        for key in ("mfu_bf16", "sol"):
            assert math.isfinite(record[key])
            assert 0 < record[key] < 1


# ---- the plan


@pytest.mark.slow
def test_the_plan_holds_the_recipe_of_every_gemm(runs: dict[str, Path]) -> None:
    plan = Plan.read(runs[MIXED] / "plan.json")
    assert len(plan.gemms) == 2 * 4 + 1
    for layer, choice in plan.gemms.items():
        expected = ["bf16"] * 3 if layer == "head" else ["fp4", "fp4", "bf16"]
        assert [getattr(choice, gemm) for gemm in GEMMS] == expected
        assert choice.saved == ("recompute" if layer.endswith(".mlp.down") else "bf16")
    head = Plan.read(runs["nvfp4,head=fp8"] / "plan.json").gemms["head"]
    assert {head.fprop, head.dgrad, head.wgrad} == {"fp8"}
    assert "rule `head=fp8`" in head.reason


@pytest.mark.slow
def test_the_log_says_what_runs_and_that_it_is_emulated(runs: dict[str, Path]) -> None:
    start = records(runs["nvfp4,head=fp8"], "events.jsonl")[0]
    assert "nvfp4 by numba (emulated)" in start["backends"]
    assert records(runs["bf16"], "events.jsonl")[0]["backends"] == ""


@pytest.mark.slow
def test_file_and_command_line_give_the_same_run(runs: dict[str, Path], corpus: Path, tmp_path: Path) -> None:
    text = (runs[MIXED] / "config.toml").read_text(encoding="utf-8")
    assert f'precision = "{MIXED}"' in text
    file, run_dir = tmp_path / "own.toml", tmp_path / "from-file"
    file.write_text(f'precision = "{MIXED}"\n[train]\nloss_chunk = 64\nsteps = {STEPS}\n', encoding="utf-8")
    words = flags(corpus, run_dir)
    assert main([words[0], str(file), *words[1:]]) == 0
    assert losses(run_dir) == losses(runs[MIXED])


@pytest.mark.slow
def test_the_saved_configuration_of_a_run_reproduces_it(runs: dict[str, Path], tmp_path: Path) -> None:
    again = tmp_path / "again"
    precision = "nvfp4,head=fp8"
    assert main(["train", str(runs[precision] / "config.toml"), f"--run.dir={again}"]) == 0
    assert losses(again) == losses(runs[precision])


@pytest.mark.slow
def test_another_seed_draws_other_noise(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The parameters and the data are the same: the run's own seed would change those too."""
    realise, found = session.realise, []
    for seed in (0, 1):

        def with_noise(*positional: Any, noise: int = seed, **named: Any) -> Executable:
            return realise(*positional, **named | {"seed": noise})

        monkeypatch.setattr(session, "realise", with_noise)
        run_dir = tmp_path / f"seed-{seed}"
        assert main(flags(corpus, run_dir, "--precision=mxfp4", "--train.steps=3")) == 0
        found.append(losses(run_dir))
    assert found[0][1] == found[1][1]  # the forward pass draws nothing
    assert found[0][3] != found[1][3]


# ---- resuming


def interrupted(run: Path, copy: Path, at: int = 4) -> Path:
    """The run's folder as it was after a step."""
    shutil.copytree(run, copy)
    for folder in (copy / "checkpoints").iterdir():
        if int(folder.name.rpartition("-")[2]) > at:
            shutil.rmtree(folder)
    return copy


@pytest.mark.parametrize("precision", PRECISIONS[1:])
@pytest.mark.every(3)
def test_a_resumed_run_repeats_the_same_losses(runs: dict[str, Path], tmp_path: Path, precision: str) -> None:
    run_dir = interrupted(runs[precision], tmp_path / "resumed")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert losses(run_dir) == losses(runs[precision])


@pytest.mark.slow
def test_a_resumed_run_is_proven_with_the_weights_of_its_checkpoint(
    runs: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = interrupted(runs["fp8"], tmp_path / "proven")
    (newest,) = sorted((run_dir / "checkpoints").iterdir())[-1:]
    saved = {}
    for file in newest.glob("*.safetensors"):
        saved |= load_file(file)
    proven: list[bool] = []

    def prove_and_look(executable: Executable, plan: Plan) -> None:
        parameters = dict(executable.model.named_parameters())
        proven.append(all(torch.equal(p, saved[f"model.{name}"]) for name, p in parameters.items()))
        prove(executable, plan)

    monkeypatch.setattr(session, "prove", prove_and_look)
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    assert proven == [True]


def edited(run_dir: Path, layer: str, **changes: str) -> None:
    """Change recipes of a layer in plan.json."""
    path = run_dir / "plan.json"
    raw = json.loads(path.read_text(encoding="utf-8"))
    raw["gemms"][layer] |= changes
    path.write_text(json.dumps(raw), encoding="utf-8")


@pytest.mark.slow
def test_an_edited_plan_is_carried_out_on_resume(runs: dict[str, Path], tmp_path: Path) -> None:
    run_dir = interrupted(runs["fp8"], tmp_path / "edited")
    edited(run_dir, "blocks.1.mlp.down", fprop="mxfp4", saved="mxfp8")
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 0
    before, after = losses(runs["fp8"]), losses(run_dir)
    assert [step for step in before if before[step] != after[step]] == list(range(5, STEPS + 1))
    assert Plan.read(run_dir / "plan.json").gemms["blocks.1.mlp.down"].fprop == "mxfp4"
    resumed = [event for event in records(run_dir, "events.jsonl") if event["kind"] == "resume"]
    assert "mxfp4 by numba (emulated)" in resumed[-1]["backends"]


@pytest.mark.parametrize(
    ("layer", "changes", "says"),
    [
        ("blocks.0.mlp.down", {"wgrad": "fp9"}, "blocks.0.mlp.down.wgrad cannot run in fp9"),
        ("blocks.0.attention.out", {"saved": "recompute"}, "attention.out cannot be recomputed"),
        ("blocks.0.mlp.down", {"saved": "fp9"}, "blocks.0.mlp.down.saved cannot be fp9"),
    ],
)
def test_an_edit_that_nothing_can_carry_out_is_refused_by_name(
    runs: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    layer: str,
    changes: dict[str, str],
    says: str,
) -> None:
    run_dir = interrupted(runs["fp8"], tmp_path / "edited")
    edited(run_dir, layer, **changes)
    before = losses(run_dir)
    assert main(["train", f"--run.dir={run_dir}", "--resume"]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert losses(run_dir) == before


# ---- cutting the batch


def of_cut(corpus: Path, run_dir: Path, micro_batch: int) -> torch.Tensor:
    """Losses of a run whose fp4 GEMMs have 128 tokens, one tile, or two."""
    more = ("--precision=fp32,*=fp4", f"--train.micro-batch={micro_batch}", "--train.steps=6")
    assert main(flags(corpus, run_dir, *more)) == 0
    return torch.tensor(list(losses(run_dir).values()), dtype=torch.float64)


@pytest.mark.slow
def test_cutting_the_batch_at_tiles_draws_the_same_noise(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What remains is the order of sums, and the few codes that it moves; lost addresses cost ten times as much."""
    whole, cut = (of_cut(corpus, tmp_path / f"cut-{size}", size) for size in (4, 2))
    begin = Clock.begin
    monkeypatch.setattr(Clock, "begin", lambda clock, step, first_row=0: begin(clock, step, 7 * first_row))
    lost = of_cut(corpus, tmp_path / "lost", 2)
    assert (cut - whole).abs().max() < 0.1 * (lost - whole).abs().max()
    assert (cut - whole).abs().max() < 1e-3


# ---- the proof, in a run


@pytest.mark.slow
def test_a_back_end_that_lies_ends_the_run_before_its_first_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Unquantized(ReferenceBackend):
        def prepare(self, x, use):  # type: ignore[no-untyped-def]
            return super().prepare(x, type(use)(None, use.axis, use.noise))

    def choose(recipe: str, gemm: str, *site: object) -> Backend:
        return Unquantized() if gemm == "dgrad" and recipe == "fp8" else ReferenceBackend()

    monkeypatch.setattr(setup, "choose_backends", lambda *a, **k: choose)
    run_dir = tmp_path / "lying"
    assert main(flags(corpus, run_dir, "--precision=fp8", "--train.steps=3")) == 1
    assert "dgrad did not run in fp8" in " ".join(capsys.readouterr().err.split())
    assert not (run_dir / "metrics.jsonl").exists() or not records(run_dir)


@pytest.mark.slow
def test_a_plan_that_is_left_after_the_proof_ends_the_run_at_its_first_step(
    corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def prove_and_leave(executable: Executable, plan: Plan) -> None:
        prove(executable, plan)
        assert executable.planned is not None
        executable.planned.replan({"blocks.1.mlp.down": LinearPrecision("fp8", "fp8", "mxfp8", "fp8")})

    monkeypatch.setattr(session, "prove", prove_and_leave)
    run_dir = tmp_path / "left"
    assert main(flags(corpus, run_dir, "--precision=fp8", "--train.steps=3")) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "of the first step that ran are not those of the plan" in said
    assert "blocks.1.mlp.down.wgrad in mxfp8" in said
    assert not records(run_dir)


# ---- refusals


@pytest.mark.parametrize(
    ("precision", "says"),
    [
        ("fp9", "fp9"),
        ("fp8,*.mlp.*=nvpf4", "did you mean nvfp4"),
        ("fp8,blocks.7.*=bf16", "blocks.7.*"),
        ("fp8,*.mlp.up=bf16", "*.mlp.up"),
        ("fp8,*.attention.out.saved=recompute", "attention.out"),
        ("fp8,,bf16", "empty rule"),
    ],
)
def test_a_precision_that_means_nothing_is_refused_before_anything_is_written(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], precision: str, says: str
) -> None:
    run_dir, cache = tmp_path / "run", tmp_path / "cache"
    more = (f"--precision={precision}", f"--data.cache={cache}", "--train.steps=3")
    words = [word for word in flags(corpus, run_dir, *more) if word != f"--data.cache={corpus.parent}/cache"]
    assert main(words) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert not run_dir.exists()
    assert not cache.exists()


# ---- around a run


def test_a_dry_run_shows_the_quantized_gemms_and_writes_nothing(
    corpus: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = tmp_path / "dry"
    words = ["plan", *TINY, f"--data.source={corpus}", f"--run.dir={run_dir}", "--precision=nvfp4,head=fp8"]
    assert main(words) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "nvfp4 by numba (emulated)" in shown
    assert "speed of light" in shown
    assert not run_dir.exists()


def test_an_exported_model_has_the_parameters_as_they_were_trained(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "exported"
    assert main(["export", str(runs["fp8"]), str(out)]) == 0
    exported = load_file(out / "model.safetensors")
    newest = runs["fp8"] / "checkpoints" / f"step-{STEPS:08d}"
    trained: dict[str, torch.Tensor] = {}
    for path in newest.glob("*.safetensors"):
        trained |= load_file(path)
    for theirs, mine in {
        "model.embed_tokens.weight": "model.embedding.weight",
        "model.layers.1.mlp.down_proj.weight": "model.blocks.1.mlp.down.weight",
        "model.layers.0.self_attn.o_proj.weight": "model.blocks.0.attention.out.weight",
    }.items():
        assert torch.equal(exported[theirs].float(), trained[mine].float())
        # Nothing quantized: an fp8 tensor has at most 255 values.
        assert len(exported[theirs].unique()) > 300


# ---- evaluations


@pytest.mark.slow
def test_evaluations_in_the_working_format_are_those_of_the_weights_alone(
    corpus: Path, tmp_path: Path
) -> None:
    """As the run's checkpoint is evaluated, whose model has no planned layer; in the plan's formats it is another."""
    found = {}
    for formats in ("plan", "working"):
        words = flags(corpus, tmp_path / formats, f"--evaluation.precision={formats}")
        more = (
            "--precision=fp4,head=fp8,*.mlp.down.saved=recompute",
            "--train.steps=2",
            "--evaluation.every=1",
        )
        assert main([*words, *more]) == 0
        events = records(tmp_path / formats, "events.jsonl")
        found[formats] = [event["loss"] for event in events if event["kind"] == "evaluation"]
    assert losses(tmp_path / "plan") == losses(tmp_path / "working")  # training is the same
    assert all(a != b for a, b in zip(*found.values(), strict=True))
    assert found["working"][-1] == loss_of_weights(tmp_path / "working")


def test_an_evaluation_in_the_working_format_reads_the_weights_alone(corpus: Path, tmp_path: Path) -> None:
    """The plan's formats would give another loss, as above."""
    more = ("--evaluation.precision=working", "--precision=fp8", "--backend=reference", "--train.steps=1")
    assert main(flags(corpus, tmp_path / "run", *more)) == 0
    (found,) = [one for one in records(tmp_path / "run", "events.jsonl") if one["kind"] == "evaluation"]
    assert found["loss"] == loss_of_weights(tmp_path / "run")


def loss_of_weights(run: Path) -> float:
    """The held-out loss of a run's last checkpoint, whose model has no planned layer."""
    config = load_config(run / "config.toml")
    return evaluate(
        load_executable(open_target(run), "cpu"),
        open_run_corpus(config, ALONE, progress=False).held_out,
        sequence=config.train.sequence,
        micro_batch=config.train.micro_batch,
        max_tokens=config.evaluation.tokens,
        mask_documents=config.data.mask_documents,
    ).loss
