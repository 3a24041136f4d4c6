"""What the current plan really does: one batch in its formats, and again in the compute format.

::

    loss_gap            (loss in the plan - loss) / loss
    gradient_cosine     between both gradients, over all parameters
    gradient_to_noise   |gradient| / |difference|: below sqrt(3) quantization, not data, decides the direction
                        (FP4 All the Way, arXiv 2505.19115)
    update_change       |change of the optimizer's next update| / |update|, both relative to the weights

The last is what `weight_divergence` predicts, the first what `loss_divergence` predicts the size of. Nothing is
changed.
Checked  tests/statistics/test_plan_probe.py
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from scrimp.precision import LinearPrecision
from scrimp.statistics.collect import Subject
from scrimp.statistics.ranks import ALONE, Ranks, local, settle
from scrimp.statistics.stream import square
from scrimp.statistics.untouched import ForwardState, untouched
from scrimp.statistics.updates import norms_of


@dataclass(frozen=True)
class Probe:
    """Figures of one comparison, all measured."""

    loss: float
    """In the compute format."""
    loss_gap: float
    gradient_cosine: float
    gradient_to_noise: float
    update_change: float

    @property
    def is_finite(self) -> bool:
        """Whether the plan's loss and gradient are numbers."""
        return all(map(math.isfinite, (self.loss_gap, self.gradient_cosine, self.update_change)))


def probe(subject: Subject, batch: Any, *, ranks: Ranks | None = None) -> Probe:
    """Compare the current plan with the compute format on one statistics batch.

    Args:
        ranks: that train the model together, each with its own rows of the batch; None: one process.
    """
    ranks = ranks or ALONE
    settle(subject.model)
    with untouched(subject.model, subject.planned):
        subject.model.train()
        start = ForwardState(subject.model, subject.planned)
        try:
            planned_loss = ranks.mean(_pass(subject, batch))
            gradients = subject.optimizer.gradients()
            noisy = {name: gradient.detach().clone() for name, gradient in gradients.items()}
            subject.optimizer.zero_grad()
            start.restore()  # the same dropout
            subject.planned.replan(LinearPrecision.of(subject.compute))
            loss = ranks.mean(_pass(subject, batch))
            return _compare(subject, noisy, loss, planned_loss, ranks)
        finally:
            subject.optimizer.zero_grad()


def _pass(subject: Subject, batch: Any) -> float:
    total = 0.0
    for loss in subject.losses(batch):
        loss.backward()
        total += float(loss.detach())
    return total


def _compare(
    subject: Subject, noisy: dict[str, torch.Tensor], loss: float, planned_loss: float, ranks: Ranks
) -> Probe:
    optimizer, parameters = subject.optimizer, dict(subject.model.named_parameters())
    clean = optimizer.gradients()
    weights = norms_of({name: parameters[name] for name in clean}, ranks)
    clip = optimizer.clip_factor(math.sqrt(sum(norm**2 for norm in norms_of(clean, ranks).values())))
    sums = np.zeros(6)
    for name, whole in clean.items():
        g, other = local(whole).float(), local(noisy[name]).float()
        found = [float((g * other).sum()), square(g), square(other), square(other - g), 0.0, 0.0]
        whole_rule, weight = optimizer.rule(name), weights[name] ** 2
        if whole_rule is not None and whole.ndim >= 2 and weight > 0:
            rule = whole_rule.here()
            h = rule.direction(g * clip)
            found[4] = rule.lr**2 * square(rule.direction(other * clip) - h) / weight
            found[5] = rule.lr**2 * square(h) / weight
        sums += np.array(found) / ranks.piece(name, whole).copies
    product, size, noisy_size, difference, moved, updated = ranks.sum(sums).tolist()
    return Probe(
        loss=loss,
        loss_gap=(planned_loss - loss) / abs(loss) if loss else 0.0,
        gradient_cosine=product / math.sqrt(size * noisy_size) if size * noisy_size > 0 else math.nan,
        gradient_to_noise=math.sqrt(size / difference) if difference > 0 else math.inf,
        update_change=math.sqrt(moved / updated) if updated > 0 else 0.0,
    )
