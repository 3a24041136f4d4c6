"""What `scrimp.measure` refuses, by name, and leaves untouched."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from small_nets import VOCABULARY, WIDTH, batch, is_plain, loss, net, trained
from torch import Tensor, nn

import scrimp
from scrimp.api.arguments import MOST_BATCHES
from scrimp.errors import ModelError, PlanError, ScrimpError, TrainingError
from scrimp.world import World


def without_linears() -> nn.Module:
    return nn.Sequential(nn.Embedding(VOCABULARY, VOCABULARY))


def in_half() -> nn.Module:
    return net().half()


def frozen() -> nn.Module:
    return net().requires_grad_(False)


def with_an_idle_layer() -> nn.Module:
    model = net()
    model.blocks[0].idle = nn.Linear(WIDTH, WIDTH)
    return model


def half_in_bf16() -> nn.Module:
    """Autocast in one block only."""
    model = net()
    block = model.blocks[0]
    forward = block.forward
    block.forward = torch.autocast("cpu", torch.bfloat16)(forward)  # type: ignore[method-assign]
    return model


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (without_linears, ModelError, "no linear layer"),
        (in_half, ModelError, "float32 or bfloat16"),
        (frozen, ModelError, "can be planned.*not trained"),
        (with_an_idle_layer, ModelError, "take no part in the loss.*blocks.0.idle"),
        (half_in_bf16, ModelError, "two types.*blocks.0.up"),
        (lambda: nn.DataParallel(net()), ModelError, r"DataParallel.*\.module"),
    ],
)
def test_models_that_cannot_be_measured_are_refused(
    make: Callable[[], nn.Module], error: type[ScrimpError], words: str
) -> None:
    model = make()
    optimizer = torch.optim.SGD(list(model.parameters()) or [nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(error, match=words):
        scrimp.measure(model, optimizer, [batch(0)], loss)
    assert is_plain(model)


def replaced(model: nn.Module) -> None:
    """The forward of a layer, after it was planned."""
    down = model.blocks[0].down  # type: ignore[index, union-attr]
    down.forward = lambda x: nn.functional.linear(x, down.weight)  # type: ignore[union-attr]


def detached(model: nn.Module) -> None:
    """The first block's results."""
    block = model.blocks[0]  # type: ignore[index]
    block.forward = lambda x: x + block.down(block.up(block.norm(x))).detach()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("gains", ["auto", "exact"])
@pytest.mark.parametrize(
    ("change", "words", "others"),
    [
        (
            replaced,
            r"got blocks\.0\.down \(its forward is replaced",
            ["blocks.0.up", "blocks.1.up", "blocks.1.down"],
        ),
        (
            detached,
            r"got blocks\.0\.up \(no gradient reaches it\), blocks\.0\.down",
            ["blocks.1.up", "blocks.1.down"],
        ),
    ],
)
@pytest.mark.every(3)
def test_layers_that_do_not_run_their_gemms_are_named_and_the_advice_works(
    change: Callable[[nn.Module], None], words: str, others: list[str], gains: str
) -> None:
    model, optimizer = trained()
    profile = scrimp.measure(model, optimizer, [batch(0)], loss)
    scrimp.apply(model, scrimp.plan(profile, 0.5))
    change(model)
    with pytest.raises(ModelError, match=f"do not run their planned GEMMs.*{words}"):
        scrimp.measure(model, optimizer, [batch(0)], loss, gains=gains)
    found = scrimp.measure(model, optimizer, [batch(0)], loss, layers=others, gains="exact")
    assert found.layers == tuple(others)


def test_a_layer_with_a_replaced_forward_is_left_out_of_the_plan() -> None:
    model, optimizer = trained()
    replaced(model)
    profile = scrimp.measure(model, optimizer, [batch(0)], loss)
    assert profile.layers == ("blocks.0.up", "blocks.1.up", "blocks.1.down")


def exhausted() -> Iterator[Tensor]:
    batches = iter([batch(0)])
    next(batches)
    return batches


@pytest.mark.parametrize(
    ("batches", "words"),
    [
        ([], "no batch"),
        (exhausted(), "no batch.*read to its end"),
        (batch(0), "one Tensor.*in a list"),
        (3, "one int"),
        ([batch(0)] * (MOST_BATCHES + 1), "got 65.*islice"),
        (itertools.repeat(batch(0)), "got more.*islice"),
    ],
)
def test_batches_that_are_none_or_a_whole_data_set_are_refused(batches: Any, words: str) -> None:
    model, optimizer = trained()
    with pytest.raises(PlanError, match=words):
        scrimp.measure(model, optimizer, batches, loss, gains="ratios", layers=["blocks.0.up"])
    assert is_plain(model)


@pytest.mark.parametrize(
    ("of", "error", "words"),
    [
        (lambda model, tokens: model(tokens), PlanError, r"no scalar.*\(4, 9, 32\).*mean"),
        (lambda model, tokens: loss(model, tokens).item(), PlanError, "no scalar.*float.*output.loss"),
        (lambda model, tokens: loss(model, tokens).detach(), PlanError, "no gradient"),
        (lambda model, tokens: loss(model, tokens) * float("nan"), TrainingError, "not finite"),
    ],
)
def test_losses_that_are_none_are_refused(of: Any, error: type[ScrimpError], words: str) -> None:
    model, optimizer = trained()
    before = torch.get_rng_state()
    with pytest.raises(error, match=words):
        scrimp.measure(model, optimizer, [batch(0)], of)
    assert is_plain(model)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"formats": ("bf16",)}, PlanError, "nothing to choose.*bf16"),
        ({"formats": ()}, PlanError, "nothing to choose.*none"),
        ({"formats": ("fp8", "fp8")}, PlanError, "each once"),
        ({"formats": ("fp8", "nvfp5")}, PlanError, "did you mean nvfp4"),
        ({"gains": "guessed"}, PlanError, "guessed"),
        ({"sensitivity": "adam"}, PlanError, "auto or gradient"),
        ({"layers": ["blocks.7.up"]}, PlanError, "blocks.7.up.*blocks.0.up"),
        ({"layers": lambda name, layer: False}, PlanError, "no layer was chosen"),
    ],
)
def test_arguments_of_measure_that_fit_nothing_are_refused(
    options: Any, error: type[ScrimpError], words: str
) -> None:
    model, optimizer = trained()
    with pytest.raises(error, match=words):
        scrimp.measure(model, optimizer, [batch(0)], loss, **options)
    assert is_plain(model)


def test_layers_that_this_optimizer_does_not_update_are_refused_by_name() -> None:
    model, _ = trained()
    some = torch.optim.AdamW(model.blocks[0].parameters())
    with pytest.raises(ModelError, match=r"not trained by this optimizer.*blocks.1.up"):
        scrimp.measure(model, some, [batch(0)], loss, layers=["blocks.1.up"])
    assert scrimp.measure(model, some, [batch(0)], loss).layers == ("blocks.0.up", "blocks.0.down")
    with pytest.raises(PlanError, match="no optimizer"):
        scrimp.measure(model, None, [batch(0)], loss)


def test_several_ranks_that_nothing_joins_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = trained()
    monkeypatch.setattr(World, "current", lambda: World(size=4))
    with pytest.raises(ModelError, match=r"4 ranks.*apply it on every rank"):
        scrimp.measure(model, optimizer, [batch(0)], loss)
