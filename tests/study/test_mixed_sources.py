"""Runs that differ in the weights of their sources: each is evaluated on all of them, and so are their merges."""

from __future__ import annotations

import argparse
import inspect
import json
import statistics
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_run import TINY, records, scrimp

from scrimp.cli import main
from scrimp.cli.trained import load_executable
from scrimp.config import load_config
from scrimp.data import Mixture
from scrimp.errors import ConfigError
from scrimp.study.combined import evaluate_together
from scrimp.study.conduct import study_of
from scrimp.study.definition import Study, parse_study
from scrimp.study.job import SOURCE
from scrimp.study.results import results_of
from scrimp.study.rows import Row, read_rows
from scrimp.training.evaluation import evaluate
from scrimp.training.run_data import open_run_corpus
from scrimp.training.trained_weights import fill_from_weights, open_target
from scrimp.world import ALONE

FIGURE = 'figure = "mean_source_loss"\n[settings]\ndata.mix = "a=1,b=1,c=0"\n'
UNITS = (
    '[[variants]]\nname = "a"\ndata.mix = "a=1,b=0,c=0"\n[[variants]]\nname = "b"\ndata.mix = "a=0,b=2,c=0"\n'
)


def write_texts(folder: Path) -> dict[str, Path]:
    texts = {
        "a": inspect.getsource(argparse),
        "b": inspect.getsource(inspect),
        "c": inspect.getsource(statistics),
    }
    for name, text in texts.items():
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return {name: folder / f"{name}.txt" for name in texts}


def mix(texts: dict[str, Path], *weights: int) -> str:
    return ",".join(f"{path}={weight}" for path, weight in zip(texts.values(), weights, strict=True))


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A seed model, one model each of two texts, and their merge; nobody trains on the third."""
    folder = tmp_path_factory.mktemp("mixed")
    texts = write_texts(folder)
    settings = [word.removeprefix("--").replace("-", "_").split("=") for word in TINY if "=" in word]
    lines = [f"{key} = {value if value.isdecimal() else json.dumps(value)}" for key, value in settings]
    text = f"""
seeds = [5]
figure = "mean_source_loss"
[settings]
{chr(10).join(line for line in lines if "evaluation" not in line)}
evaluation.tokens = 1536
data.mix = "{mix(texts, 1, 1, 0)}"
data.cache = "{folder / "cache"}"
data.tokens = 4096
data.held_out = 0.1
train.steps = 6
optimizer.lr = 3e-3
[trunk]
train.steps = 9
[[variants]]
name = "of-a"
data.mix = "{mix(texts, 1, 0, 0)}"
[[variants]]
name = "of-b"
data.mix = "{mix(texts, 0, 1, 0)}"
[[variants]]
name = "both"
merge = {{ of-a = 3, of-b = 1 }}
"""
    (folder / "mine.toml").write_text(text, encoding="utf-8")
    done = scrimp("study", str(folder / "mine.toml"), "--out", str(folder / "out"), timeout=400.0)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder / "out"


def row(results: Path, variant: str) -> Row:
    return read_rows(results)[variant, 5, 6]


@pytest.mark.slow
def test_rows_have_the_loss_of_each_source_and_their_mean(results: Path) -> None:
    for name in ("of-a", "of-b"):
        found = row(results, name).figures
        sources = {key.removeprefix(SOURCE): loss for key, loss in found.items() if key.startswith(SOURCE)}
        last = [
            one
            for one in records(results / "runs" / f"{name}-seed5", "events.jsonl")
            if one["kind"] == "evaluation"
        ]
        assert sources == last[-1]["sources"]
        assert list(sources) == ["a.txt", "b.txt", "c.txt"]
        assert found["mean_source_loss"] == pytest.approx(statistics.fmean(sources.values()), rel=1e-12)
        assert found["held_out_loss"] == found[f"{SOURCE}{name[-1]}.txt"]  # by weight: of the only one
        curve = row(results, name).held_out
        assert curve is not None
        assert curve.values[-1] == pytest.approx(found["mean_source_loss"], abs=1e-6)


@pytest.mark.slow
def test_a_merge_is_evaluated_on_each_source(results: Path) -> None:
    figures = row(results, "both").figures
    for label, loss in losses_of_merge([results / "runs" / f"of-{name}-seed5" for name in "ab"]).items():
        assert figures[f"{SOURCE}{label}"] == pytest.approx(loss, rel=1e-5)


def test_two_runs_of_other_weights_are_merged_and_evaluated_on_each_source(tmp_path: Path) -> None:
    texts, runs = write_texts(tmp_path), [tmp_path / "of-a", tmp_path / "of-b"]
    words = [
        "train",
        *TINY,
        f"--data.cache={tmp_path / 'cache'}",
        "--data.held-out=0.1",
        "--data.tokens=4096",
    ]
    words += ["--evaluation.tokens=1536", "--train.steps=2", "--optimizer.lr=3e-3"]
    for run, weights in zip(runs, ((1, 0, 0), (0, 1, 0)), strict=True):
        assert main([*words, f"--data.mix={mix(texts, *weights)}", f"--run.dir={run}"]) == 0
    found = evaluate_together(runs, [3.0, 1.0])
    assert {label: one.loss for label, one in found.sources.items()} == pytest.approx(
        losses_of_merge(runs), rel=1e-5
    )


def losses_of_merge(runs: list[Path]) -> dict[str, float]:
    """Those of three parts of the first run and one of the second, source by source."""
    executables = [load_executable(open_target(run), "cpu") for run in runs]
    merged, other = (one.model for one in executables)
    for model, run in zip((merged, other), runs, strict=True):
        fill_from_weights(model, run)
    with torch.no_grad():
        for mine, its in zip(merged.parameters(), other.parameters(), strict=True):
            mine.copy_((3 * mine.double() + its.double()) / 4)
    corpus = open_run_corpus(load_config(runs[0] / "config.toml"), ALONE, progress=False)
    assert isinstance(corpus, Mixture)
    each = zip(corpus.labels, corpus.parts, strict=True)
    how: dict[str, Any] = {"sequence": 64, "micro_batch": 1, "max_tokens": 512, "mask_documents": True}
    return {label: evaluate(executables[0], part.held_out, **how).loss for label, part in each}


@pytest.mark.slow
def test_runs_of_other_weights_are_compared_and_train_on_theirs_alone(results: Path) -> None:
    rows = read_rows(results)
    assert len({one.data for one in rows.values()}) == 1
    found = {one.name: one for one in results_of(study_of(results), rows).outcomes}
    assert not any(one.failures for one in found.values())
    assert found["both"].comparison is not None
    for name, shares in (("of-a", [1, 0, 0]), ("of-b", [0, 1, 0]), ("trunk", [0.5, 0.5, 0])):
        events = records(results / "runs" / f"{name}-seed5", "events.jsonl")
        sources = next(one for one in events if one["kind"] == "mixture")["sources"]
        assert [one["share"] for one in sources] == shares
        assert [one["tokens"] for one in sources] == [4097] * 3
        assert [bool(one["passes"]) for one in sources] == [bool(share) for share in shares]


@pytest.mark.slow
def test_a_source_with_less_than_its_tokens_is_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = write_texts(tmp_path)
    texts["b"].write_text(texts["b"].read_text()[:30_000], encoding="utf-8")
    words = ["train", *TINY, f"--data.cache={tmp_path / 'cache'}", "--data.held-out=0.1", "--train.steps=1"]
    words += ["--data.tokens=40000", f"--run.dir={tmp_path / 'run'}"]
    assert main([*words, f"--data.mix={mix(texts, 1, 1, 0)}"]) == 2
    said = capsys.readouterr().err
    assert "b.txt has fewer training tokens than data.tokens" in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists()
    assert main([*words, f"--data.mix={mix(texts, 1, 0, 0)}"]) == 0  # which reads nothing of it


def read(text: str) -> Study:
    return parse_study(text, name="mine", where="mine.toml")


def test_weights_may_differ_where_all_sources_count_alike() -> None:
    assert [one.settings["data.mix"] for one in read(FIGURE + UNITS).variants] == [
        "a=1,b=0,c=0",
        "a=0,b=2,c=0",
    ]
    assert read(FIGURE + UNITS).batches == "other"
    with pytest.raises(ConfigError, match=r"data\.mix in mine\.toml differs between variants"):
        read((FIGURE + UNITS).replace("mean_source_loss", "held_out_loss"))
    for other in ("a=0,b=1", "b=1,a=0,c=0", "a=0,b=1,d=0"):
        with pytest.raises(ConfigError, match=r"b in mine\.toml is not evaluated on the sources of a"):
            read(FIGURE + UNITS.replace("a=0,b=2,c=0", other))
    with pytest.raises(ConfigError, match=r"trunk in mine\.toml is not evaluated"):
        read(FIGURE + "[trunk]\ndata.mix = 'a=1,b=1'\n" + UNITS)
    with pytest.raises(ConfigError, match=r"one in mine\.toml is not evaluated"):
        read('figure = "mean_source_loss"\n[settings]\ntrain.steps = 8\n[[variants]]\nname = "one"\n')


MERGE = '[[variants]]\nname = "both"\nmerge = ["a", "b"]\n'
TRUNK = "[trunk]\ntrain.steps = 8\n"


@pytest.mark.parametrize(
    ("of_b", "says"),
    [
        ("draw = 1", "initial weights"),
        ("model.width = 32", "settings of the model"),
        ('model.weights = "elsewhere"', "settings of the model"),
        ('model.weights = "run:c"', "initial weights"),
    ],
)
def test_merges_of_models_that_do_not_go_together_are_refused(of_b: str, says: str) -> None:
    text = f'[settings]\ntrain.steps = 8\n[[variants]]\nname = "a"\n[[variants]]\nname = "b"\n{of_b}\n'
    text += MERGE + '[[variants]]\nname = "c"\ndraw = 2\n'
    with pytest.raises(
        ConfigError, match=r"both in mine\.toml merges models that do not go together"
    ) as refused:
        read(text)
    assert says in str(refused.value)
    assert read(text.replace("merge", "ensemble")).named("both").combined is not None


def test_what_goes_on_from_one_run_can_be_merged_whatever_its_draw() -> None:
    text = (
        '[settings]\ntrain.steps = 8\n{}[[variants]]\nname = "a"\n{}[[variants]]\nname = "b"\ndraw = 1\n{}'
        + MERGE
    )
    assert read(text.format(TRUNK, "", "")).named("both").needs == ("a", "b")
    assert read(text.format("", "draw = 1\n", 'model.weights = "run:a"\n')).named("both").needs == ("a", "b")


@pytest.mark.parametrize(
    "value", ["{ a = 1 }", "{ a = 1, b = 0 }", "{ a = 1, b = true }", "{ a = 1, b = inf }"]
)
def test_weights_of_a_merge_are_two_or_more_numbers_above_0(value: str) -> None:
    text = FIGURE + TRUNK + UNITS + MERGE
    with pytest.raises(ConfigError, match=r"merge of both in mine\.toml cannot be used"):
        read(text.replace('["a", "b"]', value))
    with pytest.raises(ConfigError, match=r"ensemble of both in mine\.toml cannot be used"):
        read(text.replace("merge", "ensemble").replace('["a", "b"]', "{ a = 1, b = 1 }"))


def test_other_weights_of_a_merge_are_another_one() -> None:
    text = FIGURE + TRUNK + UNITS + MERGE
    found = [
        (study := read(text.replace('["a", "b"]', value))).digest(study.named("both"), 0)
        for value in ('["a", "b"]', "{ a = 2, b = 2 }", "{ a = 1, b = 2 }", "{ a = 2, b = 1 }")
    ]
    assert found[0] == found[1]
    assert len(set(found)) == 3
