"""Data-limited training: much compute, little text. Strong decay, ensembles, and a student of them.

Problem  There is more compute than text. Reading it again and again, or with a larger model, soon makes the held-out
         loss worse: the usual recipe (decay 0.1) overfits.
Method   Four steps, each on the one before.
         Decay      10 to 30 times stronger than usual: larger models are better again, and the loss follows
                    L(N) = E + A / N^a. What a recipe is worth is its E, not its loss at one size.
         Ensemble   K models that differ in their draw of weights and order. Their mean logits have
                    L(K) = E_N + A / K, whose E_N lies below what one larger model reaches.
         Both       E_N over N has a limit of its own: of ever more, ever larger members.
         Student    one model of a member's size learns from the ensemble, most of all from text that this one writes
                    (`scrimp.training.written_text`): of the text that its members know by heart they say little
                    more than it does itself. In the paper a student keeps 83 % of the gain.
         AdamW decays by lr * decay in a step: at 1 it would erase the weights, which any run refuses.
Study    `scrimp study recipe:data-limited`: on 65,536 tokens of the standard library, at three widths, with three
         members each, and the usual recipe on up to eight times the text, which says what the method is worth in data.
Limits   The study's rates and decays are one choice each, not tuned per size; the paper tunes rate, epochs and decay by
         coordinate descent for each.
Source   Kim et al., "Pre-training under infinite compute" (2025, arXiv 2509.14786)
Checked  tests/recipes/test_data_limited.py
"""

from __future__ import annotations

import itertools
import re
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from scrimp.config import Config, base_architecture, replace_values
from scrimp.models import spec_of
from scrimp.recipes.data_limited.laws import Law, amount_of, fit, limits_of_members
from scrimp.study.results import shared_seeds

if TYPE_CHECKING:
    from scrimp.study.results import Results

_SINGLE: Final = re.compile(r"(usual|strong)-(\d+)")
_ENSEMBLE: Final = re.compile(r"ensemble-(\d+)-of-(\d+)")
_DATA: Final = re.compile(r"data-(\d+)")
Losses = Mapping[str, Sequence[float]]
"""Variant to its losses, of the seeds that all variants have."""


def findings(results: Results) -> list[str]:
    """What the study's results say, a sentence each; of runs that are missing nothing."""
    losses = _losses(results)
    parts = [
        _by_size(results, losses, "usual", "decay 0.1"),
        _by_size(results, losses, "strong", "strong decay"),
        *_by_members(results, losses),
        *_of_students(losses),
        _in_data(losses),
    ]
    return [one for one in parts if one]


def _losses(results: Results) -> dict[str, list[float]]:
    values = {one.name: one.values for one in results.outcomes if one.values}
    seeds = shared_seeds(values.values())
    return {name: [one[seed] for seed in seeds] for name, one in values.items()} if seeds else {}


def _parameters(results: Results, variant: str) -> int:
    config = replace_values(Config(), results.study.named(variant).settings)
    return spec_of(base_architecture(config, None)).parameters


def _by_size(results: Results, losses: Losses, kind: str, words: str) -> str:
    """How the loss goes with the size of one model."""
    names = sorted((one for one in losses if _SINGLE.fullmatch(one) and one.startswith(kind)), key=_width)
    if len(names) < 2:
        return ""
    means = [statistics.fmean(losses[one]) for one in names]
    shown = ", ".join(f"{_width(name)}: {mean:.3f}" for name, mean in zip(names, means, strict=True))
    falls = all(after < before for before, after in itertools.pairwise(means))
    rises = all(after > before for before, after in itertools.pairwise(means))
    trend = "falls" if falls else "rises" if rises else "has no one trend"
    text = f"One model, {words}: the loss {trend} with the width ({shown})"
    sizes = [_parameters(results, one) for one in names]
    if not falls or len(set(sizes)) < 3:
        return text + "."
    law = fit(sizes, [losses[one] for one in names])
    return f"{text}; {_law_text(law)} for ever larger ones."


def _by_members(results: Results, losses: Losses) -> list[str]:
    """How the loss goes with the number of members, and where ever more of ever larger ones would end."""
    sizes = sorted({int(found[2]) for one in losses if (found := _ENSEMBLE.fullmatch(one))})
    said, limits, parameters = [], [], []
    for width in sizes:
        members = {
            int(found[1]): one
            for one in losses
            if (found := _ENSEMBLE.fullmatch(one)) and int(found[2]) == width
        }
        members[1] = f"strong-{width}"
        counts = sorted(members)
        if members[1] not in losses or len(counts) < 2:
            continue
        each = [losses[members[count]] for count in counts]
        law = fit(counts, each, exponent=1.0)
        shown = ", ".join(
            f"{count}: {statistics.fmean(one):.3f}" for count, one in zip(counts, each, strict=True)
        )
        said.append(f"Members of width {width} ({shown}): {_law_text(law)} for ever more of them.")
        limits.append(limits_of_members(counts, each))
        parameters.append(_parameters(results, members[1]))
    if len(set(parameters)) > 2:
        said.append(f"Ever more of ever larger members: {_law_text(fit(parameters, limits))}.")
    return said


def _of_students(losses: Losses) -> list[str]:
    """How much of the ensemble's gain over its members a student keeps."""
    if "ensemble-3-of-64" not in losses or "strong-64" not in losses:
        return []
    single, whole = (statistics.fmean(losses[one]) for one in ("strong-64", "ensemble-3-of-64"))
    said = []
    for name in ("student", "self-student"):
        if name not in losses:
            continue
        own = statistics.fmean(losses[name])
        kept = (
            f"{(single - own) / (single - whole):.0%} of the ensemble's gain" if single > whole else "no gain"
        )
        said.append(
            f"The {name}: {own:.3f}, where one model has {single:.3f} and the ensemble {whole:.3f}: {kept}."
        )
    if said and "untaught" in losses:
        own = statistics.fmean(losses["untaught"])
        said.append(f"Without teachers, by the same steps and decay: {own:.3f}.")
    return said


def _in_data(losses: Losses) -> str:
    """What the best of the method is worth in text for the usual recipe, and what more epochs alone are."""
    names = sorted((one for one in losses if _DATA.fullmatch(one)), key=_width)
    others = [one for one in losses if one not in names]
    if len(names) < 2 or not others:
        return ""
    amounts, table = [_width(one) for one in names], [losses[one] for one in names]
    best = _lowest(others, losses)
    worth = _worth(amounts, table, losses[best])
    said = f"In data: {best} has the loss that the usual recipe, four epochs, has with {worth}"
    usual = [one for one in others if one.startswith("usual-")]
    if usual and (more := _lowest(usual, losses)) != best:
        said += f"; {more}, the best of the usual decay, with {_worth(amounts, table, losses[more])}"
    return f"{said}."


def _lowest(names: Sequence[str], losses: Losses) -> str:
    return min(names, key=lambda one: statistics.fmean(losses[one]))


def _worth(amounts: Sequence[int], table: Sequence[Sequence[float]], losses: Sequence[float]) -> str:
    """How many times the text has these losses: by their means, and by each seed alone.

    Args:
        amounts: times the text, growing.
        table: of each amount the losses of all seeds.
    """
    whole = amount_of(amounts, [statistics.fmean(one) for one in table], statistics.fmean(losses))
    each = sorted(amount_of(amounts, [one[seed] for one in table], loss) for seed, loss in enumerate(losses))
    text = f"{_times(whole, amounts)} times the text"
    if len(each) > 1:
        text += f" (by single seeds {_times(each[0], amounts)} to {_times(each[-1], amounts)})"
    return text


def _times(amount: float, amounts: Sequence[int]) -> str:
    if amount < amounts[0]:
        return f"less than {amounts[0]}"
    return f"more than {amounts[-1]}" if amount == float("inf") else f"{amount:.1f}"


def _width(name: str) -> int:
    return int(name.rpartition("-")[2])


def _law_text(law: Law) -> str:
    if not law.has_limit:
        return f"no limit that shows (the best exponent is the lowest of those tried, {law.exponent:g})"
    interval = f" ({law.interval[0]:.3f} to {law.interval[1]:.3f})" if law.interval else ""
    return f"{law.limit:.3f}{interval}"
