"""`scrimp eval --tasks`: models and their checkpoints on tasks, side by side, and which task tells them apart early.

Without --checkpoints each model is asked as it is now, and compared with the first on the same items. With it, all
checkpoints that a run has kept are asked, and each task's four figures follow (`scrimp.tasks.curves`).

Runs whose settings differ in nothing but their seed, and in what a resumed run may change, are one model.
Checked  tests/cli/test_eval_tasks.py
"""

from __future__ import annotations

import os
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from scrimp.cli.show import plain_console, say
from scrimp.cli.task_tables import figures_table, notes_of, series_table, signal_table
from scrimp.cli.trained import load_executable
from scrimp.config import flatten, may_change, nearest_word
from scrimp.config.read_toml import expand_home
from scrimp.errors import CheckpointError, ConfigError
from scrimp.tasks import BUILT_IN, Figure, Task, early_signal, figures_of, read_task, read_texts, score
from scrimp.training.checkpoint import CheckpointStore
from scrimp.training.distillation import TEACHERS
from scrimp.training.run_folder import saved_config
from scrimp.training.trained_weights import is_run, open_target

if TYPE_CHECKING:
    from scrimp.cli.model_commands import Evaluate

HARNESS = "lm-eval:"
_SEEDS = ("run.seed", "run.rounding_seed")


@dataclass(frozen=True)
class Questions:
    """What models are asked."""

    tasks: Sequence[Task]
    harness: Sequence[str]
    """Names of lm-eval's tasks."""

    def figures(self, folder: Path, command: Evaluate) -> list[Figure]:
        """What the model of a folder reaches."""
        target = open_target(folder)
        executable = load_executable(target, command.device)
        found = [
            figure for task in self.tasks for figure in figures_of(score(executable, target.tokenizer, task))
        ]
        if self.harness:
            from scrimp.tasks.harness import measure

            found += measure(executable, target.tokenizer, self.harness, trusted=command.trust_code)
        return found


def evaluate_tasks(command: Evaluate) -> int:
    """Ask the models of a command, and print what they reach.

    Raises:
        ConfigError: a task is not known, or its text is missing.
        ScrimpError: a model or a task cannot be read.
    """
    questions = _questions(command)
    others = [expand_home("--beside", Path(folder)) for folder in command.beside]
    folders = list(dict.fromkeys([command.target, *others]))
    if command.checkpoints:
        _show_series(folders, questions, command)
    else:
        found = {
            name: questions.figures(folder, command)
            for name, folder in zip(_names(folders), folders, strict=True)
        }
        plain_console().print(figures_table(found))
        _show_notes([figure for figures in found.values() for figure in figures])
    return 0


def _questions(command: Evaluate) -> Questions:
    names = [name.strip() for name in (command.tasks or "").split(",")]
    harness = [name.removeprefix(HARNESS) for name in names if name.startswith(HARNESS)]
    own = list(dict.fromkeys(name for name in names if not name.startswith(HARNESS)))
    if harness:
        from scrimp.tasks.harness import refuse_untrusted

        refuse_untrusted(harness, trusted=command.trust_code)
    reads_text = any(name in BUILT_IN and BUILT_IN[name].reads_text for name in own)
    if reads_text and command.data is None:
        raise ConfigError(
            "--data is missing, from which tasks are made",
            got=f"--tasks {command.tasks}",
            do="give a text that the models have not seen",
        )
    if command.data is not None and not reads_text:
        raise ConfigError("--data is read by none of these tasks", got=command.tasks, do="leave --data out")
    texts = read_texts(command.data, command.text_column) if reads_text and command.data else []
    return Questions([_task(name, texts) for name in own], harness)


def _task(name: str, texts: Sequence[str]) -> Task:
    if name in BUILT_IN:
        return BUILT_IN[name].task(name, texts)
    path = expand_home("--tasks", Path(name))
    if not name or not path.is_file():
        near = nearest_word(name, list(BUILT_IN))
        raise ConfigError(
            f"--tasks: there is no task {name!r}",
            expected=f"{', '.join(BUILT_IN)}, a JSONL file, or {HARNESS}NAME",
            do=f"did you mean {near}?" if near else "check the spelling",
        )
    return read_task(path)


def _show_series(folders: Sequence[Path], questions: Questions, command: Evaluate) -> None:
    runs = {
        name: {step: questions.figures(at, command) for step, at in _checkpoints(folder)}
        for name, folder in zip(_names(folders), folders, strict=True)
    }
    models = [_model_of(folder) for folder in folders]
    first = next(iter(next(iter(runs.values())).values()))
    values = {
        (figure.task, figure.name): {
            run: {step: figures[number].value for step, figures in series.items()}
            for run, series in runs.items()
        }
        for number, figure in enumerate(first)
    }
    console = plain_console()
    for (task, name), by_run in values.items():
        console.print(series_table(f"{task}, {name}", by_run))
    signals = {key: early_signal(list(by_run.values()), models) for key, by_run in values.items()}
    console.print(signal_table(signals, len(runs), len(set(models))))
    _show_notes([figure for series in runs.values() for figures in series.values() for figure in figures])


def _names(folders: Sequence[Path]) -> list[str]:
    """What tables call models: their folders, without what the paths of all begin with."""
    shared = os.path.commonpath([folder.resolve().parent for folder in folders])
    return [str(folder.resolve().relative_to(shared)) for folder in folders]


def _checkpoints(folder: Path) -> Iterator[tuple[int, Path]]:
    """Steps and folders of all checkpoints that a run has kept."""
    found = CheckpointStore(folder, keep_last=1, keep_every=0).complete() if is_run(folder) else []
    if not found:
        raise CheckpointError(
            f"{folder} has no checkpoints to go through",
            expected="the folder of a run; all checkpoints stay with --checkpoint.keep-every",
        )
    for checkpoint in found:
        say(f"{folder}: step {checkpoint.step:,}")
        yield checkpoint.step, checkpoint.folder


def _model_of(folder: Path) -> Hashable:
    """What a run's settings make it, whatever its seed. Teachers may have moved when a run goes on, but other ones make
    another model."""
    saved = saved_config(folder)
    free = may_change(saved).union(_SEEDS) - {TEACHERS}
    return tuple((key, str(value)) for key, value in flatten(saved).items() if key not in free)


def _show_notes(figures: Sequence[Figure]) -> None:
    for note in notes_of(figures):
        plain_console().print(note)
