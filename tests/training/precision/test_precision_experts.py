"""Formats of routed experts, planned while a run trains: resumed bit for bit, and the same plan on two ranks."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from distributed import spawn
from tiny_run import flags, losses, scrimp, write_corpus

from scrimp.cli import main
from scrimp.planner.precision import PrecisionPlan

pytestmark = pytest.mark.slow

SNIP = [
    "--model.preset=mixtral-8m",
    "--precision=snip",
    "--train.steps=6",
    "--snip.first=2",
    "--snip.every=0",
    "--snip.delay=1",
    "--snip.start=bf16",
    "--snip.formats=fp8,nvfp4",
    "--train.micro-batch=2",
    "--checkpoint.every=3",
    "--evaluation.every=0",
]


def command(rank: int, words: Sequence[str]) -> int:
    return main(list(words))


def analysis(run: Path) -> PrecisionPlan:
    return PrecisionPlan.read(run / "plans" / "step-00000004.precision.json")


def test_experts_are_planned_as_one_layer_on_any_number_of_ranks(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path)
    alone, ranks, again = (tmp_path / name for name in ("alone", "ranks", "again"))
    assert scrimp(*flags(corpus, alone, *SNIP)).returncode == 0
    found = analysis(alone)
    assert not [layer for layer in found.layers if layer.endswith("router")]
    shares = {layer.rpartition(".")[2]: row.flops_share for layer, row in found.layers.items()}
    assert shares["gate_up"] == pytest.approx(2 * shares["down"])
    assert sum(row.flops_share for row in found.layers.values()) == pytest.approx(1.0)

    shutil.copytree(alone, again)
    assert main(["train", "--resume-from=3", f"--run.dir={again}"]) == 0
    assert losses(again) == losses(alone)

    (tmp_path / "meeting").mkdir()
    words = flags(corpus, ranks, *SNIP)
    assert spawn(2, command, tmp_path / "meeting", words) == [0, 0]
    for key in ("loss_divergence", "weight_divergence"):
        assert analysis(ranks).predicted[key] == pytest.approx(found.predicted[key], rel=0.01)
    assert losses(ranks) == pytest.approx(losses(alone), rel=1e-3)
