"""Stages of a file: what each has, what stands in whose place, and what no stage has of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrimp.cli import main
from scrimp.cli.build import build
from scrimp.cli.staged import StagedPlan, StagedTrain
from scrimp.config import Config, StagedRun, flatten, leaves, load_config, read_config, stage_in
from scrimp.errors import ConfigError

FILE = """
optimizer.lr = 2e-3
data.tokenizer = "bytes"
data.mix = "stdlib:json=1,stdlib:email=0"
model.width = 64

[[stages]]
train.steps = 30

[[stages]]
data.mix = "stdlib:json=1,stdlib:email=1"
train.steps = 20

[[stages]]
data.mix = "stdlib:json=0,stdlib:email=1"
train.steps = 10
optimizer = { lr = 1e-4, from_weights = false }
"""


def staged(tmp_path: Path, text: str, *words: str) -> StagedRun:
    (tmp_path / "file.toml").write_text(text)
    command, _ = build("train", [str(tmp_path / "file.toml"), *words])
    assert isinstance(command, StagedTrain)
    return command.stages


def test_each_stage_is_a_run_that_differs_in_what_it_says(tmp_path: Path) -> None:
    found = [staged(tmp_path, FILE).stage(number, Path("r")) for number in (1, 2, 3)]
    values = [flatten(config) for config, _ in found]
    varies = {key for key in values[0] if len({str(one[key]) for one in values}) > 1}
    assert varies == {
        *("data.mix", "train.steps", "optimizer.lr", "optimizer.from_weights"),
        *("run.dir", "model.weights", "data.tokenizer"),
    }
    assert [one["train.steps"] for one in values] == [30, 20, 10]
    assert [one["optimizer.lr"] for one in values] == [2e-3, 2e-3, 1e-4]
    assert [str(one["run.dir"]) for one in values] == ["r/stage-1", "r/stage-2", "r/stage-3"]
    assert [str(one["model.weights"]) for one in values] == ["None", "r/stage-1", "r/stage-2"]
    assert [one["data.tokenizer"] for one in values] == ["bytes", "auto", "auto"]
    assert [one["optimizer.from_weights"] for one in values] == [False, True, False]
    assert "data.tokenizer" in found[0][1]
    assert not {"data.tokenizer", "model.weights", "run.dir"} & found[1][1]


def test_an_option_of_the_command_line_counts_in_every_stage(tmp_path: Path) -> None:
    stages = staged(tmp_path, FILE, "--train.steps=5", "--optimizer.no-from-weights", "--run.seed", "7")
    for number in (1, 2, 3):
        config, given = stages.stage(number, Path("r"))
        assert (config.train.steps, config.run.seed) == (5, 7)
        assert config.optimizer.from_weights is False
        assert {"train.steps", "run.seed"} <= given
    assert stages.stage(3, Path("r"))[0].optimizer.lr == 1e-4


def test_adapters_begin_with_empty_states_and_so_does_what_follows_them(tmp_path: Path) -> None:
    text = "[[stages]]\n[[stages]]\nadapter.rank = 4\n[[stages]]\n[[stages]]\n"
    stages = staged(tmp_path, text)
    kept = [stages.stage(number, Path("r"))[0].optimizer.from_weights for number in (1, 2, 3, 4)]
    assert kept == [False, False, False, True]


@pytest.mark.parametrize("key", [key for key in leaves(Config) if key.startswith("model.")])
def test_no_stage_has_a_model_of_its_own(key: str, tmp_path: Path) -> None:
    leaf = leaves(Config)[key]
    value = {int: "7", float: "1.5"}.get(leaf.kind, '"x"')
    with pytest.raises(ConfigError, match=rf"{key} in stage 2 of .* is the same in all stages"):
        staged(tmp_path, f"[[stages]]\n[[stages]]\n{key} = {value}\n")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[[stages]]\ndata.tokenizer = 'bytes'\n", "data.tokenizer in stage 1"),
        ("[[stages]]\ndata.vocab_size = 300\n", "data.vocab_size in stage 1"),
        ("[[stages]]\nrun.dir = 'x'\n", "run.dir in stage 1"),
        ("[[stages]]\ntrain.stpes = 3\n", "unknown key train.stpes in stage 1"),
        ("[[stages]]\n[[stages]]\ntrain.steps = 'x'\n", "train.steps in stage 2 of .* has the wrong type"),
        ("[[stages]]\nstages = []\n", "unknown key stages in stage 1"),
        ("stages = []\n", "no list of tables"),
        ("stages = 3\n", "no list of tables"),
        ("[stages]\ntrain.steps = 3\n", "no list of tables"),
        ("stages = [{}, 3]\n", "no list of tables"),
    ],
)
def test_what_is_no_stage_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "file.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path / "file.toml")


def test_the_settings_of_a_run_that_is_there_have_no_stages(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text(FILE)
    with pytest.raises(ConfigError, match="unknown key stages"):
        load_config(tmp_path / "config.toml")


@pytest.mark.parametrize(
    ("command", "option"),
    [
        ("train", "--resume-from=3"),
        ("train", "--restart"),
        ("train", "--plan=x.json"),
        ("plan", "--hardware=h100"),
        ("plan", "--tune=3"),
        ("plan", "--model.shape=x.toml"),
        ("plan", "--out=x.json"),
    ],
)
def test_options_of_one_run_are_refused(
    command: str, option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file.toml").write_text(FILE)
    assert main([command, str(tmp_path / "file.toml"), option]) == 2
    assert f"{option.partition('=')[0]} does not go with stages" in capsys.readouterr().err
    built, _ = build(command, [str(tmp_path / "file.toml")])
    assert isinstance(built, StagedTrain | StagedPlan)


def test_folders_of_stages_are_told_from_others() -> None:
    names = ("stage-1", "stage-12", "stage-0", "stage-01", "stage-", "stage-x", "1", "checkpoints")
    assert [stage_in(name) for name in names] == [1, 12, None, None, None, None, None, None]


@pytest.mark.parametrize("key", ["source", "mix"])
def test_a_text_on_the_command_line_is_that_of_every_stage(tmp_path: Path, key: str) -> None:
    """Also where a stage names the other kind."""
    given = {"source": "stdlib:http", "mix": "stdlib:http=1,stdlib:wsgiref=1"}
    stage = {"source": 'data.mix = "stdlib:json=1,stdlib:email=1"', "mix": 'data.source = "stdlib:json"'}[key]
    text = f'data.tokenizer = "bytes"\n[[stages]]\ntrain.steps = 3\n[[stages]]\ntrain.steps = 2\n{stage}\n'
    found = staged(tmp_path, text, f"--data.{key}={given[key]}")
    for number in (1, 2):
        values = flatten(found.stage(number, Path("r"))[0])
        assert values[f"data.{key}"] == given[key]
        assert values["data.mix" if key == "source" else "data.source"] in (None, Config().data.source)
