"""Sources that count by how well they are learnt: the formula, and runs whose course does not depend on their cut."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from runs_on_ranks import check_same_course, on_ranks
from test_mixed_runs import NAMES, SHARES, STEPS, mix_flags, write_texts
from tiny_run import losses, records

from scrimp.cli import main
from scrimp.config import Config, replace_values
from scrimp.data import Batch
from scrimp.data.interleave import Interleave
from scrimp.errors import CheckpointError
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training.checkpoint import CheckpointStore
from scrimp.training.run_state import read_state
from scrimp.training.source_weighting import SourceWeighting, weighting_of

SCALE = 0.5
REFERENCES = {"inspect.txt": 2.0, "argparse.txt": 1.5, "logging.txt": 2.5}
WEIGHED = [
    f"--objective.reference-losses={','.join(f'{name}={loss}' for name, loss in REFERENCES.items())}",
    f"--objective.excess-scale={SCALE}",
]


def metrics(**means: float | None) -> dict[str, float]:
    """As the loss gives them, of sources a, b, c."""
    found = {"accuracy": 0.5}
    for number, name in enumerate("abc"):
        mean = means.get(name)
        found |= {
            f"source-loss/{number}": 0.25 * (mean or 0.0),
            f"source-targets/{number}": 0.25 * (mean is not None),
        }
    return found


def test_weights_are_those_of_the_formula() -> None:
    weighting = SourceWeighting("abc", {"a": 1.0, "b": 2.0}, SCALE)
    assert weighting.weights() == [1.0, 1.0, 1.0]
    recorded = weighting.seen(metrics(a=3.0, b=3.5), learns=True)
    assert recorded == {"accuracy": 0.5, "weight/a": 1.0, "loss/a": 3.0, "weight/b": 1.0, "loss/b": 3.5}
    # Excess: a 2.0, b 1.5.
    assert weighting.weights() == [pytest.approx(2 - math.exp(-(0.5**2) / (2 * SCALE**2))), 1.0, 1.0]
    weighting.seen(metrics(a=2.0), learns=True)  # b has no sample in this step
    assert weighting.losses == {"a": pytest.approx(0.9 * 3.0 + 0.1 * 2.0), "b": 3.5}
    weighting.seen(metrics(a=math.nan, b=math.nan), learns=False)
    assert weighting.losses == {"a": pytest.approx(2.9), "b": 3.5}
    for loss in [9.0] * 200:
        weighting.seen(metrics(a=1.0, b=loss), learns=True)
    assert weighting.weights() == [1.0, pytest.approx(2.0), 1.0]


def test_batches_get_weights_by_source() -> None:
    weighting = SourceWeighting("ab", {"a": 0.0, "b": 0.0}, 1.0)
    weighting.restore({"a": 3.0, "b": 4.0})
    tokens = torch.zeros(2, 4, dtype=torch.int64)
    (found,) = weighting.weighed([Batch.of(tokens, tokens)])
    assert found.weights_G is not None
    assert found.weights_G.tolist() == pytest.approx([1.0, 2 - math.exp(-0.5)])


@pytest.mark.parametrize("losses", [{"x": 1.0}, {"a": math.nan}])
def test_averages_of_other_sources_are_refused(losses: dict[str, float]) -> None:
    with pytest.raises(CheckpointError, match="not those of the run's sources"):
        SourceWeighting("ab", {"a": 1.0, "b": 1.0}, 1.0).restore(losses)


def test_without_references_nothing_is_weighed() -> None:
    assert weighting_of(Config()) is None
    assert weighting_of(replace_values(Config(), {"data.mix": "a=1,b=1"})) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With a plain run, and one whose sources are weighed."""
    folder = tmp_path_factory.mktemp("weighed")
    mix = write_texts(folder)
    assert main(mix_flags(folder, mix, folder / "plain")) == 0
    assert main(mix_flags(folder, mix, folder / "weighed", *WEIGHED)) == 0
    return folder


def test_a_run_follows_the_formula_and_shows_the_loss_of_the_text(folder: Path) -> None:
    assert losses(folder / "weighed")[1] == losses(folder / "plain")[1]
    assert losses(folder / "weighed")[3] != losses(folder / "plain")[3]
    averages: dict[str, float] = {}
    order, per_step = Interleave(SHARES), 4
    for number, record in enumerate(records(folder / "weighed")):
        excess = {name: averages[name] - REFERENCES[name] for name in averages}
        for name in NAMES:
            behind = excess[name] - min(excess.values()) if name in excess else 0.0
            assert record[f"weight/{name}"] == pytest.approx(2 - math.exp(-((behind / SCALE) ** 2) / 2))
        sources = [order[number * per_step + sample][0] for sample in range(per_step)]
        found = {name: record.get(f"loss/{name}") for name in NAMES}
        counts = {name: sources.count(index) for index, name in enumerate(NAMES)}
        assert {name: one is not None for name, one in found.items()} == {n: c > 0 for n, c in counts.items()}
        # All windows have 64 targets but for the ends of documents, of which these texts have one each.
        mean = sum(counts[name] * (one or 0.0) for name, one in found.items()) / per_step
        assert record["loss"] == pytest.approx(mean, rel=1e-4)
        for name, one in found.items():
            if one is not None:
                averages[name] = 0.9 * averages.get(name, one) + 0.1 * one
    state = read_state(CheckpointStore(folder / "weighed", keep_last=1, keep_every=0).at(STEPS))
    assert state.source_losses == pytest.approx(averages)


def test_a_run_goes_on_bit_for_bit(folder: Path) -> None:
    shutil.copytree(folder / "weighed", folder / "again")
    assert main(["train", f"--run.dir={folder / 'again'}", "--resume-from=6"]) == 0
    keys = ("loss", "grad_norm", *(f"weight/{name}" for name in NAMES))
    again, whole = (
        [[one[key] for key in keys] for one in records(folder / run)] for run in ("again", "weighed")
    )
    assert again == whole


def test_micro_batches_change_nothing(folder: Path) -> None:
    mix = write_texts(folder)
    assert main(mix_flags(folder, mix, folder / "cut", *WEIGHED, "--train.micro-batch=1")) == 0
    check_same_course(folder / "cut", folder / "weighed")


@pytest.mark.slow
def test_sources_are_weighed_beside_a_teacher(folder: Path) -> None:
    both = ["--objective.name=distill", "--objective.teachers=ema", *WEIGHED]
    assert main(mix_flags(folder, write_texts(folder), folder / "both", *both)) == 0
    assert losses(folder / "both")[1] == losses(folder / "plain")[1]
    assert losses(folder / "both") != losses(folder / "weighed")
    assert all("weight/logging.txt" in record for record in records(folder / "both"))


def test_a_state_of_other_sources_is_refused_before_a_step(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(folder / "weighed", folder / "spoilt")
    checkpoint = CheckpointStore(folder / "spoilt", keep_last=1, keep_every=0).at(6)
    text = (checkpoint.folder / "state.json").read_text()
    assert json.loads(text)["source_losses"]
    spoilt = text.replace('"inspect.txt"', '"other.txt"')
    (checkpoint.folder / "state.json").write_text(spoilt)
    (checkpoint.folder / manifests.MANIFEST).unlink()
    manifests.seal(checkpoint.folder, 6, not_finite=(), skipped_steps=0)
    capsys.readouterr()
    assert main(["train", f"--run.dir={folder / 'spoilt'}", "--resume-from=6"]) != 0
    assert "not those of the run's sources" in capsys.readouterr().err


@pytest.mark.slow
def test_ranks_weigh_alike(folder: Path, tmp_path: Path) -> None:
    words = mix_flags(folder, write_texts(folder), tmp_path / "two", *WEIGHED, "--train.micro-batch=1")
    on_ranks(2, tmp_path / "ranks", [*words, "--layout.fsdp=2"])
    check_same_course(tmp_path / "two", folder / "weighed")
    for one, other in zip(records(tmp_path / "two"), records(folder / "weighed"), strict=True):
        for name in NAMES:
            assert one[f"weight/{name}"] == pytest.approx(other[f"weight/{name}"], rel=1e-4)
