"""Tables of `scrimp eval --tasks`: figures of models, of their checkpoints, and what these say early.

Checked  tests/cli/test_eval_tasks.py
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from scrimp.report.html import visible
from scrimp.tasks import EarlySignal, Figure

_MISSING = "-"


def figures_table(found: Mapping[str, Sequence[Figure]]) -> Table:
    """A row for each figure of each model; of several models, what each has more than the first."""
    models = list(found)
    if len(models) == 1:
        table = _table("tasks", ["task", "figure", "value", "chance", "items"], words=2)
        for figure in found[models[0]]:
            chance, items = _value(figure.chance), _MISSING if figure.items is None else f"{figure.items:,}"
            _add(table, [figure.task, figure.name, _with_error(figure.value, figure.error), chance, items])
        return table
    table = _table("tasks", ["task", "figure", "model", "value", "less the first"], words=3)
    for number, first in enumerate(found[models[0]]):
        for model in models:
            figure = found[model][number]
            less = figure.less(first) if model != models[0] else None
            shown = _MISSING if less is None else _with_error(*less, form="+.4f")
            _add(table, [first.task, first.name, model, _with_error(figure.value, figure.error), shown])
    return table


def series_table(title: str, by_run: Mapping[str, Mapping[int, float]]) -> Table:
    """A row for each step, a column for each run."""
    table = _table(title, ["step", *by_run], words=0)
    for step in sorted({step for series in by_run.values() for step in series}):
        _add(table, [f"{step:,}", *(_value(series.get(step)) for series in by_run.values())])
    return table


def signal_table(signals: Mapping[tuple[str, str], EarlySignal], runs: int, models: int) -> Table:
    """What each figure of each task says early."""
    title = f"early signal: {runs} runs of {models} models" if runs > 1 else "early signal"
    names = ["task", "figure", "monotony", "autocorrelation", "SNR", "consistency"]
    table = _table(title, names, words=2)
    for (task, name), one in signals.items():
        figures = (one.monotony, one.autocorrelation, one.signal_to_noise, one.consistency)
        _add(table, [task, name, *(_MISSING if figure is None else f"{figure:.2f}" for figure in figures)])
    return table


def notes_of(figures: Sequence[Figure]) -> list[str]:
    """What has to be said of items that did not fit, a line for each task."""
    most: dict[str, Figure] = {}
    for figure in figures:
        if figure.shortened > (most[figure.task].shortened if figure.task in most else 0):
            most[figure.task] = figure
    return [
        f"note: {one.shortened:,} of {one.items:,} items of {one.task} are longer than the model's context, and lost "
        "their beginning"
        for one in most.values()
    ]


def _table(title: str, columns: Sequence[str], *, words: int) -> Table:
    """A table whose first columns, so many, hold words."""
    table = Table(title=Text(visible(title)), title_justify="left", box=SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        table.add_column(
            Text(visible(column)), justify="left" if number < words else "right", overflow="fold"
        )
    return table


def _add(table: Table, cells: Sequence[str]) -> None:
    table.add_row(*[Text(visible(cell)) for cell in cells])


def _value(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.4f}"


def _with_error(value: float, error: float | None, form: str = ".4f") -> str:
    return f"{value:{form}}" if error is None else f"{value:{form}} ± {error:.4f}"
