"""Settings under their earlier names: files are read, command lines are told the new name."""

from __future__ import annotations

import pytest

from scrimp.cli.commands import Train
from scrimp.cli.parse import explain, option
from scrimp.config import Config, leaves, parse_config, reasons_in, replace_values, to_toml
from scrimp.config.renamed import REMOVED, RENAMED
from scrimp.errors import ConfigError

KNOWN = leaves(Config)


def test_every_name_was_one_and_means_one_that_is() -> None:
    assert not RENAMED.keys() & KNOWN.keys()
    assert set(RENAMED.values()) <= KNOWN.keys()
    assert len(set(RENAMED.values())) == len(RENAMED)


def test_a_file_of_before_reads_as_one_of_now() -> None:
    config = replace_values(Config(), {"optimizer.lr": 0.25, "schedule.name": "wsd", "checkpoint.every": 7})
    before = '[train]\nlr = 0.25  # by hand\nschedule = "wsd"\ncheckpoint_every = 7\n'
    assert replace_values(Config(), parse_config(before)) == config
    assert reasons_in(before, config) == {"optimizer.lr": "by hand"}
    assert replace_values(Config(), parse_config(to_toml(config))) == config


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_a_command_line_is_told_the_new_name(old: str, new: str) -> None:
    error = explain(Train, [option(old), "1"], "scrimp train")
    assert error is not None
    assert f"write {option(new)} instead" in (error.do or "")


def test_a_file_with_both_names_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"train\.lr in .* is the old name of optimizer\.lr"):
        parse_config("[train]\nlr = 0.1\n[optimizer]\nlr = 0.2\n")


def test_a_wrong_value_is_refused_by_the_name_that_stands_in_the_file() -> None:
    with pytest.raises(ConfigError, match=r"^train\.lr in my\.toml has the wrong type"):
        parse_config("[train]\nlr = 'fast'\n", where="my.toml")


@pytest.mark.parametrize("key", REMOVED)
def test_a_setting_that_is_gone_is_passed_over_in_files_and_answered_on_the_command_line(key: str) -> None:
    section, _, name = key.rpartition(".")
    assert key not in KNOWN
    for value in ("false", "true"):
        assert parse_config(f"[{section}]\n{name} = {value}\n") == {}
    error = explain(Train, [option(key), "true"], "scrimp train")
    assert error is not None
    assert error.do == REMOVED[key]
