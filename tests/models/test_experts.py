"""Routed experts against loops over tokens in float64: choices, results, gradients, capacity."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scrimp.config import PRESETS
from scrimp.config.activations import LEVELS, Activations
from scrimp.config.experts import with_capacity
from scrimp.models.blocks import Place
from scrimp.models.compiled import compile_blocks
from scrimp.models.experts import RoutedMlp, capacity, keeping_choices
from scrimp.models.initialise import initialise
from scrimp.models.model import Model, build_model
from scrimp.models.spec import RoutingSpec

WIDTH, INNER, TOKENS = 12, 8, 30


def made(routing: RoutingSpec, seed: int = 0) -> tuple[RoutedMlp, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    mlp = RoutedMlp(routing, WIDTH, INNER, Place(dtype=torch.float64))
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return mlp, torch.randn(3, TOKENS // 3, WIDTH, generator=generator, dtype=torch.float64)


def reference(mlp: RoutedMlp, x_BTD: Tensor, *, drops: bool = False) -> tuple[Tensor, set[tuple[int, int]]]:
    """Token by token, and which pairs of token and expert were dropped."""
    routing = mlp.routing
    gate_up = mlp.experts.gate_up.weight.view(routing.experts, 2 * INNER, WIDTH)
    down = mlp.experts.down.weight.view(routing.experts, WIDTH, INNER)
    tokens = x_BTD.flatten(0, 1)
    p = (tokens @ mlp.router.weight.t()).softmax(-1)
    chosen = [sorted(range(routing.experts), key=lambda e: -float(row[e]))[: routing.chosen] for row in p]
    used: Counter[int] = Counter()
    dropped = set()
    for slot in range(routing.chosen):  # everyone's first choice before anyone's second
        for token, experts in enumerate(chosen):
            used[experts[slot]] += 1
            if drops and used[experts[slot]] > capacity(routing, len(tokens)):
                dropped.add((token, experts[slot]))
    rows = []
    for token, experts in enumerate(chosen):
        total = sum(p[token, e] for e in experts) if routing.normalises else 1.0
        out = torch.zeros(WIDTH, dtype=x_BTD.dtype)
        for e in experts:
            if (token, e) not in dropped:
                gate, up = (gate_up[e] @ tokens[token]).chunk(2)
                out = out + p[token, e] / total * (down[e] @ (F.silu(gate) * up))
        rows.append(out)
    return torch.stack(rows).view_as(x_BTD), dropped


@pytest.mark.parametrize("normalises", [True, False])
@pytest.mark.parametrize(("experts", "chosen"), [(5, 2), (4, 1), (3, 3)])
def test_results_and_gradients_are_those_of_a_loop_over_tokens(
    experts: int, chosen: int, normalises: bool
) -> None:
    mlp, x = made(RoutingSpec(experts, chosen, normalises))
    check(mlp, x)


@pytest.mark.parametrize("factor", [0.3, 0.6, 0.9])
def test_beyond_the_capacity_later_tokens_and_less_probable_choices_are_dropped(factor: float) -> None:
    mlp, x = made(RoutingSpec(5, 2, capacity_factor=factor))
    dropped = check(mlp, x)
    assert dropped
    assert len(dropped) < 2 * TOKENS
    mlp.eval()
    with torch.no_grad():
        torch.testing.assert_close(mlp(x, None)[0], reference(mlp, x)[0])


def check(mlp: RoutedMlp, x: Tensor) -> set[tuple[int, int]]:
    results = []
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(9), dtype=x.dtype)
    dropped: set[tuple[int, int]] = set()
    for is_reference in (False, True):
        inputs = x.clone().requires_grad_()
        if is_reference:
            out, dropped = reference(mlp, inputs, drops=mlp.routing.capacity_factor > 0)
        else:
            out, sums = mlp(inputs, None)
            assert sums[0].sum() == mlp.routing.chosen * TOKENS, (
                "balance counts what was chosen, dropped or not"
            )
            assert float(sums[1].sum()) == pytest.approx(TOKENS)
        out.backward(g)
        results.append([out, inputs.grad, *(parameter.grad for parameter in mlp.parameters())])
        mlp.zero_grad()
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12)
    return dropped


def small(name: str) -> Model:
    a = replace(PRESETS[name], num_layers=2, vocab_size=64)
    model = build_model(with_capacity(a, 1.0))
    initialise(model, 0)
    return model


def gradients(model: Model, level: str) -> dict[str, Tensor]:
    for block in model.each_block():
        block.activations = Activations(level)
    tokens = torch.randint(0, 64, (2, 24), generator=torch.Generator().manual_seed(3))
    hidden = model(tokens)
    routing = model.take_routing()
    assert routing is not None
    (hidden.square().sum() + 7 * routing[:, 1].square().sum()).backward()
    found = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }
    model.zero_grad()
    return found


@pytest.mark.parametrize("name", ["mixtral-8m", pytest.param("qwen3-moe-8m", marks=pytest.mark.slow)])
def test_no_level_of_recomputation_changes_a_bit(name: str) -> None:
    model = small(name)
    kept = gradients(model, "keep")
    for level in LEVELS[1:]:
        found = gradients(model, level)
        assert all(torch.equal(found[key], value) for key, value in kept.items()), level


@pytest.mark.slow
def test_compiled_blocks_give_the_same() -> None:
    model = small("mixtral-8m")
    kept = gradients(model, "keep")
    compile_blocks(model)
    for level in ("keep", "mlp", "block"):
        for key, value in gradients(model, level).items():
            most = 5e-5 * float(kept[key].abs().max()) + 1e-7
            assert float((value - kept[key]).abs().max()) <= most, (level, key)


def test_tokens_of_a_batch_that_runs_again_choose_as_before() -> None:
    mlp, x_BTD = made(RoutingSpec(4, 2, normalises=True, balance=0.0))
    model = nn.Sequential(mlp)

    def counts(x_BTD: Tensor) -> Tensor:
        out_BTD, sums_2E = mlp(x_BTD, None)
        return torch.cat([sums_2E[0], out_BTD.flatten()])

    plain = counts(x_BTD)
    with keeping_choices(model) as choices:
        choices.batch = "first"
        assert torch.equal(counts(x_BTD), plain)
        assert torch.equal(counts(-x_BTD)[:4], plain[:4])
        choices.batch = "second"
        assert not torch.equal(counts(-x_BTD)[:4], plain[:4])
        choices.batch = "first"
        assert torch.equal(counts(x_BTD), plain)
    assert mlp.choices is None
