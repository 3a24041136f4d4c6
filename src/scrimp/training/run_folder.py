"""The folder of a run: created once, locked while in use, continued only on request.

A run never writes into a folder that holds anything it did not put there, and never starts over
in one that holds a checkpoint. Two processes cannot train in one folder: the lock is an
advisory file lock, which the system releases however the process ends. Of several ranks that train together the writer
chooses and locks the folder for all.
"""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import IO

from scrimp.config import (
    Config,
    differences,
    flatten,
    load_config,
    may_change,
    reasons_in,
    replace_values,
    with_later_choices,
)
from scrimp.errors import CheckpointError, StorageError, typed
from scrimp.files import make_folder, storage
from scrimp.report.records import read_jsonl
from scrimp.training.checkpoint_manifest import MANIFEST, read_manifest
from scrimp.training.metrics import EVENTS, METRICS
from scrimp.training.run_record import RUN
from scrimp.world import ALONE, World

CONFIG = "config.toml"
PLAN = "plan.json"
PLANS = "plans"
"""Folder of every plan that was in force, of runs that change theirs."""
TOKENIZER = "tokenizer"
CHECKPOINTS = "checkpoints"
LOCK = ".lock"


def choose_run_dir(config: Config, root: Path = Path("runs")) -> Path:
    """The user's folder, or the next free ``runs/<preset>-<number>``."""
    if config.run.dir is not None:
        return config.run.dir
    number = 1
    while (root / f"{config.model.preset}-{number:03d}").exists():
        number += 1
    return root / f"{config.model.preset}-{number:03d}"


def run_of(folder: Path) -> Path:
    """The run that a checkpoint lies in; any other folder, and a checkpoint that is in no run, as it is."""
    own = folder.resolve()
    run_dir = own.parent.parent
    is_part = (
        (folder / MANIFEST).is_file() and own.parent.name == CHECKPOINTS and (run_dir / CONFIG).is_file()
    )
    return run_dir if is_part else folder


def refuse_used_folder(run_dir: Path) -> None:
    """Refuse a folder that exists and is not empty.

    Raises:
        CheckpointError: it holds a run. StorageError: it holds something else, or is a file.
    """
    if run_dir.is_dir() and (run_dir / CONFIG).exists():
        has_checkpoint = any((run_dir / CHECKPOINTS).glob("step-*"))
        raise CheckpointError(
            f"{run_dir} holds a run already",
            got="one with checkpoints" if has_checkpoint else "one without a complete checkpoint",
            do=f"continue it with {typed('train', '--run.dir', run_dir, '--resume')}, or choose another --run.dir",
        )
    if run_dir.is_dir():
        strangers = sorted(entry.name for entry in run_dir.iterdir() if not _is_leftover(entry))
        if strangers:
            raise StorageError(
                f"{run_dir} is not empty and holds no run",
                got=", ".join(strangers[:3]) + (" ..." if len(strangers) > 3 else ""),
                expected="a new or empty folder",
                do="choose another --run.dir",
            )
    elif run_dir.exists() or run_dir.is_symlink():
        raise StorageError(
            f"{run_dir} is not a folder", expected="a new folder", do="choose another --run.dir"
        )


def _is_leftover(entry: Path) -> bool:
    """What a run leaves that was killed before its configuration, the last of its first files, was there."""
    if entry.name == CHECKPOINTS:
        return entry.is_dir() and not any(entry.iterdir())
    return entry.name in (LOCK, TOKENIZER, PLAN, RUN) or (
        entry.name[0] == "." and entry.name.endswith(".partial")
    )


class FolderInUseError(StorageError):
    """Another process holds the lock of a run folder."""


@contextlib.contextmanager
def claim_new_folder(config: Config, world: World = ALONE) -> Iterator[Path]:
    """Hold the folder of a new run, locked. Where the user named none, the next free one is taken, also when
    several runs start at once.

    Raises:
        CheckpointError, StorageError: the folder that the user named came into use meanwhile.
    """
    with contextlib.ExitStack() as stack:
        yield world.once("making the run's folder", lambda: _claimed(config, stack), write=str, read=Path)


def _claimed(config: Config, stack: contextlib.ExitStack) -> Path:
    """The folder of a new run, whose lock a stack now holds."""
    while True:
        run_dir = choose_run_dir(config)
        with contextlib.ExitStack() as attempt:
            try:
                attempt.enter_context(RunLock(run_dir))
                refuse_used_folder(run_dir)
            except (CheckpointError, FolderInUseError):
                if config.run.dir is not None:
                    raise
                continue  # another run has taken it meanwhile: the next number is free
            stack.enter_context(attempt.pop_all())
            return run_dir


class RunLock:
    """Holds the lock of a run folder, creating the folder where needed; in the writer's process, for all ranks."""

    def __init__(self, run_dir: Path, world: World = ALONE) -> None:
        self._run_dir, self._world = run_dir, world
        self._file: IO[bytes] | None = None

    def __enter__(self) -> RunLock:
        self._world.once(f"locking {self._run_dir}", self._take)
        return self

    def _take(self) -> None:
        make_folder(self._run_dir)
        with storage(self._run_dir, "write to"):
            self._file = open(self._run_dir / LOCK, "ab")  # noqa: SIM115 - closed by `__exit__`
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise FolderInUseError(
                f"{self._run_dir} is in use", got="another process trains in it", do="wait for it or stop it"
            ) from None
        except OSError as error:
            self._file.close()
            raise StorageError(
                f"{self._run_dir} cannot be locked",
                got=error.strerror or str(error),
                do="choose a --run.dir on a file system with locks",
            ) from None

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()


def refuse_checkpoint(folder: Path) -> None:
    """Refuse a checkpoint where a run is meant: it has a configuration too."""
    if not (folder / MANIFEST).is_file():
        return
    run_dir, step = run_of(folder), read_manifest(folder).step
    do = f"go on from it with `scrimp train --run.dir {run_dir} --resume-from {step}`"
    if run_dir == folder:
        do = f"put it into {CHECKPOINTS}/ of its run, or begin a new run with --model.weights {folder}"
    raise CheckpointError(f"{folder} is a checkpoint", expected="the folder of its run", do=do)


def sign_of_checkpoints(run_dir: Path) -> str | None:
    """What the logs of a run say of checkpoints that it had; None if it never had one."""
    events = run_dir / EVENTS
    kinds = ("checkpoint", "resume")
    steps = [event.get("step") for event in read_jsonl(events) if event.get("kind") in kinds]
    saved = [step for step in steps if isinstance(step, int) and step > 0]
    if saved:
        return f"{EVENTS} tells of one at step {max(saved):,}"
    log = run_dir / METRICS
    if not events.exists() and log.exists() and log.stat().st_size:
        return f"{METRICS} holds steps, and {EVENTS} is gone"
    return None


def saved_config(run_dir: Path) -> Config:
    """The resolved configuration that a run was started with."""
    path = run_dir / CONFIG
    if not path.is_file():
        raise CheckpointError(
            f"{run_dir} holds no run", expected=f"a folder with {CONFIG}", do="start one without --resume"
        )
    return with_later_choices(load_config(path))


def config_to_resume(saved: Config, now: Config, given: Collection[str]) -> Config:
    """The saved configuration with the changes that a resumed run may make.

    Args:
        now: what the command line and file say.
        given: dotted keys that the user wrote; all others follow the saved run.

    Raises:
        CheckpointError: a given key differs from the saved run and decides its numbers.
    """
    # A choice that the user left to Scrimp has been made, and is kept; a back end is chosen anew where auto is given.
    wanted = settled(now, given) | ({"backend"} & set(given))
    changed = {key: pair for key, pair in differences(saved, now).items() if key in wanted}
    refused = {key: pair for key, pair in changed.items() if key not in may_change(saved)}
    if refused:
        raise CheckpointError(
            "the configuration is not the one of the run",
            got="; ".join(
                f"{key} = {new} (the run has {old})" for key, (old, new) in sorted(refused.items())
            ),
            expected="the saved values, so that the run continues as it began",
            do="leave them out, or start a new run from these weights with --model.weights",
        )
    return replace_values(saved, {key: new for key, (_, new) in changed.items()})


def settled(now: Config, given: Collection[str]) -> set[str]:
    """The dotted keys that the user wrote and that leave nothing to Scrimp."""
    return {key for key, value in flatten(now).items() if key in given and value not in (None, "auto")}


def chosen_values(run_dir: Path, config: Config) -> dict[str, str]:
    """Dotted keys of values that Scrimp chose, by the saved configuration of a run, and why, as far as `config` still
    has them."""
    return reasons_in((run_dir / CONFIG).read_text(encoding="utf-8"), config)


def drop_plans_after(run_dir: Path, step: int) -> None:
    """Remove the plans that began after a step: those of a run that goes on from a checkpoint of it."""
    for path in sorted((run_dir / PLANS).glob("step-*.json")):
        number = path.name.removeprefix("step-").partition(".")[0]
        if number.isdecimal() and int(number) > step:
            with storage(path, "remove"):
                path.unlink(missing_ok=True)
