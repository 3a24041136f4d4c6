"""The modelled update is the optimizer's own, and its sensitivity the closed form of the specification."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property_tests import examples
from torch import Tensor, nn

from scrimp.errors import PlanError
from scrimp.optim.foreign import TorchOptimizer
from scrimp.optim.update_rules import AdamWRule
from scrimp.statistics import sensitivity as module
from scrimp.statistics.sensitivity import sensitivity

SIZE = 512


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def closed_form(rule: AdamWRule, g: Tensor) -> Tensor:
    """h' of equation (3), as it stands in the specification."""
    m, v, b1, b2, t = rule.exp_avg, rule.exp_avg_sq, rule.beta1, rule.beta2, rule.updates + 1
    assert m is not None
    assert v is not None
    mh = (b1 * m + (1 - b1) * g) / (1 - b1**t)
    vh = (b2 * v + (1 - b2) * g**2) / (1 - b2**t)
    d = vh.sqrt() + rule.eps
    return (1 - b1) / ((1 - b1**t) * d) - mh * (1 - b2) * g / ((1 - b2**t) * vh.sqrt() * d**2)


@st.composite
def rules(draw: st.DrawFn) -> tuple[AdamWRule, Tensor]:
    """AdamW in the middle of a run: moments of the size of gradients, and a gradient."""
    seed, scale = draw(st.integers(0, 10**6)), 10.0 ** draw(st.integers(-5, 1))
    v = (normal(seed, SIZE).square() + 0.1) * scale**2
    m = normal(seed + 1, SIZE) * scale * 0.3
    betas = draw(st.sampled_from([(0.9, 0.999), (0.9, 0.95), (0.0, 0.9)]))
    rule = AdamWRule(1.0, m, v, draw(st.integers(0, 5000)), *betas, draw(st.sampled_from([1e-8, 1e-3])))
    return rule, normal(seed + 2, SIZE) * scale


@examples(40)
@given(rules())
def test_the_direction_has_the_derivative_of_the_closed_form(case: tuple[AdamWRule, Tensor]) -> None:
    rule, g = case
    step = 1e-6 * float(g.square().mean().sqrt())
    numeric = (rule.direction(g + step) - rule.direction(g - step)) / (2 * step)
    expected = closed_form(rule, g)
    assert torch.allclose(numeric, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


@examples(30)
@given(rules(), st.booleans())
def test_the_sensitivity_is_the_norm_of_the_closed_form_along_the_noise(
    case: tuple[AdamWRule, Tensor], is_spread: bool
) -> None:
    rule, g = case
    spread = normal(7, SIZE).abs() if is_spread else torch.ones(SIZE, dtype=torch.float64)
    spread /= spread.square().mean().sqrt()
    noise = torch.randn(SIZE, generator=torch.Generator().manual_seed(3)).double() * spread
    expected = float((closed_form(rule, g) * noise).square().mean().sqrt())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "STEP", 1e-3)
        found = sensitivity(rule, g, torch.Generator().manual_seed(3), spread.float() if is_spread else None)
    assert found == pytest.approx(expected, rel=0.02)


def test_the_default_step_is_small_enough_to_say_the_same() -> None:
    rule = AdamWRule(1.0, normal(1, 4096) * 0.3, normal(2, 4096).square() + 0.1, 100)
    g = normal(3, 4096)
    expected = float(closed_form(rule, g).square().mean().sqrt())
    found = sensitivity(rule, g, torch.Generator().manual_seed(0))
    assert found == pytest.approx(expected, rel=0.1)


class Weights(nn.Module):
    """Two matrices and a vector."""

    def __init__(self, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.first = nn.Parameter(normal(1, 16, 8).to(dtype))
        self.second = nn.Parameter(normal(2, 8, 8).to(dtype))
        self.bias = nn.Parameter(normal(3, 8).to(dtype))

    def give_gradients(self, seed: int, scale: float = 0.01) -> None:
        for index, parameter in enumerate(self.parameters()):
            parameter.grad = (normal(10 * seed + index, *parameter.shape) * scale).to(parameter.dtype)


OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "AdamW": (torch.optim.AdamW, {"weight_decay": 0.1, "foreach": False}),
    "AdamW, fused": (torch.optim.AdamW, {"weight_decay": 0.1, "fused": True}),
    "AdamW, other betas": (torch.optim.AdamW, {"betas": (0.8, 0.95), "eps": 1e-3}),
    "Adam": (torch.optim.Adam, {}),
    "Adam with decay": (torch.optim.Adam, {"weight_decay": 0.01}),
    "SGD": (torch.optim.SGD, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("steps", [0, 1, 7])
def test_the_direction_is_what_the_optimizer_steps_along(name: str, steps: int) -> None:
    kind, options = OPTIMIZERS[name]
    model, lr = Weights(), 1e-3
    optimizer = kind(model.parameters(), lr=lr, **options)
    for step in range(steps):
        model.give_gradients(step)
        optimizer.step()
    model.give_gradients(99)
    view = TorchOptimizer(optimizer, model)
    gradients = view.gradients()
    before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
    directions = {key: view.rule(key).direction(g) for key, g in gradients.items()}  # type: ignore[union-attr]
    optimizer.step()
    decay = lr * optimizer.param_groups[0]["weight_decay"] if kind is torch.optim.AdamW else 0.0
    for key, parameter in model.named_parameters():
        moved = (before[key] * (1 - decay) - parameter.detach()) / lr
        assert torch.allclose(moved, directions[key], rtol=1e-4, atol=1e-6), key


@pytest.mark.parametrize("limit", [0.05, 1e9])
def test_clipping_is_torchs(limit: float) -> None:
    model = Weights()
    model.give_gradients(1)
    view = TorchOptimizer(torch.optim.AdamW(model.parameters()), model, max_norm=limit)
    before = {name: g.clone() for name, g in view.gradients().items()}
    norm = nn.utils.clip_grad_norm_(model.parameters(), limit)
    factor = view.clip_factor(float(norm))
    assert all(torch.allclose(g, before[name] * factor, rtol=1e-12) for name, g in view.gradients().items())
    assert (factor < 1) == (limit < 1)


def test_no_limit_does_not_clip() -> None:
    model = Weights()
    assert TorchOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), model).clip_factor(1e6) == 1.0


def test_sgd_moves_by_the_change_of_its_gradient() -> None:
    model = Weights()
    model.give_gradients(1)
    view = TorchOptimizer(torch.optim.SGD(model.parameters(), lr=0.25, momentum=0.9), model)
    rule = view.rule("first")
    assert view.name == "sgd"
    assert rule is not None
    assert rule.lr == 0.25
    assert sensitivity(rule, normal(1, 8), torch.Generator()) == 1.0


def test_a_parameter_without_state_is_as_before_its_first_step() -> None:
    model = Weights()
    model.give_gradients(1)
    rule = TorchOptimizer(torch.optim.AdamW(model.parameters()), model).rule("first")
    assert rule is not None
    assert (rule.updates, rule.exp_avg, rule.exp_avg_sq) == (0, None, None)
    g = model.first.grad
    assert g is not None
    assert torch.allclose(rule.direction(g), g / (g.abs() + 1e-8), atol=1e-6)


def test_a_zero_gradient_has_no_errors_to_pass_on() -> None:
    rule = AdamWRule(1.0, normal(1, 8), normal(2, 8).square(), 10)
    assert sensitivity(rule, torch.zeros(8), torch.Generator()) == 0.0
    assert math.isfinite(sensitivity(AdamWRule(1.0), normal(1, 8) * 1e-30, torch.Generator()))


def test_moments_in_bfloat16_are_read() -> None:
    model = Weights(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters())
    model.give_gradients(1)
    optimizer.step()
    model.give_gradients(2)
    rule = TorchOptimizer(optimizer, model).rule("first")
    assert rule is not None
    assert rule.exp_avg is not None
    assert rule.exp_avg.dtype == torch.bfloat16
    assert model.first.grad is not None
    assert 0 < sensitivity(rule, model.first.grad, torch.Generator()) < math.inf


def test_what_the_optimizer_does_not_know_is_not_trained() -> None:
    model = Weights()
    view = TorchOptimizer(torch.optim.AdamW([model.first], lr=0.5), model)
    assert view.rule("second") is None
    rule = view.rule("first")
    assert rule is not None
    assert rule.lr == 0.5


class MyAdamW(torch.optim.AdamW):
    """Derived, and so unknown."""


Impostor = type("AdamW", (torch.optim.Optimizer,), {})


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (torch.optim.RMSprop, "RMSprop"),
        (torch.optim.Adagrad, "Adagrad"),
        (lambda p: torch.optim.AdamW(p, amsgrad=True), "AdamW with amsgrad"),
        (lambda p: torch.optim.AdamW(p, maximize=True), "AdamW with maximize"),
        (MyAdamW, "MyAdamW"),
        (lambda p: Impostor(p, {}), "AdamW"),
    ],
)
def test_other_optimizers_are_refused_by_name(make: Any, name: str) -> None:
    model = Weights()
    optimizer = make(list(model.parameters()))
    with pytest.raises(PlanError, match=f"got {name}, expected torch.optim.AdamW"):
        TorchOptimizer(optimizer, model)


def test_any_optimizer_can_be_taken_as_proportional_to_gradients() -> None:
    model = Weights()
    view = TorchOptimizer.as_gradients(torch.optim.RMSprop(model.parameters(), lr=0.1), model)
    model.give_gradients(1)
    assert view.name == "gradient"
    for name, g in view.gradients().items():
        rule = view.rule(name)
        assert rule is not None
        # An update of size lr, whatever the size of the gradient.
        assert rule.lr * float(rule.direction(g).square().mean().sqrt()) == pytest.approx(0.1, rel=1e-5)


def test_gradients_are_forgotten_all_together() -> None:
    model = Weights()
    view = TorchOptimizer(torch.optim.SGD([model.first], lr=0.1), model)
    model.give_gradients(1)
    assert set(view.gradients()) == {"first", "second", "bias"}
    view.zero_grad()
    assert view.gradients() == {}
