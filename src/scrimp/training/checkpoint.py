"""Checkpoints of a run: written beside, sealed, renamed; a kill at any moment loses no old one.

Problem  A run can be killed (kill -9, power, preemption) in the middle of a write, the disk can fill up, and what was
         written can be damaged later. Training should not wait for disks. Under a layout each of many ranks holds a
         share of the state, and must hold no more.
Method   `save` copies what this rank is to write to the host and returns; threads in the background then

             write       checkpoints/.step-00000400.1f0c55aa.partial/: all ranks their boxes, rank 0 state.json, ...
             seal        rank 0: hash and flush every file, manifest.json last
             rename      to checkpoints/step-00000400, and flush the folder
             prune       rename to .step-00000200.removed, then delete

         so that a folder named step-* was complete when it got its name: of all ranks, for between the first line and
         the second all have said that theirs is done (`Writing`). The ranks take a write further in `poll`, `wait` and
         `save`, which all of them call in the same order. What one fails in ends the write on all; older ones stay.
         The number in the name is new in each write: a rank that does not see that folder sees another disk, which is
         refused, and one that a dead run has left behind writes into none.
         Where the final name is taken (the run went back behind a damaged checkpoint and came here again), the old
         folder steps aside to .step-00000400.replaced, still found by a reader, and goes when the new one has the name.
         The first save of a process clears what a killed one left. `latest` trusts no name: it verifies the checksums,
         from the newest downwards. A state that holds a NaN or an infinity is written too, for it says what went wrong,
         and its manifest says so: it pushes out no good checkpoint, and only the newest such stays.
Bytes    The same run gives the same bytes in every file, in whichever folder, and under every layout that gives the
         same numbers: times that were measured stand in the run's own plan.json and logs. Not so where measured times
         decide: blocks that memory limits were timed for, and state.json of runs that plan their precision, which keeps
         the seconds of its plans for the run's page.
Limits   One run at a time per folder (its lock). The next `save`, `poll` or `wait` raises an error of the background.
Checked  tests/training/test_checkpoint.py, test_checkpoint_faults.py (faults made for real), test_not_finite.py,
         test_same_bytes.py, test_checkpoint_layouts.py (several ranks), test_checkpoint_kill.py (kill -9 at random
         moments and at every file operation)
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import numpy as np
from torch import Tensor

from scrimp.errors import CheckpointError, StorageError
from scrimp.files import storage, storage_error, sync_folder
from scrimp.json_files import read_json
from scrimp.parts import TensorPart, parts_of
from scrimp.report.units import format_bytes
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training import tensor_files
from scrimp.training.checkpoint_retention import Retention
from scrimp.training.checkpoint_writing import Writing, not_written
from scrimp.training.exact_json import decoded, encoded
from scrimp.training.snapshot import HostCopies
from scrimp.training.tensors_elsewhere import everywhere
from scrimp.world import ALONE, World

FOLDER: Final = "checkpoints"
STATE: Final = "state.json"

_MAX_STATE_BYTES: Final = 256 << 20
_COMPLETE: Final = re.compile(r"step-(\d{8,})")
_REPLACED: Final = re.compile(r"\.step-(\d{8,})\.replaced")
_LEFTOVER: Final = re.compile(r"\.step-\d{8,}(\.[0-9a-f]{8})?\.(partial|removed)")
_SEEN_WITHIN: Final = 5.0
"""Seconds in which a folder that one rank has made is seen by all: a network file system may need some."""


@dataclass(frozen=True)
class Checkpoint:
    """One folder with the whole state of a run after `step` steps."""

    step: int
    folder: Path

    @cached_property
    def state(self) -> dict[str, Any]:
        """What `save` was given as `state`, floats exactly as they were."""
        path, do = self.folder / STATE, "use an older checkpoint"
        saved = read_json(path, dict[str, Any], error=CheckpointError, do=do, at_most=_MAX_STATE_BYTES)
        try:
            return {key: decoded(value) for key, value in saved.items()}
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"{path} is damaged", got=error, do=do) from error

    @cached_property
    def not_finite(self) -> tuple[str, ...]:
        """Names of the tensors that hold a NaN or an infinity; of a checkpoint that does not say, counted."""
        known = manifests.read_manifest(self.folder).not_finite
        return tuple(tensor_files.not_finite(self.tensors())) if known is None else known

    def refuse_not_finite(self, prefix: str = "", *, do: str) -> None:
        """Raise CheckpointError if a tensor whose name starts with `prefix` is not finite."""
        names = [name for name in self.not_finite if name.startswith(prefix)]
        if names:
            raise not_finite_error(self.folder, names, do=do)

    def verify(self) -> None:
        """Compare every file with the manifest. Raises CheckpointError naming the first bad one."""
        manifest = manifests.verify(self.folder)
        if manifest.step != self.step:
            raise CheckpointError(
                f"{self.folder} is not what its name says", got=f"step {manifest.step}", expected=self.step
            )

    def verify_sizes(self) -> None:
        """The part of `verify` that reads no file of tensors."""
        manifests.verify_sizes(self.folder, manifests.read_manifest(self.folder))

    def load(
        self, into: Mapping[str, Tensor | TensorPart], world: World = ALONE, *, prefix: str = ""
    ) -> None:
        """Fill what this rank holds, in place; nothing is touched unless names, shapes and types all fit on all ranks.

        Args:
            prefix: only the tensors whose name starts with it are wanted.

        Raises:
            CheckpointError: on all ranks: it is of another model, or damaged.
        """
        parts = everywhere(parts_of(into), world)
        with world.together(f"comparing {self.folder} with the model"):
            self.verify_sizes()
            tensor_files.refuse_other_tensors(self.folder, parts, prefix)
        with world.together(f"reading {self.folder}"):
            tensor_files.read_parts(self.folder, parts)

    def tensors(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Stored tensors whose name starts with `prefix`, one at a time, by their full names."""
        return tensor_files.stream_tensors(self.folder, prefix)

    def read_file(self, name: str) -> str:
        """The text of a file that was saved along, such as ``config.toml``."""
        try:
            return (self.folder / name).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"{self.folder / name} cannot be read", got=error) from error


def not_finite_error(folder: Path, names: Sequence[str], *, do: str) -> CheckpointError:
    """The refusal of weights, or a whole state, that holds a NaN or an infinity."""
    more = f" and {len(names) - 3:,} more" if len(names) > 3 else ""
    return CheckpointError(
        f"{folder} holds numbers that are not finite",
        got=f"NaN or infinity in {', '.join(names[:3])}{more}",
        expected="finite numbers",
        do=do,
    )


class CheckpointStore:
    """The checkpoints of one run. Making a store touches nothing; reading never writes.

    Args:
        keep_last: newest checkpoints that stay, of those whose numbers are all finite.
        keep_every: checkpoints at multiples of this step stay for good; 0 for none.
        room: bytes that a budget of host memory leaves for the copy of what a rank writes; None: there is none.
        world: the ranks of the run. All of them call `save`, `poll` and `wait`, in the same order.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_last: int,
        keep_every: int,
        room: int | None = None,
        world: World = ALONE,
    ) -> None:
        if keep_last < 1 or keep_every < 0:
            raise ValueError(f"keep_last {keep_last} must be at least 1, keep_every {keep_every} at least 0")
        self.folder, self._world = run_dir / FOLDER, world
        self._copies = HostCopies(room)
        self._is_prepared = False
        self._writing: Writing | None = None
        self._finished: list[int] = []
        self.not_finite: dict[int, tuple[str, ...]] = {}
        """Step to the tensors that are not finite, of the checkpoints that this store has written or looked at."""
        self._retention = Retention(keep_last, keep_every, self.not_finite)

    # -- writing -------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor | TensorPart],
        state: Mapping[str, Any],
        files: Mapping[str, str],
        *,
        skipped_steps: int = 0,
        wait: bool = False,
    ) -> None:
        """Write a checkpoint of `step`. When this returns, the caller may change its tensors.

        Waits for a write that is still going on. If that one failed, its error is raised and
        nothing is saved now: record it, and save again.

        Args:
            tensors: by name, of this rank; parts, DTensors, and plain tensors, of which every rank has a copy, and
                rank 0's is written.
            state: JSON values only; comes back exactly, non-finite floats too; rank 0's, as `files`.
            files: name to text, saved along.
            skipped_steps: steps so far that moved no weight, for the manifest.
            wait: return when the checkpoint is complete.

        Raises:
            StorageError: no space, no permission, or the previous write failed.
        """
        self.wait()
        self._writing, waits = self._begun(step, tensors, state, files, skipped_steps, wait)
        is_alone = self._writing.is_sealing = self._world.size == 1
        phase = self._write_and_seal if is_alone else Writing.write
        self._writing.start(functools.partial(phase, self._writing), inline=waits)
        if waits:
            self.wait()

    def wait(self) -> None:
        """Return when no write is going on. Raises its error."""
        while self._writing is not None:
            self._writing.join()
            self._advance(inline=True)

    def poll(self) -> list[int]:
        """Steps whose checkpoints became complete since the last call. Raises a write's error."""
        self._advance(inline=False)
        finished, self._finished = self._finished, []
        return finished

    def refuse_separate_folders(self) -> None:
        """Find out before the first step whether all ranks see what one of them writes. Raises StorageError."""
        world, folder = self._world, None
        if world.size == 1:
            return
        try:
            with world.together("looking for the run's folder"):
                folder = self.folder / world.once("making a folder", lambda: self._new_folder(0).name)
                _refuse_unseen(folder)
        finally:
            self._remove(folder)

    def prepare(self) -> None:
        """Make the folder, and clear what a killed process left in it. Called by the first save."""
        if self._is_prepared:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for entry in sorted(os.listdir(self.folder)):
                replaced = _REPLACED.fullmatch(entry)
                if replaced and not (self.folder / manifests.step_name(int(replaced[1]))).exists():
                    os.rename(self.folder / entry, self.folder / manifests.step_name(int(replaced[1])))
                elif replaced or _LEFTOVER.fullmatch(entry):
                    shutil.rmtree(self.folder / entry)
            sync_folder(self.folder)
        except OSError as error:
            raise storage_error(error, f"checkpoints cannot be written in {self.folder}") from error
        self._is_prepared = True

    # -- reading -------------------------------------------------------------------------------

    def complete(self) -> list[Checkpoint]:
        """Every checkpoint that has a manifest, newest last; their contents are not checked."""
        return [c for c in self.candidates() if (c.folder / manifests.MANIFEST).is_file()]

    def latest(self, *, finite: bool = False) -> tuple[Checkpoint | None, list[CheckpointError]]:
        """The newest checkpoint that verifies, and what is wrong with the newer ones.

        Args:
            finite: whether all its numbers must be finite too.
        """
        errors: list[CheckpointError] = []
        for checkpoint in reversed(self.candidates()):
            try:
                checkpoint.verify()
                if finite:
                    checkpoint.refuse_not_finite(do="use an older checkpoint")
            except CheckpointError as error:
                if checkpoint.folder.is_dir():  # else it was pruned meanwhile by the run that goes on
                    errors.append(error)
            else:
                return checkpoint, errors
        return None, errors

    def at(self, step: int) -> Checkpoint:
        """The checkpoint of a step, verified.

        Raises:
            CheckpointError: there is none, or it is damaged.
        """
        found = {checkpoint.step: checkpoint for checkpoint in self.candidates()}
        if step not in found:
            known = ", ".join(f"{number:,}" for number in found) or "none at all"
            raise CheckpointError(
                f"{self.folder} holds no checkpoint of step {step:,}", expected=f"one of those there: {known}"
            )
        found[step].verify()
        return found[step]

    def set_aside_after(self, step: int) -> list[Path]:
        """Rename the checkpoints after a step that a run goes back to, so that nobody takes them for the newest.

        Returns their new paths; they stay until their owner deletes them. Raises StorageError.
        """
        moved = []
        for checkpoint in reversed(self.candidates()):  # a kill in between leaves a newest one that is older
            if checkpoint.step <= step:
                break
            aside, number = self.folder / f"left-{manifests.step_name(checkpoint.step)}", 1
            while aside.exists():
                number += 1
                aside = self.folder / f"left-{manifests.step_name(checkpoint.step)}.{number}"
            with storage(checkpoint.folder, "rename"):
                os.rename(checkpoint.folder, aside)
                sync_folder(self.folder)
            moved.append(aside)
        return moved

    def candidates(self) -> list[Checkpoint]:
        """Every folder with the name of a checkpoint, newest last, complete or not."""
        try:
            entries = os.listdir(self.folder)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot be read", got=error.strerror or error) from error
        found: dict[int, Path] = {}
        for entry in sorted(entries):  # ".step-*.replaced" sorts before "step-*", which wins
            match = _REPLACED.fullmatch(entry) or _COMPLETE.fullmatch(entry)
            if match:
                found[int(match[1])] = self.folder / entry
        return [Checkpoint(step, folder) for step, folder in sorted(found.items())]

    # -- the background ------------------------------------------------------------------------

    def _begun(
        self,
        step: int,
        tensors: Mapping[str, Tensor | TensorPart],
        state: Mapping[str, Any],
        files: Mapping[str, str],
        skipped_steps: int,
        wait: bool,
    ) -> tuple[Writing, bool]:
        """What is to be written of a checkpoint whose files are there, and whether the callers wait for it, all ranks
        alike: where one has no room for a copy, they do, and what they hold does not change meanwhile."""
        world, folder, doing = self._world, None, f"writing the checkpoint of step {step}"
        try:
            with world.together(doing):
                parts = everywhere(parts_of(tensors, writes_whole=world.is_writer), world)
                layout = self._layout_of(parts)
                content = json.dumps(encoded(state), indent=1, allow_nan=False) + "\n"
                texts = {STATE: content, **_checked(files)}
                size = layout.nbytes + sum(len(text.encode()) for text in texts.values())
                folder = self.folder / world.once(doing, lambda: self._created(step, layout, size).name)
                _refuse_unseen(folder)
                own = {name: part for name, part in parts.items() if part.is_writer}
                copies = None if wait else self._copies.take({name: own[name].local for name in own})
                waits = wait or world.any(copies is None)
        except BaseException:
            self._remove(folder)
            raise
        if copies is not None:
            own = {name: dataclasses.replace(own[name], local=copies[name]) for name in own}
        return Writing(step, folder, layout, own, texts if world.is_writer else {}, skipped_steps), waits

    def _layout_of(self, parts: Mapping[str, TensorPart]) -> tensor_files.Layout:
        """Where the bytes of all tensors belong. Of no tensor a hole may stay, or anything be written twice."""
        tensor_files.check_types(parts)
        tensors = [[name, str(part.local.dtype), part.shape] for name, part in parts.items()]
        self._world.agree("the tensors of a checkpoint", tensors, do="report this")
        here = np.array([part.local.numel() * part.is_writer for part in parts.values()], dtype=np.int64)
        for (name, part), count in zip(parts.items(), self._world.sum(here), strict=True):
            if count != part.whole_numel:
                raise ValueError(f"{name}: ranks write {count:,} numbers of {part.whole_numel:,}")
        return tensor_files.lay_out(parts)

    def _created(self, step: int, layout: tensor_files.Layout, size: int) -> Path:
        """A new folder with the files of a checkpoint, still empty, of so many bytes with all texts."""
        self.prepare()
        with storage(self.folder, "write checkpoints in"):
            _refuse_full_disk(self.folder, size)
        folder = self._new_folder(step)
        try:
            tensor_files.create_files(folder, layout)
        except OSError as error:
            self._remove(folder)
            raise storage_error(error, not_written(step, self.folder)) from error
        return folder

    def _new_folder(self, step: int) -> Path:
        folder = self.folder / f".{manifests.step_name(step)}.{secrets.token_hex(4)}.partial"
        self.prepare()
        with storage(self.folder, "write checkpoints in"):
            folder.mkdir()
        return folder

    def _remove(self, folder: Path | None) -> None:
        """Remove what did not become a checkpoint; rank 0 does."""
        if folder is not None and self._world.is_writer:
            shutil.rmtree(folder, ignore_errors=True)

    def _advance(self, *, inline: bool) -> None:
        """Take the write that is going on further, all ranks alike.

        Args:
            inline: do here what is left, for the caller waits.
        """
        writing = self._writing
        if writing is None:
            return
        progress = writing.progress(self._world)
        has_failed = any(one.failure for one in progress)
        if has_failed:
            writing.stop()
        if not all(one.has_ended for one in progress):
            return
        if not has_failed and not writing.is_sealing:
            writing.begin_sealing(progress)
            if self._world.is_writer:
                writing.start(functools.partial(self._seal, writing), inline=inline)
            return
        self._writing = None
        if any(one.is_complete for one in progress):
            self._finished.append(writing.step)
            self.not_finite[writing.step] = writing.not_finite
        else:
            self._remove(writing.folder)
        writing.raise_failure(progress, self._world)

    def _write_and_seal(self, writing: Writing) -> None:
        """Both phases, of a rank alone."""
        writing.write()
        self._seal(writing)

    def _seal(self, writing: Writing) -> None:
        """The second phase, on rank 0, when all that the ranks hold is written."""
        step, bad = writing.step, writing.not_finite
        manifests.seal(writing.folder, step, not_finite=bad, skipped_steps=writing.skipped_steps)
        self._publish(writing.folder, step)
        writing.is_complete = True
        try:
            if self._aside(step).exists():
                shutil.rmtree(self._aside(step))
        except OSError as error:
            raise storage_error(error, "the replaced checkpoint was not removed") from error
        try:
            self._retention.prune(self.complete(), step, is_finite=not bad)
        except OSError as error:
            raise storage_error(error, "an old checkpoint was not removed") from error

    def _aside(self, step: int) -> Path:
        return self.folder / f".{manifests.step_name(step)}.replaced"

    def _publish(self, partial: Path, step: int) -> None:
        final, aside = self.folder / manifests.step_name(step), self._aside(step)
        if final.exists():
            os.rename(final, aside)
        try:
            os.rename(partial, final)
        except OSError:
            if aside.exists():
                os.rename(aside, final)
            raise
        sync_folder(self.folder)


def _checked(files: Mapping[str, str]) -> Mapping[str, str]:
    reserved = {STATE, manifests.MANIFEST, tensor_files.INDEX}
    for name in files:
        if Path(name).name != name or name in reserved or name.endswith(manifests.TENSOR_SUFFIX):
            raise ValueError(f"{name!r} cannot be the name of a file in a checkpoint")
    return files


def _refuse_full_disk(folder: Path, needed: int) -> None:
    free = shutil.disk_usage(folder).free
    if free < needed:
        raise StorageError(
            f"no space for a checkpoint in {folder}",
            got=f"{format_bytes(free)} free",
            expected=f"{format_bytes(needed)}, {format_bytes(needed - free)} more",
            do="free space, or lower --checkpoint.keep-last",
        )


def _refuse_unseen(folder: Path) -> None:
    """Refuse to go on where this rank does not see the folder that another one has made."""
    until = time.monotonic() + _SEEN_WITHIN
    while not folder.is_dir():
        if time.monotonic() > until:
            raise StorageError(
                "ranks see different folders for checkpoints",
                got=f"no {folder} here, which another rank has made",
                expected="one folder, on a file system that all nodes share",
                do="choose another --run.dir",
            )
        time.sleep(0.05)
