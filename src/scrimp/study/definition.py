"""What a study is: variants of a run, seeds, what is compared, and how. A TOML file, or the name of one that ships.

A file has the common settings of all runs, and either a list of variants or a grid::

    about = "What does the learning rate do?"
    seeds = 3                        # or a list, [0, 1, 2]
    control = "lr=0.001"             # what the others are compared with; unset: the first
    figure = "held_out_loss"         # or training_loss, tokens_per_second; mean_source_loss, of runs whose data.mix has
                                     # other weights; steps_to_target, with target = 5.2

    [settings]                       # as `scrimp train` has them
    model.preset = "llama-3m"
    train.steps = 240

    [grid]                           # all combinations of these
    optimizer.lr = [1e-3, 3e-3]

    [descent]                        # or, instead of a grid, those on the way to the best (`scrimp.study.descent`)
    optimizer.lr = [1e-3, 3e-3]

    [[variants]]                     # or one by one
    name = "fp8"
    precision = "fp8"

    [trunk]                          # all runs of a seed go on from one run, which is made before them
    train.steps = 300

Problem  A comparison holds only where nothing else differs. A file must not be able to say otherwise by accident.
Method   All runs read one corpus: `data` belongs to the common settings (with mean_source_loss its sources, not their
         weights). The seed is the study's, the folder too. Where losses are compared, what they are measured on
         (`evaluation`, `train.sequence`) is common. Every setting goes through the reader of `scrimp train`, so that a
         file cannot say what a run would refuse.
         With a trunk, runs begin with its weights and its optimizer's states. Each seed has a trunk of its own: pairs
         are independent, and an interval over them speaks of all trunks, not of one.
Limits   A run is one process. Settings that only fail together are found by the run itself.
Checked  tests/study/test_definition.py
"""

from __future__ import annotations

import itertools
import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, TypeGuard

from scrimp.config import (
    Config,
    Range,
    check_range,
    leaves,
    nearest_key,
    nearest_word,
)
from scrimp.config.read_toml import MAX_FILE_BYTES, convert, expand_home
from scrimp.errors import ConfigError
from scrimp.files import read_bounded
from scrimp.study.checks import check_control, check_whole
from scrimp.study.comparisons import IntervalName, share_of_error
from scrimp.study.descent import Descent
from scrimp.study.rows import digest_of
from scrimp.study.variants import (
    MOST_RUNS,
    SEEDS_OF_DRAWS,
    SEEDS_OF_TRUNKS,
    TRUNK,
    Settings,
    Variant,
    lists_of,
    ordered,
    settings_of_part,
    shown,
    submissions_of,
    toml_of_given,
    toml_table,
    variants_of,
)

RecordedFigure = Literal["held_out_loss", "mean_source_loss", "training_loss", "tokens_per_second"]
"""What a row has of every run."""
FigureName = Literal[RecordedFigure, "steps_to_target"]
RankedBy = Literal["figure", "early-signal"]
_SHIPPED: Final = Path(__file__).parent / "shipped"
_CONTAINERS: Final = (
    "seeds", "settings", "variants", "grid", "descent", "halving", "trunk", "submissions", "given",
)  # fmt: skip
_RANGES: Final = {
    "confidence": Range(0.5, 1 - 1e-9),
    "power": Range(0.05, 0.999, above=True),
    "scatter": Range(0, 1e12, above=True),
    "matters": Range(0, 1e12, above=True),
    "target": Range(-1e12, 1e12),
    "threads": Range(1, 4096),
}
_SIZES_OF_BATCHES: Final = ("train.batch_tokens", "train.sequence")


@dataclass(frozen=True)
class Halving:
    """After each of `rounds` rounds one of `factor` variants goes on; the rounds grow by that factor.

    A round ends at the same share of each variant's steps, so that runs of other batch sizes may have read as much.
    """

    factor: int
    rounds: int
    by: RankedBy = "figure"
    """Which go on: those with the best figure, or those that `scrimp.study.early` finds best."""

    def steps(self, last: int) -> list[int]:
        """The step at which each round ends, the last one's being the run's."""
        return [last // self.factor**left for left in range(self.rounds, -1, -1)]


@dataclass(frozen=True, kw_only=True)
class _Head:
    """The keys of a file that are one value each."""

    about: str = ""
    """The question, in a sentence."""
    recipe: str = ""
    """The recipe (`scrimp.recipes`) that says what its results mean."""
    control: str = ""
    """The variant that the others are compared with. Unset: the first."""
    figure: FigureName = "held_out_loss"
    """What is compared."""
    target: float | None = None
    """The held-out loss that steps_to_target is to reach."""
    held_out_of: str = ""
    """The workload, a study of steps_to_target, of which this one is a held-out variant. Empty: none."""
    interval: IntervalName = "t"
    confidence: float = 0.95
    """Probability that an interval holds the true difference."""
    power: float = 0.8
    """Probability with which the smallest visible difference is seen."""
    scatter: float | None = None
    """Standard deviation of a paired difference, where earlier runs tell it."""
    matters: float | None = None
    """Smallest difference that matters: where the whole interval is nearer to zero, the verdict is `same`."""
    all_together: bool = False
    """`confidence` is that of all comparisons together, instead of each."""
    threads: int | None = None
    """Threads of each run. Unset: the cores, shared among all runs; of runs that are timed, all cores."""


@dataclass(frozen=True, kw_only=True)
class Study(_Head):
    """A study that was read and checked."""

    name: str
    text: str
    """The TOML text that it was read from."""
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    halving: Halving | None = None
    descent: Descent | None = None
    """Which of the variants are run, if these are all combinations of its values."""
    trunk: Variant | None = None
    """What all runs of a seed go on from; None: they begin with weights of their own."""
    submissions: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """What `scrimp score` ranks, by name: the variants that are its trials."""

    @property
    def runs_of_a_seed(self) -> list[Variant]:
        """All variants, and the trunk before them."""
        return [*([] if self.trunk is None else [self.trunk]), *self.variants]

    @property
    def runs(self) -> list[Variant]:
        """All variants that train."""
        return [one for one in self.variants if one.combined is None]

    @property
    def is_timed(self) -> bool:
        """Whether runs have to be alone on their machine, since what is compared is their speed."""
        return self.figure == "tokens_per_second"

    @property
    def trunk_has_own_data(self) -> bool:
        """Whether runs go on from a model of another text: they fine-tune it."""
        key = "data.source"
        return self.trunk is not None and self.trunk.settings.get(key) != self.variants[0].settings.get(key)

    @property
    def recorded_figure(self) -> RecordedFigure:
        """The figure that a row has to have: steps to a target are read from its evaluations."""
        return "held_out_loss" if self.figure == "steps_to_target" else self.figure

    @property
    def confidence_of_each(self) -> float:
        """Confidence of each comparison by itself, at the first look at it."""
        if not self.all_together:
            return self.confidence
        return share_of_error(self.confidence, len(self.others))

    def recorded_figure_of(self, variant: Variant) -> RecordedFigure:
        """The figure that a variant's row has to have: a trunk with a text of its own has no mixture's sources."""
        return "held_out_loss" if variant is self.trunk and self.trunk_has_own_data else self.recorded_figure

    @property
    def batches(self) -> Literal["same", "by model", "other"]:
        """Whether runs of one seed have the same batches; by model: only where their models ask for as large ones."""
        runs = self.runs
        sizes = {tuple(one.settings.get(key) for key in _SIZES_OF_BATCHES) for one in runs}
        reads = {(one.draw, one.settings.get("data.tokens"), one.settings.get("data.mix")) for one in runs}
        if len(sizes) > 1 or len(reads) > 1:
            return "other"
        models = {
            json.dumps(
                {k: v for k, v in one.settings.items() if k.startswith("model.")}, default=str, sort_keys=True
            )
            for one in runs
        }
        return "by model" if None in sizes.pop() and len(models) > 1 else "same"

    @property
    def shares_steps(self) -> bool:
        """Whether all variants run as many steps."""
        return len({one.settings.get("train.steps") for one in self.variants}) == 1

    @property
    def others(self) -> list[Variant]:
        """All variants but the control."""
        return [one for one in self.variants if one.name != self.control]

    def with_seeds(self, count: int) -> Study:
        """The same with so many seeds: its own first, then further ones."""
        more = itertools.chain(self.seeds, (one for one in itertools.count() if one not in self.seeds))
        found = replace(self, seeds=tuple(itertools.islice(more, count)))
        check_whole(found, self.name)
        return found

    def settings_of(self, variant: Variant, seed: int) -> dict[str, Any]:
        """All settings of one run but its folder, and its trunk's."""
        if variant is self.trunk:
            return dict(variant.settings) | {"run.seed": seed + SEEDS_OF_TRUNKS}
        settings = dict(variant.settings) | {"run.seed": seed + variant.draw * SEEDS_OF_DRAWS}
        if variant.naming:  # the tokenizer is that of the runs that it names
            settings.pop("data.vocab_size", None)
            if settings.get("data.tokenizer") == "bpe":
                del settings["data.tokenizer"]
        if self.halving is not None:
            first = self.halving.steps(settings["train.steps"])[0]
            for key in ("evaluation.every", "checkpoint.every"):
                settings.setdefault(key, first)
        return settings

    def digest(self, variant: Variant, seed: int) -> str:
        """A digest of all that decides a run: its settings, and those of its trunk and of the runs that it needs."""
        settings = self.settings_of(variant, seed)
        if self.trunk is not None and variant is not self.trunk:
            settings[TRUNK] = digest_of(self.settings_of(self.trunk, seed))
        if variant.combined is not None:
            settings["combined"] = variant.combined.how
            if len(set(variant.combined.weights)) > 1:
                settings["weights"] = variant.combined.weights
        for name in variant.needs:
            settings[f"run:{name}"] = self.digest(self.named(name), seed)
        return digest_of(settings)

    def step_of_control(self, variant: str, step: int) -> int:
        """Where the control stands when a variant's round of halving ends at a step."""
        steps, of_control = (self.named(name).settings["train.steps"] for name in (variant, self.control))
        return step * int(of_control) // int(steps)

    def ends_in_words(self, halving: Halving) -> list[str]:
        """Where rounds end, as a step of all variants or as a share of each one's."""
        if self.shares_steps:
            return [f"step {end:,}" for end in halving.steps(self.variants[0].settings["train.steps"])]
        shares = [halving.factor**left for left in range(halving.rounds, 0, -1)]
        return [*(f"1/{share} of their steps" for share in shares), "their end"]

    def origin_of(self, variant: Variant) -> Variant:
        """The run that a chain of runs which go on from one another begins with."""
        while "model.weights" in variant.naming:
            variant = self.named(variant.needs[0])
        return variant

    def named(self, name: str) -> Variant:
        """The variant of a name."""
        return next(one for one in self.variants if one.name == name)


def shipped_studies() -> tuple[str, ...]:
    """Names of the studies that ship."""
    return tuple(sorted(_shipped()))


def _shipped() -> dict[str, Path]:
    return {file.stem: file for file in _SHIPPED.rglob("*.toml")}


def load_study(source: str, given: Sequence[str] = (), *, name: str | None = None) -> Study:
    """A study by its file, or by the name of one that ships.

    Args:
        name: of the study. None: the file's.
        given: settings of runs as key=value, in the place of the file's; of the trunk as trunk.key=value; target=value.

    Raises:
        ConfigError: there is none, or it cannot be used; with file, key, what was got and what is expected.
    """
    file, names = expand_home("the study", Path(source)), shipped_studies()
    if source in names and not file.is_file():
        file = _shipped()[source]
    elif not file.suffix and not file.exists():
        near = nearest_word(source, names)
        raise ConfigError(
            f"there is no study {source!r}",
            expected=f"a TOML file, a folder of results, or one of {', '.join(names)}",
            do=f"did you mean {near}?" if near else "check the path",
        )
    content = read_bounded(
        file,
        error=ConfigError,
        do="name a TOML file, or a study that ships: " + ", ".join(names),
        at_most=MAX_FILE_BYTES,
    )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ConfigError(f"{file} is not UTF-8 text", expected="a study as TOML") from None
    return parse_study(text + toml_of_given(given, text), name=name or file.stem, where=str(file))


def parse_study(text: str, *, name: str, where: str) -> Study:
    """A study from TOML text.

    Args:
        name: of the study.
        where: of the text, in messages.
    """
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"{where} is not valid TOML",
            got=str(error) or type(error).__name__,
            expected="a study: seeds = 3, [settings], and [[variants]], [grid] or [descent]",
            do="correct that line",
        ) from None
    head = _read_head(table, where)
    written = settings_of_part(toml_table(table, "settings", where), where, "settings")
    told = toml_table(table, "given", where)
    of_trunk = settings_of_part(toml_table(told, TRUNK, where), where, f"given.{TRUNK}")
    if "target" in told:
        head["target"] = _head_value("target", told["target"], where)
    rest = {key: value for key, value in told.items() if key not in (TRUNK, "target")}
    given = settings_of_part(rest, where, "given")
    common, variants = variants_of(table, written, given, where)
    trunk = _trunk(table, common, of_trunk, where)
    if trunk is not None:
        variants = tuple(_after_trunk(one, trunk) for one in variants)
    descent = Descent(lists_of(table, "descent", where)) if "descent" in table else None
    first = variants[0 if descent is None else descent.number(descent.start)].name
    head["control"] = head.get("control") or first
    check_control(head["control"], variants, where)
    variants = ordered(variants, where)
    found = Study(
        name=name,
        text=text,
        seeds=_seeds(table.get("seeds", 3), where),
        variants=variants,
        halving=_halving(table, where),
        descent=descent,
        trunk=trunk,
        submissions=submissions_of(table, variants, where),
        **head,
    )
    check_whole(found, where)
    return found


# -- parts of the file -------------------------------------------------------------------------


def _read_head(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    known = leaves(_Head)
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key in _CONTAINERS:
            continue
        if key not in known:
            raise _unknown(key, [*known, *_CONTAINERS], where)
        values[key] = _head_value(key, value, where)
    return values


def _head_value(key: str, value: object, where: str) -> Any:
    found = convert(leaves(_Head)[key], value, where)
    if key in _RANGES:
        check_range(f"{key} in {where}", found, _RANGES[key])
    return found


def _unknown(key: str, known: Sequence[str], where: str) -> ConfigError:
    near, setting = nearest_word(key, known), nearest_key(key, leaves(Config))
    do = f"did you mean {near}?" if near else f"remove {key}"
    if setting is not None and (near is None or setting.rpartition(".")[2] == key):
        do = f"write {setting} below [settings]: settings of the runs belong there"
    return ConfigError(f"unknown key {key} in {where}", expected=f"one of {', '.join(known)}", do=do)


def _seeds(value: object, where: str) -> tuple[int, ...]:
    given: object = list(range(min(value, MOST_RUNS + 1))) if _is_count(value) else value
    seeds = [one for one in given if _is_count(one, 0)] if isinstance(given, list) else []
    if given != seeds or not seeds or len(set(seeds)) < len(seeds) or len(seeds) > MOST_RUNS:
        raise ConfigError(
            f"seeds in {where} cannot be used",
            got=shown(value),
            expected=f"how many, 1 to {MOST_RUNS:,}, or a list of different ones such as [0, 1, 2]",
        )
    return tuple(seeds)


def _is_count(value: object, least: int = 1) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= 2**63 - 1


def _trunk(table: Mapping[str, Any], common: Settings, given: Settings, where: str) -> Variant | None:
    if TRUNK not in table:
        if given:
            raise ConfigError(f"{where} has no trunk", got=f"settings of one: {', '.join(given)}")
        return None
    own = settings_of_part(toml_table(table, TRUNK, where), where, TRUNK) | dict(given)
    gone = ["data.mix"] if "data.source" in own else []
    if own.get("objective.name", common.get("objective.name")) != common.get("objective.name"):
        gone.append("data.chat_template")  # it may be of text, which has none
    return Variant(TRUNK, {**{key: one for key, one in common.items() if key not in gone}, **own})


def _after_trunk(variant: Variant, trunk: Variant) -> Variant:
    """Without the weights that its trunk begins with, and the size of the vocabulary, which is the trunk's."""
    gone = [
        key
        for key in ("model.weights", "data.vocab_size")
        if key in variant.settings and variant.settings[key] == trunk.settings.get(key)
    ]
    return replace(
        variant, settings={name: one for name, one in variant.settings.items() if name not in gone}
    )


def _halving(table: Mapping[str, Any], where: str) -> Halving | None:
    if "halving" not in table:
        return None
    values = toml_table(table, "halving", where)
    known = leaves(Halving, "halving.")
    for key in values:
        if f"halving.{key}" not in known:
            raise _unknown(f"halving.{key}", list(known), where)
    found = {"factor": 2, "rounds": 1} | values
    if "by" in values:
        convert(known["halving.by"], values["by"], where)
    for key, least, most in (("factor", 2, 100), ("rounds", 1, 20)):
        if not _is_count(found[key], 0):
            raise ConfigError(
                f"halving.{key} in {where} has the wrong type",
                got=shown(found[key]),
                expected="a whole number",
            )
        check_range(f"halving.{key} in {where}", found[key], Range(least, most))
    return Halving(**found)
