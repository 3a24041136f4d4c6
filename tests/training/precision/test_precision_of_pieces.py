"""Formats that are planned while ranks share the layers of a model: what one process finds, plans and goes on from."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from distributed import spawn
from tiny_run import flags, losses, records, scrimp, write_corpus

from scrimp.cli import main
from scrimp.planner.precision import PrecisionPlan

pytestmark = pytest.mark.slow

SNIP = [
    "--precision=snip",
    "--model.num-kv-heads=2",
    "--train.steps=12",
    "--snip.first=2",
    "--snip.every=4",
    "--snip.delay=1",
    "--snip.probe-every=5",
    "--train.micro-batch=2",
    "--checkpoint.every=7",
    "--checkpoint.keep-last=4",
    "--evaluation.every=0",
    "--snip.formats=fp8_row,nvfp4",
    "--snip.start=bf16",
]


def command(rank: int, words: Sequence[str]) -> int:
    return main(list(words))


def on_two(folder: Path, words: Sequence[str]) -> None:
    folder.mkdir()
    assert spawn(2, command, folder, words) == [0, 0]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("precision-of-pieces")
    corpus = write_corpus(folder)
    assert scrimp(*flags(corpus, folder / "alone", *SNIP)).returncode == 0
    on_two(folder / "ranks", flags(corpus, folder / "pieces", *SNIP, "--layout.tp=2"))
    return folder


def analysis(run: Path, step: int) -> PrecisionPlan:
    return PrecisionPlan.read(run / "plans" / f"step-{step:08d}.precision.json")


def test_pieces_are_measured_and_planned_as_whole_layers(runs: Path) -> None:
    found, wanted = analysis(runs / "pieces", 4), analysis(runs / "alone", 4)
    assert found.layers.keys() == wanted.layers.keys()
    for layer, row in wanted.layers.items():
        other = found.layers[layer]
        assert other.flops_share == row.flops_share
        for gemm, cell in row.gemms.items():
            # Partial sums are rounded to bf16, which AdamW magnifies where gradients are small.
            assert other.gemms[gemm].loss == pytest.approx(cell.loss, rel=0.05), (layer, gemm)
            assert other.gemms[gemm].update == pytest.approx(cell.update, rel=0.15), (layer, gemm)
    for key in ("loss_divergence", "weight_divergence"):
        assert found.predicted[key] == pytest.approx(wanted.predicted[key], rel=0.01)


def test_plans_come_and_go_as_in_one_process(runs: Path) -> None:
    kinds = {
        name: [one["kind"] for one in records(runs / name, "events.jsonl")] for name in ("alone", "pieces")
    }
    assert kinds["pieces"].count("replan") == kinds["alone"].count("replan") > 1
    assert kinds["pieces"].count("probe") == kinds["alone"].count("probe") > 0
    assert losses(runs / "pieces") == pytest.approx(losses(runs / "alone"), rel=1e-3)


def test_a_run_goes_on_bit_for_bit_and_in_one_process(runs: Path, tmp_path: Path) -> None:
    for name in ("again", "alone"):
        shutil.copytree(runs / "pieces", tmp_path / name)
    words = ["train", "--resume-from=7", "--run.dir"]
    on_two(tmp_path / "ranks", [*words, str(tmp_path / "again")])
    assert losses(tmp_path / "again") == losses(runs / "pieces")
    for path in sorted((runs / "pieces/plans").glob("*[0-9].json")):
        assert (tmp_path / "again/plans" / path.name).read_text() == path.read_text()
    assert main([*words, str(tmp_path / "alone")]) == 0
    assert losses(tmp_path / "alone") == pytest.approx(losses(runs / "pieces"), rel=1e-3)
