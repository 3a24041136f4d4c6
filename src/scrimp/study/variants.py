"""The variants of a study: the tables of a file that say what differs between its runs.

Problem  Variants are named one by one, or are all combinations of a grid; both end as settings of `scrimp train`.
Method   Every setting goes through the reader of `scrimp train`. A variant of a grid is called by its values. What is
         the study's own, seeds and folders, is refused. Settings of the command line (`--set`) are a part of the file,
         `[given]`, so that the file in the results' folder says all.
         A variant may need others' runs of its seed: settings name them as run:NAME, and an ensemble or a merge is made
         of them. What a variant needs stands before it in `ordered`.
Checked  tests/study/test_definition.py
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, Literal

from scrimp.config import nearest_word, settings_in
from scrimp.config.write_toml import toml_value
from scrimp.errors import ConfigError

_LONGEST: Final = 80
_NAME: Final = re.compile(rf"[A-Za-z0-9][A-Za-z0-9._=+,-]{{0,{_LONGEST - 1}}}")
MOST_RUNS: Final = 10_000
TRUNK: Final = "trunk"
SEEDS_OF_TRUNKS: Final = 2**32
"""Added to a seed for its trunk, so that the runs that go on read the corpus in another order."""
SEEDS_OF_DRAWS: Final = 2**40
"""Added to a seed for each further draw of a variant."""
_THE_STUDYS: Final = ("run.dir", "run.seed")
CombinedHow = Literal["ensemble", "merge"]
"""Mean of the logits of several models, or one model of the mean of their weights."""
MAY_NAME_RUNS: Final = ("model.weights", "objective.teachers")
"""Settings that may name runs of other variants."""
_RUN: Final = re.compile(r"(?<![^,\s])run:([^,\s]+)")
_MOST_DRAWS: Final = 1000
_OF_VARIANTS: Final = ("name", "draw", "ensemble", "merge")
Settings = Mapping[str, Any]
"""Values of settings by dotted key, as `scrimp train` has them."""


@dataclass(frozen=True)
class Combined:
    """Models of other variants' runs, evaluated together."""

    how: CombinedHow
    members: tuple[str, ...]
    weights: tuple[float, ...]
    """Those of the members in the mean of their weights; equal in an ensemble."""


@dataclass(frozen=True)
class Variant:
    """One of the things that are compared."""

    name: str
    settings: Settings
    """The common settings with its own."""
    draw: int = 0
    """Which other initial weights and order of the data than those of its seed it has; 0: those."""
    combined: Combined | None = None
    """What is evaluated in place of a run of its own; None: it is a run."""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the variants whose runs it needs, each once."""
        if self.combined is not None:
            return self.combined.members
        return tuple(
            dict.fromkeys(one for key in self.naming for one in _RUN.findall(str(self.settings[key])))
        )

    @property
    def naming(self) -> tuple[str, ...]:
        """Settings that name runs of other variants."""
        return tuple(key for key in MAY_NAME_RUNS if _RUN.search(str(self.settings.get(key) or "")))

    def named_in(self, folders: Mapping[str, Path]) -> dict[str, str]:
        """Its settings that name runs, by the folders of these."""
        return {
            key: _RUN.sub(lambda found: str(folders[found[1]]), str(self.settings[key]))
            for key in self.naming
        }


def toml_table(table: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """The table of a key; empty where there is none."""
    value = table.get(key, {})
    if not isinstance(value, dict):
        raise ConfigError(
            f"{key} in {where} is no table", got=shown(value), expected=f"[{key}], with settings below"
        )
    return value


def settings_of_part(table: dict[str, Any], where: str, part: str) -> dict[str, Any]:
    """Settings of runs out of one part of the file."""
    values = settings_in(table, f"{where}, [{part}]")
    for key in _THE_STUDYS:
        if key in values:
            raise ConfigError(
                f"{key} in {where}, [{part}] is the study's own",
                got=shown(values[key]),
                expected="seeds of the study, and folders below the study's",
                do="give seeds at the top of the file"
                if key == "run.seed"
                else "remove it; --out names the folder",
            )
    return values


def toml_of_given(words: Sequence[str], text: str) -> str:
    """Settings that a command line has as key=value, as the part of a file that `scrimp study --set` writes.

    Args:
        text: of the file.

    Raises:
        ConfigError: a word is no key=value, or says again what another one or the file says.
    """
    found: dict[str, str] = {}
    for word in words:
        key, equals, value = (part.strip() for part in word.partition("="))
        key = key.replace("-", "_")
        if not (equals and value and re.fullmatch(r"[a-z0-9_]+(\.[a-z0-9_]+)*", key)):
            raise ConfigError(
                "--set takes a setting and its value", got=word, expected="as train.steps=400, without spaces"
            )
        if any(key == one or key.startswith(f"{one}.") or one.startswith(f"{key}.") for one in found):
            raise ConfigError("--set names a setting twice", got=word, do="leave one of the two out")
        found[key] = _as_toml(value)
    if found and re.search(r"(?m)^\s*\[given", text):
        raise ConfigError(
            "the study has settings of an earlier --set already",
            got="[given] in its file",
            do="change them there, and leave --set out",
        )
    lines = [f"{key} = {value}\n" for key, value in found.items()]
    return "".join(["\n# What scrimp study was told with --set.\n[given]\n", *lines]) if lines else ""


def _as_toml(value: str) -> str:
    """The value as it stands where that is TOML, else as text."""
    try:
        is_toml = set(tomllib.loads(f"value = {value}")) == {"value"}
    except (ValueError, RecursionError):
        is_toml = False
    return value if is_toml else toml_value(value)


def variants_of(
    table: Mapping[str, Any], common: Settings, given: Settings, where: str
) -> tuple[Settings, tuple[Variant, ...]]:
    """The common settings, and the variants that a file names or its grid gives, which have them too.

    Args:
        given: settings that stand in for those of the variants that have them, else for the common ones.
    """
    given_as = [key for key in ("variants", "grid", "descent") if key in table]
    if len(given_as) != 1:
        raise ConfigError(
            f"{where} has {' and '.join(given_as) or 'no variants'}",
            expected="[[variants]], a name and settings each, or [grid] or [descent], a list for each setting",
            do="keep one of them" if given_as else "add one of them",
        )
    listed = given_as == ["variants"]
    own = (
        _of_list(table["variants"], where)
        if listed
        else _of_lists(lists_of(table, given_as[0], where), where)
    )
    further = _further(table["variants"], own, where) if listed else {}
    names = [name for name, _ in own]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"two variants in {where} are called {twice}", do="give each a name of its own")
    has = {key: [settings[key] for _, settings in own if key in settings] for key in given}
    for key, values in has.items():
        if any(value != values[0] for value in values):
            raise ConfigError(
                f"{key} is what {where} compares, and cannot be set",
                got=f"{shown(given[key])}, where variants have {shown(values[0])} and others",
                do="write a study of your own",
            )
    common = {**common, **{key: value for key, value in given.items() if not has[key]}}
    variants = []
    for name, settings in own:
        changed = {key: given.get(key, value) for key, value in settings.items()}
        draw, combined = further.get(name, (0, None))
        variants.append(Variant(name, {**common, **changed}, draw, combined))
    return common, tuple(variants)


def ordered(variants: Sequence[Variant], where: str) -> tuple[Variant, ...]:
    """As they are listed, but after what they need.

    Raises:
        ConfigError: one needs what is no run of the study, or itself.
    """
    known, found = {one.name: one for one in variants}, dict[str, Variant]()

    def add(variant: Variant, path: tuple[str, ...]) -> None:
        for name in variant.needs:
            if name not in known or known[name].combined is not None:
                names = [one.name for one in variants if one.combined is None and "," not in one.name]
                near = nearest_word(name, names)
                raise ConfigError(
                    f"{variant.name} in {where} needs a run that is not there",
                    got=f"{name}, which is evaluated in the place of a run" if name in known else name,
                    expected="another variant that is a run, its name without a comma",
                    do=f"did you mean {near}?" if near else "add the variant",
                )
            if name in path:
                raise ConfigError(
                    f"variants in {where} need one another",
                    got=" of ".join([*path, name]),
                    do="break the circle",
                )
            add(known[name], (*path, name))
        if variant.combined is not None:  # its figure stands at its members' last step
            steps = known[variant.needs[0]].settings.get("train.steps")
            variant = replace(variant, settings={**variant.settings, "train.steps": steps})
        found.setdefault(variant.name, variant)

    for one in variants:
        add(one, (one.name,))
    return tuple(found.values())


def _of_list(value: object, where: str) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(value, list) or not value or not all(isinstance(one, dict) for one in value):
        raise ConfigError(
            f"variants in {where} is no list of tables",
            got=shown(value),
            expected="[[variants]], with a name and settings, once for each",
        )
    found = []
    for number, one in enumerate(value, start=1):
        name = one.get("name")
        if not isinstance(name, str) or _NAME.fullmatch(name) is None:
            raise ConfigError(
                f"variant {number} in {where} has no name that a folder can have",
                got=shown(name) if name is not None else "no name",
                expected="up to 80 letters, digits and . _ = + , - , the first a letter or digit",
            )
        rest = {key: setting for key, setting in one.items() if key not in _OF_VARIANTS}
        found.append((name, settings_of_part(rest, where, f"variants, {name}")))
    return found


def _further(
    tables: Sequence[Mapping[str, Any]], own: Sequence[tuple[str, Settings]], where: str
) -> dict[str, tuple[int, Combined | None]]:
    """By name what listed variants have beside settings: their draw, and what they combine."""
    found = {}
    for one, (name, settings) in zip(tables, own, strict=True):
        draw = one.get("draw", 0)
        if not isinstance(draw, int) or isinstance(draw, bool) or not 0 <= draw <= _MOST_DRAWS:
            raise ConfigError(
                f"draw of {name} in {where} cannot be used",
                got=shown(draw),
                expected=f"0 to {_MOST_DRAWS:,}: which other initial weights and order of the data",
            )
        how = [key for key in ("ensemble", "merge") if key in one]
        if how and (len(how) > 1 or settings or draw):
            raise ConfigError(
                f"{name} in {where} is made of other runs, and has settings of a run of its own",
                got=", ".join([*how, *settings, *(["draw"] if draw else [])]),
                expected=f"a name and {how[0]} alone",
            )
        found[name] = draw, _combined(one[how[0]], how[0], name, where) if how else None
    return found


def _combined(value: object, how: str, name: str, where: str) -> Combined:
    given = list(value) if isinstance(value, list | dict) else []
    names = [one for one in given if isinstance(one, str)]
    weights = list(value.values()) if isinstance(value, dict) else [1] * len(names)
    are_weights = how == "merge" or isinstance(value, list)
    are_weights &= all(type(one) in (int, float) and 0 < one < math.inf for one in weights)
    if names != given or len(names) < 2 or len(set(names)) < len(names) or not are_weights:
        raise ConfigError(
            f"{how} of {name} in {where} cannot be used",
            got=shown(value),
            expected="names of two or more variants, each once"
            + (", or a table of their weights above 0" if how == "merge" else ""),
        )
    return Combined("ensemble" if how == "ensemble" else "merge", tuple(names), tuple(map(float, weights)))


def lists_of(table: Mapping[str, Any], part: str, where: str) -> dict[str, list[Any]]:
    """The values of each setting of [grid] or [descent], settings of one section together.

    Raises:
        ConfigError: a setting has no list, or there are too many combinations.
    """
    lists = _flat(toml_table(table, part, where), where)
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(
                f"{part}.{key} in {where} is no list of values",
                got=shown(values),
                expected=f"{key} = [ ... ]",
            )
        inner = next((one for one in lists if one.startswith(f"{key}.")), None)
        if inner is not None:
            raise ConfigError(
                f"{part}.{key} in {where} is a list of values, and a table with {inner} in it",
                expected="one of the two",
                do=f"remove {key}, or {inner}",
            )
    count = math.prod(len(values) for values in lists.values())
    if not lists or count > MOST_RUNS:
        raise ConfigError(
            f"the {part} in {where} has {count if lists else 0:,} variants", expected=f"1 to {MOST_RUNS:,}"
        )
    return lists


def _of_lists(lists: Mapping[str, list[Any]], where: str) -> list[tuple[str, dict[str, Any]]]:
    """All combinations, the last list's values next to one another."""
    found = []
    for values in itertools.product(*lists.values()):
        chosen = dict(zip(lists, values, strict=True))
        words = ",".join(f"{key.rpartition('.')[2]}={_word(value)}" for key, value in chosen.items())
        found.append((_folder_name(words), settings_of_part(_nested(chosen), where, "combinations")))
    return found


def _folder_name(words: str) -> str:
    """The words as a folder can be called: long ones, or with other letters, end in a hash that tells them apart."""
    name = re.sub(r"[^A-Za-z0-9._=+,-]", "_", words)
    if name == words and len(name) <= _LONGEST:
        return name
    digest = hashlib.sha256(words.encode()).hexdigest()[:8]
    return f"{name[: _LONGEST - len(digest) - 1]}-{digest}"


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _flat(table: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Values by dotted key, of tables within tables."""
    found: dict[str, Any] = {}
    for key, value in table.items():
        name = f"{prefix}{key}"
        part = _flat(value, where, f"{name}.") if isinstance(value, dict) else {name: value}
        twice = sorted(found.keys() & part.keys())
        if twice:
            raise ConfigError(
                f"{where} has {', '.join(twice)} twice",
                got="the name in quotes, and in a table",
                do="keep one of them",
            )
        found |= part
    return found


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Tables within tables, of values by dotted key."""
    found: dict[str, Any] = {}
    for key, value in values.items():
        *path, last = key.split(".")
        inner = found
        for name in path:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return found


def shown(value: object) -> str:
    """A value of the file, as a message shows it."""
    text = json.dumps(value, default=str)
    return text if len(text) <= 80 else text[:77] + "..."


def submissions_of(
    table: Mapping[str, Any], variants: Sequence[Variant], where: str
) -> dict[str, tuple[str, ...]]:
    """What is ranked, by name, with the variants that are its trials: each variant by itself unless the file says.

    Raises:
        ConfigError: trials are no variants, not every variant is one trial, or numbers of trials differ.
    """
    names = [one.name for one in variants]
    given = toml_table(table, "submissions", where)
    if not given:
        return {name: (name,) for name in names}
    for name, trials in given.items():
        if not isinstance(trials, list) or not trials or not all(one in names for one in trials):
            raise ConfigError(
                f"submissions.{name} in {where} is no list of variants",
                got=shown(trials),
                expected=f"some of {', '.join(names)}",
            )
    trials = [one for listed in given.values() for one in listed]
    if sorted(trials) != sorted(names):
        raise ConfigError(
            f"submissions in {where} do not have every variant once",
            got=", ".join(sorted(trials)),
            expected=", ".join(sorted(names)),
        )
    if len({len(listed) for listed in given.values()}) > 1:
        raise ConfigError(
            f"submissions in {where} have different numbers of trials",
            got=", ".join(f"{name} {len(listed)}" for name, listed in given.items()),
            expected="as many for each: whoever tries more often finds more",
        )
    return {name: tuple(listed) for name, listed in given.items()}
