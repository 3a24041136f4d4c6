"""What only the parts of a study together can break: refused before anything runs.

Checked  tests/study/test_definition.py
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from scrimp.config import Config, cadence, check_values, nearest_word, ranks_of, replace_values
from scrimp.config.mixture import mixed_sources
from scrimp.config.optimizers import AUTO
from scrimp.errors import ConfigError, ScrimpError
from scrimp.study.comparisons import pairs_for_bootstrap
from scrimp.study.rows import MOST_POINTS
from scrimp.study.variants import MOST_RUNS, SEEDS_OF_DRAWS, SEEDS_OF_TRUNKS, TRUNK, Variant, shown

if TYPE_CHECKING:
    from scrimp.study.definition import Halving, Study

_RECORDS: Final = {"distill": Config().objective.name}
"""Objectives whose recorded loss is another one's."""
_MAY_DIFFER: Final = ("data.tokens",)
"""How much of a common corpus a variant reads: what is held out stays the same."""
_ONLY_COMMON: Final = ("data",)
_ONLY_COMMON_OF_LOSSES: Final = ("data", "evaluation", "train.sequence", "objective.name")
_ONLY_COMMON_OF_TRUNKS: Final = ("model",)
_ONLY_COMMON_OF_SIGNALS: Final = ("model", "adapter", "objective")
"""Norms of gradients of other losses or weights have nothing in common."""
_OF_COMBINED: Final = ("held_out_loss", "mean_source_loss")
"""Figures that models which are evaluated together have."""
_ONLY_COMMON_OF_TARGETS: Final = ("model", "train.steps", "train.batch_tokens")


def check_control(control: str, variants: Sequence[Variant], where: str) -> None:
    names = [one.name for one in variants]
    if control not in names:
        near = nearest_word(control, names)
        raise ConfigError(
            f"control in {where} is none of the variants",
            got=repr(control),
            expected=f"one of {', '.join(names)}",
            do=f"did you mean {near}?" if near else None,
        )


def check_whole(study: Study, where: str) -> None:
    """What only the parts together can break."""
    if study.power <= 1 - study.confidence:
        raise ConfigError(
            f"power in {where} is no more than chance",
            got=f"power {study.power:g} beside confidence {study.confidence:g}",
            expected=f"above {1 - study.confidence:g}: variants that do nothing are found so often",
        )
    if len(study.variants) * len(study.seeds) > MOST_RUNS:
        raise ConfigError(
            f"{where} asks for too many runs",
            got=f"{len(study.variants):,} variants x {len(study.seeds):,} seeds",
            expected=f"at most {MOST_RUNS:,}",
        )
    least = pairs_for_bootstrap(1 - study.confidence_of_each)
    if study.interval == "bootstrap" and len(study.seeds) < least:
        raise ConfigError(
            f"interval in {where} cannot be bootstrap with so few seeds",
            got=f"{len(study.seeds)} seeds",
            expected=f"{least} or more: means of fewer differences never leave their range",
            do=f'give seeds = {least}, or interval = "t"',
        )
    _check_target(study, where)
    _check_needs(study, where)
    _check_descent(study, where)
    _check_merges(study, where)
    _check_shared(study, where)
    if study.figure == "mean_source_loss":
        _check_sources(study, where)
    if study.trunk is not None:
        _check_trunk(study, study.trunk, where)
    for variant in study.variants:
        _check_run(study, variant, where)


def _check_trunk(study: Study, trunk: Variant, where: str) -> None:
    """Refuse runs that cannot go on from their trunk."""
    if any(one.name == TRUNK for one in study.variants):
        raise ConfigError(
            f"a variant in {where} is called {TRUNK}, as the run that all go on from",
            do="give it another name",
        )
    if max(study.seeds) >= SEEDS_OF_TRUNKS:
        raise ConfigError(
            f"seeds in {where} are too large beside a trunk",
            got=f"{max(study.seeds):,}",
            expected=f"below {SEEDS_OF_TRUNKS:,}: a trunk's own seed is as much more",
        )
    for variant in study.variants:
        if "data.vocab_size" in variant.settings:
            raise ConfigError(
                f"{variant.name} in {where} has another vocabulary than its trunk",
                got=f"data.vocab_size {variant.settings['data.vocab_size']}",
                expected="the trunk's, whose tokenizer it reads",
                do="move data.vocab_size to [settings]",
            )
        if "model.weights" in variant.settings and "model.weights" not in variant.naming:
            raise ConfigError(
                f"{variant.name} in {where} begins with other weights than the trunk's",
                got=f"model.weights {variant.settings['model.weights']}",
                expected="the trunk's, which the study gives it, or those of a run that goes on from it",
                do="move model.weights to [trunk], or remove [trunk]",
            )
    if trunk.naming:
        raise ConfigError(
            f"the trunk in {where} needs runs that go on from it",
            got=", ".join(trunk.naming),
            expected="folders that are there before the study",
        )
    models = [key for key in trunk.settings if key.startswith("model.") and key != "model.weights"]
    own = [key for key in models if trunk.settings[key] != study.variants[0].settings.get(key)]
    if own:
        raise ConfigError(
            f"the trunk in {where} is another model than the runs that go on from it",
            got=", ".join(own),
            expected="one model",
            do="move it to [settings]",
        )
    _check_settings(trunk, where)
    _check_judged(trunk, study.recorded_figure_of(trunk), where)


def _check_shared(study: Study, where: str) -> None:
    """Refuse variants that are measured on something else than the control."""
    is_timed = study.figure == "tokens_per_second"
    shared: tuple[str, ...] = _ONLY_COMMON if is_timed else _ONLY_COMMON_OF_LOSSES
    if study.trunk is not None:
        shared += _ONLY_COMMON_OF_TRUNKS
    if study.figure == "steps_to_target":
        shared += _ONLY_COMMON_OF_TARGETS
    is_by_signal = study.halving is not None and study.halving.by == "early-signal"
    if is_by_signal:
        shared += _ONLY_COMMON_OF_SIGNALS
    control = next(one for one in study.variants if one.name == study.control)
    for variant in study.variants:
        keys = {*variant.settings, *control.settings}
        for key in sorted(keys):
            may_differ = study.target is None and key in _MAY_DIFFER
            may_differ |= key == "data.mix" and study.figure == "mean_source_loss"
            may_differ |= (
                key == "model.weights" and study.trunk is not None
            )  # another run of the trunk's, or refused
            if may_differ or not any(key == one or key.startswith(f"{one}.") for one in shared):
                continue
            mine, of_control = (one.settings.get(key) for one in (variant, control))
            if study.target is None:
                mine, of_control = _as_read(key, mine), _as_read(key, of_control)
            if mine != of_control:
                raise ConfigError(
                    f"{key} in {where} differs between variants",
                    got=f"{mine!r} of {variant.name}, {of_control!r} of {study.control}",
                    expected="one value: all runs of a study share their data"
                    + ("" if is_timed else " and evaluation")
                    + ("" if study.trunk is None else ", and their model, which is the trunk's")
                    + (
                        ", and model, adapters and objective where early signals rank them"
                        if is_by_signal
                        else ""
                    )
                    + ("" if study.target is None else ", and model, steps and batch on the way to a target"),
                    do="move it to [settings], or make it another study",
                )


def _as_read(key: str, value: object) -> object:
    """A setting as far as figures depend on it: objectives that record the same loss are the same."""
    return _RECORDS.get(str(value), value or Config().objective.name) if key == "objective.name" else value


def _check_needs(study: Study, where: str) -> None:
    """Refuse what does not go with further draws, and with variants that need others' runs."""
    if any(one.draw for one in study.variants) and max(study.seeds) >= SEEDS_OF_DRAWS:
        raise ConfigError(
            f"seeds in {where} are too large beside a draw",
            got=f"{max(study.seeds):,}",
            expected=f"below {SEEDS_OF_DRAWS:,}: a further draw is a seed as much larger",
        )
    needing = next((one for one in study.variants if one.needs), None)
    if needing is None:
        return
    if study.halving is not None or study.figure not in _OF_COMBINED:
        raise ConfigError(
            f"{needing.name} in {where} needs runs of other variants",
            got="[halving]" if study.halving is not None else f"figure {study.figure}",
            expected=f"{' or '.join(_OF_COMBINED)}, of whole runs",
            do="leave that out",
        )
    if study.named(study.control).combined is not None:
        raise ConfigError(f"the control in {where} is no run", got=study.control, do="name a run as control")


def _check_descent(study: Study, where: str) -> None:
    """Refuse what a descent has no use for, and lists of one value or without an order."""
    if study.descent is None:
        return
    start = study.variants[study.descent.number(study.descent.start)].name
    beside = {
        "[halving]": study.halving is not None,
        f"figure {study.figure}": study.figure not in ("held_out_loss", "mean_source_loss", "training_loss"),
        f"control {study.control}": study.control != start,
        "all_together": study.all_together,
        "runs that need others": any(one.needs for one in study.variants),
    }
    if any(beside.values()):
        raise ConfigError(
            f"descent in {where} does not go with "
            + ", ".join(name for name, is_so in beside.items() if is_so),
            expected="a loss, of whole runs, each comparison by itself; the control is where it begins",
            do="leave that out",
        )
    for key, values in study.descent.values.items():
        numbers = [one for one in values if isinstance(one, int | float)]
        is_in_order = len(numbers) < len(values) or numbers in (sorted(numbers), sorted(numbers)[::-1])
        if len(values) < 2 or not is_in_order:
            raise ConfigError(
                f"descent.{key} in {where} is no list to descend along",
                got=shown(list(values)),
                expected="two or more values, each beside the next lower and the next higher one",
            )


def _check_merges(study: Study, where: str) -> None:
    """Refuse means of weights that are of other shapes, or do not come from the same ones."""
    for merge in study.variants:
        if merge.combined is None or merge.combined.how != "merge":
            continue
        first, *others = (study.origin_of(study.named(name)) for name in merge.needs)
        model = replace_values(Config(), first.settings).model
        if model.rank is not None:
            raise ConfigError(
                f"{merge.name} in {where} merges layers of low rank",
                got=f"model.rank {model.rank}: a mean of factors is no factor of the mean",
                expected="models of full rank",
                do="leave the merge out, or model.rank",
            )
        draws_weights = study.trunk is None and model.weights is None
        for name, one in zip(merge.needs[1:], others, strict=True):
            is_same_model = replace_values(Config(), one.settings).model == model
            if not is_same_model or (draws_weights and one.draw != first.draw):
                raise ConfigError(
                    f"{merge.name} in {where} merges models that do not go together",
                    got=f"{merge.needs[0]} and {name}, with other "
                    + ("initial weights (draw)" if is_same_model else "settings of the model"),
                    expected="runs that go on from the same weights: a mean of others is no model",
                    do="give the study a [trunk], or leave one of the two out",
                )


def _check_sources(study: Study, where: str) -> None:
    """Refuse runs that have no mixture, or one of other sources: these are what all are evaluated on."""
    runs = [*study.runs, *([] if study.trunk is None or study.trunk_has_own_data else [study.trunk])]
    mixes = {one.name: one.settings.get("data.mix") for one in runs}
    of_run = {name: _sources_of(mix, name, where) for name, mix in mixes.items()}
    for name, mix in mixes.items():
        sources, common = of_run[name], of_run[study.control]
        if not sources or sources != common:
            raise ConfigError(
                f"{name} in {where} is not evaluated on the sources of {study.control}",
                got=f"data.mix {mix}" if mix else "no data.mix",
                expected=f"{', '.join(common) or 'a data.mix'}, in this order, with weights of its own",
                do="give what it does not train on the weight 0",
            )


def _sources_of(mix: object, name: str, where: str) -> list[str]:
    """The names of a mixture's sources; none without one."""
    try:
        return [one.name for one in mixed_sources(str(mix))] if mix else []
    except ConfigError as error:
        do = "give what it does not train on the weight 0" if "one source" in error.what else error.do
        raise ConfigError(
            f"{name} in {where}: {error.what}", got=error.got, expected=error.expected, do=do
        ) from None


def _check_settings(variant: Variant, where: str) -> None:
    config = replace_values(Config(), variant.settings)
    try:
        check_values(config)
        cadence.check_decay(config)
    except ScrimpError as error:
        raise type(error)(
            f"{variant.name} in {where}: {error.what}", got=error.got, expected=error.expected, do=error.do
        ) from None
    if ranks_of(config.layout) > 1:
        raise ConfigError(
            f"{variant.name} in {where} asks for {ranks_of(config.layout)} ranks",
            expected="runs of one process each",
            do="leave the degrees of layout out",
        )
    if config.optimizer.name == AUTO:
        raise ConfigError(
            f"{variant.name} in {where} leaves its optimizer to the memory that is free when it begins",
            got=f"optimizer.name {AUTO}",
            expected="runs that do not depend on what else runs",
            do="set optimizer.name, as `scrimp plan` with auto finds it",
        )


def _check_run(study: Study, variant: Variant, where: str) -> None:
    _check_settings(variant, where)
    _check_judged(variant, study.figure, where)
    if study.halving is not None:
        _check_halving(study, study.halving, variant, where)


def _check_judged(variant: Variant, figure: str, where: str) -> None:
    """Refuse a run without the text that its figure is of."""
    if figure in ("held_out_loss", "mean_source_loss") and variant.settings.get("data.held_out") == 0:
        raise ConfigError(
            f"{variant.name} in {where} has nothing to be judged by",
            got=f"data.held_out 0, figure {figure}",
            do="leave data.held_out out, or compare training_loss",
        )


def _check_halving(study: Study, halving: Halving, variant: Variant, where: str) -> None:
    steps, whole = variant.settings.get("train.steps"), halving.factor**halving.rounds
    if study.recorded_figure != study.figure or study.is_timed:
        raise ConfigError(f"halving in {where} does not go with {study.figure}", expected="a loss as figure")
    if not isinstance(steps, int) or steps % whole:
        raise ConfigError(
            f"halving in {where} does not divide train.steps of {variant.name}",
            got="no train.steps" if steps is None else f"{steps:,} steps",
            expected=f"a multiple of factor^rounds, {whole:,}",
            do=f"give train.steps = {max(whole, round((steps or whole) / whole) * whole)}",
        )
    every, first = variant.settings.get("evaluation.every"), halving.steps(steps)[0]
    if every is not None and (every == 0 or first % every):
        raise ConfigError(
            f"evaluation.every of {variant.name} in {where} does not meet the rounds of halving",
            got=f"every {every:,} steps",
            expected=f"a divisor of {first:,}, the first round's steps",
            do="leave it out",
        )


def _check_target(study: Study, where: str) -> None:
    """Refuse a target without its figure, and runs whose evaluations could not tell when it was reached."""
    if study.figure != "steps_to_target":
        if study.target is not None or study.held_out_of:
            raise ConfigError(
                f"{'held_out_of' if study.target is None else 'target'} in {where} has no effect",
                got=f'figure = "{study.figure}"',
                expected='figure = "steps_to_target"',
            )
        return
    if study.target is None:
        raise ConfigError(
            f"{where} names no target", expected="target = 5.2, a held-out loss that the control reaches"
        )
    for variant in study.variants:
        _check_evaluations(variant, where)


def _check_evaluations(variant: Variant, where: str) -> None:
    """Steps to a target are a multiple of `evaluation.every`, up to `train.steps`."""
    needed = ("train.steps", "train.batch_tokens", "evaluation.every")
    missing = [key for key in needed if not variant.settings.get(key)]
    if missing:
        raise ConfigError(
            f"{variant.name} in {where} says too little for steps to a target",
            got=f"no {', '.join(missing)}",
            expected=", ".join(needed),
            do="give it under [settings]",
        )
    steps, every = variant.settings["train.steps"], variant.settings["evaluation.every"]
    if steps % every or steps // every > MOST_POINTS:
        raise ConfigError(
            f"evaluation.every of {variant.name} in {where} does not divide its steps",
            got=f"every {every:,} of {steps:,} steps",
            expected=f"a divisor of {steps:,}, and at most {MOST_POINTS} evaluations",
        )
