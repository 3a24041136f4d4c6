"""Updates of blocks on the CPU: one after the other in a thread, while the device goes on.

Problem  Beside a device that computes, the CPU has the time to update what lives in its own memory. But whether a step
         is updated at all, and by how much its gradients are scaled, is known when the norm of all of them is: the
         last gradient may be infinite.
Method   One thread works through blocks in the order in which they were begun; torch gives up the interpreter's lock
         inside its kernels. A block may begin early, under the backward pass, as if its step were neither clipped
         nor skipped: then all that its update writes is copied first, in the same thread::

             verdict "as supposed"          the update stands
             clipped, skipped, given up     what has begun to run is waited for, the rest never runs, copies go back

         so that a step that is not as supposed begins from the same bits as if nothing had been early.
         Copies have places of their own for as long as the run lasts: the account counts them.
Exact    Bytes are copied, never computed back.
Limits   An early update that is taken back is done twice. What fails in the thread fails whoever waits for that
         block; of an update that is taken back nobody asks how it went.
Source   CPU Adam under the backward pass: ProTrain; speculation and rollback: SuperOffload; docs/memory.md
Checked  tests/optim/test_cpu_update.py
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

from torch import Tensor

from scrimp.runtime.memory import HostArena


class CpuUpdates:
    """The updates of one step, begun and waited for from one thread.

    Args:
        written: block to every tensor that its update writes, all in host memory.
        spare: where the copies for early updates live; None: no update may be early.
    """

    def __init__(self, written: Mapping[int, Sequence[Tensor]], spare: HostArena | None = None) -> None:
        self._written = written
        self._copies: dict[int, list[Tensor]] = {}
        if spare is not None:
            self._copies = {block: [_like(one, spare) for one in written[block]] for block in written}
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrimp-update")
        self._begun: dict[int, Future[None]] = {}
        self._kept: set[int] = set()
        """Blocks whose copies are whole; the thread adds to it."""

    @property
    def blocks(self) -> list[int]:
        """Whose updates run here."""
        return list(self._written)

    def has_begun(self, block: int) -> bool:
        """Whether the block's update of this step runs, waits for its turn, or is over."""
        return block in self._begun

    def begin(self, block: int, update: Callable[[], None], *, early: bool = False) -> None:
        """Run a block's update as soon as those before it are over.

        Args:
            update: writes what `written` says, reads what nobody else writes until it was waited for.
            early: it may have to be taken back.
        """
        self._begun[block] = self._thread.submit(self._run, block, update, early)

    def finish(self, block: int) -> None:
        """Wait for a block's update; its error is raised here."""
        self._begun[block].result()

    def accept(self) -> None:
        """All of them are over, and stand: the step is complete."""
        assert all(update.done() for update in self._begun.values()), "an update is still running"
        self._begun.clear()
        self._kept.clear()

    def take_back(self) -> None:
        """Wait until nothing runs, and put back what early updates have written. Others are not undone."""
        for update in self._begun.values():
            update.cancel()
        wait(self._begun.values())
        for block in self._kept:
            for tensor, copy in zip(self._written[block], self._copies[block], strict=True):
                tensor.copy_(copy)
        self._begun.clear()
        self._kept.clear()

    def close(self) -> None:
        """Take back what nobody has accepted, and end the thread."""
        self.take_back()
        self._thread.shutdown()

    def _run(self, block: int, update: Callable[[], None], early: bool) -> None:
        if early:
            for tensor, copy in zip(self._written[block], self._copies[block], strict=True):
                copy.copy_(tensor)
            self._kept.add(block)
        update()


def _like(tensor: Tensor, arena: HostArena) -> Tensor:
    return arena.take(tensor.nbytes).view(tensor.shape, tensor.dtype)
