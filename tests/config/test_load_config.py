"""A TOML file is read strictly: what is wrong is named, with the nearest known key."""

from __future__ import annotations

import dataclasses
import inspect
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples

from scrimp.config import Config, leaves, load_config, nearest_key, read_config, replace_values
from scrimp.config.read_toml import MAX_FILE_BYTES, _read_table
from scrimp.errors import ConfigError
from scrimp.precision import GEMMS, RECIPES, RECOMPUTE, parse_rules


@pytest.fixture
def write(tmp_path: Path):
    def write_file(content: str | bytes) -> Path:
        file = tmp_path / "my.toml"
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
        return file

    return write_file


def refusal(file: Path) -> str:
    with pytest.raises(ConfigError) as caught:
        load_config(file)
    return str(caught.value)


def test_no_file_means_the_defaults() -> None:
    assert load_config(None) == Config()
    assert read_config(None) == (Config(), frozenset(), ())


def test_values_of_a_file_replace_defaults_and_the_rest_stays(write) -> None:
    file = write(
        'device = "cuda:1"\n[run]\ndir = "runs/a"\n[train]\nsteps = 7\nlr = 1\nmaster_weights = true\n'
    )
    config, given, _ = read_config(file)
    expected = replace_values(
        Config(),
        {
            "device": "cuda:1",
            "run.dir": Path("runs/a"),
            "train.steps": 7,
            "optimizer.lr": 1.0,
            "optimizer.master_weights": True,
        },
    )
    assert config == expected
    assert isinstance(config.optimizer.lr, float)
    assert given == {"device", "run.dir", "train.steps", "optimizer.lr", "optimizer.master_weights"}


def test_a_setting_given_with_its_default_value_counts_as_given(write) -> None:
    default = Config().train.steps
    assert read_config(write(f"[train]\nsteps = {default}\n")) == (Config(), frozenset({"train.steps"}), ())


def test_home_folder_is_expanded(write, monkeypatch, tmp_path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_config(write('[run]\ndir = "~/runs/a"\n')).run.dir == tmp_path / "runs/a"
    assert "run.dir" in refusal(write('[run]\ndir = "~nobody-of-that-name/a"\n'))


def test_what_is_held_out_is_a_share_or_a_path(write) -> None:
    assert load_config(write("[data]\nheld_out = 0.1\n")).data.held_out == 0.1
    assert load_config(write("[data]\nheld_out = 0\n")).data.held_out == 0.0
    assert load_config(write('[data]\nheld_out = "valid.txt"\n')).data.held_out == Path("valid.txt")


def test_byte_order_mark_and_empty_file_are_accepted(write) -> None:
    assert load_config(write(b"\xef\xbb\xbf[train]\nsteps = 7\n")).train.steps == 7
    assert load_config(write("")) == Config()


@pytest.mark.parametrize(
    ("text", "key", "nearest"),
    [
        ("[train]\nstepz = 5", "train.stepz", "train.steps"),
        ("steps = 5", "steps", "train.steps"),
        ("[run]\nsteps = 5", "run.steps", "train.steps"),
        ("[train]\nseed = 5", "train.seed", "run.seed"),
        ("[train]\nbatch-tokens = 5", "train.batch-tokens", "train.batch_tokens"),
        ("[train]\nLR = 5", "train.LR", "optimizer.lr"),
        ("[train]\nprecision = 'bf16'", "train.precision", "precision"),
        ("[optim]\nlr = 5", "[optim]", "[optimizer]"),
        ("[trian]\nsteps = 5", "[trian]", "[train]"),
        ("[train.optimizer]\nlr = 5", "[train.optimizer]", "[optimizer]"),
        ("learning_rate = 5", "learning_rate", "expected"),
        ("[data]\nheldout = 0.1", "data.heldout", "data.held_out"),
        ("[zzz]", "[zzz]", "[train]"),
    ],
)
def test_unknown_key_is_refused_with_the_nearest_known(write, text, key, nearest) -> None:
    message = refusal(write(text + "\n"))
    assert f" {key} in " in message
    assert nearest in message
    assert "my.toml" in message


@pytest.mark.parametrize(
    ("text", "key", "expected"),
    [
        ("[train]\nsteps = 5.0", "train.steps", "write 5"),
        ("[train]\nsteps = 5.5", "train.steps", "a whole number"),
        ("[train]\nsteps = '5'", "train.steps", "without quotes"),
        ("[train]\nsteps = true", "train.steps", "a whole number"),
        ("[train]\nsteps = [5]", "train.steps", "a whole number"),
        ("[train]\nsteps = 2024-01-01", "train.steps", "a whole number"),
        ("[train.steps]\nvalue = 5", "train.steps", "a whole number"),
        ("[optimizer]\nlr = 'auto'", "optimizer.lr", "leave optimizer.lr out"),
        ("[optimizer]\nlr = false", "optimizer.lr", "a number"),
        ("[optimizer]\nlr = 1" + "0" * 400, "optimizer.lr", "a number"),
        ("[data]\nsource = 5", "data.source", "in quotes"),
        ("[data]\nmask_documents = 1", "data.mask_documents", "true or false"),
        ("[data]\nmask_documents = 'false'", "data.mask_documents", "without quotes"),
        ("[run]\ndir = 5", "run.dir", "a path"),
        ("[data]\nheld_out = true", "data.held_out", "a number or a path"),
        ("[budget]\ndevice_memory = 17179869184", "budget.device_memory", "text"),
        ("precision = 16", "precision", "in quotes"),
        ("precision = ['fp8', '*.wgrad=bf16']", "precision", "text"),
        ("[precision]\nbase = 'fp8'", "precision", "text"),
        ("[schedule]\nname = 'cosin'", "schedule.name", "'cosine'"),
        ("train = 5", "train", "a section"),
    ],
)
def test_wrong_type_or_choice_is_refused_with_what_is_allowed(write, text, key, expected) -> None:
    message = refusal(write(text + "\n"))
    assert message.startswith(f"{key} in ")
    assert expected in message


SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.dates()
NAMES = st.sampled_from(["train", "run", "steps", "dir", "device", "lr", "x"])
TABLES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3)
)


@examples(200)
@given(st.dictionaries(NAMES, TABLES, max_size=3))
def test_any_table_at_all_is_read_or_refused(table) -> None:
    known = leaves(Config)
    try:
        values = _read_table(table, Config, "", "my.toml")
    except ConfigError:
        return
    assert set(values) <= set(known)


def test_syntax_error_names_the_line(write) -> None:
    assert "line 3" in refusal(write("[train]\nsteps = 5\nlr = \n"))
    assert "--data.source" in refusal(write("Once upon a time\nthere was a corpus\n"))


@pytest.mark.parametrize("content", ["x = " + "[" * 100_000, "[train]\nsteps = " + "9" * 5000])
def test_what_breaks_the_toml_parser_itself_is_an_error_too(write, content) -> None:
    assert "not valid TOML" in refusal(write(content))


def test_duplicate_key_is_refused(write) -> None:
    assert "line" in refusal(write("[train]\nsteps = 5\nsteps = 6\n"))


def test_files_that_are_no_configuration_are_refused(write, tmp_path) -> None:
    assert "does not exist" in refusal(tmp_path / "absent.toml")
    assert "is a folder" in refusal(tmp_path)
    assert "cannot be read" in refusal(tmp_path / "nul\0.toml")
    assert "offset 8" in refusal(write(b"[train]\n\xff\xfe"))
    assert "too large" in refusal(write("#" * (MAX_FILE_BYTES + 1)))
    assert "cannot be read" in refusal(write("") / "below-a-file.toml")


def test_help_on_precision_names_every_recipe_and_every_kind_of_rule() -> None:
    source = inspect.getsource(Config)
    text = source.split('precision: str = "auto"\n    """')[1].split('"""')[0]
    for name in (*RECIPES, RECOMPUTE, "auto", *GEMMS, "saved", "head="):
        assert re.search(rf"(?<![\w]){name}(?![\w])" if name[-1] != "=" else name, text), name
    examples = re.findall(r"[\w.*/]+=[\w=.*,]+", text)
    assert len(examples) >= 5
    for example in [text.split("Example: ")[1].strip(), *examples]:
        assert (
            parse_rules(example.strip(","))
            .with_base("fp8")
            .assign({"blocks.0.mlp.down": "made", "head": "alone"})
        )


def test_every_unset_setting_is_unset_by_default() -> None:
    # TOML cannot say None, so a field that may be None must be None when it is left out.
    assert all(leaf.default is None for leaf in leaves(Config).values() if leaf.optional)


def test_every_setting_has_a_docstring() -> None:
    # The help of the command line is made of them; a field without one shows up as a bare option.
    source = Path(__import__("scrimp.config.schema", fromlist=["_"]).__file__).read_text()
    for key in leaves(Config):
        field = source.split(f"\n    {key.rpartition('.')[2]}: ", 1)[1]
        assert field.split("\n")[1].startswith('    """'), key


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("stpes", "train.steps"),
        ("train.wieght_decay", "optimizer.weight_decay"),
        ("qqqqqq", None),
        ("seed", "run.seed"),
    ],
)
def test_nearest_key(wrong, right) -> None:
    assert nearest_key(wrong, leaves(Config)) == right


def test_every_known_key_survives_the_loss_of_its_second_letter() -> None:
    known = leaves(Config)
    for key in known:
        section, dot, name = key.rpartition(".")
        if len(name) > 3:
            assert nearest_key(f"{section}{dot}{name[0]}{name[2:]}", known) == key


def test_replace_values_leaves_the_original_alone() -> None:
    config = Config()
    changed = replace_values(config, {"train.steps": 1, "device": "cpu"})
    assert (config, changed.train.steps, changed.device) == (Config(), 1, "cpu")
    assert dataclasses.replace(changed, device="auto", train=config.train) == config
