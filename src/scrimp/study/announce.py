"""What a study says before it starts, in words: its runs, its hours, and the smallest difference that it can see.

The visible difference needs the scatter of a paired difference. The file may know it from earlier runs; rows of this
study that are there already know it better; where neither does, the difference is told in scatters.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from scrimp.report.units import format_bytes, format_duration, format_number, format_percent
from scrimp.study.comparisons import pairs_needed, visible_difference
from scrimp.study.definition import Study
from scrimp.study.estimate import Probe
from scrimp.study.looks import Looks, confidence_of
from scrimp.study.results import FIGURES, UNITS, Results, ranked_by, results_of
from scrimp.study.rounds import steps_of
from scrimp.study.rows import Key, Row
from scrimp.study.variants import Variant


def announcement(
    study: Study,
    rows: Mapping[Key, Row],
    probes: Mapping[str, Probe],
    *,
    places: int,
    limited_by: str,
    seconds: float,
    threads: int,
    looks: Looks | None = None,
) -> list[str]:
    """The lines.

    Args:
        looks: at verdicts of the study, before.
    """
    done = sum(len(one.values.keys() & set(study.seeds)) for one in results_of(study, rows).outcomes)
    lines = _runs(study)
    if done:
        lines.append(f"{done} of them are done")
    lines += [f"  {line}" for line in _costs(study, probes)]
    about = "about" if study.descent is None else "at least"
    lines.append(
        f"{places} at once ({limited_by}), {threads} {'thread' if threads == 1 else 'threads'} each: "
        f"{about} {format_duration(seconds)} for what is left (predicted from first steps; evaluations not counted)"
    )
    return [*lines, visible_text(study, rows, looks)]


def _runs(study: Study) -> list[str]:
    """Which runs there are, and how they hang together."""
    each = {steps_of(one) for one in study.variants}
    steps = f"{min(each):,}" if len(each) == 1 else f"{min(each):,} to {max(each):,}"
    count, seeds = len(study.variants) * len(study.seeds), len(study.seeds)
    lines = [
        f"{study.name}: {len(study.variants)} variants x {seeds} {'seed' if seeds == 1 else 'seeds'} = {count} runs "
        f"of {steps} steps, {FIGURES[study.figure]}, control {study.control}"
    ]
    if study.descent is not None:
        lines.append(
            f"a descent along {', '.join(study.descent.values)}, "
            f"which runs {len(study.descent.least())} of the variants or more"
        )
    if study.trunk is not None:
        lines.append(
            f"all runs of a seed go on from one run of {steps_of(study.trunk):,} steps, made before them"
        )
    needing = [f"{one.name} {_of(one)} {', '.join(one.needs)}" for one in study.variants if one.needs]
    if needing:
        lines.append("made of other runs of their seed: " + "; ".join(needing))
    if study.halving is not None:
        first, *ends = study.ends_in_words(study.halving)
        lines.append(
            f"halving by {ranked_by(study)}: all run to {first}; "
            f"one of {study.halving.factor} goes on to " + ", then to ".join(ends)
        )
    return lines


def _of(variant: Variant) -> str:
    return "after" if variant.combined is None else f"as {variant.combined.how} of"


def _costs(study: Study, probes: Mapping[str, Probe]) -> Sequence[str]:
    """A line for each cost, with the variants that have it."""
    names: dict[Probe, list[str]] = {}
    for variant in (one for one in study.runs_of_a_seed if one.combined is None):
        names.setdefault(probes[variant.name], []).append(variant.name)
    steps = {one.name: steps_of(one) for one in study.runs_of_a_seed}
    return [
        f"{', '.join(group[:4])}{f' and {len(group) - 4} more' if len(group) > 4 else ''}: "
        f"{format_duration(one.step_seconds)} a step, "
        f"{format_duration(one.startup_seconds + one.step_seconds * steps[group[0]])} a run, "
        f"{format_bytes(one.host_bytes)} of host memory"
        + (f", {format_bytes(one.device_bytes)} of GPU memory" if one.device_bytes else "")
        for one, group in names.items()
    ]


def visible_text(study: Study, rows: Mapping[Key, Row], looks: Looks | None = None) -> str:
    """The smallest difference that the study can see, in a sentence."""
    pairs, unit = len(study.seeds), UNITS[study.figure]
    earlier = [
        sum(set(look.seeds) != set(study.seeds) for look in (looks or {}).get(one.name, ()))
        for one in study.others
    ]
    confidence = confidence_of(study.confidence_of_each, max(earlier, default=0))
    alpha = 1 - confidence
    if pairs < 2:
        return "one seed sees no difference at all: give two or more"
    scatter, origin = _scatter(study, results_of(study, rows))
    found = visible_difference(pairs, scatter or 1.0, alpha=alpha, power=study.power)
    assert found is not None
    power = format_percent(study.power, 0)
    how = f"with {pairs} seeds, at {format_percent(confidence, 1)} confidence and {power} power"
    if scatter is None:
        return (
            f"smallest visible difference: {found:.3g} times the scatter of a paired difference, "
            f"which is not known yet ({how})"
        )
    words = f"smallest visible difference: {format_number(found, 2)} {unit} ({how}; scatter {scatter:.2g}, {origin})"
    if study.matters is not None and found > study.matters:
        needed = pairs_needed(study.matters, scatter, alpha=alpha, power=study.power)
        more = "more seeds than anybody has" if needed is None else f"{needed} seeds"
        words += f"; to see {format_number(study.matters)}, which matters, takes {more}"
    return words


def _scatter(study: Study, results: Results) -> tuple[float | None, str]:
    """The scatter of a paired difference, pooled over the variants that have one, and where it is from."""
    squares, freedom = 0.0, 0
    for one in results.others:
        if one.comparison is not None and one.comparison.scatter is not None and not one.is_dropped:
            degrees = len(one.comparison.differences) - 1
            squares, freedom = squares + degrees * one.comparison.scatter**2, freedom + degrees
    if freedom >= 2 and squares > 0:
        return math.sqrt(squares / freedom), "of the pairs that are done"
    return study.scatter, "as its file says"
