"""The decoder against a float64 decoder that shares no code with it (decoder_reference.py)."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from decoder_reference import FAMILIES, LLAMA, filled, packed_logits, summed_loss, weights_of
from hypothesis import given
from hypothesis import strategies as st
from losses import next_token_loss
from property_tests import examples

from scrimp.errors import ModelError
from scrimp.models import spec_of
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model

ROWS, LENGTH = 2, 24
PACKED = [0, 5, 6, 24, 30, 48]
MANY = [*range(0, 48, 3), 48]
WHOLE = [0, 24, 48]
CASES = pytest.mark.parametrize(
    ("family", "starts"),
    [(family, starts) for family in FAMILIES for starts in (WHOLE, PACKED)] + [("qwen3", MANY)],
    ids=lambda value: value if isinstance(value, str) else f"{len(value) - 1} documents",
)


def batch(vocab_size: int = 61) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocab_size, (ROWS, LENGTH), generator=generator)
    targets = torch.randint(0, vocab_size, (ROWS, LENGTH), generator=generator)
    targets[0, 3] = targets[1, :4] = -100
    return tokens, targets


def starts_tensor(starts: list[int]) -> torch.Tensor | None:
    return None if starts == WHOLE else torch.tensor(starts, dtype=torch.int32)


@CASES
def test_logits_equal_each_document_run_alone(family: str, starts: list[int]) -> None:
    architecture = FAMILIES[family]
    model = filled(architecture)
    tokens, _ = batch()
    with torch.no_grad():
        ours = model.logits(model(tokens, starts_tensor(starts))).flatten(0, 1)
        expected = packed_logits(architecture, weights_of(model), tokens, starts)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)


@CASES
def test_loss_and_every_gradient_equal_the_reference(family: str, starts: list[int]) -> None:
    architecture = FAMILIES[family]
    model, (tokens, targets) = filled(architecture), batch()
    sums = next_token_loss(model, tokens, targets, starts_tensor(starts), chunk=7, z_loss=1e-2)
    (sums.total / 43).backward()
    weights = weights_of(model)
    ce, z = summed_loss(packed_logits(architecture, weights, tokens, starts), targets.flatten(), 1e-2)
    ((ce + z) / 43).backward()
    torch.testing.assert_close(sums.loss.double(), ce, atol=0, rtol=1e-5)
    torch.testing.assert_close(sums.penalty.double(), z, atol=0, rtol=1e-5)
    for name, parameter in model.named_parameters():
        expected = weights[name].grad
        assert parameter.grad is not None
        assert expected is not None
        error = (parameter.grad.double() - expected).norm() / expected.norm()
        assert error < 1e-5, f"{name}: {error}"


@examples(12)
@given(inner=st.sets(st.integers(1, 47), max_size=40))
def test_any_packing_equals_each_document_run_alone(inner: set[int]) -> None:
    starts = sorted({0, 24, 48} | inner)
    architecture = replace(LLAMA, num_layers=1)
    model, (tokens, _) = filled(architecture), batch()
    with torch.no_grad():
        ours = model.logits(model(tokens, torch.tensor(starts, dtype=torch.int32))).flatten(0, 1)
        expected = packed_logits(architecture, weights_of(model), tokens, starts)
    torch.testing.assert_close(ours.double(), expected, atol=1e-5, rtol=1e-5)


def test_a_later_token_changes_nothing_before_it() -> None:
    model, (tokens, _) = filled(LLAMA), batch()
    changed = tokens.clone()
    changed[:, 15] = (changed[:, 15] + 1) % 61
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :15], after[:, :15])
    assert not torch.equal(before[:, 15:], after[:, 15:])


@pytest.mark.parametrize("compiled", [False, True], ids=["segments", "masked"])
@pytest.mark.parametrize("family", ["olmo2", "gemma3_text"])
def test_documents_of_other_kinds_are_as_each_alone(family: str, compiled: bool) -> None:
    architecture = replace(
        LLAMA,
        family=family,
        qk_norm=True,
        num_layers=3,
        sliding_window=4 if family == "gemma3_text" else None,
        options=(("full_every", 2.0),) if family == "gemma3_text" else (),
    )
    model = build_model(architecture, dtype=torch.float64)
    initialise(model, 0)
    tokens = batch(architecture.vocab_size)[0]
    alone = [model(tokens.flatten()[None, begin:end])[0] for begin, end in itertools.pairwise(PACKED)]
    for block in model.each_block():
        block.is_compiled = compiled  # which decides how attention keeps documents apart
    packed = model(tokens, starts_tensor(PACKED)).flatten(0, 1)
    # Positions run on in a packed row, and their angles are float32.
    torch.testing.assert_close(packed, torch.cat(alone), rtol=0, atol=1e-5)
    assert len({block.attends for block in model.each_block()}) == (2 if family == "gemma3_text" else 1)


@pytest.mark.parametrize("starts", [WHOLE, PACKED])
@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_autocast_stays_near_float32(family: str, starts: list[int]) -> None:
    model, (tokens, targets) = filled(FAMILIES[family]), batch()
    exact = next_token_loss(model, tokens, targets, starts_tensor(starts))
    exact.total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(tokens, starts_tensor(starts)).dtype == torch.bfloat16
        rounded = next_token_loss(model, tokens, targets, starts_tensor(starts), chunk=16)
    rounded.total.backward()
    torch.testing.assert_close(rounded.loss, exact.loss, rtol=0.02, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.dtype == torch.float32
        error = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
        assert error < 0.06, f"{name}: {error}"


def test_bf16_parameters_train_without_autocast() -> None:
    model, (tokens, targets) = filled(FAMILIES["qwen3"], dtype=torch.bfloat16), batch()
    sums = next_token_loss(model, tokens, targets, chunk=10)
    sums.total.backward()
    exact = next_token_loss(filled(FAMILIES["qwen3"]), tokens, targets)
    assert sums.loss.dtype == torch.float32
    torch.testing.assert_close(sums.loss, exact.loss, rtol=0.02, atol=0)
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}


@pytest.mark.slow
def test_compiled_blocks_give_the_same_loss_and_gradients() -> None:
    """Traced by torch.compile's front end alone, which needs no C++ compiler; no graph break allowed."""
    model, (tokens, targets) = filled(FAMILIES["qwen3"]), batch()
    plain = next_token_loss(model, tokens, targets, starts_tensor(PACKED))
    plain.total.backward()
    gradients = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    compiled = next_token_loss(model, tokens, targets, starts_tensor(PACKED))
    compiled.total.backward()
    torch.testing.assert_close(compiled.total, plain.total, rtol=1e-6, atol=0)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert (parameter.grad - gradients[name]).norm() < 1e-5 * gradients[name].norm(), name


def test_parameter_names_and_shapes_are_the_agreed_ones() -> None:
    shapes = {
        name: tuple(p.shape) for name, p in build_model(FAMILIES["qwen3"], device="meta").named_parameters()
    }
    assert shapes["blocks.1.attention.qkv.weight"] == (8 * 12, 32)
    assert shapes["blocks.0.attention.q_norm.weight"] == (12,)
    assert shapes["blocks.0.attention.out.weight"] == (32, 4 * 12)
    assert shapes["blocks.0.mlp.gate_up.weight"] == (96, 32)
    assert shapes["head.weight"] == (61, 32)
    assert "blocks.0.attention.qkv.bias" in dict(
        build_model(FAMILIES["qwen2"], device="meta").named_parameters()
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_parameter_count_is_the_architectures(family: str) -> None:
    model = build_model(FAMILIES[family], device="meta")
    assert sum(p.numel() for p in model.parameters()) == spec_of(FAMILIES[family]).parameters


def test_tied_head_is_the_embedding() -> None:
    model = build_model(FAMILIES["qwen2"], device="meta")
    assert model.head_weight is model.embedding.weight


def test_a_sequence_beyond_the_context_is_refused() -> None:
    with pytest.raises(
        ModelError, match="longer than the model's context - got 65 tokens, expected at most 64"
    ):
        filled(LLAMA)(torch.zeros(1, 65, dtype=torch.int64))


def test_building_a_decoder_draws_no_random_numbers() -> None:
    before = torch.get_rng_state()
    build_model(LLAMA)
    assert torch.equal(before, torch.get_rng_state())
