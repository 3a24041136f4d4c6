"""Every family against transformers in float32: logits, gradients, greedy text, both directions.

The models are small and random in every parameter; the sequence is longer than the original
context of the scaled RoPE and than the sliding windows.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hf_families import (
    FAMILIES,
    VOCABULARY,
    random_tokens,
    reference_folder,
    reference_model,
    scrimp_model,
    stored_gradients,
    stored_pieces,
)
from losses import next_token_loss
from transformers import AutoModelForCausalLM

from scrimp.models.generation import generate
from scrimp.models.huggingface.config_json import read_architecture
from scrimp.models.huggingface.export import export_model
from scrimp.models.huggingface.load import load_weights
from scrimp.models.huggingface.tensor_names import fused_parameters, split_parameter
from scrimp.models.initialise import initialise
from scrimp.models.model import build_model

LOGIT_ERROR = 1e-5
GRADIENT_ERROR = 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_gradients_equal_those_of_transformers(name: str, tmp_path: Path) -> None:
    reference, folder = reference_folder(name, tmp_path)
    model = scrimp_model(folder)
    tokens_BT, targets_BT = random_tokens(), random_tokens(seed=2)

    logits_BTV = model.logits(model(tokens_BT))
    expected_BTV = reference(tokens_BT).logits
    assert expected_BTV.std() > 0.1, "logits of a model that does something"
    assert (logits_BTV - expected_BTV).abs().max() <= LOGIT_ERROR

    F.cross_entropy(expected_BTV.flatten(0, 1), targets_BT.flatten()).backward()
    (next_token_loss(model, tokens_BT, targets_BT).total / targets_BT.numel()).backward()
    ours = dict(model.named_parameters())
    theirs = stored_gradients(reference)
    for fused in fused_parameters(model.architecture):
        for piece, gradient in split_parameter(fused, ours[fused.name].grad).items():
            expected = theirs.pop(piece)
            assert expected.abs().max() > 0, piece
            assert (gradient - expected).abs().max() <= GRADIENT_ERROR * expected.abs().max(), piece
    assert not theirs, "every parameter of the reference was compared"


@pytest.mark.parametrize("name", FAMILIES)
def test_transformers_loads_an_export_completely_and_gives_the_same_logits(name: str, tmp_path: Path) -> None:
    _, folder = reference_folder(name, tmp_path / "saved")
    model = scrimp_model(folder)
    out = tmp_path / "exported"
    export_model(model, model.architecture, out)
    loaded, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True)
    assert not any(info.values()), info
    tokens_BT = random_tokens()
    with torch.no_grad():
        difference = loaded(tokens_BT).logits - model.logits(model(tokens_BT))
    assert difference.abs().max() <= LOGIT_ERROR
    assert read_architecture(out) == model.architecture


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.every(2)
def test_greedy_text_equals_that_of_transformers(name: str, tmp_path: Path) -> None:
    reference, folder = reference_folder(name, tmp_path)
    model = scrimp_model(folder)
    for length in (1, 30):  # 30 + 24 crosses the windows and the original context
        prompt = random_tokens(1, length, seed=length)
        expected = reference.generate(
            prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, pad_token_id=0
        )
        assert list(generate(model, prompt[0].tolist(), max_tokens=24)) == expected[0, length:].tolist()


def test_transformers_stops_at_the_end_token_that_was_exported(tmp_path: Path) -> None:
    _, folder = reference_folder("llama", tmp_path / "saved")
    model = scrimp_model(folder)
    prompt = random_tokens(1, 8)
    text = list(generate(model, prompt[0].tolist(), max_tokens=24))
    end = text[5]
    export_model(model, model.architecture, tmp_path / "out", bos_id=0, eos_ids=[end, VOCABULARY - 1])
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.config.bos_token_id == 0
    stopped = loaded.generate(
        prompt, attention_mask=torch.ones_like(prompt), do_sample=False, max_new_tokens=24, pad_token_id=0
    )
    assert stopped[0, 8:].tolist() == text[: text.index(end) + 1]


@pytest.mark.parametrize("name", ["llama with scaled RoPE", "qwen2 tied", "qwen3 with a free head size"])
def test_bfloat16_goes_out_and_in_without_a_change(name: str, tmp_path: Path) -> None:
    _, folder = reference_folder(name, tmp_path / "saved")
    model = scrimp_model(folder)
    export_model(model, model.architecture, tmp_path / "half", dtype=torch.bfloat16)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "half")
    assert loaded.dtype == torch.bfloat16
    back = build_model(model.architecture, dtype=torch.float32)
    load_weights(back, tmp_path / "half")
    for name_, parameter in model.named_parameters():
        assert torch.equal(back.get_parameter(name_), parameter.to(torch.bfloat16).float()), name_
    tokens_BT = random_tokens()
    half = scrimp_model(tmp_path / "half", torch.bfloat16)
    with torch.no_grad():
        exact_BTV = loaded.float()(tokens_BT).logits
        assert (back.logits(back(tokens_BT)) - exact_BTV).abs().max() <= LOGIT_ERROR
        assert (half.logits(half(tokens_BT)) - exact_BTV).abs().max() < 0.1 * exact_BTV.abs().max()


@pytest.mark.parametrize("name", ["llama", "qwen2 untied", "qwen3 tied", "mistral with a window", "mixtral"])
def test_first_weights_are_distributed_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = reference_model(name).config
    torch.manual_seed(0)
    fresh = AutoModelForCausalLM.from_config(config)
    fresh.save_pretrained(tmp_path)
    model = build_model(read_architecture(tmp_path))
    initialise(model, seed=0)
    ours = dict(model.named_parameters())
    theirs = stored_pieces(fresh)
    for fused in fused_parameters(model.architecture):
        for piece, tensor in split_parameter(fused, ours[fused.name]).items():
            expected = theirs[piece]
            if expected.ndim == 1:
                assert torch.equal(tensor, expected), piece
                continue
            error = 5 * 0.02 / tensor.numel() ** 0.5
            assert abs(tensor.mean()) < error
            assert abs(tensor.std() - 0.02) < error
            assert abs(expected.std() - 0.02) < error, piece
