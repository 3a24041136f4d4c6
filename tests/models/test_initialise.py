"""First weights: decided by seed and name alone."""

from __future__ import annotations

from dataclasses import replace

import torch
from decoder_reference import FAMILIES, LLAMA

from scrimp.models.initialise import initialise
from scrimp.models.model import build_model


def weights(seed: int, **changes: object) -> dict[str, torch.Tensor]:
    model = build_model(replace(LLAMA, **changes))  # type: ignore[arg-type]
    initialise(model, seed)
    return dict(model.named_parameters())


def test_the_seed_decides_everything_and_the_global_generator_nothing() -> None:
    torch.manual_seed(1)
    first = weights(5)
    torch.manual_seed(2)
    second, other = weights(5), weights(6)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not any(torch.equal(first[name], other[name]) for name in first if first[name].ndim == 2)


def test_a_parameter_keeps_its_weights_when_others_come_or_go() -> None:
    small, deep, tied = weights(5), weights(5, num_layers=4), weights(5, tied_embeddings=True)
    assert all(torch.equal(small[name], deep[name]) for name in small)
    assert all(torch.equal(small[name], tied[name]) for name in tied)


def test_matrices_are_normal_002_norms_one_and_biases_zero() -> None:
    model = build_model(replace(FAMILIES["qwen2"], width=128, ffn_width=256, qk_norm=True))
    initialise(model, 0)
    for name, parameter in model.state_dict().items():
        if name.endswith("bias"):
            assert not parameter.any(), name
        elif parameter.ndim == 1:
            assert bool((parameter == 1).all()), name
        else:
            assert abs(float(parameter.mean())) < 0.001, name
            assert abs(float(parameter.std()) - 0.02) < 0.001, name


def test_bf16_parameters_are_the_float32_ones_rounded() -> None:
    exact = weights(5)
    model = build_model(LLAMA, dtype=torch.bfloat16)
    initialise(model, 5)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, exact[name].bfloat16()), name


def test_parameters_of_one_shape_get_different_weights() -> None:
    model = weights(5)
    assert not torch.equal(model["blocks.0.mlp.down.weight"], model["blocks.1.mlp.down.weight"])
    assert not torch.equal(model["embedding.weight"], model["head.weight"])
