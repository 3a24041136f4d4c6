"""Which linear layers are planned by default, and which are left out for what reason."""

from __future__ import annotations

import logging
import re

import pytest
from small_nets import VOCABULARY, WIDTH, batch, loss, net, trained
from torch import nn

import scrimp
from scrimp.api.modules import choose_layers, unwrap
from scrimp.config import PRESETS
from scrimp.errors import ModelError
from scrimp.models.layers import layers_of
from scrimp.models.model import build_model


def reasons(model: nn.Module) -> dict[str, str]:
    return choose_layers(model, lambda weight: weight.requires_grad).left_out


def test_the_head_is_known_by_its_name_its_weight_or_its_place() -> None:
    model = net()
    assert list(reasons(model)) == ["head"]
    model.to_logits, model.head = model.head, nn.Identity()  # type: ignore[assignment]
    assert reasons(model) == {"to_logits": "the head: the last layer, outside the blocks"}
    tied = net()
    del tied.head
    tied.first = nn.Linear(WIDTH, VOCABULARY)
    tied.later = nn.Linear(WIDTH, WIDTH)
    tied.first.weight = tied.embedding.weight
    assert reasons(tied) == {"first": "the head: it shares the embedding's weight"}


def test_bodies_without_a_head_and_plain_stacks_are_planned_whole() -> None:
    body = net()
    del body.head
    assert reasons(body) == {}
    assert reasons(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))) == {}


def test_what_cannot_be_planned_is_left_out_with_its_reason() -> None:
    model = nn.ModuleDict(
        {
            "attention": nn.MultiheadAttention(WIDTH, 2),
            "own": type("Own", (nn.Linear,), {"forward": lambda self, x: x})(WIDTH, WIDTH),
            "frozen": nn.Linear(WIDTH, WIDTH).requires_grad_(False),
            "router": nn.Linear(WIDTH, 4),
            "good": nn.Linear(WIDTH, WIDTH),
        }
    )
    found = reasons(model)
    assert list(found) == ["attention.out_proj", "own", "frozen", "router"]
    assert [
        re.search(word, found[name]) is not None
        for word, name in zip(
            ("never calls it", "Own has a forward", "not trained", "router"), found, strict=True
        )
    ] == [True] * 4


def test_the_measurement_says_which_layers_it_leaves_out(caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained()
    with caplog.at_level(logging.INFO, "scrimp"):
        scrimp.measure(model, optimizer, [batch(0)], loss)
    assert "head is left out of the plan: the head, by its name" in caplog.text


def test_only_modules_are_taken() -> None:
    with pytest.raises(ModelError, match="only modules"):
        unwrap("model")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["llama-3m", "llama-1b", "olmo2-8m", "gemma3-8m"])
def test_a_model_of_scrimp_says_itself_which_layers_it_has(name: str) -> None:
    model = build_model(PRESETS[name], device="meta")
    found = layers_of(model)
    own = {} if PRESETS[name].tied_embeddings else {"head": "the head"}
    assert found.special == own
    assert found.others == []
    assert set(found.linears) | {"head"} == set(model.spec.layers())
    # As anybody would find out from the modules alone.
    body = nn.ModuleDict(dict(model.named_children()))
    assert list(layers_of(body).special) == list(own)
