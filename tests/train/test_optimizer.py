"""The optimizer against torch's own AdamW and against float64 arithmetic."""

import dataclasses

import pytest
import torch
from torch import nn

from scrimp.config import TrainConfig
from scrimp.train.optimizer import AdamW

TRAIN = TrainConfig(master_weights=False, weight_decay=0.1, beta1=0.9, beta2=0.95)


def parameters(dtype: torch.dtype) -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(8, 8, generator=generator).to(dtype)
    return {"weight": nn.Parameter(matrix), "norm": nn.Parameter(torch.ones(8, dtype=dtype))}


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    loss = sum(
        (p.float() * torch.sin(torch.arange(p.numel()) + step).view_as(p)).sum() for p in named.values()
    )
    loss.backward()


def test_fp32_updates_equal_torchs_adamw_with_decay_on_matrices_only() -> None:
    ours, theirs = parameters(torch.float32), parameters(torch.float32)
    optimizer = AdamW(ours, TRAIN)
    groups = [
        {"params": [theirs["weight"]], "weight_decay": 0.1},
        {"params": [theirs["norm"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=0.01, betas=(0.9, 0.95), foreach=False, fused=False)
    for step in range(5):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        optimizer.step(0.01)
        optimizer.zero_grad()
        reference.step()
        reference.zero_grad()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=1e-6, atol=1e-7)


def test_master_weights_keep_updates_that_bf16_would_lose() -> None:
    with_master, without = parameters(torch.bfloat16), parameters(torch.bfloat16)
    start = with_master["norm"].float().clone()
    keep = AdamW(with_master, dataclasses.replace(TRAIN, master_weights=True))
    lose = AdamW(without, TRAIN)
    for _ in range(100):
        for named, optimizer in ((with_master, keep), (without, lose)):
            named["norm"].sum().backward()
            named["weight"].sum().backward()
            optimizer.step(1e-4)
            optimizer.zero_grad()
    assert torch.equal(without["norm"].float(), start)
    torch.testing.assert_close(with_master["norm"].float(), start - 0.01, rtol=0, atol=0.005)
    assert not torch.equal(with_master["norm"].float(), start)


def test_bf16_gradients_of_micro_batches_are_summed_in_fp32() -> None:
    named = parameters(torch.bfloat16)
    optimizer = AdamW(named, dataclasses.replace(TRAIN, master_weights=True))
    for value in (1.0, *([2.0**-9] * 8)):
        (named["norm"].float() * value).sum().backward()
        assert named["norm"].grad is None
    # In bf16, 1 + 2^-9 is 1: all eight small gradients would have vanished.
    expected = (8 * (1.0 + 8 * 2.0**-9) ** 2) ** 0.5
    assert optimizer.gradient_norm() == pytest.approx(expected, rel=1e-6)


def test_clipping_bounds_the_norm_and_leaves_small_gradients_alone() -> None:
    named = parameters(torch.float32)
    optimizer = AdamW(named, TRAIN)
    set_gradients(named, 1)
    norm = optimizer.gradient_norm()
    before = named["weight"].grad.clone()
    optimizer.clip(norm, 2 * norm)
    assert torch.equal(named["weight"].grad, before)
    optimizer.clip(norm, norm / 4)
    assert optimizer.gradient_norm() == pytest.approx(norm / 4, rel=1e-6)
    optimizer.clip(norm / 4, 0.0)
    assert optimizer.gradient_norm() == pytest.approx(norm / 4, rel=1e-6)


@pytest.mark.parametrize("master", [False, True])
def test_restored_state_continues_bit_for_bit(master: bool) -> None:
    train = dataclasses.replace(TRAIN, master_weights=master)
    dtype = torch.bfloat16 if master else torch.float32
    straight = parameters(dtype)
    optimizer = AdamW(straight, train)
    for step in range(3):
        set_gradients(straight, step)
        optimizer.step(0.01)
        optimizer.zero_grad()
    resumed = {name: nn.Parameter(p.detach().clone()) for name, p in straight.items()}
    again = AdamW(resumed, train)
    saved = {name: tensor.clone() for name, tensor in optimizer.tensors()}
    for name, tensor in again.tensors():
        tensor.copy_(saved[name])
    again.restore_updates(optimizer.num_updates)
    for step in range(3, 6):
        for named, one in ((straight, optimizer), (resumed, again)):
            set_gradients(named, step)
            one.step(0.01)
            one.zero_grad()
    for name in straight:
        assert torch.equal(straight[name], resumed[name])
