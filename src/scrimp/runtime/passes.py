"""The forward and backward passes of a step: one micro-batch after another, or through the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from scrimp.data import Batch
from scrimp.runtime.execute import Executable
from scrimp.runtime.pipeline import PassSums, first_rows


def run_passes(
    executable: Executable, batches: Sequence[Batch], num_targets: int, *, step: int = 0, first_row: int = 0
) -> PassSums:
    """Sums of the loss and of metrics; gradients of the sum divided by `num_targets` add up. In a pipeline the sums
    are zero on ranks that have not the last stage.

    Args:
        batches: this rank's micro-batches of the step.
        num_targets: of all ranks' batches, as the objective counts.
        first_row: address of this rank's first token among those of the step.
    """
    rows = first_rows(batches, first_row, executable.mesh.layout.cp)
    if executable.stages is not None:
        return executable.stages.passes(
            batches,
            executable.run,
            lambda number, is_last: executable.begin(step, rows[number], is_last=is_last),
            num_targets,
        )
    # Sums stay on the device: reading one per micro-batch would make the host wait each time.
    total = PassSums(torch.zeros((), device=executable.device))
    for number, batch in enumerate(batches):
        executable.begin(step, rows[number], is_last=number == len(batches) - 1)
        sums = executable.loss(batch)
        (sums.total / max(1, num_targets)).backward()
        executable.end_backward()
        total.add(sums)
        del sums  # the graph, and with it masks and tables, before the next one is made
    return total
