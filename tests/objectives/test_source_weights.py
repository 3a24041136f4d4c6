"""The loss whose targets count by their source, against the loss spelled out in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from torch import Tensor

from scrimp.data import Batch
from scrimp.objectives.cross_entropy import cross_entropy_sums
from scrimp.objectives.soft_targets import SoftTargets
from scrimp.objectives.source_weights import SourceWeights, means_of, without_sums

ROWS, LENGTH, VOCABULARY, SOURCES = 5, 7, 23, 3
TOKENS = ROWS * LENGTH


def random(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


HIDDEN, HEAD = random(TOKENS, 8, seed=1), random(VOCABULARY, 8, seed=2)
TARGETS = torch.arange(TOKENS) % VOCABULARY
TARGETS[::4] = -100
ROW_SOURCES = torch.tensor([2, 0, 2, 0, 0])
WEIGHTS = torch.tensor([1.0, 1.7, 1.25])
SOFT = SoftTargets(0.3, (random(TOKENS, 6, seed=3),), (random(VOCABULARY, 6, seed=4),))


def weights(of: Tensor = WEIGHTS) -> SourceWeights:
    return SourceWeights(ROW_SOURCES, of, LENGTH)


def spelled_out(
    hidden: Tensor, head: Tensor, soft: SoftTargets | None, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Each target's loss, and what is minimised of it, in float64."""
    logits = hidden @ head.T
    log_p = logits.log_softmax(-1)
    hard = mixed = -log_p.gather(1, TARGETS.clamp_min(0)[:, None])[:, 0]
    if soft is not None:
        q = (soft.hidden[0].double() @ soft.heads[0].double().T).softmax(-1)
        mixed = (1 - soft.weight) * hard + soft.weight * -(q * log_p).sum(-1)
    real = (TARGETS >= 0).double()
    return hard * real, (mixed + z_loss * logits.logsumexp(-1) ** 2) * real


@examples(25)
@given(
    chunk=st.integers(0, TOKENS),
    is_taught=st.booleans(),
    z_loss=st.sampled_from([0.0, 0.1]),
    rows=st.booleans(),
)
def test_loss_gradients_and_sums_are_those_spelled_out(
    chunk: int, is_taught: bool, z_loss: float, rows: bool
) -> None:
    soft = SOFT if is_taught else None
    hidden, head = HIDDEN.clone().requires_grad_(), HEAD.clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if rows:  # several blocks of a chunk
            patch.setattr("scrimp.objectives.cross_entropy.BLOCK_ELEMENTS", {"cpu": 4 * VOCABULARY})
        sums = cross_entropy_sums(
            hidden, head, TARGETS, chunk=chunk, z_loss=z_loss, soft=soft, weights=weights()
        )
    (0.25 * sums.total).backward()
    wide = [one.detach().double().requires_grad_() for one in (hidden, head)]
    shown, minimised = spelled_out(*wide, soft, z_loss)
    shown = shown.detach()
    sources = ROW_SOURCES.repeat_interleave(LENGTH)
    expected = (WEIGHTS.double()[sources] * minimised).sum()
    (0.25 * expected).backward()
    torch.testing.assert_close(sums.loss.double(), shown.sum(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.total.double(), expected, rtol=1e-5, atol=1e-6)
    for found, other in zip((hidden, head), wide, strict=True):
        assert found.grad is not None
        assert other.grad is not None
        torch.testing.assert_close(found.grad.double(), other.grad, rtol=1e-4, atol=1e-6)
    means = means_of({name: float(one) for name, one in sums.metrics.items()}, SOURCES)
    of_source = [shown[(sources == number) & (TARGETS >= 0)] for number in range(SOURCES)]
    assert means == [pytest.approx(float(one.mean()), rel=1e-5) if len(one) else None for one in of_source]
    assert means[1] is None  # no row is of it


def test_weights_of_one_change_no_bit() -> None:
    found = []
    for one in (None, weights(torch.ones(SOURCES))):
        hidden, head = HIDDEN.clone().requires_grad_(), HEAD.clone().requires_grad_()
        sums = cross_entropy_sums(hidden, head, TARGETS, chunk=10, weights=one)
        (sums.total / 3).backward()
        found.append((sums.loss, hidden.grad, head.grad))
    for plain, weighed in zip(*found, strict=True):
        assert torch.equal(plain, weighed)


def test_a_batch_has_weights_where_both_halves_are_there() -> None:
    tokens = torch.zeros(ROWS, LENGTH, dtype=torch.int64)
    batch = Batch.of(tokens, tokens)
    assert SourceWeights.of(batch) is None
    both = Batch(tokens, tokens, None, TOKENS, ROW_SOURCES, WEIGHTS).to(torch.device("cpu"))
    found = SourceWeights.of(both)
    assert found is not None
    assert (found.length, found.sources_B.tolist()) == (LENGTH, ROW_SOURCES.tolist())


def test_metrics_of_sources_are_told_from_others() -> None:
    sums = cross_entropy_sums(HIDDEN, HEAD.clone().requires_grad_(), TARGETS, weights=weights())
    metrics = {name: float(one) for name, one in sums.metrics.items()}
    assert len(metrics) == 2 * SOURCES
    assert without_sums(metrics | {"router_aux_loss": 1.0}) == {"router_aux_loss": 1.0}
