"""NAdamW: its formula in float64, its rule, masters, and its bytes."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path

import pytest
import torch
from allocator import allocator_peak
from distributed import spawn
from states import states_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from scrimp.config import OptimizerConfig
from scrimp.optim.nadamw import NAdamW, NAdamWMemory

SETTINGS = OptimizerConfig(name="nadamw", master_weights=False, weight_decay=0.1, beta1=0.8, beta2=0.9)
LR = 0.01


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def parameters(dtype: torch.dtype = torch.float32) -> dict[str, nn.Parameter]:
    shapes = {"matrix": (6, 5), "bias": (5,)}
    return {
        name: nn.Parameter(normal(number, *shape).to(dtype))
        for number, (name, shape) in enumerate(shapes.items())
    }


def gradients(named: dict[str, nn.Parameter], step: int) -> dict[str, Tensor]:
    return {name: normal(100 * step + number, *one.shape) for number, (name, one) in enumerate(named.items())}


def stepped(named: dict[str, nn.Parameter], optimizer: NAdamW, step: int) -> None:
    for name, gradient in gradients(named, step).items():
        (named[name] * gradient.to(named[name].dtype)).sum().backward()
    optimizer.step(LR)
    optimizer.zero_grad()


def test_every_step_is_the_formulas_in_float64() -> None:
    named = parameters()
    optimizer = NAdamW(named, SETTINGS)
    weights = {name: one.detach().double() for name, one in named.items()}
    means = {name: torch.zeros_like(one) for name, one in weights.items()}
    squares = {name: torch.zeros_like(one) for name, one in weights.items()}
    for t in range(1, 8):
        stepped(named, optimizer, t)
        for name, gradient in gradients(named, t).items():
            g = gradient.double()
            means[name] = 0.8 * means[name] + 0.2 * g
            squares[name] = 0.9 * squares[name] + 0.1 * g * g
            ahead = (0.8 * means[name] + 0.2 * g) / (1 - 0.8**t)
            root = (squares[name] / (1 - 0.9**t)).sqrt() + 1e-8
            decay = 0.1 if weights[name].ndim > 1 else 0.0
            weights[name] = weights[name] * (1 - LR * decay) - LR * ahead / root
            torch.testing.assert_close(named[name].detach().double(), weights[name], rtol=1e-5, atol=1e-6)


def test_late_steps_are_those_of_torchs_nadam_without_its_schedule() -> None:
    """Both differ only in how they correct an average for its start, by b1^t: after 60 steps by nothing."""
    settings = dataclasses.replace(SETTINGS, weight_decay=0.0)
    named, theirs = parameters(), parameters()
    optimizer = NAdamW(named, settings)
    # 0.96^(t psi) is 0 from the first step on: torch's b1 stays what it is.
    other = torch.optim.NAdam(theirs.values(), lr=LR, betas=(0.8, 0.9), momentum_decay=1e9)
    for step in range(1, 61):
        before = [one.detach().clone() for pair in (named, theirs) for one in pair.values()]
        stepped(named, optimizer, step)
        for name, gradient in gradients(theirs, step).items():
            theirs[name].grad = gradient
        other.step()
    after = [one.detach() for pair in (named, theirs) for one in pair.values()]
    moved = [new - old for new, old in zip(after, before, strict=True)]
    for mine, torchs in zip(moved[:2], moved[2:], strict=True):
        torch.testing.assert_close(mine, torchs, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_the_rules_direction_is_what_it_steps_along(steps: int) -> None:
    named = parameters()
    optimizer = NAdamW(named, dataclasses.replace(SETTINGS, weight_decay=0.0))
    for step in range(steps):
        stepped(named, optimizer, step)
    before = {name: one.detach().clone() for name, one in named.items()}
    found = {name: optimizer.rule(name).direction(g) for name, g in gradients(named, 9).items()}
    stepped(named, optimizer, 9)
    for name, one in named.items():
        torch.testing.assert_close((before[name] - one.detach()) / LR, found[name], rtol=1e-3, atol=1e-4)


def test_masters_move_and_parameters_are_these_rounded() -> None:
    named = parameters(torch.bfloat16)
    optimizer = NAdamW(named, dataclasses.replace(SETTINGS, master_weights=True))
    for step in range(3):
        stepped(named, optimizer, step)
    states = states_of(optimizer)
    assert all(math.isfinite(float(state.sum())) for state in states.values())
    for name, one in named.items():
        assert states[f"{name}.master"].dtype == torch.float32
        assert torch.equal(one.detach(), states[f"{name}.master"].bfloat16())


def test_the_account_foretells_states_and_the_peak_of_the_update() -> None:
    named = {"large": nn.Parameter(normal(0, 300, 200)), "small": nn.Parameter(normal(1, 200, 200))}
    optimizer = NAdamW(named, SETTINGS)
    costs = NAdamWMemory("fp32")
    assert costs.state_bytes(named) == sum(state.nbytes for state in states_of(optimizer).values())
    for name, gradient in gradients(named, 1).items():
        named[name].grad = gradient
    peak = costs.update_peak(named, "cpu", None)  # type: ignore[arg-type]
    real = allocator_peak(lambda: optimizer.step(LR))
    assert peak == pytest.approx(real, rel=1e-3)


RANKS = 2


def layer() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(12, 7)


def on_a_rank(rank: int) -> dict[str, Tensor]:
    """Three steps of a layer whose rows ranks share, each with data of its own."""
    model = layer()
    fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,)))
    optimizer = NAdamW(dict(model.named_parameters()), SETTINGS)
    for number in range(3):
        model(normal(10 * number + rank, 5, 12)).square().sum().backward()
        optimizer.step(LR)
        optimizer.zero_grad()
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name] = parameter.full_tensor().detach().clone()
    return found


@pytest.mark.slow
def test_ranks_that_share_rows_are_one_process(tmp_path: Path) -> None:
    model = layer()
    optimizer = NAdamW(dict(model.named_parameters()), SETTINGS)
    for number in range(3):
        for rank in range(RANKS):  # gradients of ranks are averaged
            (model(normal(10 * number + rank, 5, 12)).square().sum() / RANKS).backward()
        optimizer.step(LR)
        optimizer.zero_grad()
    for found in spawn(RANKS, on_a_rank, tmp_path):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found[name], parameter.detach(), rtol=1e-4, atol=1e-6)
