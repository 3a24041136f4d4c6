"""The loss with a teacher's targets against the loss spelled out in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from torch import Tensor

from scrimp.objectives.cross_entropy import cross_entropy_sums
from scrimp.objectives.soft_targets import SoftTargets

TOKENS, VOCABULARY = 19, 23


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def taught_by(teachers: int, weight: float) -> SoftTargets:
    """Teachers of different widths."""
    widths = range(5, 5 + teachers)
    hidden = tuple(random(TOKENS, width, seed=10 + width) for width in widths)
    return SoftTargets(weight, hidden, tuple(random(VOCABULARY, width, seed=20 + width) for width in widths))


def spelled_out(
    hidden: Tensor, head: Tensor, targets: Tensor, soft: SoftTargets, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Loss of the text, and what is minimised, in float64."""
    logits = hidden @ head.T
    log_p = logits.log_softmax(-1)
    teachers = [h.double() @ w.double().T for h, w in zip(soft.hidden, soft.heads, strict=True)]
    q = torch.stack(teachers).mean(0).softmax(-1)
    hard = -log_p.gather(1, targets.clamp_min(0)[:, None])[:, 0]
    mixed = (1 - soft.weight) * hard + soft.weight * -(q * log_p).sum(-1)
    real = (targets >= 0).double()
    return (hard * real).sum(), ((mixed + z_loss * logits.logsumexp(-1) ** 2) * real).sum()


@examples(25)
@given(
    chunk=st.integers(0, TOKENS),
    teachers=st.integers(1, 3),
    weight=st.sampled_from([0.25, 0.5, 1.0]),
    z_loss=st.sampled_from([0.0, 0.1]),
)
def test_loss_and_gradients_are_those_spelled_out(
    chunk: int, teachers: int, weight: float, z_loss: float
) -> None:
    hidden, head = random(TOKENS, 8, seed=1).requires_grad_(), random(VOCABULARY, 8, seed=2).requires_grad_()
    targets = torch.arange(TOKENS) % VOCABULARY
    targets[::4] = -100
    soft = taught_by(teachers, weight)
    sums = cross_entropy_sums(hidden, head, targets, chunk=chunk, z_loss=z_loss, soft=soft)
    (0.25 * sums.total).backward()
    wide = [one.detach().double().requires_grad_() for one in (hidden, head)]
    shown, minimised = spelled_out(*wide, targets, soft, z_loss)
    (0.25 * minimised).backward()
    torch.testing.assert_close(sums.loss.double(), shown, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.total.double(), minimised, rtol=1e-5, atol=1e-6)
    for found, expected in zip((hidden, head), wide, strict=True):
        assert found.grad is not None
        assert expected.grad is not None
        torch.testing.assert_close(found.grad.double(), expected.grad, rtol=1e-4, atol=1e-6)


def test_a_loss_and_its_penalty_are_differentiated_together() -> None:
    hidden, head = random(TOKENS, 8, seed=1).requires_grad_(), random(VOCABULARY, 8, seed=2)
    sums = cross_entropy_sums(hidden, head, torch.arange(TOKENS), soft=taught_by(1, 0.5))
    with pytest.raises(RuntimeError, match="differentiated together"):
        sums.loss.backward()
