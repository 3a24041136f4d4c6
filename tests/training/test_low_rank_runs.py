"""Whole runs whose linear layers are products of two factors, with and without refactorization."""

from __future__ import annotations

from pathlib import Path

import pytest
from runs_on_ranks import check_same_course, check_same_tensors, goes_on, on_ranks
from tiny_run import flags, losses, records, write_corpus

from scrimp.cli import main

FACTORS = ("--model.rank=6", "--optimizer.refactor-every=3", "--optimizer.lr=0.01")
CHECKPOINTS = ("--checkpoint.every=2", "--checkpoint.keep-last=8")
SPARSE = (*FACTORS, "--model.sparse-share=0.1")
SNIP = ("--snip.first=1", "--snip.every=3", "--snip.delay=1", "--snip.formats=fp8,nvfp4")


@pytest.mark.parametrize(
    ("factors", "optimizer", "precision"),
    [
        (FACTORS, "adamw", "fp32"),
        pytest.param(SPARSE, "adamw", "fp32", marks=pytest.mark.slow),
        pytest.param(SPARSE, "muon", "bf16", marks=pytest.mark.slow),
        pytest.param(FACTORS, "muon", "fp8,*.mlp.*.B=bf16", marks=pytest.mark.slow),
        pytest.param(FACTORS, "adamw", "snip", marks=pytest.mark.slow),
    ],
)
def test_the_loss_falls_and_a_resumed_run_repeats_it(
    factors: tuple[str, ...], optimizer: str, precision: str, tmp_path: Path
) -> None:
    corpus, run = write_corpus(tmp_path), tmp_path / "run"
    words = [*factors, *CHECKPOINTS, f"--optimizer.name={optimizer}", f"--precision={precision}"]
    words += ["--train.steps=10", *(SNIP if precision == "snip" else ())]
    assert main(flags(corpus, run, *words)) == 0
    whole = losses(run)
    assert whole[10] < 0.95 * whole[1]
    events = records(run, "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "refactorization"] == [3, 6, 9]
    if precision == "snip":
        assert [event["step"] for event in events if event["kind"] == "replan"]
    for step in (2, 6):  # before a refactorization, and right after one
        assert main(["train", f"--run.dir={run}", "--resume", f"--resume-from={step}"]) == 0
        assert losses(run) == whole
    assert main(["verify", str(run)]) == 0


@pytest.mark.slow
@pytest.mark.parametrize(("factors", "precision"), [(FACTORS, "fp32"), (FACTORS, "bf16"), (SPARSE, "bf16")])
def test_where_states_live_changes_no_number(
    factors: tuple[str, ...], precision: str, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path)
    words = [*factors, "--train.steps=8", f"--precision={precision}"]
    assert main(flags(corpus, tmp_path / "device", *words)) == 0
    for name, more in {
        "visiting": ["--memory.optimizer=host", "--memory.weights=1"],
        "on the CPU": ["--memory.optimizer=host", "--memory.gradients=host", "--memory.update=cpu"],
    }.items():
        assert main(flags(corpus, tmp_path / name, *words, *more)) == 0
        assert losses(tmp_path / name) == losses(tmp_path / "device"), name


@pytest.mark.slow
@pytest.mark.parametrize("factors", [FACTORS, SPARSE], ids=["factors", "sparse"])
def test_runs_go_from_ranks_to_one_process_and_back(factors: tuple[str, ...], tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    words = [*factors, "--train.steps=6", "--checkpoint.every=3", "--checkpoint.keep-last=4"]
    words += ["--train.micro-batch=1", "--evaluation.every=0"]
    alone, shards = tmp_path / "alone", tmp_path / "shards"
    assert main(flags(corpus, alone, *words)) == 0
    on_ranks(
        2,
        tmp_path / "two",
        flags(corpus, shards, *words),
        flags(corpus, tmp_path / "copies", *words, "--layout.dp=2", "--layout.fsdp=1"),
        flags(corpus, tmp_path / "stages", *words, "--layout.pp=2"),
        goes_on(alone, tmp_path / "from one", 3),
    )
    assert main(goes_on(shards, tmp_path / "to one", 3)) == 0
    for name in ("shards", "copies", "stages", "from one", "to one"):
        check_same_course(tmp_path / name, alone)
        check_same_tensors(tmp_path / name, alone, 6)


@pytest.mark.slow
@pytest.mark.parametrize("share", [(), ("--model.sparse-share=0.1",)], ids=["factors", "sparse"])
def test_an_export_is_dense_and_weights_of_another_rank_are_refused(
    share: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus, run, out = write_corpus(tmp_path), tmp_path / "run", tmp_path / "out"
    assert main(flags(corpus, run, "--model.rank=6", *share, "--train.steps=2")) == 0
    assert main(["export", str(run), str(out)]) == 0
    assert main(["verify", str(out)]) == 0
    capsys.readouterr()
    found = []
    for folder in (run, out):
        assert main(["eval", str(folder), f"--data={corpus}", "--sequence=64"]) == 0
        found.append([line for line in capsys.readouterr().out.splitlines() if "loss" in line])
    assert found[0] == found[1]
    assert found[0]
    for weights, rank, theirs in ((out, 6, "none"), (run, 5, "6")):
        assert (
            main(flags(corpus, tmp_path / "next", f"--model.weights={weights}", f"--model.rank={rank}")) == 2
        )
        said = " ".join(capsys.readouterr().err.split())
        assert "model.rank differs from that of the weights" in said
        assert f"expected {theirs}, as in" in said
    more = [f"--model.weights={run}", "--optimizer.refactor-every=1", "--train.steps=2"]
    assert main(flags(corpus, tmp_path / "on", *more)) == 0
    kinds = [event["kind"] for event in records(tmp_path / "on", "events.jsonl")]
    assert kinds.count("refactorization") == 2
