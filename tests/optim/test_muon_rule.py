"""What Muon makes of a noisy gradient: against singular values in float64, torch's own step, and brute force."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from scrimp.errors import PlanError
from scrimp.optim.foreign import TorchOptimizer
from scrimp.optim.update_rules import MuonRule
from scrimp.statistics.sensitivity import STEP, sensitivity

SHAPES = [(48, 16), (16, 48), (32, 32)]


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_singular_values(moved: Tensor, rate: str | None) -> Tensor:
    """Newton-Schulz's odd polynomial acts on each singular value alone, and leaves the singular vectors."""
    u, s, v = torch.linalg.svd(moved / moved.norm(), full_matrices=False)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    rows, columns = moved.shape
    factor = 0.2 * math.sqrt(max(rows, columns)) if rate else math.sqrt(max(1, rows / columns))
    return factor * (u * s) @ v


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rate", ["match_rms_adamw", None])
def test_the_direction_is_that_of_the_singular_values(shape: tuple[int, int], rate: str | None) -> None:
    average, gradient = normal(1, *shape) * 0.3, normal(2, *shape)
    rule = MuonRule(1.0, average, 0.9, rate=rate)
    after = 0.9 * average + 0.1 * gradient
    expected = by_singular_values(0.1 * gradient + 0.9 * after, rate)
    assert torch.allclose(rule.direction(gradient), expected, rtol=1e-9, atol=1e-10)


def test_stacked_maps_are_turned_each_alone() -> None:
    gradient = normal(3, 40, 16)
    rule = MuonRule(1.0, None, 0.0, nesterov=False, rate="match_rms_adamw", rows=(8, 32))
    parts = [by_singular_values(part, "match_rms_adamw") for part in gradient.split([8, 32])]
    assert torch.allclose(rule.direction(gradient), torch.cat(parts), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("options", [{}, {"adjust_lr_fn": "match_rms_adamw"}, {"nesterov": False}])
def test_torchs_own_step_is_this_direction_but_for_its_bf16(
    shape: tuple[int, int], options: dict[str, object]
) -> None:
    model = nn.Linear(shape[1], shape[0], bias=False)
    optimizer = torch.optim.Muon(model.parameters(), lr=0.5, weight_decay=0.0, **options)  # type: ignore[arg-type]
    for step in range(3):
        gradient = model.weight.grad = normal(10 + step, *shape).float()
        rule, before = TorchOptimizer(optimizer, model).rule("weight"), model.weight.detach().clone()
        assert rule is not None
        expected = rule.direction(gradient)
        optimizer.step()
    moved = (before - model.weight.detach()) / 0.5
    assert float((moved - expected).norm() / expected.norm()) < 0.03


@pytest.mark.parametrize("shape", SHAPES)
def test_the_sensitivity_is_that_of_a_brute_force_perturbation(shape: tuple[int, int]) -> None:
    average, gradient = normal(1, *shape) * 0.3, normal(2, *shape)
    rule = MuonRule(1.0, average.float(), 0.95, rate="match_rms_adamw")

    def moved(g: Tensor) -> Tensor:
        return by_singular_values(0.05 * g + 0.95 * (0.95 * average + 0.05 * g), "match_rms_adamw")

    noise = torch.randn(shape, generator=torch.Generator().manual_seed(7)).double()
    size = STEP * float(gradient.square().mean().sqrt())
    change = moved(gradient + size * noise) - moved(gradient)
    found = sensitivity(rule, gradient, torch.Generator().manual_seed(7))
    assert found == pytest.approx(float(change.square().mean().sqrt()) / size, rel=1e-3)


def test_directions_that_a_gradient_hardly_has_are_moved_most_by_noise() -> None:
    u, _, v = torch.linalg.svd(normal(5, 32, 32))
    rules = MuonRule(1.0, None, 0.0, rate="match_rms_adamw")
    flat, steep = (u * torch.ones(32)) @ v, (u * torch.logspace(0, -4, 32)) @ v
    even, uneven = (
        sensitivity(rules, g / g.square().mean().sqrt(), torch.Generator().manual_seed(0))
        for g in (flat, steep)
    )
    assert uneven > 2 * even


def test_shards_are_refused_by_name() -> None:
    weight = nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.Muon(weight.parameters())
    weight.weight.device_mesh = "a mesh"  # type: ignore[attr-defined]  # as a DTensor's
    with pytest.raises(PlanError, match=r"not known from its shards.*shape \(8, 8\)"):
        TorchOptimizer(optimizer, weight).rule("weight")
