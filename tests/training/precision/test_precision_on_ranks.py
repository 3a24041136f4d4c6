"""Formats that are planned while several ranks train: what one process finds, and plans."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from distributed import spawn
from tiny_run import flags, losses, records, scrimp, write_corpus

from scrimp.cli import main
from scrimp.planner.precision import PrecisionPlan

pytestmark = pytest.mark.slow

STEPS, HALF = 12, 7
SNIP = [
    "--precision=snip",
    f"--train.steps={STEPS}",
    "--snip.first=2",
    "--snip.every=4",
    "--snip.delay=1",
    "--snip.probe-every=5",
    "--train.micro-batch=2",
    "--checkpoint.every=7",
    "--checkpoint.keep-last=4",
    "--evaluation.every=0",
    "--snip.formats=fp8,nvfp4",
    "--snip.start=bf16",
]
LAYOUTS = {
    "fsdp": [],
    "copies": ["--layout.dp=2"],
    "zero 1": ["--layout.zero=1"],
    "rows": ["--layout.cp=2"],
}


def command(rank: int, words: Sequence[str]) -> int:
    return main(list(words))


def on_two(folder: Path, words: Sequence[str]) -> None:
    folder.mkdir()
    assert spawn(2, command, folder, words) == [0, 0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision-on-ranks")
    corpus = write_corpus(folder)
    assert scrimp(*flags(corpus, folder / "alone", *SNIP)).returncode == 0
    for name, more in LAYOUTS.items():
        on_two(folder / f"{name} ranks", flags(corpus, folder / name, *SNIP, *more))
    return folder


@pytest.fixture(scope="module")
def stages(runs: Path) -> Path:
    """A run on two stages of a pipeline."""
    words = flags(runs / "corpus.txt", runs / "stages", *SNIP, "--layout.pp=2")
    on_two(runs / "stages ranks", words)
    return runs / "stages"


def test_stages_measure_what_one_process_does_and_each_keeps_its_budget(runs: Path, stages: Path) -> None:
    found, wanted = analysis(stages, 4), analysis(runs / "alone", 4)
    assert found.layers.keys() == wanted.layers.keys()
    for layer, row in wanted.layers.items():
        for gemm, cell in row.gemms.items():
            other = found.layers[layer].gemms[gemm]
            assert other.loss == pytest.approx(cell.loss, rel=0.05), (layer, gemm)
            assert other.update == pytest.approx(cell.update, rel=0.05), (layer, gemm)
    blocks = [{name: row for name, row in found.layers.items() if f"blocks.{i}." in name} for i in (0, 1)]
    for layers in blocks:
        total = sum(row.flops_share for row in layers.values())
        low = sum(
            row.flops_share / 3
            for row in layers.values()
            for cell in row.gemms.values()
            if cell.choice == "nvfp4"
        )
        assert low >= 0.75 * total - 1e-9


def test_a_pipeline_goes_on_bit_for_bit(stages: Path, tmp_path: Path) -> None:
    shutil.copytree(stages, tmp_path / "again")
    on_two(tmp_path / "ranks", ["train", "--resume-from=7", "--run.dir", str(tmp_path / "again")])
    assert losses(tmp_path / "again") == losses(stages)


def analysis(run: Path, step: int) -> PrecisionPlan:
    return PrecisionPlan.read(run / "plans" / f"step-{step:08d}.precision.json")


@pytest.mark.parametrize("name", LAYOUTS)
def test_ranks_find_and_plan_what_one_process_does(runs: Path, name: str) -> None:
    found, wanted = analysis(runs / name, 4), analysis(runs / "alone", 4)
    assert found.layers.keys() == wanted.layers.keys()
    for layer, row in wanted.layers.items():
        for gemm, cell in row.gemms.items():
            other = found.layers[layer].gemms[gemm]
            # Of half rows bf16 rounds other sums, which AdamW magnifies where gradients are small.
            for kind, rel in (("loss", 0.05), ("update", 0.15 if name == "rows" else 0.05)):
                assert getattr(other, kind) == pytest.approx(getattr(cell, kind), rel=rel), (
                    layer,
                    gemm,
                    kind,
                )
    assert found.predicted["weight_divergence"] == pytest.approx(
        wanted.predicted["weight_divergence"], rel=0.01
    )
    assert found.predicted["loss_divergence"] == pytest.approx(wanted.predicted["loss_divergence"], rel=0.01)


@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_are_those_of_one_process(runs: Path, name: str) -> None:
    wanted = losses(runs / "alone")
    assert losses(runs / name) == pytest.approx(wanted, rel=1e-3)
    assert {k: v for k, v in losses(runs / name).items() if k <= 3} == pytest.approx(
        {k: v for k, v in wanted.items() if k <= 3}, rel=1e-4 if name == "rows" else 1e-5
    )


def test_a_probe_finds_what_one_process_finds(runs: Path) -> None:
    probes = {
        name: [one for one in records(runs / name, "events.jsonl") if one["kind"] == "probe"]
        for name in ("alone", *LAYOUTS)
    }
    assert probes["alone"]
    for name in LAYOUTS:
        for found, wanted in zip(probes[name], probes["alone"], strict=True):
            for key, rel in (("loss", 1e-3), ("gradient_cosine", 1e-3), ("gradient_to_noise", 0.3)):
                assert found[key] == pytest.approx(wanted[key], rel=rel), (name, key)
            assert found["update_change"] == pytest.approx(wanted["update_change"], rel=0.3), name


def test_a_run_goes_on_bit_for_bit_and_in_one_process(runs: Path, tmp_path: Path) -> None:
    for name in ("again", "alone"):
        shutil.copytree(runs / "fsdp", tmp_path / name)
    words = ["train", "--resume-from=7", "--run.dir"]
    on_two(tmp_path / "ranks", [*words, str(tmp_path / "again")])
    assert losses(tmp_path / "again") == losses(runs / "fsdp")
    plans = sorted(path.name for path in (runs / "fsdp/plans").iterdir())
    assert sorted(path.name for path in (tmp_path / "again/plans").iterdir()) == plans
    assert main([*words, str(tmp_path / "alone")]) == 0
    assert losses(tmp_path / "alone") == pytest.approx(losses(runs / "fsdp"), rel=1e-3)


def test_one_rank_writes_what_is_planned(runs: Path) -> None:
    kinds = [one["kind"] for one in records(runs / "fsdp", "events.jsonl")]
    assert kinds.count("replan") == [one["kind"] for one in records(runs / "alone", "events.jsonl")].count(
        "replan"
    )
    for path in (runs / "fsdp/plans").glob("*.json"):
        json.loads(path.read_text())
