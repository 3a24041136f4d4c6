"""Checkpoints of a run: written beside, sealed, renamed; a kill at any moment loses no old one.

Problem  A run can be killed (kill -9, power, preemption) in the middle of a write, the disk can
         fill up, and what was written can be damaged later. Training should not wait for disks.
Method   `save` copies the state to the host and returns; one background thread then

             writes      checkpoints/.step-00000400.partial/   tensors, state.json, given files
             seals       hash and flush every file, manifest.json last
             renames     to checkpoints/step-00000400, and flushes the folder
             prunes      renames to .step-00000200.removed, then deletes

         so that a folder named step-* was complete when it got its name. Where that name is
         taken (the run went back behind a damaged checkpoint and came here again), the old
         folder steps aside to .step-00000400.replaced, still found by a reader, and goes when
         the new one has the name. The first save of a process clears what a killed one left.
         `latest` trusts no name: it verifies the checksums, from the newest downwards.
         A state that holds a NaN or an infinity is written too, for it says what went wrong, and
         its manifest says so: it pushes out no good checkpoint, and only the newest such stays.
Bytes    The same run gives the same bytes in every file, in whichever folder: times that were measured
         stand in the run's own plan.json and logs. Not so where measured times decide: blocks that
         memory limits were timed for, and state.json of runs that plan their precision, which keeps the
         seconds of its plans for the run's page.
Limits   One writing process per run folder (the run's lock sees to it). An error of the thread
         is raised by the next `save`, `poll` or `wait`; the training itself can go on. Of several
         ranks, which all call these, one writes what it holds; its errors are raised on all.
Checked  tests/training/test_checkpoint.py, test_checkpoint_faults.py (faults made for real),
         test_not_finite.py, test_same_bytes.py,
         test_checkpoint_kill.py (kill -9 at random moments and at every file operation)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

from torch import Tensor

from scrimp.errors import CheckpointError, ScrimpError, StorageError
from scrimp.files import storage, storage_error, sync_folder
from scrimp.json_files import read_json
from scrimp.report.units import format_bytes
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training import tensor_files
from scrimp.training.exact_json import decoded, encoded
from scrimp.training.snapshot import HostCopies
from scrimp.world import ALONE, World

FOLDER: Final = "checkpoints"
STATE: Final = "state.json"

_MAX_STATE_BYTES: Final = 256 << 20
_COMPLETE: Final = re.compile(r"step-(\d{8,})")
_REPLACED: Final = re.compile(r"\.step-(\d{8,})\.replaced")
_LEFTOVER: Final = re.compile(r"\.step-\d{8,}\.(partial|removed)")
_HEADER_BYTES: Final = 512
"""Generous size of one tensor's entry in a file's header and in the index."""


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

    def load(self, into: Mapping[str, Tensor]) -> None:
        """Fill `into` in place; nothing is touched unless names, shapes and types all fit."""
        _verify_sizes(self.folder)
        tensor_files.read_tensors(self.folder, into)

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
        room: bytes that a budget of host memory leaves for the copy and for the file that is being assembled, which
            is never smaller than the largest tensor; None: there is none.
        world: the ranks of the run.
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
        self._keep_last, self._keep_every = keep_last, keep_every
        self._copies = HostCopies(room)
        most = tensor_files.MAX_FILE_BYTES
        self._file_bytes = most if room is None else max(1, min(most, room))
        self._is_prepared = False
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._finished: list[int] = []
        self.not_finite: dict[int, tuple[str, ...]] = {}
        """Step to the tensors that are not finite, of the checkpoints that this store has written or looked at."""

    # -- writing -------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
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
            state: JSON values only; comes back exactly, non-finite floats too.
            files: name to text, saved along.
            skipped_steps: steps so far that moved no weight, for the manifest.
            wait: return when the checkpoint is complete.

        Raises:
            StorageError: no space, no permission, or the previous write failed.
        """
        self._world.once(
            f"writing the checkpoint of step {step}",
            lambda: self._save(step, tensors, state, files, skipped_steps, wait),
        )

    def _save(
        self,
        step: int,
        tensors: Mapping[str, Tensor],
        state: Mapping[str, Any],
        files: Mapping[str, str],
        skipped_steps: int,
        wait: bool,
    ) -> None:
        self._finish()
        tensor_files.check_types(tensors)
        texts = {STATE: json.dumps(encoded(state), indent=1, allow_nan=False) + "\n", **_checked(files)}
        try:
            self.prepare()
            num_bytes = sum(tensor.nbytes + _HEADER_BYTES for tensor in tensors.values())
            num_bytes += sum(len(text.encode()) for text in texts.values())
            _refuse_full_disk(self.folder, num_bytes)
        except OSError as error:
            raise storage_error(error, f"checkpoints cannot be written in {self.folder}") from error
        largest = max((tensor.nbytes for tensor in tensors.values()), default=0)
        extra = min(num_bytes, max(self._file_bytes, largest))
        copies = None if wait else self._copies.take(tensors, extra_bytes=extra)
        if copies is None:  # nothing changes the tensors while the caller waits here
            live = {name: tensor.detach().contiguous() for name, tensor in tensors.items()}
            self._write(step, live, texts, skipped_steps)
            self._raise_error()
            return
        arguments = (step, copies, texts, skipped_steps)
        # Not a daemon: a process that ends normally ends after the write.
        thread = threading.Thread(target=self._write, args=arguments, name=f"checkpoint-{step}")
        try:
            thread.start()
        except RuntimeError as error:
            if not manifests.is_out_of_threads(error):
                raise
            self._write(*arguments)
            self._raise_error()
        else:
            self._thread = thread

    def wait(self) -> None:
        """Return when no write is going on. Raises its error."""
        self._world.once("writing a checkpoint", self._finish)

    def _finish(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        self._raise_error()

    def poll(self) -> list[int]:
        """Steps whose checkpoints became complete since the last call. Raises a write's error."""
        found = self._world.once("writing a checkpoint", self._finished_since)
        self.not_finite |= {step: tuple(names) for step, names in found}
        return [step for step, _ in found]

    def _finished_since(self) -> list[tuple[int, tuple[str, ...]]]:
        """Steps, each with the tensors that are not finite."""
        self._raise_error()
        finished, self._finished = self._finished, []
        return [(step, self.not_finite[step]) for step in finished]

    def prepare(self) -> None:
        """Make the folder, and clear what a killed process left in it. Called by the first save."""
        if self._is_prepared:
            return
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            for entry in sorted(os.listdir(self.folder)):
                replaced = _REPLACED.fullmatch(entry)
                if replaced and not (self.folder / _name(int(replaced[1]))).exists():
                    os.rename(self.folder / entry, self.folder / _name(int(replaced[1])))
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
            aside, number = self.folder / f"left-{_name(checkpoint.step)}", 1
            while aside.exists():
                number += 1
                aside = self.folder / f"left-{_name(checkpoint.step)}.{number}"
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

    def _write(
        self, step: int, tensors: Mapping[str, Tensor], texts: Mapping[str, str], skipped_steps: int
    ) -> None:
        partial = self.folder / f".{_name(step)}.partial"
        try:
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            tensor_files.write_tensors(partial, tensors, max_file_bytes=self._file_bytes)
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8", newline="\n")
            bad = tuple(tensor_files.not_finite(tensors.items()))
            manifests.seal(partial, step, not_finite=bad, skipped_steps=skipped_steps)
            self._publish(partial, step)
        except BaseException as error:  # of a thread: kept, and raised by the caller's next call
            shutil.rmtree(partial, ignore_errors=True)
            what = f"the checkpoint of step {step} was not written to {self.folder}"
            self._error = _as_storage_error(error, what)
            return
        self.not_finite[step] = bad
        self._finished.append(step)
        try:
            shutil.rmtree(self._aside(step))
        except FileNotFoundError:
            pass  # the usual case: no older checkpoint of this step
        except OSError as error:
            self._error = storage_error(error, "the replaced checkpoint was not removed")
        try:
            self._prune(step)
        except OSError as error:
            self._error = storage_error(error, "an old checkpoint was not removed")

    def _aside(self, step: int) -> Path:
        return self.folder / f".{_name(step)}.replaced"

    def _publish(self, partial: Path, step: int) -> None:
        final, aside = self.folder / _name(step), self._aside(step)
        if final.exists():
            os.rename(final, aside)
        try:
            os.rename(partial, final)
        except OSError:
            if aside.exists():
                os.rename(aside, final)
            raise
        sync_folder(self.folder)

    def _prune(self, newest: int) -> None:
        """Remove what is older than the last N good ones, and all older ones whose numbers are not finite.

        Good is what has its full size and finite numbers and, while the newest one is not finite, the right checksums:
        an older one is then what the run goes on from. Steps beyond the newest are of a future that this
        run, gone back, has not reached: they stay. A folder whose manifest cannot be read stays too: nobody knows
        what it is.
        """
        older = [c for c in self.complete() if c.step < newest and _passes(c, manifests.read_manifest)]
        bad = {c.step for c in older if self._is_finite(c) is False}
        good = [] if self.not_finite[newest] else [newest]
        for checkpoint in reversed(older):
            if len(good) == self._keep_last:
                break
            if self._is_finite(checkpoint) and (newest in good or _passes(checkpoint, manifests.verify)):
                good.append(checkpoint.step)
        oldest = good[-1] if len(good) == self._keep_last else 0
        for checkpoint in older:
            is_milestone = self._keep_every > 0 and checkpoint.step % self._keep_every == 0
            if is_milestone or (checkpoint.step >= oldest and checkpoint.step not in bad):
                continue
            removed = self.folder / f".{_name(checkpoint.step)}.removed"
            # Renamed first: a kill in the middle of deleting must not leave half a checkpoint.
            os.rename(checkpoint.folder, removed)
            shutil.rmtree(removed)

    def _is_finite(self, checkpoint: Checkpoint) -> bool | None:
        """Whether all numbers of a checkpoint are finite; None if it is damaged."""
        try:
            _verify_sizes(checkpoint.folder)
            if checkpoint.step not in self.not_finite:
                self.not_finite[checkpoint.step] = checkpoint.not_finite
        except CheckpointError:
            return None
        return not self.not_finite[checkpoint.step]

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            raise error


def _as_storage_error(error: BaseException, what: str) -> BaseException:
    """The same error as one that a run survives, where it is of the disk or of memory."""
    if isinstance(error, OSError):
        return storage_error(error, what)
    # safetensors, in Rust, panics where a byte string of Python cannot be made.
    if isinstance(error, MemoryError) or type(error).__name__ == "PanicException":
        return StorageError(
            what, got="no memory to write it with", do="free memory, or lower what the run takes of it"
        )
    return error


def _name(step: int) -> str:
    return f"step-{step:08d}"


def _verify_sizes(folder: Path) -> None:
    manifests.verify_sizes(folder, manifests.read_manifest(folder))


def _passes(checkpoint: Checkpoint, check: Callable[[Path], object]) -> bool:
    try:
        check(checkpoint.folder)
    except ScrimpError:
        return False
    return True


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
