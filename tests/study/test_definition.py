"""What a study's file may say, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from scrimp.cli import main
from scrimp.errors import ConfigError
from scrimp.study.definition import Study, load_study, parse_study, shipped_studies

GRID = """
seeds = [4, 2]
control = "lr=0.002"
[settings]
train.steps = 8
data.source = "stdlib"
[grid]
optimizer.lr = [1e-3, 2e-3]
"train.batch_tokens" = [512]
"""
LIST = """
figure = "training_loss"
[settings]
train.steps = 8
[[variants]]
name = "bf16"
precision = "bf16"
[[variants]]
name = "fp8"
precision = "fp8,*.wgrad=bf16"
optimizer.lr = 0.1
"""
DESCENT = """
seeds = 2
[settings]
train.steps = 8
[descent]
optimizer.lr = [1e-3, 2e-3, 4e-3]
"""
TARGET = LIST.replace('figure = "training_loss"', 'figure = "steps_to_target"\ntarget = 5.2').replace(
    "train.steps = 8", "train.steps = 8\ntrain.batch_tokens = 512\nevaluation.every = 2"
)


def read(text: str) -> Study:
    return parse_study(text, name="mine", where="mine.toml")


def test_a_grid_is_all_combinations() -> None:
    text = GRID.replace("lr=0.002", "lr=0.002,batch_tokens=512")
    study = read(text)
    assert [one.name for one in study.variants] == ["lr=0.001,batch_tokens=512", "lr=0.002,batch_tokens=512"]
    assert [one.settings["optimizer.lr"] for one in study.variants] == [1e-3, 2e-3]
    assert all(one.settings["train.steps"] == 8 for one in study.variants)
    assert study.seeds == (4, 2)
    assert [one.name for one in study.others] == ["lr=0.001,batch_tokens=512"]
    assert study.settings_of(study.variants[0], 4)["run.seed"] == 4


def test_variants_of_a_grid_whose_values_are_long_are_told_apart() -> None:
    start = "fp8," + ",".join(f"blocks.{block}.*.fprop=bf16" for block in range(9))
    study = read(
        GRID.replace("[512]", f"[512]\nprecision = ['{start}', '{start},blocks.9.*.fprop=bf16']").replace(
            'control = "', '# "'
        )
    )
    names = [one.name for one in study.variants]
    assert len(set(names)) == len(names) == 4
    assert all(len(name) == 80 for name in names)


def test_a_list_compares_with_its_first_variant() -> None:
    study = read(LIST)
    assert (study.control, study.seeds, study.figure) == ("bf16", (0, 1, 2), "training_loss")
    assert study.variants[1].settings == {
        "train.steps": 8,
        "precision": "fp8,*.wgrad=bf16",
        "optimizer.lr": 0.1,
    }


def test_a_target_is_read_from_evaluations_and_can_be_set(tmp_path: Path) -> None:
    study = read(TARGET)
    assert (study.target, study.recorded_figure) == (5.2, "held_out_loss")
    assert study.submissions == {"bf16": ("bf16",), "fp8": ("fp8",)}
    (tmp_path / "mine.toml").write_text(TARGET)
    given = load_study(str(tmp_path / "mine.toml"), ["target=3.5", "train.steps=16"])
    assert (given.target, given.variants[0].settings["train.steps"]) == (3.5, 16)
    assert "target" not in given.variants[0].settings
    assert parse_study(given.text, name="mine", where="mine.toml") == given


def test_further_seeds_follow_the_files_own() -> None:
    study = read("seeds = [1, 5]\n" + LIST)
    assert study.with_seeds(4).seeds == (1, 5, 0, 2)
    assert study.with_seeds(1).seeds == (1,)


def test_halving_evaluates_where_rounds_end() -> None:
    study = read(LIST + "[halving]\nfactor = 2\nrounds = 2\n")
    assert study.halving is not None
    assert study.halving.steps(8) == [2, 4, 8]
    settings = study.settings_of(study.variants[0], 0)
    assert settings["evaluation.every"] == settings["checkpoint.every"] == 2


def test_a_trunk_has_the_common_settings_and_its_own() -> None:
    study = read(LIST + '[trunk]\ntrain.steps = 30\nschedule.name = "constant"\n')
    assert study.trunk is not None
    assert study.trunk.settings == {"train.steps": 30, "schedule.name": "constant"}
    assert [one.name for one in study.runs_of_a_seed] == ["trunk", "bf16", "fp8"]
    assert study.digest(study.variants[0], 0) != read(LIST).digest(study.variants[0], 0)
    assert read(LIST).trunk is None


def test_settings_of_the_command_line_stand_in_for_the_files(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(LIST + "[trunk]\ntrain.steps = 30\n")
    study = load_study(str(file), ["train.steps=9", "optimizer.lr=0.2", "data.source=my text"])
    assert [one.settings.get("optimizer.lr") for one in study.variants] == [None, 0.2], (
        "where variants have it"
    )
    assert [one.settings["train.steps"] for one in study.variants] == [9, 9]
    assert study.trunk is not None
    assert (study.trunk.settings["train.steps"], study.trunk.settings["data.source"]) == (30, "my text")
    assert read(study.text).variants == study.variants, "the text says all"
    for word in ("train.steps", "train steps=3", "=3", "train.steps="):
        with pytest.raises(ConfigError, match="--set takes a setting and its value"):
            load_study(str(file), [word])
    with pytest.raises(ConfigError, match=r"is what .* compares"):
        load_study(str(file), ["precision=mxfp8"])
    with pytest.raises(ConfigError, match=r"unknown key train\.stepz in .*mine\.toml, \[given\]"):
        load_study(str(file), ["train.stepz=3"])


def test_weights_that_are_given_are_the_trunks(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(LIST + "[trunk]\ntrain.steps = 30\n")
    study = load_study(
        str(file), ["model.weights=runs/mine", "trunk.train.steps=40", "data.source=/x/\U0001f600.txt"]
    )
    assert study.trunk is not None
    assert str(study.trunk.settings["model.weights"]) == "runs/mine"
    assert study.trunk.settings["train.steps"] == 40
    assert study.trunk.settings["data.source"] == "/x/\U0001f600.txt"
    assert not any("model.weights" in one.settings for one in study.variants)
    load_study("precision", ["model.weights=runs/mine", "data.source=my.txt", "budget.fp4_flops=0.9"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train.steps=4", "train.steps=5"], "--set names a setting twice"),
        (["train.steps=4", "train=5"], "--set names a setting twice"),
        (["train.steps=" + "9" * 5000], "wrong type"),
        (["data.source=" + "[" * 3000, "trunk.train.steps=3"], "has no trunk"),
    ],
)
def test_settings_of_the_command_line_are_refused_by_their_words(
    words: list[str], message: str, tmp_path: Path
) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(LIST)
    with pytest.raises(ConfigError, match=message):
        load_study(str(file), words)
    file.write_text(LIST + "[given]\ntrain.steps = 7\n")
    with pytest.raises(ConfigError, match=r"earlier --set|--set names"):
        load_study(str(file), words)


REFUSED = {
    "a trunk of another model": (
        LIST + "[trunk]\nmodel.num_layers = 3\n",
        "the trunk in mine.toml is another model",
        "move it to [settings]",
    ),
    "other weights than the trunk's": (
        LIST.replace('name = "bf16"', 'name = "bf16"\nmodel.weights = "elsewhere"')
        + 'model.weights = "elsewhere"\n[trunk]\n',
        "bf16 in mine.toml begins with other weights",
        "move model.weights to [trunk]",
    ),
    "other weights than the trunk's beside a run's": (
        LIST.replace("training_loss", "held_out_loss").replace(
            'name = "bf16"', 'name = "bf16"\nmodel.weights = "elsewhere"'
        )
        + 'model.weights = "run:bf16"\n[trunk]\n',
        "bf16 in mine.toml begins with other weights",
        "move model.weights to [trunk]",
    ),
    "models differ after a trunk": (
        LIST + "model.num_layers = 3\n[trunk]\n",
        "model.num_layers in mine.toml differs between variants",
        "move it to [settings]",
    ),
    "a variant called trunk": (
        LIST.replace('"fp8"', '"trunk"', 1) + "[trunk]\n",
        "a variant in mine.toml is called trunk",
        "another name",
    ),
    "an unknown setting of a trunk": (
        LIST + "[trunk]\ntrain.stepz = 3\n",
        "unknown key train.stepz",
        "steps",
    ),
    "no toml": ("seeds = = 3", "not valid TOML", "correct that line"),
    "unknown key": ("seedz = 3\n" + LIST, "unknown key seedz", "did you mean seeds"),
    "setting at the top": ("steps = 3\n" + LIST, "unknown key steps", "[settings]"),
    "unknown setting": (LIST.replace("train.steps", "train.stepz"), "unknown key train.stepz", "steps = ..."),
    "type": (LIST.replace("train.steps = 8", 'train.steps = "8"'), "wrong type", "without quotes"),
    "impossible value": (LIST.replace("optimizer.lr = 0.1", "optimizer.lr = 7.0"), "fp8 in mine.toml", None),
    "no variants": ("[settings]\ntrain.steps = 8", "no variants", "add one of them"),
    "both": (LIST + "[grid]\nprecision = ['fp8']", "variants and grid", "keep one"),
    "descent and grid": (GRID + "[descent]\nprecision = ['bf16', 'fp8']", "grid and descent", "keep one"),
    "descent with a control": (
        DESCENT.replace("seeds", "control = 'lr=0.004'\nseeds"),
        "control lr=0.004",
        None,
    ),
    "descent with halving": (DESCENT + "[halving]\n", "[halving]", None),
    "descent by speed": (
        DESCENT.replace("seeds", "figure = 'tokens_per_second'\nseeds"),
        "figure tokens_per_second",
        None,
    ),
    "a merge of factors": (
        LIST.replace('figure = "training_loss"', "").replace(
            "train.steps = 8", "train.steps = 8\nmodel.rank = 8"
        )
        + '[[variants]]\nname = "both"\nmerge = ["bf16", "fp8"]\n',
        "layers of low rank",
        None,
    ),
    "descent of all together": (DESCENT.replace("seeds", "all_together = true\nseeds"), "all_together", None),
    "descent without an order": (DESCENT.replace("2e-3", "8e-3"), "descent.optimizer.lr", None),
    "nothing to be judged by": (
        DESCENT.replace("[settings]", "[settings]\ndata.held_out = 0"),
        "judged by",
        None,
    ),
    "descent along one value": (
        DESCENT.replace("[1e-3, 2e-3, 4e-3]", "[1e-3]"),
        "descent.optimizer.lr",
        None,
    ),
    "descent along equal values": (DESCENT.replace("2e-3", "1e-3"), "are called lr=0.001", None),
    "no name": (LIST.replace('name = "fp8"\n', ""), "variant 2", None),
    "bad name": (LIST.replace('name = "fp8"', 'name = "../fp8"'), "variant 2", None),
    "same name": (LIST.replace('name = "fp8"', 'name = "bf16"'), "called bf16", "name of its own"),
    "control": ('control = "bf1"\n' + LIST, "control in mine.toml", "did you mean bf16"),
    "no list in a grid": (GRID.replace("[512]", "512"), "grid.train.batch_tokens", None),
    "a list and a table in a grid": (GRID + "train = [1]\n", "grid.train in", "train.batch_tokens"),
    "a key twice in a grid": (GRID + '"optimizer.lr" = [3e-3]\n', "optimizer.lr twice", "keep one"),
    "seed in settings": (LIST.replace("train.steps = 8", "run.seed = 8"), "run.seed", "seeds at the top"),
    "folder": (LIST.replace("train.steps = 8", 'run.dir = "x"'), "run.dir", "--out"),
    "seeds twice": ("seeds = [1, 1]\n" + LIST, "seeds in mine.toml", None),
    "no seeds": ("seeds = 0\n" + LIST, "seeds in mine.toml", None),
    "seeds of another type": ('seeds = "3"\n' + LIST, "seeds in mine.toml", None),
    "confidence": ("confidence = 1.0\n" + LIST, "confidence in mine.toml is out of range", None),
    "power": ("power = 0.9999999\n" + LIST, "power in mine.toml is out of range", None),
    "power of chance": ("power = 0.3\nconfidence = 0.6\n" + LIST, "power in mine.toml is no more than", None),
    "other objectives": (
        LIST.replace("optimizer.lr = 0.1", 'objective.name = "mine.py:Mine"'),
        "objective.name in mine.toml differs",
        None,
    ),
    "seeds beside a trunk": (f"seeds = [{2**32}]\n" + LIST + "[trunk]\n", "too large beside a trunk", None),
    "another vocabulary than the trunk's": (
        LIST.replace("train.steps = 8", "train.steps = 8\ndata.vocab_size = 300")
        + "[trunk]\ndata.vocab_size = 400\n",
        "another vocabulary than its trunk",
        "[settings]",
    ),
    "no rounds of halving": (LIST + "[halving]\nrounds = 0\n", "halving.rounds in mine.toml", None),
    "figure": (LIST.replace("training_loss", "loss"), "figure in mine.toml", None),
    "bootstrap": ('interval = "bootstrap"\n' + LIST, "so few seeds", "seeds = 6"),
    "bootstrap of all together": (
        'seeds = 6\ninterval = "bootstrap"\nall_together = true\n' + LIST + '[[variants]]\nname = "third"\n',
        "so few seeds",
        "seeds = 7",
    ),
    "other data": (LIST.replace("optimizer.lr = 0.1", 'data.source = "x"'), "data.source", "[settings]"),
    "other evaluation": (LIST.replace("optimizer.lr = 0.1", "train.sequence = 64"), "train.sequence", None),
    "ranks": (LIST.replace("train.steps = 8", "layout.tp = 2"), "2 ranks", "leave"),
    "an optimizer by free memory": (
        LIST.replace("optimizer.lr = 0.1", 'optimizer.name = "auto"\nbudget.device_memory = "9GB"'),
        "leaves its optimizer to the memory",
        "scrimp plan",
    ),
    "a trunk's optimizer by free memory": (
        LIST + '[trunk]\noptimizer.name = "auto"\nbudget.device_memory = "9GB"\n',
        "trunk in mine.toml leaves its optimizer to the memory",
        "scrimp plan",
    ),
    "halving without steps": (
        LIST.replace("train.steps = 8", "") + "[halving]\nrounds = 2\n",
        "halving",
        "train.steps = 4",
    ),
    "halving that does not divide": (LIST + "[halving]\nrounds = 4\n", "halving", "train.steps = 16"),
    "halving by speed": (
        LIST.replace("training_loss", "tokens_per_second") + "[halving]\n",
        "tokens_per_second",
        None,
    ),
    "halving and evaluations": (
        LIST.replace("train.steps = 8", "train.steps = 8\nevaluation.every = 3") + "[halving]\n",
        "evaluation.every",
        "leave it out",
    ),
    "halving key": (LIST + "[halving]\nround = 1\n", "halving.round", "halving.rounds"),
    "a target of a loss": ("target = 5.2\n" + LIST, "target in mine.toml has no effect", None),
    "a held-out variant of a loss": ('held_out_of = "lm"\n' + LIST, "held_out_of in mine.toml", None),
    "no target": (TARGET.replace("target = 5.2", ""), "names no target", None),
    "a target that is no number": (TARGET.replace("5.2", "nan"), "target in mine.toml", None),
    "a target without evaluations": (
        TARGET.replace("evaluation.every = 2", "evaluation.every = 0"),
        "too little for steps to a target",
        "[settings]",
    ),
    "evaluations that miss the last step": (
        TARGET.replace("every = 2", "every = 3"),
        "does not divide its steps",
        None,
    ),
    "more evaluations than a row has": (
        TARGET.replace("steps = 8", "steps = 402"),
        "does not divide its steps",
        None,
    ),
    "halving to a target": (TARGET + "[halving]\n", "does not go with steps_to_target", None),
    "other batches on the way to a target": (
        TARGET.replace("optimizer.lr = 0.1", "train.batch_tokens = 1024"),
        "train.batch_tokens",
        "[settings]",
    ),
    "another model on the way to a target": (
        TARGET.replace("optimizer.lr = 0.1", "model.num_layers = 2"),
        "model.num_layers",
        "[settings]",
    ),
    "trials that are no variants": (
        LIST + '[submissions]\nmine = ["bf16", "fp4"]\n',
        "submissions.mine in mine.toml",
        None,
    ),
    "a variant of no submission": (LIST + '[submissions]\nmine = ["bf16"]\n', "every variant once", None),
    "unequal trials": (
        LIST + '[[variants]]\nname = "c"\n[submissions]\nmine = ["bf16", "c"]\ntheirs = ["fp8"]\n',
        "different numbers of trials",
        None,
    ),
    "too many": ("seeds = 9000\n" + LIST, "too many runs", None),
    "a mixture of one source": (
        'figure = "mean_source_loss"\n'
        + LIST.removeprefix('\nfigure = "training_loss"').replace(
            "train.steps = 8", 'train.steps = 8\ndata.mix = "stdlib:email=1"'
        ),
        "bf16 in mine.toml: data.mix has one source",
        "weight 0",
    ),
    "a step that decays all": (
        LIST + "optimizer.weight_decay = 10\n",
        "fp8 in mine.toml: a step decays all of the weights",
        "lower one of them",
    ),
    "a trunk without held-out text": (
        LIST + '[trunk]\ndata.source = "copy"\ndata.held_out = 0\n',
        "trunk in mine.toml has nothing to be judged by",
        "leave data.held_out out",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_a_study_is_refused_with_advice(case: str) -> None:
    text, what, do = REFUSED[case]
    with pytest.raises(ConfigError) as refusal:
        read(text)
    assert what in refusal.value.what
    assert "mine.toml" in refusal.value.what or case == "impossible value"
    if do is not None:
        assert do in (refusal.value.do or "")


def test_a_trunk_of_runs_that_are_judged_by_training_needs_no_held_out_text() -> None:
    assert read(LIST.replace("train.steps = 8", "train.steps = 8\ndata.held_out = 0") + "[trunk]\n").trunk


def test_speeds_may_be_of_other_sequences() -> None:
    text = LIST.replace("training_loss", "tokens_per_second").replace(
        "optimizer.lr = 0.1", "train.sequence = 64"
    )
    assert read(text).is_timed


def test_a_study_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refusal:
        load_study("format")
    assert "formats" in (refusal.value.do or "")
    with pytest.raises(ConfigError):
        load_study(str(tmp_path / "none.toml"))
    (tmp_path / "mine.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError) as refusal:
        load_study(str(tmp_path / "mine.toml"))
    assert "UTF-8" in refusal.value.what


def test_a_vocabulary_that_all_share_is_the_trunks_alone() -> None:
    text = LIST.replace("train.steps = 8", "train.steps = 8\ndata.vocab_size = 300")
    study = parse_study(text + "[trunk]\n", name="mine", where="mine.toml")
    assert study.trunk is not None
    assert study.trunk.settings["data.vocab_size"] == 300
    assert all("data.vocab_size" not in one.settings for one in study.variants)


def test_a_home_that_nobody_has_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["~zzzq/x.toml"], ["formats", "--out=~zzzq/x"]):
        assert main(["study", *words]) == 2
        assert "names a home folder that is not known" in capsys.readouterr().err


@pytest.mark.parametrize("name", shipped_studies())
def test_shipped_studies_can_be_read(name: str) -> None:
    study = load_study(name)
    assert study.name == name
    assert study.about
    assert study.scatter is not None or study.target is not None


def test_shipped_workloads_are_one_race() -> None:
    """The same submissions with the same settings, and each workload with a held-out variant of other sizes."""
    studies = [one for name in shipped_studies() if (one := load_study(name)).target is not None]
    own = [
        {
            v.name: {k: s for k, s in v.settings.items() if s != one.variants[0].settings.get(k)}
            for v in one.variants
        }
        for one in studies
    ]
    assert all(one == own[0] for one in own)
    names = {one.name for one in studies}
    assert {one.held_out_of for one in studies if one.held_out_of} == names - {
        one.name for one in studies if one.held_out_of
    }
