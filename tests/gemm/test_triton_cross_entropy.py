"""The loss in one kernel, against float64 and torch's operators, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from scrimp.errors import PlanError
from scrimp.gemm import kernels
from scrimp.objectives import cross_entropy

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


def exact(logits: torch.Tensor, targets: torch.Tensor, z_loss: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Losses [rows, 2] and gradients of their sum, in float64; those of rows without a target as if it were 0."""
    wide = logits.double().requires_grad_()
    lse = wide.logsumexp(1)
    both = torch.stack([lse - wide.gather(1, targets.clamp_min(0)[:, None])[:, 0], z_loss * lse**2], 1)
    (gradient,) = torch.autograd.grad(both.sum(), wide)
    return torch.where((targets >= 0)[:, None], both, 0.0).detach(), gradient


@settings(max_examples=20)
@example(rows=1, columns=1, scale=0.1, z_loss=1e-4, dtype=torch.float32, seed=0)
@example(rows=1, columns=1, scale=0.1, z_loss=1e-4, dtype=torch.float32, seed=2)
@given(
    rows=st.integers(1, 6),
    columns=st.one_of(st.integers(1, 300), st.integers(4000, 9000)),
    scale=st.sampled_from((0.1, 3.0, 40.0)),
    z_loss=st.sampled_from((0.0, 1e-4, 0.1)),
    dtype=st.sampled_from((torch.bfloat16, torch.float32)),
    seed=st.integers(0, 1000),
)
def test_losses_and_gradients_are_those_of_float64(rows, columns, scale, z_loss, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = (scale * torch.randn(rows, columns, generator=generator)).to(dtype)
    targets = torch.randint(-1, columns, (rows,), generator=generator)
    losses, gradient = exact(logits, targets, z_loss)
    here = logits.to(DEVICE, copy=True)
    said = kernels.cross_entropy(here, targets.to(DEVICE), z_loss, training=False)
    assert torch.equal(here.cpu(), logits)
    found = kernels.cross_entropy(here, targets.to(DEVICE), z_loss, training=True)
    assert torch.equal(said, found)
    torch.testing.assert_close(found.cpu().double(), losses, rtol=3e-6, atol=3e-6 * max(1.0, scale))
    # The gradient is rounded once to what the logits are, from exponents that have the last bits of the largest logit.
    # A target's (the first word's, where there is none) is a probability less 1, which may cancel.
    exponents = 2.0**-22 * (2 + logits.double().abs().amax(1, keepdim=True))
    step = exponents + (2.0**-8 if dtype == torch.bfloat16 else 1e-5)
    allowed = step * gradient.abs() + 1e-5 * step
    allowed.scatter_add_(1, targets.clamp_min(0)[:, None], exponents)
    assert ((here.cpu().double() - gradient).abs() <= allowed).all()


def test_numbers_that_are_not_are_seen():
    logits = torch.tensor(
        [[1.0, float("nan"), 2.0], [1.0, float("inf"), 2.0], [1.0, 2.0, 3.0]], device=DEVICE
    )
    found = kernels.cross_entropy(
        logits, torch.zeros(3, dtype=torch.int64, device=DEVICE), 0.0, training=True
    )
    assert found[:, 0].isfinite().tolist() == [False, False, True]
    assert logits.isfinite().all(1).tolist() == [False, False, True]


def test_words_that_cannot_be_have_no_gradient():
    logits = torch.tensor([[0.0, float("-inf"), 0.0]], device=DEVICE)
    found = kernels.cross_entropy(
        logits, torch.zeros(1, dtype=torch.int64, device=DEVICE), 0.0, training=True
    )
    assert found[0, 0].item() == pytest.approx(torch.tensor(2.0).log().item())
    assert logits.tolist() == [[pytest.approx(-0.5), 0.0, pytest.approx(0.5)]]


def test_the_kernel_is_tried_before_it_runs():
    """A GPU's way in the loss, taken here in the interpreter."""
    assert cross_entropy._may_run(DEVICE)


def test_no_rows_have_no_losses():
    found = kernels.cross_entropy(
        torch.empty(0, 5, device=DEVICE), torch.empty(0, dtype=torch.int64, device=DEVICE), 0.0, training=True
    )
    assert found.shape == (0, 2)


@pytest.mark.parametrize(
    ("logits", "targets"),
    [
        (torch.zeros(2, 4), torch.zeros(3, dtype=torch.int64)),
        (torch.zeros(2, 4), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(4, 2).t(), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 4).half(), torch.zeros(2, dtype=torch.int64)),
    ],
)
def test_what_the_kernel_does_not_read_is_refused(logits, targets):
    with pytest.raises(PlanError):
        kernels.cross_entropy(logits.to(DEVICE), targets.to(DEVICE), 0.0, training=True)
