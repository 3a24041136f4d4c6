"""One checkpoint while it is being written: what this rank does of it in the background, and how far it is.

Problem  Several ranks write one checkpoint, each in a thread of its own beside the training. Collectives belong to the
         main thread, and whether all ranks have written their share is known to none of them.
Method   A thread does one phase and ends; it asks no other rank. Between two phases the main threads tell one another
         what became of theirs (`Progress`, through the World), and all decide by the same rule::

             writing     every rank its boxes      one failed: the others stop, the folder goes, all raise the error
             sealing     rank 0 hashes and renames    the checkpoint is complete, or not: all know it

         A rank alone has nobody to wait for: its thread does both.
Limits   Where the system gives no thread, the phase is done by the caller.
Checked  tests/training/test_checkpoint_layouts.py, test_checkpoint_kill.py
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scrimp.errors import StorageError
from scrimp.files import storage_error
from scrimp.parts import TensorPart
from scrimp.training import checkpoint_manifest as manifests
from scrimp.training import tensor_files
from scrimp.world import World, error_of, failure_of, set_told


@dataclass(frozen=True)
class Progress:
    """What a rank tells the others of its phase."""

    has_ended: bool
    is_complete: bool
    """Whether the checkpoint has its name; rank 0 knows."""
    not_finite: list[str]
    """Tensors with a NaN or an infinity in what this rank has written."""
    failure: dict[str, str | None] | None
    """Its error, as other ranks are told of it."""


class Writing:
    """This rank's side of a checkpoint that is being written.

    Args:
        folder: where it is written, before it is complete.
        layout: of its files, which are there.
        parts: what this rank holds; the caller may not change it until the first phase has ended.
        texts: name to text of the other files; none but on the rank that writes them.
        skipped_steps: of the run, for the manifest.
    """

    def __init__(
        self,
        step: int,
        folder: Path,
        layout: tensor_files.Layout,
        parts: Mapping[str, TensorPart],
        texts: Mapping[str, str],
        skipped_steps: int,
    ) -> None:
        self.step, self.folder, self.layout, self.skipped_steps = step, folder, layout, skipped_steps
        self.not_finite: tuple[str, ...] = ()
        """Tensors that are not finite: this rank's, and once all have written, all of them."""
        self.is_sealing = self.is_complete = False
        self._parts, self._texts = parts, texts
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, phase: Callable[[], None], *, inline: bool) -> None:
        """Do a phase in a thread, or here."""
        self._thread = None
        if not inline:
            # Not a daemon: a process that ends normally ends after the write.
            thread = threading.Thread(target=self._run, args=(phase,), name=f"checkpoint-{self.step}")
            try:
                thread.start()
            except RuntimeError as error:
                if not manifests.is_out_of_threads(error):
                    raise
            else:
                self._thread = thread
                return
        self._run(phase)

    def write(self) -> None:
        """The first phase: the parts that are this rank's to write, and the texts."""
        bad = tensor_files.write_parts(self.folder, self.layout, self._parts, stopped=self._stopped)
        self.not_finite = self._in_order(bad)
        for name, text in self._texts.items():
            (self.folder / name).write_text(text, encoding="utf-8", newline="\n")
        self._parts = {}  # copies need not live as long as the sealing

    def begin_sealing(self, progress: Sequence[Progress]) -> None:
        """All ranks have written: what they found is what the checkpoint has."""
        self.is_sealing = True
        self.not_finite = self._in_order([name for one in progress for name in one.not_finite])

    def join(self) -> None:
        """Wait for this rank's thread."""
        if self._thread is not None:
            self._thread.join()

    def stop(self) -> None:
        """End this rank's writing before its next piece: another rank has failed."""
        self._stopped.set()

    def progress(self, world: World) -> list[Progress]:
        """How far all ranks are."""
        has_ended = self._thread is None or not self._thread.is_alive()
        # In this order: a thread that ends in between has not ended yet.
        error = self._error if has_ended else None
        failure = None if error is None else failure_of(error, f"writing the checkpoint of step {self.step}")
        own = Progress(has_ended, has_ended and self.is_complete, list(self.not_finite), failure)
        return [Progress(**one) for one in world.gathered(vars(own))]

    def raise_failure(self, progress: Sequence[Progress], world: World) -> None:
        """Raise the error of a rank, the same on all: a bug before what a run survives."""
        failures: dict[int, Any] = {rank: one.failure for rank, one in enumerate(progress) if one.failure}
        if not failures:
            return
        rank = min(failures, key=lambda rank: failures[rank]["kind"] is not None)
        error = self._error if rank == world.rank and self._error else error_of(rank, failures[rank])
        set_told(error, rank)  # so that it is shown where it has its traceback
        raise error

    def _run(self, phase: Callable[[], None]) -> None:
        what = not_written(self.step, self.folder.parent)
        try:
            phase()
        except OSError as error:
            self._error = storage_error(error, what)
        except MemoryError as error:
            do = "free memory, or lower what the run takes of it"
            self._error = StorageError(what, got="no memory to write it with", do=do)
            self._error.__cause__ = error
        except Exception as error:  # of a thread: kept, and raised by the caller's next call
            self._error = error
        except BaseException:
            self._error = StorageError(what, got="an interruption")
            raise

    def _in_order(self, names: Collection[str]) -> tuple[str, ...]:
        return tuple(name for name in self.layout.places if name in names)


def not_written(step: int, folder: Path) -> str:
    """The sentence that errors of a write begin with."""
    return f"the checkpoint of step {step} was not written to {folder}"
