"""Formats that are planned while ranks share layers, experts or stages: what one process finds, plans and goes on from.

Statistics in float32 are compared number by number in `test_statistics_on_ranks`; here whole runs are, in bf16.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
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
    "--snip.first=2",
    "--snip.every=4",
    "--snip.delay=1",
    "--snip.probe-every=5",
    "--train.micro-batch=2",
    "--train.steps=12",
    "--checkpoint.every=7",
    "--checkpoint.keep-last=4",
    "--evaluation.every=0",
    "--snip.formats=fp8_row,nvfp4",
    "--snip.start=bf16",
]
MODELS = {
    "dense": [],
    "deep": ["--model.num-layers=4"],
    "experts": ["--model.preset=mixtral-8m"],
}


@dataclass(frozen=True)
class Laid:
    """A run on ranks."""

    layout: dict[str, int | str]
    model: str = "dense"
    ranks: int = 2
    is_whole: bool = True
    """Whether its plan keeps the budget of the whole model, as one process does, not one for each stage."""
    update: float = 0.15
    """How far an update's harm may be from one process's: partial sums are rounded to bf16, which AdamW magnifies where
    gradients are small."""
    predicted: float = 0.01

    @property
    def words(self) -> list[str]:
        return [f"--layout.{key}={value}" for key, value in self.layout.items()]


LAID = {
    "pieces": Laid({"tp": 2}),
    "shards of pieces": Laid({"tp": 2, "fsdp": 2}, ranks=4),
    "there and back": Laid({"pp": 2, "schedule": "zbv"}, "deep", is_whole=False),
    "rows on stages": Laid({"pp": 2, "cp": 2}, ranks=4, is_whole=False),
    "experts": Laid({"ep": 2}, "experts", update=0.5, predicted=0.1),
    "pieces of experts": Laid({"etp": 2}, "experts", update=0.5, predicted=0.1),
    "experts beside pieces": Laid({"tp": 2}, "experts", update=0.5, predicted=0.1),
    "experts on stages": Laid({"pp": 2}, "experts", is_whole=False, update=0.5),
    "experts of rows": Laid({"cp": 2}, "experts", update=0.5, predicted=0.1),
}


def command(rank: int, words: Sequence[str]) -> int:
    return main(list(words))


def on_ranks(ranks: int, folder: Path, words: Sequence[str]) -> None:
    folder.mkdir()
    assert spawn(ranks, command, folder, words) == [0] * ranks


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("precision-of-layouts"))


@pytest.fixture(scope="module")
def alone(corpus: Path) -> dict[str, Path]:
    """A run of one process, by model."""
    for name, words in MODELS.items():
        assert scrimp(*flags(corpus, corpus.parent / name, *SNIP, *words)).returncode == 0
    return {name: corpus.parent / name for name in MODELS}


def analysis(run: Path, step: int) -> PrecisionPlan:
    return PrecisionPlan.read(run / "plans" / f"step-{step:08d}.precision.json")


@pytest.mark.parametrize("name", LAID)
def test_a_run_plans_as_one_process_and_goes_on_bit_for_bit(
    corpus: Path, alone: dict[str, Path], tmp_path: Path, name: str
) -> None:
    laid, run = LAID[name], tmp_path / "run"
    on_ranks(laid.ranks, tmp_path / "meet", flags(corpus, run, *SNIP, *MODELS[laid.model], *laid.words))
    one = alone[laid.model]
    compare(analysis(run, 4), analysis(one, 4), laid)
    kinds = {path: [event["kind"] for event in records(path, "events.jsonl")] for path in (run, one)}
    for kind in ("replan", "probe"):
        assert kinds[run].count(kind) == kinds[one].count(kind) > 0
    assert kinds[run].count("replan") > 1
    assert losses(run) == pytest.approx(losses(one), rel=1e-3 if laid.is_whole else 1e-2)

    shutil.copytree(run, tmp_path / "again")
    words = ["train", "--resume-from=7", "--run.dir"]
    on_ranks(laid.ranks, tmp_path / "again-meet", [*words, str(tmp_path / "again")])
    assert losses(tmp_path / "again") == losses(run)
    for path in sorted((run / "plans").glob("*[0-9].json")):
        assert (tmp_path / "again/plans" / path.name).read_text() == path.read_text()
    if name == "pieces":
        assert main([*words, str(run)]) == 0
        assert losses(run) == pytest.approx(losses(tmp_path / "again"), rel=1e-3)


def compare(found: PrecisionPlan, wanted: PrecisionPlan, laid: Laid) -> None:
    assert found.layers.keys() == wanted.layers.keys()
    for layer, row in wanted.layers.items():
        other = found.layers[layer]
        assert other.flops_share == pytest.approx(row.flops_share)
        for gemm, cell in row.gemms.items():
            assert other.gemms[gemm].loss == pytest.approx(cell.loss, rel=max(0.05, laid.predicted * 5)), (
                layer,
                gemm,
            )
            assert other.gemms[gemm].update == pytest.approx(cell.update, rel=laid.update), (layer, gemm)
    if laid.is_whole:
        for key in ("loss_divergence", "weight_divergence"):
            assert found.predicted[key] == pytest.approx(wanted.predicted[key], rel=laid.predicted)
