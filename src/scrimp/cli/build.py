"""From the words of a command line to a command, and its execution.

`train` and `plan` have a FILE, or a recipe, whose values are the defaults of their options; `launch` takes another
command as its last words. What is no command, and a word that became FILE by mistake, is refused with what was probably
meant.
"""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from pathlib import Path

from scrimp import user_code
from scrimp.cli.advice import in_words_of
from scrimp.cli.commands import COMMANDS, Command, Launch, Plan, Train
from scrimp.cli.parse import expand_paths, flags_of, given_keys, option, parse, refuse_empty_paths
from scrimp.cli.staged import in_stages
from scrimp.config import (
    Config,
    check_values,
    flatten,
    leaves,
    nearest_key,
    nearest_word,
    read_config,
    replace_values,
    with_command_line,
)
from scrimp.config.elsewhere import answer_for
from scrimp.config.stages import Settings
from scrimp.errors import ConfigError, ScrimpError, typed
from scrimp.recipes import is_recipe, settings_file


def build(name: str, words: Sequence[str]) -> tuple[Command, frozenset[str]]:
    """The command that the words after its name describe, and the dotted keys that the user set.

    Raises:
        ConfigError: an option, the file, or a value is wrong.
        SystemExit: `--help` was asked for and printed.
    """
    kind, prog = COMMANDS[name], f"scrimp {name}"
    if kind is Launch:
        words = _with_one_command(words)
    refuse_empty_paths(words, kind, prog)
    if kind is Train or kind is Plan:
        return _build_configured(kind, words, prog)
    return parse(kind, words, prog=prog), given_keys(words, flags_of(kind))


def carry_out(name: str, command: Command, given: frozenset[str]) -> int:
    """Execute a command that was built; its errors are in its own words."""
    try:
        with user_code.trusting(getattr(command, "trust_code", False)):
            return command.execute(given)
    except ScrimpError as error:
        raise in_words_of(name, COMMANDS[name], error) from None


def unknown_command(words: Sequence[str]) -> ConfigError:
    """The refusal of a command that there is not."""
    wanted = words[0]
    if list(words[:2]) == ["data", "verify"]:
        return ConfigError(
            "unknown command 'data verify'",
            expected="scrimp verify, of corpora, runs, checkpoints and exported models",
            do=f"write {typed('verify', *(words[2:] or ['FOLDER']))}",
        )
    if wanted.startswith("-"):
        return ConfigError(
            f"option {wanted} before a command",
            expected="scrimp COMMAND, then its options",
            do=f"write `scrimp train {wanted} ...` to train",
        )
    near = nearest_word(wanted, list(COMMANDS))
    return ConfigError(
        f"unknown command {wanted!r}",
        expected=f"one of {', '.join(COMMANDS)}",
        do=f"did you mean `scrimp {near}`?" if near else "see scrimp --help",
    )


def _with_one_command(words: Sequence[str]) -> list[str]:
    """The words of `scrimp launch`, with the command and all that follows it as one."""
    at = 0
    while at < len(words) and words[at].startswith("-"):
        at += 1 if "=" in words[at] or words[at] in ("-h", "--help") else 2
    rest = words[at:]
    return [*words[:at], *([shlex.join(rest)] if rest else [])]


def _build_configured(
    kind: type[Train] | type[Plan], words: Sequence[str], prog: str
) -> tuple[Command, frozenset[str]]:
    """Parse once to learn which FILE, and if there is one, again with its values as the options' defaults."""
    quiet = [word for word in words if word not in ("-h", "--help")]
    try:
        command = parse(kind, quiet, prog=prog)
    except ConfigError:
        if len(quiet) == len(words):
            raise
        command = kind()  # a mistake beside --help: the help answers it
    in_file, stages = frozenset[str](), tuple[Settings, ...]()
    if command.file is not None or len(quiet) < len(words):
        file = command.file
        if file is not None:
            if not is_recipe(str(file)):
                _check_is_file(str(file), words, prog)
            file = settings_file(file)
        from_file, in_file, stages = read_config(file)
        command = parse(kind, words, prog=prog, default=kind(config=from_file))
    given = given_keys(words, leaves(Config))
    values = flatten(command.config)
    expanded = expand_paths({key: values[key] for key in given})
    config = replace_values(command.config, expanded)
    command = dataclasses.replace(command, config=config)
    if stages:  # whose values are checked together with these
        return in_stages(command, with_command_line(config, in_file | given, stages, given)), in_file | given
    check_values(config)
    return command, in_file | given


def _check_is_file(file: str, words: Sequence[str], prog: str) -> None:
    """Catch words that became FILE by mistake: `steps=5`, or a value after an on/off option."""
    if Path(file).exists():
        return
    for word, after in itertools.pairwise((*words, "")):
        if word.startswith("--") and (word.endswith(f"={file}") or after == file):
            switch = word.partition("=")[0]
            raise ConfigError(
                f"{switch} takes no value",
                got=repr(file),
                expected=f"{switch} alone; its opposite begins with no-, as --data.no-mask-documents",
                do=f"remove {file!r}; if it was meant as the configuration file: it does not exist",
            )
    key, equals, value = file.partition("=")
    answer = answer_for(key, leaves(Config)) if equals else None
    near = answer.key if answer else nearest_key(key, leaves(Config)) if equals else None
    if near is not None:
        raise ConfigError(
            f"{prog}: unexpected argument {file!r}",
            expected=f"an option; the nearest is {option(near)}",
            do=f"write {option(near)} {value}",
        )
