"""Command line to command: tyro parses, and what it refuses is explained in Scrimp's words.

tyro makes the options from the fields of a command's dataclass, so `Config` is not written down
a second time here. tyro alone decides what is accepted. Only when it has refused does
`explain` look for the first offending word, so that a mistake on the command line reads like the same
mistake in a file: the option, what was given, what is allowed, the nearest known option.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import itertools
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, Union

import tyro
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from scrimp.config import leaves, nearest_key, nearest_word
from scrimp.config.elsewhere import answer_for, answer_for_section
from scrimp.config.fields import NUMBER_OR_PATH, Leaf
from scrimp.config.read_toml import expand_home
from scrimp.errors import ConfigError

CommandT = TypeVar("CommandT")

_UNSET = ("unset", "none")
_FLAGS = {"true": True, "false": False}
_UNNAMED = ("config.", "sampling.")
"""Fields of commands whose own fields are options without a prefix."""


def parse(
    command: type[CommandT], argv: Sequence[str], *, prog: str, default: CommandT | None = None
) -> CommandT:
    """The command with the values given on the command line.

    Args:
        prog: how the user called it, `scrimp train`.
        default: values for what is not given; the command's own defaults for None.

    Raises:
        ConfigError: the command line is not understood.
        SystemExit: `--help` was asked for and printed.
    """
    refusal = io.StringIO()
    options: dict[str, Any] = {} if default is None else {"default": default}
    try:
        with contextlib.redirect_stderr(refusal):
            parsed = tyro.cli(
                command,
                args=list(argv),
                prog=prog,
                registry=_registry(),
                config=(tyro.conf.PositionalMetavarFromFieldName,),
                **options,
            )
            return typing.cast(CommandT, parsed)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise explain(command, argv, prog) or ConfigError(
            f"{prog}: the command line is not understood",
            got=" ".join(refusal.getvalue().split()),
            do=f"see {prog} --help",
        ) from None


def flags_of(command: type[Any]) -> dict[str, Leaf]:
    """Every option and positional of a command by its dotted key; `Config`'s and `Sampling`'s without a prefix."""
    found, renamed = {}, renamed_options(command)
    for key, leaf in leaves(command).items():
        unnamed = next((prefix for prefix in _UNNAMED if key.startswith(prefix)), "")
        short = renamed.get(key, key.removeprefix(unnamed))
        found[short] = dataclasses.replace(leaf, key=short)
    return found


def renamed_options(command: type[Any]) -> dict[str, str]:
    """Fields whose option has another name, which `tyro.conf.arg` gives, and that name."""
    hints = typing.get_type_hints(command, include_extras=True)
    names = {
        field.name: next(
            (word for one in _metadata(hints[field.name]) if (word := getattr(one, "name", ""))), ""
        )
        for field in dataclasses.fields(command)
    }
    return {field: name for field, name in names.items() if name}


def positionals_of(command: type[Any]) -> tuple[str, ...]:
    """Names of a command's positional arguments, in order."""
    hints = typing.get_type_hints(command, include_extras=True)
    return tuple(
        field.name
        for field in dataclasses.fields(command)
        if tyro.conf.Positional in _metadata(hints[field.name])
    )


def _metadata(hint: Any) -> tuple[Any, ...]:
    """What `Annotated` says beside a type."""
    return getattr(hint, "__metadata__", ())


def option(key: str) -> str:
    """A dotted key as the command line spells it."""
    return "--" + key.replace("_", "-")


def given_keys(argv: Sequence[str], known: Mapping[str, Leaf]) -> frozenset[str]:
    """Dotted keys that an accepted command line sets."""
    names = (word[2:].partition("=")[0] for word in argv if word.startswith("--"))
    return frozenset(key for name in names if (key := _key_of(name, known)) is not None)


def refuse_empty_paths(argv: Sequence[str], command: type[Any], prog: str) -> None:
    """Refuse an empty text where a path belongs: `Path("")` is the working folder.

    Raises:
        ConfigError: naming the option or the argument.
    """
    flags = flags_of(command)
    for before, word in itertools.pairwise(("", *argv)):
        if word and not (word.startswith("--") and word.endswith("=")):
            continue
        name = word.removesuffix("=") or before
        key = _key_of(name[2:], flags) if name.startswith("--") else None
        if key is None or flags[key].kind is Path:
            what = f"{prog}: an argument" if key is None else option(key)
            raise ConfigError(f"{what} is empty", expected="a path", do=f"see {prog} --help")


def explain(command: type[Any], argv: Sequence[str], prog: str) -> ConfigError | None:
    """The first thing wrong with a command line that tyro refused; None if it is not found."""
    flags, positionals = flags_of(command), positionals_of(command)
    options = {key: leaf for key, leaf in flags.items() if key not in positionals}
    seen: set[str] = set()
    loose: list[str] = []
    words = iter(argv)
    for word in words:
        if not word.startswith("-") or _is_number(word) or word == "-":
            loose.append(word)
            continue
        name, equals, value = word.lstrip("-").partition("=")
        key = _key_of(name, options) if word.startswith("--") else None
        if key is None:
            return _unknown_option(word.partition("=")[0], name, options, prog)
        seen.add(key)
        leaf = options[key]
        if leaf.kind is bool and not leaf.optional:
            if equals:
                return ConfigError(
                    f"{option(key)} takes no value",
                    got=repr(value),
                    expected=f"{option(key)} or {option(_negated(key))}",
                )
            continue
        text = value if equals else next(words, None)
        if text is None or (not equals and text.startswith("--")):
            return ConfigError(f"{option(key)} has no value", expected=leaf.expected)
        if (problem := _check_text(leaf, text)) is not None:
            return problem
    return _check_loose(loose, positionals, flags, prog) or _check_missing(options, seen, prog)


def _check_loose(
    loose: Sequence[str], positionals: Sequence[str], flags: Mapping[str, Leaf], prog: str
) -> ConfigError | None:
    if len(loose) > len(positionals):
        return ConfigError(
            f"{prog}: unexpected argument {loose[len(positionals)]!r}",
            got=f"{len(loose)} arguments that belong to no option",
            expected=" ".join(name.upper() for name in positionals) or "options only",
            do=f"see {prog} --help",
        )
    for name in positionals[len(loose) :]:
        if flags[name].default is dataclasses.MISSING:
            return ConfigError(
                f"{prog}: {name.upper()} is missing",
                expected=f"{prog} {' '.join(name.upper() for name in positionals)}",
                do=f"see {prog} --help",
            )
    return None


def _check_missing(options: Mapping[str, Leaf], seen: set[str], prog: str) -> ConfigError | None:
    for key, leaf in options.items():
        if key not in seen and leaf.default is dataclasses.MISSING:
            return ConfigError(f"{prog}: {option(key)} is missing", do=f"see {prog} --help")
    return None


def _unknown_option(word: str, name: str, options: Mapping[str, Leaf], prog: str) -> ConfigError:
    what, see = f"{prog}: unknown option {word}", f"see {prog} --help"
    answer = answer_for(name, options)
    near = None if answer else nearest_key(name, options)
    if near is None:
        answer = answer or answer_for_section(name, options)
    if answer is not None and answer.key is not None:
        note = f" ({answer.note})" if answer.note else ""
        return ConfigError(
            what,
            expected=f"Scrimp's name for it, {option(answer.key)}",
            do=f"write {option(answer.key)} instead{note}",
        )
    if answer is not None:
        return ConfigError(what, expected="a known option; Scrimp has none for this", do=answer.note)
    if near is not None:
        expected = f"a known option; the nearest is {option(near)}"
        return ConfigError(what, expected=expected, do=f"write {option(near)} instead, or {see}")
    return ConfigError(what, expected="a known option", do=see)


def _check_text(leaf: Leaf, text: str) -> ConfigError | None:
    if leaf.optional and text.lower() in _UNSET:
        return None
    try:
        _converted(leaf.kind, leaf.choices, text)
    except ValueError:
        near = nearest_word(text, leaf.choices)
        return ConfigError(
            f"{option(leaf.key)} cannot take this value",
            got=repr(text),
            expected=f"one of {leaf.expected}" if leaf.choices else leaf.expected,
            do=f"did you mean {near}?" if near else None,
        )
    return None


def _converted(kind: Any, choices: Sequence[str], text: str) -> Any:
    if choices:
        if text not in choices:
            raise ValueError(text)
        return text
    if kind is bool:
        if text.lower() not in _FLAGS:
            raise ValueError(text)
        return _FLAGS[text.lower()]
    if kind == NUMBER_OR_PATH:
        return float(text) if _is_number(text) else Path(text)
    return kind(text)


def _registry() -> ConstructorRegistry:
    """How tyro reads a setting that may be unset: INT instead of {None}|INT, and true as in TOML."""
    registry = ConstructorRegistry()

    @registry.primitive_rule
    def optional(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        kinds = typing.get_args(info.type)
        if typing.get_origin(info.type) not in (Union, types.UnionType) or type(None) not in kinds:
            return None
        (kind,) = (kind for kind in kinds if kind is not type(None))

        def read(words: list[str]) -> Any:
            return None if words[0].lower() in _UNSET else _converted(kind, (), words[0])

        def write(value: Any) -> list[str]:
            return [_UNSET[0] if value is None else str(value).lower() if kind is bool else str(value)]

        return PrimitiveConstructorSpec(
            nargs=1,
            metavar="{true,false}" if kind is bool else kind.__name__.upper(),
            instance_from_str=read,
            is_instance=lambda value: value is None or isinstance(value, kind),
            str_from_instance=write,
        )

    return registry


def _key_of(name: str, known: Mapping[str, Leaf]) -> str | None:
    """The dotted key that an option's name stands for, `data.no-mask-documents` included."""
    key = name.replace("-", "_")
    if key in known:
        return key
    head, dot, last = key.rpartition(".")
    positive = head + dot + last.removeprefix("no_")
    return positive if positive in known and known[positive].kind is bool else None


def _negated(key: str) -> str:
    head, dot, last = key.rpartition(".")
    return f"{head}{dot}no_{last}"


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def expand_paths(values: Mapping[str, Any]) -> dict[str, Path]:
    """The paths among some settings that begin with ~, with the home folder in its place."""
    tilde = {key: value for key, value in values.items() if isinstance(value, Path) and str(value)[:1] == "~"}
    return {key: expand_home(option(key), path) for key, path in tilde.items()}
