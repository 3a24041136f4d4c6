"""Updates of blocks on the CPU: one after the other in a thread, while the device updates the others.

Problem  Beside a device that updates what lives on it, the CPU has the time to update what lives in its own memory.
Method   One thread works through blocks in the order in which they were begun; torch gives up the interpreter's lock
         inside its kernels.
Limits   What fails in the thread fails whoever waits for that block. Whether a step is updated at all, and by how much
         its gradients are scaled, is known when the norm of all of them is: no update begins before.
Source   CPU Adam beside the device: ProTrain; docs/memory.md
Checked  tests/optim/test_cpu_update.py
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait


class CpuUpdates:
    """The updates of one step, begun and waited for from one thread.

    Args:
        blocks: whose updates run here.
    """

    def __init__(self, blocks: Sequence[int]) -> None:
        self.blocks = tuple(blocks)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="scrimp-update")
        self._begun: dict[int, Future[None]] = {}

    def begin(self, block: int, update: Callable[[], None]) -> None:
        """Run a block's update as soon as those before it are over.

        Args:
            update: reads what nobody else writes until it was waited for.
        """
        self._begun[block] = self._thread.submit(update)

    def finish(self, block: int) -> None:
        """Wait for a block's update; its error is raised here."""
        self._begun.pop(block).result()

    def stop(self) -> None:
        """Wait until nothing runs; what has not begun never does."""
        for update in self._begun.values():
            update.cancel()
        wait(self._begun.values())
        self._begun.clear()

    def close(self) -> None:
        """End the thread."""
        self.stop()
        self._thread.shutdown()
