"""The auxiliary loss of routed experts against transformers: value, gradients, and what a run records."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hf_families import random_tokens, reference_folder, scrimp_model, stored_gradients
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from scrimp.config import PRESETS
from scrimp.config.activations import Activations
from scrimp.data import Batch
from scrimp.models import spec_of
from scrimp.models.huggingface.tensor_names import fused_parameters, split_parameter
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model
from scrimp.objectives.load_balance import METRIC, load_balance, with_load_balance
from scrimp.objectives.next_token import NEXT_TOKEN


@pytest.mark.parametrize(("experts", "chosen", "blocks"), [(4, 2, 3), (6, 3, 1), (5, 1, 2)])
def test_value_is_that_of_transformers(experts: int, chosen: int, blocks: int) -> None:
    logits = [2 * torch.randn(40, experts, generator=torch.Generator().manual_seed(n)) for n in range(blocks)]
    sums = []
    for one in logits:
        p = one.softmax(-1)
        counts = torch.bincount(p.topk(chosen).indices.flatten(), minlength=experts)
        sums.append(torch.stack([counts.float(), p.sum(0)]))
    expected = load_balancing_loss_func(tuple(logits), experts, chosen)
    assert float(load_balance(torch.stack(sums), chosen)) == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe in every second block"])
@pytest.mark.parametrize(
    "level", ["keep", *(pytest.param(x, marks=pytest.mark.slow) for x in ("mlp", "block"))]
)
def test_gradients_of_loss_and_balance_are_those_of_transformers(
    name: str, level: str, tmp_path: Path
) -> None:
    reference, folder = reference_folder(name, tmp_path)
    reference.config.output_router_logits = True
    reference.router_aux_loss_coef = 0.7 if name == "mixtral" else 0.0
    model = scrimp_model(folder)
    if name == "mixtral":  # far more than anybody would take, so that it is seen
        options = tuple((k, 0.7 if k == "router_aux_loss_coef" else v) for k, v in model.architecture.options)
        model.spec = spec_of(replace(model.architecture, options=options))
    for block in model.each_block():
        block.activations = Activations(level)
    tokens_BT = random_tokens()
    labels_BT = torch.cat([torch.full((2, 1), -100), random_tokens(seed=2)[:, 1:]], dim=1)
    found = reference(tokens_BT, labels=labels_BT)
    found.loss.backward()

    targets_BT = torch.cat([labels_BT[:, 1:], torch.full((2, 1), -100)], dim=1)
    batch = Batch.of(tokens_BT, targets_BT)
    sums = with_load_balance(model, NEXT_TOKEN.loss(model, batch), batch.num_targets)
    (sums.total / batch.num_targets).backward()
    assert float(sums.total / batch.num_targets) == pytest.approx(float(found.loss), rel=1e-6)
    assert float(sums.metrics[METRIC] / batch.num_targets) == pytest.approx(float(found.aux_loss), rel=1e-6)
    ours, theirs = dict(model.named_parameters()), stored_gradients(reference)
    for fused in fused_parameters(model.architecture):
        for piece, gradient in split_parameter(fused, ours[fused.name].grad).items():
            expected = theirs.pop(piece)
            assert (gradient - expected).abs().max() <= 1e-4 * expected.abs().max() + 1e-8, piece


def test_routing_is_taken_once_and_models_without_experts_have_none() -> None:
    model = build_model(PRESETS["llama-3m"])
    initialise(model, 0)
    tokens = torch.zeros(1, 8, dtype=torch.int64)
    sums = NEXT_TOKEN.loss(model, Batch.of(tokens, tokens))
    assert with_load_balance(model, sums, 8) is sums
    routed = build_model(PRESETS["mixtral-8m"])
    initialise(routed, 0)
    NEXT_TOKEN.loss(routed, Batch.of(tokens, tokens))
    assert routed.take_routing() is not None
    assert routed.take_routing() is None
