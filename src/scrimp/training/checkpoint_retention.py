"""Which checkpoints of a run stay: the last N good ones, and one in every so many steps.

Problem  Disks fill up, and the newest checkpoint may be one that nobody wants to go on from.
Method   Good is what has its full size and finite numbers and, while the newest one is not finite, the right checksums:
         an older one is then what the run goes on from. What is older than the last N good ones goes, and all
         older ones whose numbers are not finite. Steps beyond the newest are of a future that this run, gone
         back, has not reached: they stay. A folder whose manifest cannot be read stays too: nobody knows what it is.
Checked  tests/training/test_checkpoint.py, test_not_finite.py
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from scrimp.errors import CheckpointError, ScrimpError
from scrimp.training import checkpoint_manifest as manifests

if TYPE_CHECKING:
    from pathlib import Path

    from scrimp.training.checkpoint import Checkpoint


class Retention:
    """What a store keeps.

    Args:
        keep_last: newest checkpoints that stay, of those whose numbers are all finite.
        keep_every: checkpoints at multiples of this step stay for good; 0 for none.
        not_finite: step to the tensors that are not finite, as far as known; more is added.
    """

    def __init__(self, keep_last: int, keep_every: int, not_finite: dict[int, tuple[str, ...]]) -> None:
        self._keep_last, self._keep_every, self._not_finite = keep_last, keep_every, not_finite

    def prune(self, complete: Sequence[Checkpoint], newest: int, *, is_finite: bool) -> None:
        """Remove what need not stay. Raises OSError.

        Args:
            complete: all checkpoints, newest last.
            newest: the step of the one that was written last.
            is_finite: whether its numbers are.
        """
        older = [c for c in complete if c.step < newest and _passes(c, manifests.read_manifest)]
        bad = {c.step for c in older if self._is_finite(c) is False}
        good = [newest] if is_finite else []
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
            removed = checkpoint.folder.with_name(f".{manifests.step_name(checkpoint.step)}.removed")
            # Renamed first: a kill in the middle of deleting must not leave half a checkpoint.
            os.rename(checkpoint.folder, removed)
            shutil.rmtree(removed)

    def _is_finite(self, checkpoint: Checkpoint) -> bool | None:
        """Whether all numbers of a checkpoint are finite; None if it is damaged."""
        try:
            checkpoint.verify_sizes()
            if checkpoint.step not in self._not_finite:
                self._not_finite[checkpoint.step] = checkpoint.not_finite
        except CheckpointError:
            return None
        return not self._not_finite[checkpoint.step]


def _passes(checkpoint: Checkpoint, check: Callable[[Path], object]) -> bool:
    try:
        check(checkpoint.folder)
    except ScrimpError:
        return False
    return True
