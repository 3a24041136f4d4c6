"""What the targets of each source of a mixture count while it is trained on, by how well the source is learnt.

Problem  Sources of unequal shares are learnt unequally. Shares can be tuned, by runs of their own; a run can also let
         those sources count more that it is behind with.
Method   L_b is the average loss of source b over the last steps (0.9 of itself, from the first step that had any of
         it), R_b a loss that b can reach (`objective.reference_losses`), s `objective.excess_scale`::

             e_b = L_b - R_b
             w_b = 2 - exp(-(e_b - min over sources of e)^2 / (2 s^2))

         1 for the source that is nearest to its reference, towards 2 for those that are far behind it. All that is
         minimised of b's targets is multiplied by w_b, of the averages before the step. The loss that is shown stays
         that of the text, as in any run.
Metric   Losses of texts differ by their entropy. By L_b alone, the metric of Momentum-GS (there PSNR and SSIM), the
         text that is hardest to predict would count twice for ever, whether anything is left to learn of it or not. The
         gap to its own loss at the start says the same: a new model knows nothing of any text, and begins with the same
         loss on all of them. So a source is measured by its excess over what can be reached, as DoReMi does: the loss
         of an earlier run, on the mixture or on that source alone. With 0 for all sources the metric is L_b.
Scale    Weights are not brought to a mean of 1. AdamW's update knows no common factor of gradients; `optimizer.clip`
         does.
State    The averages, in state.json of a checkpoint. They are the same on all ranks.
Limits   A source has weight 1, and is nobody's measure, until it has been seen. A step that is skipped teaches no
         average. More sources than ranks need nothing: any rank draws from any source, where Momentum-GS has to
         swap blocks, each with parameters of its own.
Source   Fan et al., "Momentum-GS" (2024), arXiv 2412.04887; excess losses: Xie et al., "DoReMi" (2023), arXiv
         2305.10429
Checked  tests/training/test_source_weighting_runs.py
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Final

import torch

from scrimp.config import Config
from scrimp.config.mixture import labels_of
from scrimp.config.reference_losses import reference_losses
from scrimp.data import Batch
from scrimp.errors import CheckpointError
from scrimp.objectives.source_weights import means_of, without_sums

KEEPS: Final = 0.9
"""What an average of losses keeps of itself in a step."""


class SourceWeighting:
    """The weights of a run's sources.

    Args:
        labels: of all sources of the mixture, in its order.
        references: losses that can be reached, by label; sources without one have weight 1.
        scale: nats.
    """

    def __init__(self, labels: Sequence[str], references: Mapping[str, float], scale: float) -> None:
        self._labels, self._references, self._scale = tuple(labels), dict(references), scale
        self.losses: dict[str, float] = {}
        """Average loss of each source that has been seen."""

    def weights(self) -> list[float]:
        """What targets of each source count, in the order of the mixture."""
        excess = {label: loss - self._references[label] for label, loss in self.losses.items()}
        least = min(excess.values(), default=0.0)
        return [self._weight(excess.get(label, least) - least) for label in self._labels]

    def weighed(self, batches: Sequence[Batch]) -> list[Batch]:
        """Micro-batches of a step, with what their targets count."""
        weights_G = torch.tensor(self.weights())
        return [dataclasses.replace(batch, weights_G=weights_G) for batch in batches]

    def seen(self, metrics: Mapping[str, float], *, learns: bool) -> dict[str, float]:
        """A step is over: what is to be recorded of it, with the loss of each source that it had, and the weight of
        each in it.

        Args:
            metrics: of the step, over all ranks.
            learns: whether averages take its losses in.
        """
        record = without_sums(metrics)
        weights = self.weights()
        found = zip(self._labels, weights, means_of(metrics, len(self._labels)), strict=True)
        for label, weight, loss in found:
            if label not in self._references:
                continue
            record[f"weight/{label}"] = weight
            if loss is None:
                continue
            record[f"loss/{label}"] = loss
            if learns:
                self.losses[label] = KEEPS * self.losses.get(label, loss) + (1 - KEEPS) * loss
        return record

    def restore(self, losses: Mapping[str, float] | None) -> None:
        """Go on with the averages of a checkpoint.

        Raises:
            CheckpointError: they are of other sources, or no losses.
        """
        found = dict(losses or {})
        if not set(found) <= set(self._references) or not all(map(math.isfinite, found.values())):
            raise CheckpointError(
                "source_losses of the checkpoint are not those of the run's sources",
                got=found,
                expected=f"finite losses of {', '.join(self._references)}",
                do="use an older checkpoint",
            )
        self.losses = found

    def _weight(self, behind: float) -> float:
        ratio = behind / self._scale
        return 2.0 - math.exp(-ratio * ratio / 2)


def weighting_of(config: Config) -> SourceWeighting | None:
    """That of a run's settings; None: all sources count alike."""
    text = config.objective.reference_losses
    if text is None:
        return None
    labels = labels_of([one.name for one in config.data.mixed])
    return SourceWeighting(labels, reference_losses(text), config.objective.excess_scale)
