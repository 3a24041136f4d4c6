"""The chunked loss against the loss spelled out in float64."""

from __future__ import annotations

import pytest
import torch
from decoder_reference import summed_loss
from hypothesis import given
from hypothesis import strategies as st
from kernel_ways import BOTH
from property_tests import examples
from torch import Tensor

from scrimp.objectives import cross_entropy
from scrimp.objectives.cross_entropy import cross_entropy_sums


def case(tokens: int = 23, width: int = 8, vocabulary: int = 31) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(tokens, width, generator=generator).requires_grad_()
    weight = torch.randn(vocabulary, width, generator=generator).requires_grad_()
    targets = torch.randint(0, vocabulary, (tokens,), generator=generator)
    targets[::5] = -100
    return hidden, weight, targets


def expected(hidden: Tensor, weight: Tensor, targets: Tensor, z_loss: float) -> tuple[Tensor, ...]:
    h, w = hidden.detach().double().requires_grad_(), weight.detach().double().requires_grad_()
    ce, z = summed_loss(h @ w.T, targets, z_loss)
    if bool((targets != -100).any()):
        (0.25 * (ce + z)).backward()
    zero = torch.zeros((), dtype=torch.float64)
    return ce, z, zero + (0 if h.grad is None else h.grad), zero + (0 if w.grad is None else w.grad)


@examples(25)
@given(chunk=st.integers(0, 30), z_loss=st.sampled_from([0.0, 0.1]), ignored=st.sets(st.integers(0, 22)))
def test_any_chunk_gives_the_loss_and_gradients_spelled_out(
    chunk: int, z_loss: float, ignored: set[int]
) -> None:
    hidden, weight, targets = case()
    targets[list(ignored)] = -100
    sums = cross_entropy_sums(hidden, weight, targets, chunk=chunk, z_loss=z_loss)
    (0.25 * sums.total).backward()
    ce, z, grad_hidden, grad_weight = expected(hidden, weight, targets, z_loss)
    torch.testing.assert_close(sums.loss.double(), ce, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(sums.penalty.double(), z, rtol=1e-5, atol=1e-6)
    assert hidden.grad is not None
    assert weight.grad is not None
    torch.testing.assert_close(hidden.grad.double(), grad_hidden.expand_as(hidden), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(weight.grad.double(), grad_weight.expand_as(weight), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("training", [True, False])
def test_the_kernel_gives_what_operators_give(dtype: torch.dtype, training: bool) -> None:
    logits = (6 * torch.randn(9, 1003, generator=torch.Generator().manual_seed(0))).to(dtype)
    for row, number in enumerate([float("nan"), float("inf"), -float("inf"), 300.0, -300.0]):
        logits[row, 7] = number
    targets = torch.tensor([3, 3, 3, 3, 3, 7, 1002, 0, -100])
    arguments = targets, (targets >= 0)[:, None], 1e-3, training, None, None
    found = []
    for way in BOTH:
        gradient, each = logits.clone(), torch.empty(2, 9, 1)
        with way():
            sums = cross_entropy._losses(gradient, *arguments, each)
        found.append([sums, gradient[:-1], each])  # the last row has no target: what multiplies it is 0
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=1e-5 if dtype == torch.float32 else 0.01, atol=1e-6, equal_nan=True
        )


@pytest.mark.parametrize("offset", [0.0, 300.0])
def test_the_kernel_is_as_exact_where_a_word_is_nearly_certain(offset: float) -> None:
    """Far from 0 a loss must not be rounded as its logits are."""
    logits = torch.randn(64, 500, generator=torch.Generator().manual_seed(1)) + offset
    targets = torch.arange(64)
    logits[targets, targets] += 14
    exact = torch.nn.functional.cross_entropy(logits.double(), targets, reduction="none")
    each = torch.empty(2, 64, 1)
    with BOTH[0]():
        cross_entropy._losses(logits, targets, (targets >= 0)[:, None], 0.0, True, None, None, each)
    assert (each[0, :, 0] - exact).abs().max() < 2e-6
    assert (logits[targets, targets] - torch.expm1(-exact)).abs().max() < 2e-6
    assert logits.sum(1).abs().max() < 2e-6


def test_threads_change_no_loss_and_targets_may_lie_apart() -> None:
    logits, threads, found = torch.randn(50, 3001), torch.get_num_threads(), []
    targets = torch.randint(0, 3001, (50, 2))[:, 1]
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            gradient, each = logits.clone(), torch.empty(2, 50, 1)
            cross_entropy._losses(gradient, targets, (targets >= 0)[:, None], 1e-3, True, None, None, each)
            found.append([gradient, each])
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(one, two) for one, two in zip(*found, strict=True))
    expected = torch.nn.functional.cross_entropy(logits, targets, reduction="none")
    torch.testing.assert_close(found[0][1][0, :, 0], expected)


@pytest.mark.parametrize("target", [31, 1000, -1])
def test_a_target_that_is_no_word_is_refused(target: int) -> None:
    pytest.importorskip("numba", reason="operators refuse those above alone")
    hidden, weight, targets = case()
    targets[-1] = target
    with pytest.raises(IndexError, match=f"target {target} of a vocabulary of 31"):
        cross_entropy_sums(hidden, weight, targets)


def test_all_targets_ignored_is_zero_loss_and_zero_gradients() -> None:
    hidden, weight, targets = case()
    sums = cross_entropy_sums(hidden, weight, torch.full_like(targets, -100), z_loss=1.0)
    sums.total.backward()
    assert sums.total.item() == 0
    assert hidden.grad is not None
    assert not hidden.grad.any()
    assert weight.grad is not None
    assert not weight.grad.any()


def test_confident_and_hopeless_targets_keep_a_finite_loss() -> None:
    hidden = torch.tensor([[1.0], [1.0]], requires_grad=True)
    weight = torch.tensor([[300.0], [-300.0], [0.0]], requires_grad=True)
    sums = cross_entropy_sums(hidden, weight, torch.tensor([0, 1]))
    sums.total.backward()
    assert sums.loss.item() == 600
    torch.testing.assert_close(hidden.grad, torch.tensor([[0.0], [600.0]]))


def test_nothing_is_differentiated_without_gradients() -> None:
    hidden, weight, targets = case()
    with torch.no_grad():
        sums = cross_entropy_sums(hidden, weight, targets, chunk=4)
    assert not sums.total.requires_grad
    kept = cross_entropy_sums(hidden, weight, targets, chunk=4).loss
    torch.testing.assert_close(sums.loss, kept.detach(), rtol=0, atol=0)


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_a_frozen_side_gets_no_gradient_and_the_other_is_right(frozen: str) -> None:
    hidden, weight, targets = case()
    (hidden if frozen == "hidden" else weight).requires_grad_(False)
    (0.25 * cross_entropy_sums(hidden, weight, targets, chunk=9).total).backward()
    _, _, grad_hidden, grad_weight = expected(hidden, weight, targets, 0.0)
    trained, other, right = (
        (weight, hidden, grad_weight) if frozen == "hidden" else (hidden, weight, grad_hidden)
    )
    assert other.grad is None
    assert trained.grad is not None
    torch.testing.assert_close(trained.grad.double(), right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("chunk", [0, 6])
def test_bf16_autocast_over_float32_weights_keeps_float32_gradients_near_the_exact(chunk: int) -> None:
    hidden, weight, targets = case()
    with torch.autocast("cpu", torch.bfloat16):
        sums = cross_entropy_sums(hidden, weight, targets, chunk=chunk)
    (0.25 * sums.total).backward()
    ce, _, grad_hidden, grad_weight = expected(hidden, weight, targets, 0.0)
    assert sums.loss.dtype == torch.float32
    torch.testing.assert_close(sums.loss.double(), ce, rtol=0.01, atol=0)
    for tensor, right in ((hidden, grad_hidden), (weight, grad_weight)):
        assert tensor.grad is not None
        assert tensor.grad.dtype == torch.float32
        assert (tensor.grad.double() - right).norm() / right.norm() < 0.02


def test_the_sums_cannot_be_differentiated_apart_when_there_is_a_z_loss() -> None:
    with pytest.raises(RuntimeError, match="differentiated together"):
        cross_entropy_sums(*case(), z_loss=0.1).loss.backward()
    unequal = cross_entropy_sums(*case(), z_loss=0.1)
    with pytest.raises(RuntimeError, match="differentiated together"):
        (unequal.loss + 2 * unequal.penalty).backward()
    hidden, weight, targets = case()
    equal = cross_entropy_sums(hidden, weight, targets, z_loss=0.1)
    (0.25 * equal.loss + 0.25 * equal.penalty).backward()
    assert hidden.grad is not None
    torch.testing.assert_close(
        hidden.grad.double(), expected(hidden, weight, targets, 0.1)[2], rtol=1e-4, atol=1e-6
    )


def test_a_second_backward_pass_is_refused() -> None:
    total = cross_entropy_sums(*case()).total
    total.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        total.backward()


def test_chunks_bound_the_memory_of_the_logits() -> None:
    hidden, weight, targets = case(tokens=1024, vocabulary=16384)
    peaks = {}
    for chunk in (0, 64, 512):
        with torch.profiler.profile(profile_memory=True) as profile:
            cross_entropy_sums(hidden, weight, targets, chunk=chunk).total.backward()
        peaks[chunk] = profile_peak(profile)
    logits = 1024 * 16384 * 4
    assert peaks[0] > logits
    assert peaks[64] < logits / 4
    # One chunk at a time.
    assert peaks[512] < 0.9 * logits


def profile_peak(profile: torch.profiler.profile) -> int:
    """Largest sum of live bytes over the profiler's allocation events."""
    live = peak = 0
    for event in profile.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
