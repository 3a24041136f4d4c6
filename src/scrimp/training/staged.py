"""A training in stages: runs in one folder, each from the weights of the one before (`scrimp.config.stages`).

Problem  A stage that cannot begin is noticed when the stages before it have taken hours.
Method   Before the first stage all are decided as they will be: the first as a run is, the others with its architecture
         and tokenizer in the place of weights that are not there yet. Their sources are looked for, their memory is
         planned, and the optimizer's states that go over have to be those that the next stage keeps.
         Then each stage is a run (`scrimp.training.session`), with a plan of its own: formats, memory and back ends are
         decided for its data, batch and precision. Nothing else is kept: where the same command is given again, stages
         whose next one has begun are over, if their settings are still the same, the last one that has begun goes on
         from its newest checkpoint, and the others begin.
Limits   Whether a text is long enough, and what a tokenizer that is still to be trained makes of it, is seen when its
         stage begins. Copies that are jobs of their own (`scrimp launch --copies`) have no stages.
Checked  tests/training/test_staged.py
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path

from scrimp.config import Config, StagedRun, base_architecture, folder_of, stage_in
from scrimp.data.find_source import open_source
from scrimp.errors import CheckpointError, ConfigError, ScrimpError, StorageError
from scrimp.launchers import copy_of
from scrimp.training.finish import RunSummary
from scrimp.training.run_data import reads_conversations, shards_of
from scrimp.training.run_folder import (
    CONFIG,
    LOCK,
    TOKENIZER,
    RunLock,
    claim_new_folder,
    config_to_resume,
    saved_config,
)
from scrimp.training.session import train
from scrimp.training.setup import Decisions, decide
from scrimp.training.start import anchored, decided_before_data
from scrimp.training.trained_weights import going_on, refuse_states_of_others
from scrimp.world import World

_UNNAMED = Path("runs/stages")
"""Stands for a folder that is not chosen yet."""


def train_stages(stages: StagedRun, *, resume: bool = False) -> RunSummary:
    """Train stage after stage; what was interrupted goes on where it stopped.

    Args:
        resume: refuse to begin: there has to be a stage to go on with.

    Returns:
        That of the last stage, or of the one that was stopped.

    Raises:
        ScrimpError: bad input (nothing was started), or a run that failed.
    """
    world, root = World.current(), stages.common.run.dir
    with world.together("the stages"), contextlib.ExitStack() as stack:
        if copy_of(os.environ) is not None:
            raise ConfigError(
                "stages do not go with copies that are jobs of their own",
                expected="one job",
                do="start each stage by itself, with model.weights",
            )
        begun = world.once("looking for stages", lambda: _begun(stages.common.run.dir, stages.count))
        if resume and begun == 0:
            raise CheckpointError(
                f"{root or 'a folder without a name'} holds no stage to go on with",
                do="leave --resume out: stages that were interrupted go on by the same command",
            )
        for _ in decided_stages(stages, world, begun=begun):
            pass
        if root is None:
            root = stack.enter_context(claim_new_folder(stages.common, world))
        else:
            stack.enter_context(RunLock(root, world))
        return _train_in(root, stages, begun)


def decided_stages(
    stages: StagedRun, world: World, *, begun: int = 0, plans_ahead: bool = False
) -> Iterator[Decisions]:
    """The stages as they will be, each checked: settings, sources, memory, the states that it takes over.

    Args:
        begun: how many have begun, whose sources may be gone.
        plans_ahead: one process decides for as many ranks as the layout says, and shows a stage before it is refused.
    """
    root = stages.common.run.dir or _UNNAMED
    first: Decisions | None = None
    before: Decisions | None = None
    for number in range(1, stages.count + 1):
        config, given = stages.stage(number, root)
        with _named(number):
            if first is not None and before is not None:
                config = going_on(config, before.config)
                found = _decided_after(first, anchored(config), world, plans_ahead=plans_ahead)
            elif plans_ahead:
                found = decide(anchored(config), plans_ahead=True)
            else:
                found = decided_before_data(anchored(config), world, given)
            if before is not None and config.optimizer.from_weights:
                whose = f"the optimizer's states of stage {number - 1}"
                refuse_states_of_others(found.config, before.config, whose)
            if number > begun:
                _refuse_missing_sources(found.config)
            yield found
            found.refuse_misfit()
            found.backends()
        first, before = first or found, found


def _decided_after(first: Decisions, config: Config, world: World, *, plans_ahead: bool) -> Decisions:
    """A later stage, with the model and the tokenizer of the first one, whose run is not there yet."""
    shards, own = shards_of(first.config.data), shards_of(config.data)
    tokenizer = first.config.data.tokenizer if shards is None else str(shards / TOKENIZER)
    if own is not None and tokenizer == "bpe":
        raise ConfigError(
            f"the shards in {own} have a tokenizer of their own",
            got="a tokenizer that the first stage trains",
            expected="one tokenizer for all stages",
            do=f"set data.tokenizer = {str(own / TOKENIZER)!r} above the first [[stages]]",
        )
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=tokenizer))
    architecture = base_architecture(config, first.architecture.base)
    return decide(config, architecture=architecture, world=world, plans_ahead=plans_ahead)


def _refuse_missing_sources(config: Config) -> None:
    """Refuse texts that are not there, or nothing to read: those of shards were looked at before."""
    held_out = config.data.held_out
    names = [*config.data.sources, *([str(held_out)] if isinstance(held_out, Path) else [])]
    for name in names:
        own = dataclasses.replace(config.data, source=name, mix=None)
        if shards_of(own) is None:
            open_source(name, config.data.text_column, conversations=reads_conversations(config))


def _begun(root: Path | None, count: int) -> int:
    """How many stages have begun in a folder.

    Raises:
        CheckpointError, StorageError: it holds something else, or other stages.
    """
    if root is None:
        return 0
    if not root.is_dir():
        if root.exists() or root.is_symlink():
            raise StorageError(f"{root} is not a folder", do="choose another --run.dir")
        return 0
    names = sorted(entry.name for entry in root.iterdir() if entry.name != LOCK)
    strangers = [name for name in names if not 1 <= (stage_in(name) or 0) <= count]
    if strangers:
        is_run = CONFIG in names
        raise (CheckpointError if is_run else StorageError)(
            f"{root} holds a run without stages already" if is_run else f"{root} is not empty",
            got=", ".join(strangers[:3]) + (" ..." if len(strangers) > 3 else ""),
            expected=f"a new folder, or one with stages 1 to {count}",
            do="choose another --run.dir",
        )
    begun = [number for number in range(1, count + 1) if (folder_of(root, number) / CONFIG).is_file()]
    if begun != list(range(1, len(begun) + 1)):
        raise CheckpointError(
            f"a stage in {root} is gone",
            got=f"stage {begun[-1]} without one before it",
            do="put it back, or choose another --run.dir",
        )
    return len(begun)


def _train_in(root: Path, stages: StagedRun, begun: int) -> RunSummary:
    summary = None
    for number in range(1, stages.count + 1):
        config, given = stages.stage(number, root)
        folder = folder_of(root, number)
        with _named(number):
            if number < begun:
                config_to_resume(saved_config(folder), anchored(config), given)  # refuses other settings
                continue
            print(f"stage {number} of {stages.count}: {folder}", file=sys.stderr)
            summary = train(config, resume=number == begun, given=given)
            if summary.exit_code:
                print(
                    f"stage {number} of {stages.count} was stopped: the same command goes on with it, and the stages "
                    f"after it, with --run.dir {root}",
                    file=sys.stderr,
                )
                return summary
    assert summary is not None, "the last stage is trained, or goes on"
    return summary


@contextlib.contextmanager
def _named(number: int) -> Iterator[None]:
    """Errors that say in which stage they are."""
    try:
        yield
    except ScrimpError as error:
        # In place: its class, which decides the exit code, and its traceback stay.
        what = f"stage {number}: {error.what}"
        ScrimpError.__init__(error, what, got=error.got, expected=error.expected, do=error.do)
        raise
