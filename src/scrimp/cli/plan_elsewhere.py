"""`scrimp plan --hardware`: the best layouts of a model on hardware that is not here, and why not others."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from scrimp import __version__
from scrimp.cli.export_layout import model_of_line, save_plan
from scrimp.cli.plan_question import Ask, Asked, read_ask
from scrimp.cli.plan_refusals import hardware_of_line, misfit
from scrimp.cli.show import plain_console, say
from scrimp.cli.simulate import architecture_of, show_simulation
from scrimp.config import Config
from scrimp.errors import ConfigError, StorageError
from scrimp.planner.layout.as_json import answer_json, beside_json, change_json
from scrimp.planner.layout.contenders import Misfit
from scrimp.planner.layout.divisibility import objections, values_of
from scrimp.planner.layout.objectives import Answer, answered
from scrimp.planner.layout.predict import timeline
from scrimp.planner.layout.search import Candidate, Found
from scrimp.planner.layout.setting import Setting
from scrimp.planner.layout.stage_texts import stage_texts
from scrimp.planner.layout.what_if import Change, what_if

_DRAWN_ROUNDS, _DRAWN_ALONE = 3, 8
"""Rounds of as many micro-batches as there are ranks, and micro-batches of a rank alone."""


@dataclasses.dataclass(frozen=True)
class Explained:
    """The answer to --explain."""

    asked: str
    found: Found | None
    """The best that has it; None: no layout has."""
    objections: list[str]

    @property
    def text(self) -> str:
        """What speaks against it where there is no plan to compare."""
        if not self.objections:
            return f"the best plan has {self.asked}"
        return f"no layout has {self.asked}: {'; '.join(self.objections)}"


def plan_elsewhere(ask: Ask, config: Config, given: Collection[str]) -> int:
    """Search, and print the best plans.

    Args:
        given: dotted keys that the user wrote.

    Raises:
        ConfigError: a file, a name or a setting that the search does not know.
        PlanError: no layout fits.
    """
    _refuse_together(ask)
    model_line = None if ask.save is None else model_of_line(config, ask.shape, given)
    architecture = architecture_of(config, ask.shape) if ask.simulate else None
    asked = read_ask(ask, config, given)
    answer = answered(asked.question, asked.goal, asked.searching(), lambda: asked.family)
    if not answer.found.best:
        raise misfit(answer, asked, ask.hardware)
    explained = _explained(answer, asked) if asked.explain else None
    changes = what_if(answer.question, asked.searching()) if ask.what_if else []
    found = answer_json(answer, asked.goal, __version__)
    if explained is not None:
        found["explain"] = _explained_json(answer, explained)
    if changes:
        found["what_if"] = [change_json(one, asked.goal) for one in changes]
    if ask.report is not None:
        _write_page(found, answer.found.best[0].setting, ask.report)
    if ask.json:
        print(json.dumps(found))
    else:
        _show(answer, asked, explained, changes)
    out, best = sys.stderr if ask.json else sys.stdout, answer.found.best[0].setting
    if ask.report is not None:
        say(f"written: {ask.report}", out)
    if ask.save is not None and model_line is not None:
        hardware = hardware_of_line(answer.question.cluster, asked.question.cluster, ask.hardware)
        save_plan(ask.save, best, model_line, hardware)
        say(f"written: {ask.save}", out)
    if architecture is not None:
        show_simulation(best, architecture)
    return 0


def _refuse_together(ask: Ask) -> None:
    """Refuse files that exist or have no folder, and options of which one takes from the other what it is about."""
    for file in (ask.report, ask.save):
        if file is not None and file.exists():
            raise StorageError(f"{file} exists already", do="choose another name; nothing is overwritten")
        if file is not None and not file.absolute().parent.is_dir():
            raise StorageError(
                f"the folder of {file} does not exist", do="make it, or check the spelling of the path"
            )
    resized = ask.objective == "largest-model"
    for option, why in {
        "--save": "a line names a model that was given, not one that was found"
        if ask.save and resized
        else None,
        "--simulate": "a model that was found is not one that Scrimp has"
        if ask.simulate and resized
        else None,
        "--json": "--simulate prints tables" if ask.json and ask.simulate else None,
    }.items():
        if why:
            raise ConfigError(
                f"{option} does not go with this",
                got=f"--objective {ask.objective}" if resized else "--simulate",
                expected=why,
                do="leave one of them out",
            )


def _write_page(found: dict[str, Any], best: Setting, path: Path) -> None:
    """The answer as a page; of a long step the first micro-batches are drawn."""
    from scrimp.report.layout_page import LayoutPage, write_layout_page

    ranks = best.layout.pp
    shown = min(best.micro_batches, _DRAWN_ROUNDS * ranks if ranks > 1 else _DRAWN_ALONE)
    page = LayoutPage(
        answer=found,
        passes=timeline(best, shown),
        shown_micro_batches=shown,
        micro_batches=best.micro_batches,
        stages=stage_texts(best),
        room=best.memory_bytes,
    )
    write_layout_page(page, path)


def _show(answer: Answer, asked: Asked, explained: Explained | None, changes: Sequence[Change]) -> None:
    # Not at the top: rich takes a while, which --json need not wait for.
    from scrimp.cli.plan_tables import (
        beside_tables,
        changes_table,
        losers_table,
        plans_table,
        summary,
        trials_table,
    )

    console, best = plain_console(), answer.found.best[0]
    if answer.trials:
        console.print(trials_table(answer.trials, asked.goal))
    console.print(plans_table(answer.found, answer.question))
    console.print(summary(answer, asked.goal))
    if explained is None:
        table, more = losers_table(answer.found)
        if table.row_count:
            console.print(table)
        if more:
            console.print(f"{more} more: --json")
    elif explained.found is None:
        console.print(explained.text)
    else:
        for table in beside_tables(explained.asked, best, _nearest(explained.found)):
            console.print(table)
    if changes:
        console.print(changes_table(best, changes))


def _explained(answer: Answer, asked: Asked) -> Explained:
    """The best plan that has what is asked about; all else as it is given."""
    question, words = answer.question, " ".join(f"{name} {value}" for name, value in asked.explain.items())
    best = answer.found.best[0].setting
    values = vars(best.layout) | {"micro_batch": best.micro_batch}
    if asked.explain.items() <= values.items():
        return Explained(words, None, [])
    other = dataclasses.replace(question, given={**question.given, **asked.explain})
    reasons = objections(other)
    if reasons:
        reasons += [
            f"{name} can be {', '.join(map(str, values_of(question, name)))}"
            for name in asked.explain
            if name != "micro_batch"
        ]
        return Explained(words, None, reasons)
    return Explained(words, asked.searching().search(other, words), [])


def _nearest(found: Found) -> Candidate | Misfit:
    """Its best plan, or where none fits the one that needs the fewest bytes."""
    if found.best:
        return found.best[0]
    return min((one for one in found.families.values() if isinstance(one, Misfit)), key=lambda one: one.bytes)


def _explained_json(answer: Answer, explained: Explained) -> dict[str, Any]:
    if explained.found is None:
        return {"asked": explained.asked, "objections": explained.objections}
    return {"asked": explained.asked, **beside_json(answer.found.best[0], _nearest(explained.found))}
