"""Ensembles and merges of real runs against what is computed by hand from their weights."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest
import torch
from allocator import allocator_peak
from runs_on_ranks import on_ranks
from tiny_run import TINY, flags, scrimp, write_corpus
from torch import Tensor

from scrimp.cli import main as cli
from scrimp.data import evaluation_batches
from scrimp.errors import ScrimpError
from scrimp.models.model import Model, build_model
from scrimp.study import combined
from scrimp.study.combined import average, evaluate_together
from scrimp.study.definition import parse_study
from scrimp.study.estimate import probe_all
from scrimp.study.rows import read_rows
from scrimp.training.run_data import open_run_corpus
from scrimp.training.run_folder import saved_config
from scrimp.training.trained_weights import (
    architecture_of_weights,
    checkpoint_of,
    fill_from_weights,
    finite_weights,
)
from scrimp.world import ALONE

NAMES = ("one", "two", "three")
OF_TWO = ("two", "longer", "slower")
"""Two, and what goes on from it."""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A study of three runs, their ensemble, a student of two of them, and merges of runs that come from one."""
    folder = tmp_path_factory.mktemp("combined")
    corpus = write_corpus(folder)
    settings = [word.removeprefix("--").replace("-", "_").split("=") for word in TINY if "=" in word]
    lines = [f"{key} = {value if value.isdecimal() else json.dumps(value)}" for key, value in settings]
    runs = "".join(f'[[variants]]\nname = "{name}"\ndraw = {n}\n' for n, name in enumerate(NAMES))
    text = f"""
seeds = [5]
control = "one"
[settings]
{chr(10).join(lines)}
data.source = "{corpus}"
data.cache = "{folder / "cache"}"
data.held_out = 0.1
train.steps = 12
optimizer.lr = 3e-3
{runs}
[[variants]]
name = "ensemble"
ensemble = {list(NAMES)}
[[variants]]
name = "merge"
merge = {list(OF_TWO)}
[[variants]]
name = "weighted"
merge = {{ longer = 1, slower = 1, two = 2 }}
[[variants]]
name = "student"
objective.name = "distill"
objective.teachers = "run:two,run:three"
[[variants]]
name = "longer"
model.weights = "run:two"
[[variants]]
name = "slower"
model.weights = "run:two"
optimizer.lr = 1e-3
"""
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    done = scrimp("study", str(folder / "mine.toml"), "--out", str(folder / "out"), timeout=400.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def loaded(run: Path) -> Model:
    model = build_model(architecture_of_weights(run), dtype=torch.float32)
    fill_from_weights(model, run)
    return model.double().eval()


def losses_of(run: Path, models: list[Model]) -> Tensor:
    """The loss of the mean of all logits on the run's held-out tokens, in float64, row by row."""
    config, total, count = saved_config(run), 0.0, 0
    stream = open_run_corpus(config, ALONE, progress=False).held_out
    for batch in evaluation_batches(
        stream, sequence=64, micro_batch=1, max_tokens=config.evaluation.tokens, mask_documents=True
    ):
        with torch.no_grad():
            logits = torch.stack([one.logits(one(batch.tokens_BT, batch.document_starts)) for one in models])
        log_p = logits.mean(0).log_softmax(-1).flatten(0, 1)
        targets = batch.targets_BT.flatten()
        real = targets >= 0
        total -= log_p[real].gather(1, targets[real][:, None]).sum()
        count += int(real.sum())
    return torch.as_tensor(total / count)


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of other initial weights."""
    folder = tmp_path_factory.mktemp("two")
    corpus, runs = write_corpus(folder), [folder / "first", folder / "second"]
    for seed, run in enumerate(runs):
        words = ("--train.steps=2", "--data.held-out=0.1", "--optimizer.lr=3e-3", f"--run.seed={seed}")
        assert cli(flags(corpus, run, *words)) == 0
    return runs


@pytest.mark.parametrize("how", ["ensemble", "merge"])
def test_two_runs_together_are_what_their_weights_say(
    how: str, two_runs: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert combined.main(how, "3.0,1.0", *map(str, two_runs)) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    first, second = models = [loaded(run) for run in two_runs]
    alone = [float(losses_of(two_runs[0], [one])) for one in models]
    if how == "merge":
        with torch.no_grad():
            for mine, its in zip(first.parameters(), second.parameters(), strict=True):
                mine.copy_((3 * mine + its) / 4)
        models = [first]
    assert found == pytest.approx(float(losses_of(two_runs[0], models)), rel=1e-5)
    assert min(abs(found - one) for one in alone) > 1e-3


@pytest.mark.slow
def test_a_merge_reads_runs_of_ranks_and_holds_one_tensor_of_each(tmp_path: Path) -> None:
    corpus, runs = write_corpus(tmp_path), [tmp_path / "ranks", tmp_path / "alone"]
    words = "--train.steps=2", "--model.num-layers=16", "--optimizer.lr=3e-3"
    on_ranks(2, tmp_path / "two", flags(corpus, runs[0], *words, "--layout.fsdp=2"))
    assert cli(flags(corpus, runs[1], *words, "--run.seed=1")) == 0
    merged = build_model(architecture_of_weights(runs[0]), dtype=torch.float32)
    # torch counts the whole of a file that is mapped; the kernel drops its pages where memory is short.
    mapped = allocator_peak(lambda: [next(finite_weights(checkpoint_of(run))) for run in runs])
    files = [file for run in runs for file in checkpoint_of(run).folder.glob("*.safetensors")]
    assert mapped <= sum(file.stat().st_size for file in files)
    peak = allocator_peak(lambda: average(merged, runs, [3.0, 1.0])) - mapped
    largest = max(parameter.numel() for parameter in merged.parameters())
    assert peak <= 3 * 8 * largest  # sums and means in float64
    assert peak < sum(4 * parameter.numel() for parameter in merged.parameters()) / 2
    first, second = (dict(loaded(run).named_parameters()) for run in runs)
    for name, parameter in merged.named_parameters():
        assert torch.equal(parameter, ((3 * first[name] + second[name]) / 4).float()), name


def row(results: Path, variant: str) -> float:
    found = read_rows(results)[variant, 5, 12].figures["held_out_loss"]
    assert found is not None
    return found


@pytest.mark.slow
def test_an_ensemble_is_the_mean_of_logits(results: Path) -> None:
    runs = [results / "runs" / f"{name}-seed5" for name in NAMES]
    expected = losses_of(runs[0], [loaded(run) for run in runs])
    assert row(results, "ensemble") == pytest.approx(float(expected), rel=1e-5)
    assert float(losses_of(runs[0], [loaded(runs[0])])) == pytest.approx(row(results, "one"), rel=1e-5)
    # A log-sum-exp of means is at most the mean of log-sum-exps.
    assert row(results, "ensemble") < statistics.fmean(row(results, name) for name in NAMES)


@pytest.mark.slow
def test_a_merge_is_the_mean_of_weights(results: Path) -> None:
    runs = [results / "runs" / f"{name}-seed5" for name in OF_TWO]
    models = [loaded(run) for run in runs]
    merged = loaded(runs[0])
    average(merged, runs, [1.0, 1.0, 1.0])
    for name, parameter in merged.named_parameters():
        parts = [dict(model.named_parameters())[name] for model in models]
        torch.testing.assert_close(parameter, torch.stack(parts).mean(0), rtol=1e-12, atol=1e-15)
    assert row(results, "merge") == pytest.approx(float(losses_of(runs[0], [merged])), rel=1e-5)


@pytest.mark.slow
def test_a_merge_with_weights_is_the_average_of_averages(results: Path) -> None:
    """((longer + slower) / 2 + two) / 2, in float64, has the loss of the row."""
    two, longer, slower = (loaded(results / "runs" / f"{name}-seed5") for name in OF_TWO)
    with torch.no_grad():
        for first, second, third in zip(
            longer.parameters(), slower.parameters(), two.parameters(), strict=True
        ):
            third.copy_(((first + second) / 2 + third) / 2)
    expected = float(losses_of(results / "runs" / "two-seed5", [two]))
    assert row(results, "weighted") == pytest.approx(expected, rel=1e-5)
    assert abs(expected - row(results, "merge")) > 1e-3 * expected  # and not that of the plain mean


@pytest.mark.slow
def test_students_and_runs_that_go_on_find_what_they_need(results: Path) -> None:
    teachers = str(saved_config(results / "runs" / "student-seed5").objective.teachers)
    assert teachers == ",".join(str(results / "runs" / f"{name}-seed5") for name in ("two", "three"))
    assert row(results, "longer") < row(results, "two")
    assert row(results, "student") != row(results, "one")


@pytest.mark.slow
def test_models_that_do_not_go_together_are_a_row_with_the_reason(results: Path, tmp_path: Path) -> None:
    corpus, cache = results.parent / "corpus.txt", results.parent / "cache"
    other = [
        "train",
        *TINY,
        f"--data.source={corpus}",
        f"--data.cache={cache}",
        f"--run.dir={tmp_path / 'run'}",
    ]
    done = scrimp(*other, "--train.steps=1", "--model.vocab-size=512", "--data.held-out=0.1")
    assert done.returncode == 0, done.stderr
    for weights, says in (([1.0, 1.0], "no merge"), (None, "no ensemble")):
        with pytest.raises(ScrimpError, match=says):
            evaluate_together([results / "runs" / "one-seed5", tmp_path / "run"], weights)


@pytest.mark.slow
def test_first_steps_of_students_read_the_words_of_their_teachers(results: Path, tmp_path: Path) -> None:
    text = (results / "study.toml").read_text()
    text = text.replace('data.tokenizer = "bytes"', "data.vocab_size = 300")
    study = parse_study(text, name="mine", where="mine.toml")
    kept = tuple(one for one in study.variants if one.name in ("one", "two", "three", "student", "longer"))
    study = dataclasses.replace(study, variants=kept)
    probes = probe_all(study, tmp_path, 1, lambda said: None, trusts=False)
    assert len({probe.data for probe in probes.values()}) == 1


@pytest.mark.slow
def test_a_combination_of_what_is_not_there_is_refused(results: Path) -> None:
    with pytest.raises(ScrimpError):
        evaluate_together([results / "runs" / "one-seed5", results / "runs" / "nobody-seed5"], None)
